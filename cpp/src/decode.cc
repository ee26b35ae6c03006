#include "zcomm/decode.h"

#include "parallel_rows.h"
#include "tiles.h"
#include "zcomm/float_formats.h"

namespace zcomm {

void Decode(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output,
            std::size_t num_threads) {
  CheckThreads(num_threads);
  CheckMessages(layout, input, "input");
  if (input.count != 0) CheckRows(layout, AsConst(output), "output");
  CheckTrailers(layout, input);
  const BlockKernels& kernels = ActiveKernels();
  const bool stream = input.count * layout.numel() * ItemSize(output.dtype) >= kStreamNbytes;
  const DecodeTarget target{MaxFinite(output.dtype), 1.0F, output.dtype, stream};
  ParallelOverRows(
      input.count * layout.num_segments, layout.segment_numel, TileOfBlocks(layout), num_threads,
      [&](std::size_t row, std::size_t begin, std::size_t end) {
        const std::size_t message = row / layout.num_segments;
        const std::size_t segment = row % layout.num_segments;
        const std::size_t offset = message * output.message_stride + segment * output.segment_stride + begin;
        const ConstMessages one{input.data + message * input.stride_nbytes, input.stride_nbytes, 1, input.layout_hash};
        Workspace workspace;
        DecodeSumRange(kernels, layout, one, segment, begin, end, target, ElementAt(output.data, output.dtype, offset),
                       &workspace);
      });
}

}  // namespace zcomm
