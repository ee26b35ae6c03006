#include "reference_codecs.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "zcomm/float_formats.h"

namespace zcomm {
namespace {

constexpr std::uint32_t kInfinity = 0x7F800000U;
constexpr std::uint32_t kTiny = 0x0D800000U;  // 2^-100
constexpr std::uint16_t kNan = 0x7FC0;
constexpr float kLargest = std::numeric_limits<float>::max();

std::uint32_t BitsOf(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float FloatOf(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// bf16 bits of a positive value rounded up.
std::uint16_t RoundedUp(float value) {
  return static_cast<std::uint16_t>(std::min((BitsOf(value) + 0xFFFFU) >> 16, 0x7F7FU));
}

// bf16 bits of a value rounded down; 0 below 2^-100.
std::uint16_t RoundedDown(float value) {
  const std::uint32_t bits = BitsOf(value);
  if ((bits & 0x7FFFFFFFU) < kTiny) return 0;
  const bool is_exact = (bits & 0xFFFFU) == 0;
  return static_cast<std::uint16_t>((bits >> 16) + (value < 0 && !is_exact ? 1 : 0));
}

int CodeOf(Codec codec, float y, const float* uniform) {
  switch (codec) {
#define ZCOMM_CODEC(id, ...) \
  case Codec::id:            \
    return CodeRef<Codec::id>(y, uniform);
#include "zcomm/codecs.def"
    default:
      return 0;
  }
}

float LevelOf(Codec codec, int code) {
  switch (codec) {
#define ZCOMM_CODEC(id, ...) \
  case Codec::id:            \
    return LevelRef<Codec::id>(code);
#include "zcomm/codecs.def"
    default:
      return 0.0F;
  }
}

}  // namespace

float ClampRef(float value, float limit) { return std::isnan(value) ? value : std::clamp(value, -limit, limit); }

EncodedBlock EncodeBlockRef(Codec codec, const std::vector<float>& values, const std::vector<float>& uniform) {
  EncodedBlock block{kNan, std::vector<int>(values.size(), 0)};
  std::uint32_t absmax_bits = 0;
  for (const float value : values) absmax_bits = std::max(absmax_bits, BitsOf(value) & 0x7FFFFFFFU);
  if (absmax_bits >= kInfinity) return block;

  const float bound = HasZeroPoint(codec) ? std::ldexp(1.0F, 126) : kLargest;
  std::uint16_t zero_bits = 0;
  float spread = FloatOf(absmax_bits);
  if (HasZeroPoint(codec)) {
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    zero_bits = RoundedDown(ClampRef(*low, bound));
    spread = std::max(0.0F, ClampRef(*high, bound) - FloatFromBfloat16(zero_bits));
  }
  const bool is_tiny = BitsOf(spread) < kTiny;
  const std::uint16_t scale_bits = is_tiny ? 0 : RoundedUp(spread / static_cast<float>(QMax(codec)));
  const float zero = FloatFromBfloat16(zero_bits);
  const float inverse = is_tiny ? 0.0F : 1.0F / FloatFromBfloat16(scale_bits);
  block.header = static_cast<std::uint32_t>(zero_bits) << 16 | scale_bits;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float offset = HasZeroPoint(codec) ? ClampRef(values[i], bound) - zero : values[i];
    block.codes[i] = CodeOf(codec, offset * inverse, uniform.empty() ? nullptr : &uniform[i]);
  }
  return block;
}

std::vector<float> DecodeBlockRef(Codec codec, const EncodedBlock& block) {
  const float scale = FloatFromBfloat16(static_cast<std::uint16_t>(block.header));
  const float zero = FloatFromBfloat16(static_cast<std::uint16_t>(block.header >> 16));
  std::vector<float> values;
  for (const int code : block.codes) {
    const float product = LevelOf(codec, code) * scale;
    values.push_back(ClampRef(HasZeroPoint(codec) ? zero + product : product, kLargest));
  }
  return values;
}

void RotateRef(std::vector<float>* values) {
  for (std::size_t stride = 1; stride < values->size(); stride *= 2) {
    for (std::size_t i = 0; i < values->size(); ++i) {
      if ((i & stride) != 0) continue;
      const float a = (*values)[i];
      const float b = (*values)[i + stride];
      (*values)[i] = a + b;
      (*values)[i + stride] = a - b;
    }
  }
}

}  // namespace zcomm
