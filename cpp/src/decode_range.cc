#include <algorithm>
#include <limits>

#include "tiles.h"

namespace zcomm {
namespace {

CodeRange RangeOf(const MessageLayout& layout, const ConstMessages& input, std::size_t segment, std::size_t begin,
                  std::size_t numel) {
  return {input.data + HeaderNbytes(layout.codec) * segment * layout.blocks_per_segment,
          input.data + layout.codes_offset + segment * layout.segment_codes_nbytes,
          input.stride_nbytes,
          input.count,
          layout.block,
          begin,
          numel};
}

// Float32 values of whole blocks (except the segment's last) of one message, rotated back. A short last block is not
// rotated.
void DecodeRotated(const BlockKernels& kernels, const MessageLayout& layout, const CodeRange& range, float limit,
                   float* values) {
  const std::size_t whole = range.numel / range.block * range.block;
  kernels.decode_sum[Index(layout.codec)][Index(DType::kFloat32)](range, kLargest, 1.0F, values);
  kernels.rotate(values, whole, range.block);
  kernels.scale(values, whole, 1.0F / static_cast<float>(range.block), limit);
  kernels.scale(values + whole, range.numel - whole, 1.0F, limit);
}

// workspace->values = the sum over the messages, of whole blocks as in DecodeRotated.
void SumRotated(const BlockKernels& kernels, const MessageLayout& layout, const ConstMessages& input,
                std::size_t segment, std::size_t begin, std::size_t end, const DecodeTarget& target,
                Workspace* workspace) {
  const std::size_t numel = end - begin;
  workspace->values.resize(numel);
  workspace->terms.resize(numel);
  float* sum = workspace->values.data();
  CodeRange range = RangeOf(layout, input, segment, begin, numel);
  range.count = 1;
  for (std::size_t i = 0; i < input.count; ++i) {
    float* values = i == 0 ? sum : workspace->terms.data();
    DecodeRotated(kernels, layout, range, target.limit, values);
    if (i > 0) kernels.add(sum, values, numel);
    range.headers += range.stride_nbytes;
    range.codes += range.stride_nbytes;
  }
  if (target.divisor != 1.0F) kernels.divide(sum, numel, target.divisor);
}

// Stores at most kTileNumel values to `out`.
void StoreTile(const BlockKernels& kernels, const float* values, std::size_t numel, const DecodeTarget& target,
               void* out) {
  const auto convert = kernels.convert[Index(DType::kFloat32)][Index(target.dtype)];
  if (!target.stream) return convert(values, numel, out);
  if (target.dtype == DType::kFloat32) return kernels.stream(out, values, numel * sizeof(float));
  alignas(64) std::uint16_t narrow[kTileNumel];
  convert(values, numel, narrow);
  kernels.stream(out, narrow, numel * sizeof(std::uint16_t));
}

void DecodeSumRotatedRange(const BlockKernels& kernels, const MessageLayout& layout, const ConstMessages& input,
                           std::size_t segment, std::size_t begin, std::size_t end, const DecodeTarget& target,
                           void* out, Workspace* workspace) {
  const std::size_t tile = TileOfBlocks(layout);
  for (std::size_t at = begin; at < end;) {
    // A range that starts or ends inside a block needs the whole block, because rotation mixes its elements.
    const std::size_t first = at / layout.block * layout.block;
    const std::size_t end_of_blocks = (end + layout.block - 1) / layout.block * layout.block;
    const std::size_t last = std::min({first + tile, end_of_blocks, layout.segment_numel});
    SumRotated(kernels, layout, input, segment, first, last, target, workspace);
    const std::size_t tile_end = std::min(last, end);
    while (at < tile_end) {
      const std::size_t numel = std::min(kTileNumel, tile_end - at);
      StoreTile(kernels, workspace->values.data() + (at - first), numel, target, out);
      out = ElementAt(out, target.dtype, numel);
      at += numel;
    }
  }
}

}  // namespace

std::size_t TileOfBlocks(const MessageLayout& layout) {
  return IsBlockCodec(layout.codec) ? std::max<std::size_t>(1, kTileNumel / layout.block) * layout.block : kTileNumel;
}

void DecodeSumRange(const BlockKernels& kernels, const MessageLayout& layout, const ConstMessages& input,
                    std::size_t segment, std::size_t begin, std::size_t end, const DecodeTarget& target, void* out,
                    Workspace* workspace) {
  if (layout.is_rotated) {
    return DecodeSumRotatedRange(kernels, layout, input, segment, begin, end, target, out, workspace);
  }
  const auto decode_sum = kernels.decode_sum[Index(layout.codec)][Index(target.dtype)];
  if (!target.stream) {
    return decode_sum(RangeOf(layout, input, segment, begin, end - begin), target.limit, target.divisor, out);
  }
  alignas(64) std::uint8_t tile[kTileNumel * sizeof(float)];
  for (std::size_t at = begin; at < end; at += kTileNumel) {
    const std::size_t numel = std::min(kTileNumel, end - at);
    decode_sum(RangeOf(layout, input, segment, at, numel), target.limit, target.divisor, tile);
    kernels.stream(ElementAt(out, target.dtype, at - begin), tile, numel * ItemSize(target.dtype));
  }
}

}  // namespace zcomm
