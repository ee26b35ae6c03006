#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ulps_arithmetic.h"

namespace zcomm::ulps {

// By the symbol for kMaxDirectBits.
struct EncodeTable {
  EncodeEntry entries[256];
};

// Extra bits, of little-endian u32, the lowest first. Functions of it are static, as those of ulps_arithmetic.h.
struct BitReader {
  const std::uint8_t* begin;
  std::size_t nbytes;
  std::size_t last;    // where the last word is
  std::size_t at = 0;  // in bits
};

inline constexpr std::uint8_t kNoBits[4] = {};

// `nbytes` must be a multiple of 4.
static inline BitReader MakeBitReader(const std::uint8_t* data, std::size_t nbytes) {
  if (nbytes == 0) return {kNoBits, 0, 0};
  return {data, nbytes, nbytes - 4};
}

static inline bool IsWithin(const BitReader& bits) { return bits.at <= 8 * bits.nbytes; }
static inline bool IsUsedUp(const BitReader& bits) { return (bits.at + 31) / 32 * 4 == bits.nbytes; }

// Joined() of a symbol that is not direct, of this width, and the next bits, or any value where those are no longer
// within, so that a loop may ask once, at its end. Without a branch, as nobody could predict where a word ends.
static inline std::uint32_t TakeJoined(BitReader* bits, std::uint32_t symbol, std::uint32_t width) {
  const std::size_t from = bits->at / 8 < bits->last ? bits->at / 8 : bits->last;
  std::uint32_t word = 0;
  std::memcpy(&word, bits->begin + from, sizeof(word));
  bits->at += width;
  const std::uint32_t extra = word << ((8 * from - bits->at) & 31U);  // its bits are the highest, anything below
  return (1U << 31 | symbol << 30 | extra >> 2) >> (30U - width);
}

struct Lanes {
  alignas(64) std::uint32_t states[kDenseLanes];
  const std::uint8_t* words;
  const std::uint8_t* words_end;
};

// What decodes a dense chunk, and where its next symbols go.
struct DenseStream {
  Lanes* lanes;
  const std::uint32_t* slots;
  std::uint8_t* symbols;
};

// The loops over elements, compiled once for each ISA level from ulps_kernels_impl.h.
struct UlpsKernels {
  // The symbols of the changes for kMaxDirectBits; returns how many are not 0.
  std::size_t (*symbols)(const std::uint16_t* new_bits, const std::uint16_t* old_bits, std::size_t numel,
                         std::uint8_t* symbols);
  // Writes the words of symbols to just before `end`, not below `begin`, and returns where they begin; null if they may
  // not fit, which leaves less than 64 bytes. Between 64 bytes below its result and the result, it writes anything.
  std::uint8_t* (*encode)(const std::uint8_t* symbols, std::size_t numel, const EncodeTable& table, std::uint8_t* begin,
                          std::uint8_t* end, std::uint32_t* states);
  // Writes the extra bits of symbols from `least` on to u32 at `out`.
  void (*write_extra)(const std::uint8_t* symbols, std::uint32_t least, const std::uint16_t* new_bits,
                      const std::uint16_t* old_bits, std::size_t numel, std::uint8_t* out);
  // The next symbols, a multiple of kDenseLanes of them but at a chunk's end; false if the words do not suffice.
  bool (*decode)(const DenseStream& stream, std::size_t numel);
  // Those of two chunks, where that takes less time than one after the other; else null.
  bool (*decode_both)(const DenseStream& a, const DenseStream& b, std::size_t numel);
  // Changes the values by symbols and extra bits; false if those do not suffice.
  bool (*apply)(const std::uint8_t* symbols, std::uint32_t direct, std::size_t numel, BitReader* extra,
                std::uint16_t* values);
  // The sum of Mixed() of little-endian words of which the first has index `first`.
  std::uint32_t (*checksum)(const std::uint8_t* words, std::size_t count, std::uint32_t first);
};

const UlpsKernels& BaselineUlpsKernels();
#ifdef ZCOMM_X86
const UlpsKernels& Avx2UlpsKernels();
const UlpsKernels& Avx512UlpsKernels();
#endif

}  // namespace zcomm::ulps
