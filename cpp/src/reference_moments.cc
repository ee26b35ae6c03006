// The oracle of blocks of moments: as zcomm/moment_blocks.h words them.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "float_mode.h"
#include "zcomm/moment_blocks.h"

namespace zcomm {
namespace {

float NumLevels(MomentKind kind) { return kind == MomentKind::kSigned ? 127.0F * 127.0F : 255.0F * 255.0F; }

float Magnitude(MomentKind kind, float value) {
  return kind == MomentKind::kSigned ? std::fabs(value) : std::sqrt(value);
}

float Scale(MomentKind kind, const float* values, std::size_t numel) {
  float scale = kLeastScale;
  for (std::size_t i = 0; i < numel; ++i) {
    const float magnitude = Magnitude(kind, values[i]);
    if (!std::isfinite(magnitude)) return std::numeric_limits<float>::quiet_NaN();
    scale = std::max(scale, magnitude);
  }
  return scale;
}

std::uint8_t Code(MomentKind kind, float value, float uniform, float scale) {
  const float magnitude = Magnitude(kind, value);
  const float square = magnitude / scale * NumLevels(kind);
  const float floor = std::floor(std::sqrt(square));
  const float low = floor * floor;
  if (kind == MomentKind::kSigned) {
    const bool up = uniform * (2.0F * floor + 1.0F) < (square - low) * 16777216.0F;
    const int code = static_cast<int>(floor) + (up ? 1 : 0);
    return static_cast<std::uint8_t>(value < 0.0F ? -code : code);
  }
  const float gap = (2.0F * floor + 1.0F) * (2.0F * low + 2.0F * floor + 1.0F);
  const bool up = uniform * gap < (square - low) * (square + low) * 16777216.0F;
  return static_cast<std::uint8_t>(std::max(static_cast<int>(floor) + (up ? 1 : 0), value > 0.0F ? 1 : 0));
}

}  // namespace

void EncodeMomentsRef(MomentKind kind, const float* values, const float* uniform, std::size_t numel,
                      std::uint8_t* records) {
  const IeeeFloatMode ieee;
  for (std::size_t begin = 0; begin < numel; begin += kMomentBlock, records += kMomentRecordNbytes) {
    const std::size_t count = std::min(kMomentBlock, numel - begin);
    const float scale = Scale(kind, values + begin, count);
    std::memset(records, 0, kMomentRecordNbytes);
    std::memcpy(records, &scale, sizeof(scale));
    if (std::isnan(scale)) continue;
    for (std::size_t i = 0; i < count; ++i) {
      records[sizeof(scale) + i] = Code(kind, values[begin + i], uniform[begin + i], scale);
    }
  }
}

void DecodeMomentsRef(MomentKind kind, const std::uint8_t* records, std::size_t numel, float* values) {
  const IeeeFloatMode ieee;
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint8_t* record = records + i / kMomentBlock * kMomentRecordNbytes;
    float scale = 0;
    std::memcpy(&scale, record, sizeof(scale));
    const std::uint8_t byte = record[sizeof(scale) + i % kMomentBlock];
    const int code = kind == MomentKind::kSigned ? static_cast<std::int8_t>(byte) : byte;
    const float value = scale * (static_cast<float>(code * std::abs(code)) / NumLevels(kind));
    values[i] = kind == MomentKind::kSigned ? value : value * value;
  }
}

}  // namespace zcomm
