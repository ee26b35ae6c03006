#include "tiles.h"

namespace zcomm {

void StoreTile(const BlockKernels& kernels, const float* values, std::size_t numel, DType dtype, void* out,
               bool stream) {
  const auto convert = kernels.convert[Index(DType::kFloat32)][Index(dtype)];
  if (!stream) {
    convert(values, numel, out);
  } else if (dtype == DType::kFloat32) {
    kernels.stream(out, values, numel * sizeof(float));
  } else {
    alignas(64) std::uint16_t narrow[kTileNumel];
    convert(values, numel, narrow);
    kernels.stream(out, narrow, numel * sizeof(std::uint16_t));
  }
}

void QuantizeRange(const BlockKernels& kernels, const MessageLayout& layout, std::size_t segment, std::size_t begin,
                   std::size_t end, DType dtype, const void* x, std::uint8_t* message) {
  std::uint8_t* codes = message + layout.codes_offset + segment * layout.segment_codes_nbytes;
  if (!IsBlockCodec(layout.codec)) {
    const auto wire = static_cast<DType>(layout.codec);
    kernels.convert[Index(dtype)][Index(wire)](x, end - begin, codes + begin * ItemSize(wire));
    return;
  }
  std::uint8_t* scales = message + 2 * (segment * layout.blocks_per_segment + begin / layout.block);
  const std::size_t codes_per_byte = layout.codec == Codec::kInt8 ? 1 : 2;
  kernels.quantize[Index(layout.codec)][Index(dtype)](x, end - begin, layout.block, scales,
                                                      codes + begin / codes_per_byte);
}

}  // namespace zcomm
