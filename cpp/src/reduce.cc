#include "zcomm/reduce.h"

#include <algorithm>
#include <vector>

#include "parallel_rows.h"
#include "tiles.h"
#include "zcomm/check.h"

namespace zcomm {
namespace {

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
  const DecodeTarget target{kLargest, divisor, output.dtype, stream};
  ParallelOverRows(layout.num_segments, layout.segment_numel, TileOfBlocks(layout), num_threads,
                   [&](std::size_t segment, std::size_t begin, std::size_t end) {
                     void* out = ElementAt(output.data, output.dtype, segment * output.segment_stride + begin);
                     Workspace workspace;
                     DecodeSumRange(kernels, layout, input, segment, begin, end, target, out, &workspace);
                   });
}

void DecodeSumRequantize(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                         const MutableMessages& output, const Draw* draw, std::size_t num_threads) {
  CheckInput(layout, input, num_threads);
  CheckRequantized(layout, out_layout, output);
  CheckTrailers(layout, input);
  const BlockKernels& kernels = ActiveKernels();
  // Whole blocks of the output, and at least a whole block of the input, which a rotation needs.
  const std::size_t unit = TileOfBlocks(out_layout);
  const std::size_t least = layout.is_rotated ? layout.block : 1;
  const std::size_t tile_numel = (least + unit - 1) / unit * unit;
  ParallelOverRows(layout.num_segments, layout.segment_numel, tile_numel, num_threads,
                   [&](std::size_t segment, std::size_t begin, std::size_t end) {
                     std::vector<float> sum(std::min(tile_numel, end - begin));
                     std::uint8_t* message = output.data + segment * output.stride_nbytes;
                     Workspace workspace;
                     for (std::size_t at = begin; at < end; at += tile_numel) {
                       const std::size_t numel = std::min(tile_numel, end - at);
                       DecodeSumRange(kernels, layout, input, segment, at, at + numel, kToFloat, sum.data(),
                                      &workspace);
                       QuantizeRange(kernels, out_layout, 0, at, at + numel, DType::kFloat32, sum.data(),
                                     {draw, segment * layout.segment_numel + at}, message, &workspace);
                     }
                   });
  WriteTrailers(out_layout, output);
}

}  // namespace zcomm
