#include <algorithm>
#include <cmath>

#include "reference_codecs.h"

namespace zcomm {
namespace {

float Rounded(float y, const float* uniform) {
  if (uniform == nullptr) return std::nearbyint(y);
  const float magnitude = std::fabs(y);
  const float floor = std::floor(magnitude);
  const bool is_up = *uniform < (magnitude - floor) * 16777216.0F;
  return std::copysign(floor + (is_up ? 1.0F : 0.0F), y);
}

int Clamped(float y, const float* uniform, float lowest, float largest) {
  return static_cast<int>(std::clamp(Rounded(y, uniform), lowest, largest));
}

}  // namespace

template <>
int CodeRef<Codec::kInt8>(float y, const float* uniform) {
  return Clamped(y, uniform, -127.0F, 127.0F);
}

template <>
float LevelRef<Codec::kInt8>(int code) {
  return static_cast<float>(static_cast<std::int8_t>(code));
}

template <>
int CodeRef<Codec::kInt4>(float y, const float* uniform) {
  return Clamped(y, uniform, -7.0F, 7.0F);
}

template <>
float LevelRef<Codec::kInt4>(int code) {
  return static_cast<float>((code & 0x0F) >= 8 ? (code & 0x0F) - 16 : code & 0x0F);
}

template <>
int CodeRef<Codec::kInt8Asym>(float y, const float* uniform) {
  return Clamped(y, uniform, 0.0F, 255.0F);
}

template <>
float LevelRef<Codec::kInt8Asym>(int code) {
  return static_cast<float>(code & 0xFF);
}

template <>
int CodeRef<Codec::kInt4Asym>(float y, const float* uniform) {
  return Clamped(y, uniform, 0.0F, 15.0F);
}

template <>
float LevelRef<Codec::kInt4Asym>(int code) {
  return static_cast<float>(code & 0x0F);
}

}  // namespace zcomm
