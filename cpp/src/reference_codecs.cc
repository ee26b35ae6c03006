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

constexpr float kNf4Levels[16] = {-8.0F,       -5.5625F, -4.1875F,    -3.15625F,  -2.28125F, -1.4765625F,
                                  -0.7265625F, 0.0F,     0.63671875F, 1.2890625F, 1.96875F,  2.703125F,
                                  3.53125F,    4.5F,     5.78125F,    8.0F};

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

int NearestNf4(float y) {
  int code = 0;
  while (code < 15 && (kNf4Levels[code] + kNf4Levels[code + 1]) / 2 < y) ++code;
  return code;
}

double Fp8Magnitude(int code) {
  const int exponent = code >> 3;
  const int eighths = code & 7;
  return exponent == 0 ? std::ldexp(eighths, -9) : std::ldexp(8 + eighths, exponent - 10);
}

int NearestFp8(float y) {
  const double magnitude = std::fabs(static_cast<double>(y));
  int below = 0;
  for (int bit = 0x40; bit > 0; bit >>= 1) {
    if (below + bit <= 0x7E && Fp8Magnitude(below + bit) <= magnitude) below += bit;
  }
  const double down = magnitude - Fp8Magnitude(below);
  const double up = below < 0x7E ? Fp8Magnitude(below + 1) - magnitude : std::numeric_limits<double>::infinity();
  const int best = below + (up < down || (up == down && below % 2 == 1) ? 1 : 0);
  return y < 0 && best > 0 ? best | 0x80 : best;
}

float Rounded(float y, const float* uniform) {
  if (uniform == nullptr) return std::nearbyint(y);
  const float magnitude = std::fabs(y);
  const float floor = std::floor(magnitude);
  const bool is_up = *uniform < (magnitude - floor) * 16777216.0F;
  return std::copysign(floor + (is_up ? 1.0F : 0.0F), y);
}

int CodeOf(Codec codec, float y, const float* uniform) {
  if (codec == Codec::kNf4) return NearestNf4(y);
  if (codec == Codec::kFp8E4m3) return NearestFp8(y);
  const auto qmax = static_cast<float>(QMax(codec));
  return static_cast<int>(std::clamp(Rounded(y, uniform), HasZeroPoint(codec) ? 0.0F : -qmax, qmax));
}

float LevelOf(Codec codec, int code) {
  switch (codec) {
    case Codec::kInt8:
      return static_cast<float>(static_cast<std::int8_t>(code));
    case Codec::kInt4:
      return static_cast<float>((code & 0x0F) >= 8 ? (code & 0x0F) - 16 : code & 0x0F);
    case Codec::kNf4:
      return kNf4Levels[code & 0x0F];
    case Codec::kFp8E4m3:
      return static_cast<float>((code & 0x80) != 0 ? -Fp8Magnitude(code & 0x7F) : Fp8Magnitude(code & 0x7F));
    default:
      return static_cast<float>(code & (codec == Codec::kInt4Asym ? 0x0F : 0xFF));
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
