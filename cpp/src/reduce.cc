#include "zcomm/reduce.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "parallel_rows.h"
#include "tiles.h"
#include "zcomm/check.h"

namespace zcomm {
namespace {

// sum[0 .. numel) = elements [begin, begin + numel) of a segment, decoded and summed over the messages in order.
void SumTile(const BlockKernels& kernels, const MessageLayout& layout, const ConstMessages& input, std::size_t segment,
             std::size_t begin, std::size_t numel, float* sum) {
  constexpr float kLimit = std::numeric_limits<float>::max();
  for (std::size_t i = 0; i < input.count; ++i) {
    const auto decode =
        i == 0 ? kernels.decode[Index(layout.codec)][Index(DType::kFloat32)] : kernels.decode_add[Index(layout.codec)];
    decode(RangeOf(layout, input.data + i * input.stride_nbytes, segment, begin, numel), kLimit, sum);
  }
}

void CheckInput(const MessageLayout& layout, const ConstMessages& input, std::size_t num_threads) {
  CheckThreads(num_threads);
  ZCOMM_CHECK(input.count >= 1, "a sum needs at least one message: num_messages=", input.count);
  CheckMessages(layout, input, "input");
}

}  // namespace

void DecodeSum(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, float divisor,
               std::size_t num_threads) {
  CheckInput(layout, input, num_threads);
  CheckRows(layout, AsConst(output), "output");
  CheckTrailers(layout, input);
  const BlockKernels& kernels = ActiveKernels();
  const bool stream = layout.numel() * ItemSize(output.dtype) >= kStreamNbytes;
  ParallelOverRows(layout.num_segments, layout.segment_numel, kTileNumel, num_threads,
                   [&](std::size_t segment, std::size_t begin, std::size_t end) {
                     alignas(64) float sum[kTileNumel];
                     for (std::size_t at = begin; at < end; at += kTileNumel) {
                       const std::size_t numel = std::min(kTileNumel, end - at);
                       SumTile(kernels, layout, input, segment, at, numel, sum);
                       if (divisor != 1.0F) kernels.divide(sum, numel, divisor);
                       void* out = ElementAt(output.data, output.dtype, segment * output.segment_stride + at);
                       StoreTile(kernels, sum, numel, output.dtype, out, stream);
                     }
                   });
}

void DecodeSumRequantize(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                         const MutableMessages& output, std::size_t num_threads) {
  CheckInput(layout, input, num_threads);
  ZCOMM_CHECK(out_layout.num_segments == 1 && out_layout.segment_numel == layout.segment_numel &&
                  output.count == layout.num_segments,
              "each segment must become one message: out num_segments=", out_layout.num_segments,
              ", out segment_numel=", out_layout.segment_numel, ", segment_numel=", layout.segment_numel,
              ", out messages=", output.count, ", num_segments=", layout.num_segments);
  CheckMessages(out_layout, AsConst(output), "output");
  CheckTrailers(layout, input);
  const BlockKernels& kernels = ActiveKernels();
  const std::size_t out_block = std::max<std::size_t>(2, out_layout.block);
  const std::size_t tile_numel = std::max<std::size_t>(1, kTileNumel / out_block) * out_block;
  ParallelOverRows(layout.num_segments, layout.segment_numel, tile_numel, num_threads,
                   [&](std::size_t segment, std::size_t begin, std::size_t end) {
                     std::vector<float> sum(std::min(tile_numel, end - begin));
                     std::uint8_t* message = output.data + segment * output.stride_nbytes;
                     for (std::size_t at = begin; at < end; at += tile_numel) {
                       const std::size_t numel = std::min(tile_numel, end - at);
                       SumTile(kernels, layout, input, segment, at, numel, sum.data());
                       QuantizeRange(kernels, out_layout, 0, at, at + numel, DType::kFloat32, sum.data(), message);
                     }
                   });
  for (std::size_t i = 0; i < output.count; ++i) {
    WriteTrailer(out_layout, output.layout_hash, output.data + i * output.stride_nbytes);
  }
}

}  // namespace zcomm
