#include "zcomm/quantize.h"

#include "parallel_rows.h"
#include "tiles.h"

namespace zcomm {

void Quantize(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output, const Draw* draw,
              std::size_t num_threads) {
  CheckThreads(num_threads);
  CheckMessages(layout, AsConst(output), "output");
  if (output.count != 0) CheckRows(layout, input, "input");
  const BlockKernels& kernels = ActiveKernels();
  ParallelOverRows(output.count * layout.num_segments, layout.segment_numel, TileOfBlocks(layout), num_threads,
                   [&](std::size_t row, std::size_t begin, std::size_t end) {
                     const std::size_t message = row / layout.num_segments;
                     const std::size_t segment = row % layout.num_segments;
                     const std::size_t offset = message * input.message_stride + segment * input.segment_stride + begin;
                     Workspace workspace;
                     QuantizeRange(kernels, layout, segment, begin, end, input.dtype,
                                   ElementAt(input.data, input.dtype, offset), {draw, offset},
                                   output.data + message * output.stride_nbytes, &workspace);
                   });
  WriteTrailers(layout, output);
}

}  // namespace zcomm
