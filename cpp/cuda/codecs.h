#pragma once

#include <cstdint>

#include "portable.h"

// The block codecs of the numerics contract (zcomm/_formats/reference.py), eight elements of a lane at a time: from
// scaled values to the bits of their codes, and from bits to levels (level * scale = value).
//
// No code needs a clamp. The scale is absmax / qmax rounded up. After the roundings of the quotient, the inverse and
// the product, a scaled value is at most qmax * (1 + 2^-22), which rounds to at most qmax. The scale does not reach its
// bound 0x7F7F either, because qmax is at least 7.
namespace zcomm::cuda {

constexpr std::uint32_t kInfinityBits = 0x7F800000U;
constexpr std::uint32_t kTinyBits = 0x0D800000U;  // 2^-100
constexpr std::uint32_t kNanHeader = 0x7FC0U;

// The levels of nf4 (N5) and the midpoints between them, in shared memory.
struct Tables {
  // Cell c covers scaled values within [(c - 16) / 2 - 1/16, (c - 16) / 2 + 7/16], and at most one midpoint: the first
  // that is not below the cell, with the number of those below in its lowest 4 bits (which a midpoint does not need).
  // Cells from 33 on are those of NaNs.
  std::uint32_t cells[64];
  float levels[16];
};

ZCOMM_DEVICE float Nf4Level(int code) {
  constexpr float levels[16] = {-8.0F,       -5.5625F, -4.1875F,    -3.15625F,  -2.28125F, -1.4765625F,
                                -0.7265625F, 0.0F,     0.63671875F, 1.2890625F, 1.96875F,  2.703125F,
                                3.53125F,    4.5F,     5.78125F,    8.0F};
  return levels[code];
}

// Fills entry `index`; to be called for each of 0 .. 63.
ZCOMM_DEVICE void FillTables(int index, Tables* tables) {
  ZCOMM_UNROLL
  for (int i = 0; i < 16; ++i) {
    if (index == i) tables->levels[i] = Nf4Level(i);
  }
  const float start = static_cast<float>(index - 16) * 0.5F - 0.0625F;
  std::uint32_t below = 0;
  float next = 3e38F;
  ZCOMM_UNROLL
  for (int i = 14; i >= 0; --i) {
    const float midpoint = (Nf4Level(i) + Nf4Level(i + 1)) * 0.5F;
    if (midpoint < start) {
      ++below;
    } else {
      next = midpoint;
    }
  }
  tables->cells[index] = (BitsOf(next) & ~15U) | below;
}

// Rounds half to even; |value| < 2^21. The integer, in two's complement, is in the lowest bits.
ZCOMM_DEVICE std::uint32_t Rounded(float value) { return BitsOf(value + 12582912.0F); }

// Packs the lowest 4 bits of eight words into one word.
template <class P>
ZCOMM_DEVICE std::uint32_t Nibbles(const std::uint32_t (&r)[8]) {
  const std::uint32_t even = LowBytes<P>(r[0], r[2], r[4], r[6]);
  const std::uint32_t odd = LowBytes<P>(r[1], r[3], r[5], r[7]);
  return (even & 0x0F0F0F0FU) | ((odd << 4) & 0xF0F0F0F0U);
}

// 2^23 plus byte k of a word: the byte becomes the lowest of the float32.
template <class P>
ZCOMM_DEVICE float FloatAbove2To23(std::uint32_t word, int k) {
  return FloatOf(P::Permute(word, 0x4B000000U, 0x7650U | static_cast<std::uint32_t>(k)));
}

struct Int8Codec {
  static constexpr int kBits = 8;
  static constexpr float kQMax = 127.0F;
  static constexpr float kLargestLevel = 128.0F;

  template <class P>
  ZCOMM_DEVICE static void Encode(const float (&y)[8], const Tables& /*tables*/, std::uint32_t (&words)[2]) {
    ZCOMM_UNROLL
    for (int i = 0; i < 2; ++i) {
      words[i] = LowBytes<P>(Rounded(y[4 * i]), Rounded(y[4 * i + 1]), Rounded(y[4 * i + 2]), Rounded(y[4 * i + 3]));
    }
  }

  template <class P>
  ZCOMM_DEVICE static void Decode(const std::uint32_t (&words)[2], const Tables& /*tables*/, float (&levels)[8]) {
    ZCOMM_UNROLL
    for (int k = 0; k < 8; ++k) {
      levels[k] = FloatAbove2To23<P>(words[k / 4] ^ 0x80808080U, k % 4) - 8388736.0F;  // 2^23 + 128
    }
  }
};

struct Int4Codec {
  static constexpr int kBits = 4;
  static constexpr float kQMax = 7.0F;
  static constexpr float kLargestLevel = 8.0F;

  template <class P>
  ZCOMM_DEVICE static void Encode(const float (&y)[8], const Tables& /*tables*/, std::uint32_t (&words)[1]) {
    std::uint32_t rounded[8];
    ZCOMM_UNROLL
    for (int k = 0; k < 8; ++k) rounded[k] = Rounded(y[k]);
    words[0] = Nibbles<P>(rounded);
  }

  template <class P>
  ZCOMM_DEVICE static void Decode(const std::uint32_t (&words)[1], const Tables& /*tables*/, float (&levels)[8]) {
    const std::uint32_t shifted = words[0] ^ 0x88888888U;
    const std::uint32_t halves[2] = {shifted & 0x0F0F0F0FU, (shifted >> 4) & 0x0F0F0F0FU};
    ZCOMM_UNROLL
    for (int k = 0; k < 8; ++k) {
      levels[k] = FloatAbove2To23<P>(halves[k % 2], k / 2) - 8388616.0F;  // 2^23 + 8
    }
  }
};

struct Nf4Codec {
  static constexpr int kBits = 4;
  static constexpr float kQMax = 8.0F;
  static constexpr float kLargestLevel = 8.0F;

  template <class P>
  ZCOMM_DEVICE static void Encode(const float (&y)[8], const Tables& tables, std::uint32_t (&words)[1]) {
    std::uint32_t codes[8];
    ZCOMM_UNROLL
    for (int k = 0; k < 8; ++k) {
      // 1.5 * 2^20 + 8 has steps of 1/8: the lowest 8 bits are round(8 y) + 64, and without the last two 4 * the cell.
      const std::uint32_t cell = tables.cells[(BitsOf(y[k] + 1572872.0F) & 0xFCU) >> 2];
      codes[k] = cell + (y[k] > FloatOf(cell & ~15U) ? 1 : 0);
    }
    words[0] = Nibbles<P>(codes);
  }

  template <class P>
  ZCOMM_DEVICE static void Decode(const std::uint32_t (&words)[1], const Tables& tables, float (&levels)[8]) {
    ZCOMM_UNROLL
    for (int k = 0; k < 8; ++k) levels[k] = tables.levels[(words[0] >> (4 * k)) & 15U];
  }
};

struct Fp8Codec {
  static constexpr int kBits = 8;
  static constexpr float kQMax = 448.0F;
  static constexpr float kLargestLevel = 480.0F;

  template <class P>
  ZCOMM_DEVICE static void Encode(const float (&y)[8], const Tables& /*tables*/, std::uint32_t (&words)[2]) {
    ZCOMM_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float* four = y + 4 * i;
      const std::uint32_t magnitudes =
          LowBytes<P>(Magnitude(four[0]), Magnitude(four[1]), Magnitude(four[2]), Magnitude(four[3]));
      const std::uint32_t signs =
          LowBytes<P>(BitsOf(four[0]) >> 24, BitsOf(four[1]) >> 24, BitsOf(four[2]) >> 24, BitsOf(four[3]) >> 24);
      // No negative zero: a magnitude, at most 0x7E, plus 0x7F has the highest bit unless it is 0.
      words[i] = magnitudes | (signs & (magnitudes + 0x7F7F7F7FU) & 0x80808080U);
    }
  }

  // Moves sign, exponent and mantissa to where a float32 has them; the factor 2^120 makes up for the difference of the
  // biases, for denormals too.
  template <class P>
  ZCOMM_DEVICE static void Decode(const std::uint32_t (&words)[2], const Tables& /*tables*/, float (&levels)[8]) {
    ZCOMM_UNROLL
    for (int k = 0; k < 8; ++k) {
      // byte k at the top
      const auto top =
          static_cast<std::int32_t>(P::Permute(words[k / 4], 0U, 0x0444U | static_cast<std::uint32_t>(k % 4) << 12));
      levels[k] = FloatOf(static_cast<std::uint32_t>(top >> 4) & 0x87F00000U) * FloatOf(0x7B800000U);
    }
  }

 private:
  // In the lowest byte, half to even: of normal numbers the exponent, less by 120, and 3 bits; below 2^-6 in steps of
  // 2^-9, which are those of float32 from 2^14 on.
  ZCOMM_DEVICE static std::uint32_t Magnitude(float value) {
    const std::uint32_t bits = BitsOf(value) & 0x7FFFFFFFU;
    const std::uint32_t normal = (bits - 0x3C000000U + 0x7FFFFU + ((bits >> 20) & 1U)) >> 20;
    return bits < 0x3C800000U ? BitsOf(FloatOf(bits) + 16384.0F) : normal;
  }
};

struct Scale {
  std::uint32_t header;
  float inverse;
};

// N1 to N3 of a block. The caller must ignore the result if a value is not finite: such a block has only 0 codes.
template <class P, class C>
ZCOMM_DEVICE Scale ScaleOf(std::uint32_t absmax_bits) {
  const bool is_normal = absmax_bits >= kTinyBits && absmax_bits < kInfinityBits;
  const float absmax = FloatOf(is_normal ? absmax_bits : 0x3F800000U);
  const std::uint32_t bits = (BitsOf(P::Divide(absmax, C::kQMax)) + 0xFFFFU) & 0xFFFF0000U;
  const float inverse = P::Divide(1.0F, FloatOf(bits));
  if (is_normal) return {bits >> 16, inverse};
  return {absmax_bits < kTinyBits ? 0U : kNanHeader, 0.0F};
}

// N4: the codes of a lane times their block's scale, clamped to [-limit, limit]; a NaN stays a NaN.
template <class P, class C>
ZCOMM_DEVICE void DecodeVector(const std::uint32_t (&words)[C::kBits / 4], std::uint32_t header, float limit,
                               const Tables& tables, float (&values)[8]) {
  const float scale = FloatOf(header << 16);
  C::template Decode<P>(words, tables, values);
  ZCOMM_UNROLL
  for (int k = 0; k < 8; ++k) values[k] *= scale;
  if (C::kLargestLevel * FloatOf((header & 0x7FFFU) << 16) <= limit) return;
  ZCOMM_UNROLL
  for (int k = 0; k < 8; ++k) {
    values[k] = values[k] > limit ? limit : values[k] < -limit ? -limit : values[k];
  }
}

// Adds to each sum the value that DecodeVector returns. Where nothing is clamped, by one instruction: the product of a
// level and a scale, 8 bits each, is exact.
template <class P, class C>
ZCOMM_DEVICE void AddVector(const std::uint32_t (&words)[C::kBits / 4], std::uint32_t header, float limit,
                            const Tables& tables, float (&sums)[8]) {
  if (!(C::kLargestLevel * FloatOf((header & 0x7FFFU) << 16) <= limit)) {
    float values[8];
    DecodeVector<P, C>(words, header, limit, tables, values);
    ZCOMM_UNROLL
    for (int k = 0; k < 8; ++k) sums[k] += values[k];
    return;
  }
  float levels[8];
  C::template Decode<P>(words, tables, levels);
  ZCOMM_UNROLL
  for (int k = 0; k < 8; ++k) sums[k] = P::MultiplyAdd(levels[k], FloatOf(header << 16), sums[k]);
}

}  // namespace zcomm::cuda
