#include "zcomm/decode.h"

#include <algorithm>

#include "parallel_rows.h"
#include "tiles.h"
#include "zcomm/float_formats.h"

namespace zcomm {
namespace {

// Decodes `range` to `out`, which points at its first element.
void DecodeRange(const BlockKernels& kernels, Codec codec, CodeRange range, DType dtype, void* out, bool stream) {
  const auto decode = kernels.decode[Index(codec)][Index(dtype)];
  const float limit = MaxFinite(dtype);
  if (!stream) {
    decode(range, limit, out);
    return;
  }
  alignas(64) std::uint8_t tile[kTileNumel * sizeof(float)];
  const std::size_t end = range.begin + range.numel;
  for (std::size_t done = 0; range.begin < end; done += range.numel, range.begin += range.numel) {
    range.numel = std::min(kTileNumel, end - range.begin);
    decode(range, limit, tile);
    kernels.stream(ElementAt(out, dtype, done), tile, range.numel * ItemSize(dtype));
  }
}

}  // namespace

void Decode(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output,
            std::size_t num_threads) {
  CheckThreads(num_threads);
  CheckMessages(layout, input, "input");
  if (input.count != 0) CheckRows(layout, AsConst(output), "output");
  CheckTrailers(layout, input);
  const BlockKernels& kernels = ActiveKernels();
  const bool stream = input.count * layout.numel() * ItemSize(output.dtype) >= kStreamNbytes;
  ParallelOverRows(input.count * layout.num_segments, layout.segment_numel, kTileNumel, num_threads,
                   [&](std::size_t row, std::size_t begin, std::size_t end) {
                     const std::size_t message = row / layout.num_segments;
                     const std::size_t segment = row % layout.num_segments;
                     const std::size_t offset =
                         message * output.message_stride + segment * output.segment_stride + begin;
                     const std::uint8_t* bytes = input.data + message * input.stride_nbytes;
                     DecodeRange(kernels, layout.codec, RangeOf(layout, bytes, segment, begin, end - begin),
                                 output.dtype, ElementAt(output.data, output.dtype, offset), stream);
                   });
}

}  // namespace zcomm
