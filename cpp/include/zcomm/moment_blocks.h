#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm {

// What an optimizer's moments rest in.
enum class MomentFormat : int {
  kFloat32 = 0,
  kBfloat16 = 1,
  kInt8 = 2,  // blocks of 256 elements: below
};

inline constexpr std::size_t kNumMomentFormats = 3;

// A block of kInt8 is a record of 260 bytes: a float32 `scale`, then one byte `c` an element; a short last block has
// zeros behind it. Elements are counted from the start of the parameter's part, so whoever cuts it cuts at multiples
// of 256.
//
//   kSigned       x = scale * (c |c| / 127^2)        c in -127 .. 127     a mean of gradients
//   kNonNegative  x = (scale * (c c / 255^2))^2      c in 0 .. 255        a mean, or sum, of their squares
//
// Levels lie closer together towards 0: a step is 2 / c of the value, or of the root of a kNonNegative. In float32, in
// the order written, without fused multiply-adds. With y = |x|, or sqrt(x) of a kNonNegative:
//
//   scale = max(largest y, kLeastScale). Where a y is NaN or infinite it is NaN, the codes are 0: all become NaN.
//   s = (y / scale) * 127^2 or 255^2;  f = floor(sqrt(s))
//   kSigned       up iff u (2f + 1) < (s - f f) 2^24;  c = +-(f + up)
//   kNonNegative  up iff u ((2f + 1) (2 f f + 2 f + 1)) < ((s - f f) (s + f f)) 2^24;  c = max(f + up, x > 0)
//
// With u uniform in [0, 2^24) the expected value is x, but for what is below the first level of a kNonNegative: that is
// never 0, as it stands below a fraction. With u = 2^23 it rounds to the nearest level, and what was decoded gets the
// same record again.
inline constexpr std::size_t kMomentBlock = 256;
inline constexpr std::size_t kMomentRecordNbytes = sizeof(float) + kMomentBlock;
inline constexpr float kLeastScale = 1.4210854715202004e-14F;  // 2^-46: the square of the first level is no denormal

enum class MomentKind : int { kSigned = 0, kNonNegative = 1 };

constexpr std::size_t MomentRecordsNbytes(std::size_t numel) {
  return (numel + kMomentBlock - 1) / kMomentBlock * kMomentRecordNbytes;
}

// The reference: element by element. `uniform` has `numel` whole numbers.
void EncodeMomentsRef(MomentKind kind, const float* values, const float* uniform, std::size_t numel,
                      std::uint8_t* records);
void DecodeMomentsRef(MomentKind kind, const std::uint8_t* records, std::size_t numel, float* values);

}  // namespace zcomm
