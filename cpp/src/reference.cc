// The oracle of every operation: element by element, in the order of the numerics contract, sharing nothing with the
// vector kernels but the layout.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "zcomm/check.h"
#include "zcomm/decode.h"
#include "zcomm/float_formats.h"
#include "zcomm/quantize.h"
#include "zcomm/reduce.h"

namespace zcomm {
namespace {

std::uint32_t MagnitudeBits(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7FFFFFFFU;
}

// bf16 bits of a block's scale.
std::uint16_t ScaleBits(std::uint32_t absmax_bits, int qmax) {
  if (absmax_bits >= 0x7F800000U) return 0x7FC0;
  if (absmax_bits < 0x0D800000U) return 0;
  float absmax = 0;
  std::memcpy(&absmax, &absmax_bits, sizeof(absmax));
  const std::uint32_t bits = MagnitudeBits(absmax / static_cast<float>(qmax));
  return static_cast<std::uint16_t>(std::min((bits + 0xFFFFU) >> 16, 0x7F7FU));
}

int CodeOf(float x, std::uint16_t scale_bits, int qmax) {
  if (scale_bits == 0 || scale_bits == 0x7FC0) return 0;
  const float inverse = 1.0F / FloatFromBfloat16(scale_bits);
  const float rounded = std::nearbyint(x * inverse);
  return static_cast<int>(std::clamp(rounded, -static_cast<float>(qmax), static_cast<float>(qmax)));
}

std::size_t ScaleOffset(const MessageLayout& layout, std::size_t segment, std::size_t element) {
  return 2 * (segment * layout.blocks_per_segment + element / layout.block);
}

void StoreCode(const MessageLayout& layout, std::size_t segment, std::size_t element, int code, std::uint8_t* message) {
  std::uint8_t* codes = message + layout.codes_offset + segment * layout.segment_codes_nbytes;
  if (layout.codec == Codec::kInt8) {
    codes[element] = static_cast<std::uint8_t>(code);
  } else if (element % 2 == 0) {
    codes[element / 2] = static_cast<std::uint8_t>(code & 0x0F);
  } else {
    codes[element / 2] = static_cast<std::uint8_t>(codes[element / 2] | ((code & 0x0F) << 4));
  }
}

int LoadCode(const MessageLayout& layout, std::size_t segment, std::size_t element, const std::uint8_t* message) {
  const std::uint8_t* codes = message + layout.codes_offset + segment * layout.segment_codes_nbytes;
  if (layout.codec == Codec::kInt8) return static_cast<std::int8_t>(codes[element]);
  const int nibble = element % 2 == 0 ? codes[element / 2] & 0x0F : codes[element / 2] >> 4;
  return nibble >= 8 ? nibble - 16 : nibble;
}

// `load(element)` gives the float32 values of the segment.
template <class Load>
void QuantizeBlock(const MessageLayout& layout, std::size_t segment, std::size_t begin, const Load& load,
                   std::uint8_t* message) {
  const std::size_t end = std::min(begin + layout.block, layout.segment_numel);
  std::uint32_t absmax_bits = 0;
  for (std::size_t e = begin; e < end; ++e) absmax_bits = std::max(absmax_bits, MagnitudeBits(load(e)));
  const std::uint16_t scale_bits = ScaleBits(absmax_bits, QMax(layout.codec));
  std::memcpy(message + ScaleOffset(layout, segment, begin), &scale_bits, sizeof(scale_bits));
  for (std::size_t e = begin; e < end; ++e) {
    StoreCode(layout, segment, e, CodeOf(load(e), scale_bits, QMax(layout.codec)), message);
  }
}

template <class Load>
void QuantizeSegment(const MessageLayout& layout, std::size_t segment, const Load& load, std::uint8_t* message) {
  if (IsBlockCodec(layout.codec)) {
    for (std::size_t begin = 0; begin < layout.segment_numel; begin += layout.block) {
      QuantizeBlock(layout, segment, begin, load, message);
    }
    return;
  }
  for (std::size_t e = 0; e < layout.segment_numel; ++e) {
    StoreElement(static_cast<DType>(layout.codec), message, segment * layout.segment_numel + e, load(e));
  }
}

// One decoded element in float32, within +-limit for block codecs.
float DecodeElement(const MessageLayout& layout, const std::uint8_t* message, std::size_t segment, std::size_t element,
                    float limit) {
  if (!IsBlockCodec(layout.codec)) {
    return LoadElement(static_cast<DType>(layout.codec), message, segment * layout.segment_numel + element);
  }
  std::uint16_t scale_bits = 0;
  std::memcpy(&scale_bits, message + ScaleOffset(layout, segment, element), sizeof(scale_bits));
  const float value = static_cast<float>(LoadCode(layout, segment, element, message)) * FloatFromBfloat16(scale_bits);
  return std::isnan(value) ? value : std::clamp(value, -limit, limit);
}

float SumElement(const MessageLayout& layout, const ConstMessages& input, std::size_t segment, std::size_t element) {
  constexpr float kLimit = std::numeric_limits<float>::max();
  float sum = DecodeElement(layout, input.data, segment, element, kLimit);
  for (std::size_t i = 1; i < input.count; ++i) {
    sum += DecodeElement(layout, input.data + i * input.stride_nbytes, segment, element, kLimit);
  }
  return sum;
}

}  // namespace

void QuantizeRef(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output) {
  CheckMessages(layout, AsConst(output), "output");
  if (output.count != 0) CheckRows(layout, input, "input");
  for (std::size_t i = 0; i < output.count; ++i) {
    std::uint8_t* message = output.data + i * output.stride_nbytes;
    for (std::size_t s = 0; s < layout.num_segments; ++s) {
      const std::size_t row = i * input.message_stride + s * input.segment_stride;
      const auto load = [&](std::size_t e) { return LoadElement(input.dtype, input.data, row + e); };
      QuantizeSegment(layout, s, load, message);
    }
    WriteTrailer(layout, output.layout_hash, message);
  }
}

void DecodeRef(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output) {
  CheckMessages(layout, input, "input");
  if (input.count != 0) CheckRows(layout, AsConst(output), "output");
  CheckTrailers(layout, input);
  const float limit = MaxFinite(output.dtype);
  for (std::size_t i = 0; i < input.count; ++i) {
    for (std::size_t s = 0; s < layout.num_segments; ++s) {
      const std::size_t row = i * output.message_stride + s * output.segment_stride;
      for (std::size_t e = 0; e < layout.segment_numel; ++e) {
        const float value = DecodeElement(layout, input.data + i * input.stride_nbytes, s, e, limit);
        StoreElement(output.dtype, output.data, row + e, value);
      }
    }
  }
}

void DecodeSumRef(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, float divisor) {
  ZCOMM_CHECK(input.count >= 1, "a sum needs at least one message: num_messages=", input.count);
  CheckMessages(layout, input, "input");
  CheckRows(layout, AsConst(output), "output");
  CheckTrailers(layout, input);
  for (std::size_t s = 0; s < layout.num_segments; ++s) {
    for (std::size_t e = 0; e < layout.segment_numel; ++e) {
      const float sum = SumElement(layout, input, s, e);
      StoreElement(output.dtype, output.data, s * output.segment_stride + e, divisor == 1.0F ? sum : sum / divisor);
    }
  }
}

void DecodeSumRequantizeRef(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                            const MutableMessages& output) {
  ZCOMM_CHECK(input.count >= 1, "a sum needs at least one message: num_messages=", input.count);
  CheckMessages(layout, input, "input");
  CheckMessages(out_layout, AsConst(output), "output");
  CheckTrailers(layout, input);
  for (std::size_t s = 0; s < output.count; ++s) {
    std::uint8_t* message = output.data + s * output.stride_nbytes;
    QuantizeSegment(out_layout, 0, [&](std::size_t e) { return SumElement(layout, input, s, e); }, message);
    WriteTrailer(out_layout, output.layout_hash, message);
  }
}

}  // namespace zcomm
