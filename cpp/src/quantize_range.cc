#include <algorithm>

#include "tiles.h"

namespace zcomm {
namespace {

// Quantizes a tile from a float32 copy, which is rotated if the layout says so, with random numbers if there is a draw.
void QuantizeTile(const BlockKernels& kernels, const MessageLayout& layout, std::size_t numel, DType dtype,
                  const void* x, const DrawFrom& from, std::uint8_t* headers, std::uint8_t* codes,
                  Workspace* workspace) {
  workspace->terms.resize(numel);
  float* values = workspace->terms.data();
  kernels.convert[Index(dtype)][Index(DType::kFloat32)](x, numel, values);
  if (layout.is_rotated) kernels.rotate(values, numel / layout.block * layout.block, layout.block);
  if (from.draw == nullptr) {
    kernels.quantize[Index(layout.codec)][Index(DType::kFloat32)](values, numel, layout.block, headers, codes);
    return;
  }
  workspace->uniform.resize(numel);
  kernels.uniform(*from.draw, from.element, numel, workspace->uniform.data());
  kernels.quantize_at_random[Index(layout.codec)](values, workspace->uniform.data(), numel, layout.block, headers,
                                                  codes);
}

}  // namespace

void QuantizeRange(const BlockKernels& kernels, const MessageLayout& layout, std::size_t segment, std::size_t begin,
                   std::size_t end, DType dtype, const void* x, const DrawFrom& from, std::uint8_t* message,
                   Workspace* workspace) {
  std::uint8_t* codes = message + layout.codes_offset + segment * layout.segment_codes_nbytes;
  if (!IsBlockCodec(layout.codec)) {
    const auto wire = static_cast<DType>(layout.codec);
    kernels.convert[Index(dtype)][Index(wire)](x, end - begin, codes + begin * ItemSize(wire));
    return;
  }
  const std::size_t header_nbytes = HeaderNbytes(layout.codec);
  std::uint8_t* headers = message + header_nbytes * segment * layout.blocks_per_segment;
  const bool is_random = from.draw != nullptr && IsIntCodec(layout.codec);
  const bool is_plain = !layout.is_rotated && !is_random;
  const std::size_t tile = is_plain ? end - begin : TileOfBlocks(layout);
  for (std::size_t at = begin; at < end; at += tile) {
    const std::size_t numel = std::min(tile, end - at);
    const void* tile_x = ElementAt(x, dtype, at - begin);
    std::uint8_t* tile_headers = headers + header_nbytes * (at / layout.block);
    std::uint8_t* tile_codes = codes + at * CodeBits(layout.codec) / 8;
    if (is_plain) {
      kernels.quantize[Index(layout.codec)][Index(dtype)](tile_x, numel, layout.block, tile_headers, tile_codes);
    } else {
      const DrawFrom tile_from{is_random ? from.draw : nullptr, from.element + (at - begin)};
      QuantizeTile(kernels, layout, numel, dtype, tile_x, tile_from, tile_headers, tile_codes, workspace);
    }
  }
}

}  // namespace zcomm
