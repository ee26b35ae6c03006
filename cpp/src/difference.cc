#include "zcomm/difference.h"

#include <algorithm>
#include <vector>

#include "parallel_rows.h"
#include "tiles.h"

namespace zcomm {
namespace {

// One tile of two arrays in float32.
struct Tile {
  explicit Tile(std::size_t numel) : first(numel), second(numel) {}

  std::vector<float> first;
  std::vector<float> second;
};

}  // namespace

void QuantizeDifference(const MessageLayout& layout, const ConstRows& input, DType held_dtype, const void* held,
                        const MutableMessages& output, const Draw* draw, std::size_t num_threads) {
  CheckThreads(num_threads);
  CheckMessages(layout, AsConst(output), "output");
  if (output.count != 0) {
    CheckRows(layout, input, "input");
    CheckRows(layout, {held_dtype, held, input.message_stride, input.segment_stride}, "held");
  }
  const BlockKernels& kernels = ActiveKernels();
  const std::size_t tile_numel = TileOfBlocks(layout);
  ParallelOverRows(output.count * layout.num_segments, layout.segment_numel, tile_numel, num_threads,
                   [&](std::size_t row, std::size_t begin, std::size_t end) {
                     const std::size_t message = row / layout.num_segments;
                     const std::size_t segment = row % layout.num_segments;
                     const std::size_t first = message * input.message_stride + segment * input.segment_stride;
                     Tile tile(std::min(tile_numel, end - begin));
                     Workspace workspace;
                     for (std::size_t at = begin; at < end; at += tile_numel) {
                       const std::size_t numel = std::min(tile_numel, end - at);
                       const void* x = ElementAt(input.data, input.dtype, first + at);
                       kernels.convert[Index(input.dtype)][Index(DType::kFloat32)](x, numel, tile.first.data());
                       const void* y = ElementAt(held, held_dtype, first + at);
                       kernels.convert[Index(held_dtype)][Index(DType::kFloat32)](y, numel, tile.second.data());
                       kernels.subtract(tile.first.data(), tile.second.data(), numel);
                       QuantizeRange(kernels, layout, segment, at, at + numel, DType::kFloat32, tile.first.data(),
                                     {draw, first + at}, output.data + message * output.stride_nbytes, &workspace);
                     }
                   });
  WriteTrailers(layout, output);
}

void DecodeAdd(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output,
               std::size_t num_threads) {
  CheckThreads(num_threads);
  CheckMessages(layout, input, "input");
  if (input.count != 0) CheckRows(layout, AsConst(output), "output");
  CheckTrailers(layout, input);
  const BlockKernels& kernels = ActiveKernels();
  const std::size_t tile_numel = TileOfBlocks(layout);
  ParallelOverRows(
      input.count * layout.num_segments, layout.segment_numel, tile_numel, num_threads,
      [&](std::size_t row, std::size_t begin, std::size_t end) {
        const std::size_t message = row / layout.num_segments;
        const std::size_t segment = row % layout.num_segments;
        const std::size_t first = message * output.message_stride + segment * output.segment_stride;
        const ConstMessages one{input.data + message * input.stride_nbytes, input.stride_nbytes, 1, input.layout_hash};
        Tile tile(std::min(tile_numel, end - begin));
        Workspace workspace;
        for (std::size_t at = begin; at < end; at += tile_numel) {
          const std::size_t numel = std::min(tile_numel, end - at);
          void* out = ElementAt(output.data, output.dtype, first + at);
          DecodeSumRange(kernels, layout, one, segment, at, at + numel, kToFloat, tile.first.data(), &workspace);
          kernels.convert[Index(output.dtype)][Index(DType::kFloat32)](out, numel, tile.second.data());
          kernels.add(tile.first.data(), tile.second.data(), numel);
          kernels.convert[Index(DType::kFloat32)][Index(output.dtype)](tile.first.data(), numel, out);
        }
      });
}

}  // namespace zcomm
