#include "zcomm/float_formats.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace zcomm {
namespace {

std::uint32_t BitsFromFloat(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float FloatFromBits(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace

float FloatFromBfloat16(std::uint16_t bits) { return FloatFromBits(static_cast<std::uint32_t>(bits) << 16); }

std::uint16_t Bfloat16FromFloat(float value) {
  const std::uint32_t bits = BitsFromFloat(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  const std::uint32_t lower_half_minus_tie = 0x7FFFU + ((bits >> 16) & 1U);
  return static_cast<std::uint16_t>((bits + lower_half_minus_tie) >> 16);
}

float FloatFromFloat16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const int exponent = (bits >> 10) & 0x1F;
  const std::uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0x1F) return FloatFromBits(sign | 0x7F800000U | (mantissa << 13));
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                        : std::ldexp(static_cast<float>(mantissa | 0x400U), exponent - 25);
  return FloatFromBits(sign | BitsFromFloat(magnitude));
}

std::uint16_t Float16FromFloat(float value) {
  const std::uint32_t bits = BitsFromFloat(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude_bits = bits & 0x7FFFFFFFU;
  if (magnitude_bits > 0x7F800000U) return static_cast<std::uint16_t>(sign | 0x7E00U);
  if (magnitude_bits < 0x33000000U) return sign;  // below 2^-25: half of the smallest denormal
  const float magnitude = FloatFromBits(magnitude_bits);
  if (magnitude >= 65520.0F) return static_cast<std::uint16_t>(sign | 0x7C00U);
  // Count in units of the last place: 2^-24 for denormals, 2^(e - 10) for normal numbers. A carry out of the mantissa
  // correctly increments the exponent field.
  int exponent = static_cast<int>(magnitude_bits >> 23) - 127;
  if (exponent < -14) exponent = -14;
  const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  const auto biased = static_cast<std::uint32_t>(exponent + 14) << 10;
  return static_cast<std::uint16_t>(sign | (biased + units));
}

float MaxFinite(DType dtype) {
  if (dtype == DType::kFloat32) return std::numeric_limits<float>::max();
  return dtype == DType::kBfloat16 ? FloatFromBfloat16(0x7F7F) : 65504.0F;
}

float LoadElement(DType dtype, const void* data, std::size_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[index];
  return dtype == DType::kBfloat16 ? FloatFromBfloat16(bits) : FloatFromFloat16(bits);
}

void StoreElement(DType dtype, void* data, std::size_t index, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<std::uint16_t*>(data)[index] =
        dtype == DType::kBfloat16 ? Bfloat16FromFloat(value) : Float16FromFloat(value);
  }
}

}  // namespace zcomm
