#pragma once

#include <cstdint>

// The arithmetic of zcomm/_formats/ulps_reference.py for one element, symbol or table, which all levels and the GPU
// share. Everything is static: the linker would otherwise keep one level's copy of a function (block_kernels_impl.h).
#ifdef __CUDACC__
#define ZCOMM_ULPS static __host__ __device__ __forceinline__
#else
#define ZCOMM_ULPS static inline
#endif

namespace zcomm::ulps {

inline constexpr std::uint32_t kMagic = 0x4C55;  // "UL"
inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::uint32_t kDenseChunkBits = 18;
inline constexpr std::uint32_t kSparseChunkBits = 20;
inline constexpr std::uint32_t kRareChunkBits = 22;
inline constexpr std::uint32_t kSamples = 64;
inline constexpr std::uint32_t kSampleNumel = 1024;

inline constexpr std::uint32_t kScaleBits = 12;
inline constexpr std::uint32_t kScale = 1U << kScaleBits;
inline constexpr std::uint32_t kLowestState = 1U << 15;
inline constexpr std::uint32_t kStateLimit = 1U << 31;
inline constexpr std::uint32_t kDenseLanes = 32;
inline constexpr std::uint32_t kSparseLanes = 4;

inline constexpr std::uint32_t kMaxDirectBits = 7;
inline constexpr std::uint32_t kRare = 64;
inline constexpr std::uint32_t kGapDirectBits = 1;
inline constexpr std::uint32_t kGapSymbols = 2 + 2 * (kRareChunkBits - 1);
inline constexpr std::uint32_t kMaxSymbols = (1U << kMaxDirectBits) + 2 * (16 - kMaxDirectBits);

enum Kind : std::uint32_t { kZero = 0, kSparse = 1, kDense = 2, kRaw = 3 };

// The integer of a value's bits in the order of the values, modulo 2^16, or back.
ZCOMM_ULPS std::uint32_t Order(std::uint32_t bits) { return bits ^ ((bits >> 15) * 0x7FFFU); }

// The change that z stands for, modulo 2^16.
ZCOMM_ULPS std::uint32_t Unzigzag(std::uint32_t z) { return (z >> 1) ^ (0U - (z & 1U)); }

ZCOMM_ULPS std::uint32_t Change(std::uint32_t new_bits, std::uint32_t old_bits) {
  const std::uint32_t difference = Order(new_bits) - Order(old_bits);
  return ((difference << 1) ^ (0U - (difference >> 15 & 1U))) & 0xFFFFU;
}

ZCOMM_ULPS std::uint32_t Changed(std::uint32_t old_bits, std::uint32_t z) {
  return Order((Order(old_bits) + Unzigzag(z)) & 0xFFFFU);
}

// floor(log2(value)), value > 0.
ZCOMM_ULPS std::uint32_t Octave(std::uint32_t value) {
#ifdef __CUDA_ARCH__
  return 31U - static_cast<std::uint32_t>(__clz(static_cast<int>(value)));
#else
  return 31U - static_cast<std::uint32_t>(__builtin_clz(value));
#endif
}

ZCOMM_ULPS std::uint32_t NumSymbols(std::uint32_t direct) { return (1U << direct) + 2U * (16U - direct); }

ZCOMM_ULPS std::uint32_t Symbol(std::uint32_t value, std::uint32_t direct) {
  if (value < 1U << direct) return value;
  const std::uint32_t octave = Octave(value);
  return (1U << direct) + 2U * (octave - direct) + (value >> (octave - 1U) & 1U);
}

// The extra bits of a symbol.
ZCOMM_ULPS std::uint32_t Width(std::uint32_t symbol, std::uint32_t direct) {
  return symbol < 1U << direct ? 0U : (symbol - (1U << direct)) / 2U + direct - 1U;
}

ZCOMM_ULPS std::uint32_t Extra(std::uint32_t value, std::uint32_t width) { return value & ((1U << width) - 1U); }

ZCOMM_ULPS std::uint32_t Joined(std::uint32_t symbol, std::uint32_t direct, std::uint32_t extra) {
  if (symbol < 1U << direct) return symbol;
  return ((2U + (symbol & 1U)) << Width(symbol, direct)) + extra;
}

// The symbol for fewer direct bits of a symbol for kMaxDirectBits.
ZCOMM_ULPS std::uint32_t Coarser(std::uint32_t symbol, std::uint32_t direct) {
  if (symbol < 1U << kMaxDirectBits) return Symbol(symbol, direct);
  return symbol - (1U << kMaxDirectBits) + (1U << direct) + 2U * (kMaxDirectBits - direct);
}

// What the word with this index in its message adds to a checksum.
ZCOMM_ULPS std::uint32_t Mixed(std::uint32_t word, std::uint32_t index) {
  std::uint32_t mixed = word + (index + 1U) * 0x9E3779B9U;
  mixed ^= mixed >> 16;
  mixed *= 0x85EBCA6BU;
  mixed ^= mixed >> 13;
  mixed *= 0xC2B2AE35U;
  return mixed ^ mixed >> 16;
}

ZCOMM_ULPS bool IsSparse(std::uint32_t nonzero, std::uint32_t numel) { return nonzero * 16U < numel; }

// The binary logarithm of the elements in a chunk, by how many of all samples have changed.
ZCOMM_ULPS std::uint32_t ChunkBitsOf(std::uint32_t changed) {
  constexpr std::uint32_t kAll = kSamples * kSampleNumel;
  if (!IsSparse(changed, kAll)) return kDenseChunkBits;
  return changed * 128U < kAll ? kRareChunkBits : kSparseChunkBits;
}

ZCOMM_ULPS bool IsChunkBits(std::uint32_t bits) {
  return bits == kDenseChunkBits || bits == kSparseChunkBits || bits == kRareChunkBits;
}

// The direct bits of a table from the counts of symbols for kMaxDirectBits.
ZCOMM_ULPS std::uint32_t DirectBits(const std::uint32_t* counts, std::uint32_t numel) {
  std::uint32_t above = 0;
  std::uint32_t symbol = kMaxSymbols;
  std::uint32_t least = kMaxDirectBits;
  for (std::uint32_t direct = kMaxDirectBits - 1; direct >= 1; --direct) {
    while (symbol > 1U << direct) above += counts[--symbol];
    if (above * kRare > numel) break;
    least = direct;
  }
  return least;
}

// Scales counts, of which one is positive, to frequencies of sum kScale.
ZCOMM_ULPS void ScaleCounts(const std::uint32_t* counts, std::uint32_t num_symbols, std::uint32_t* frequency) {
  std::uint32_t total = 0;
  for (std::uint32_t s = 0; s < num_symbols; ++s) total += counts[s];
  std::uint32_t sum = 0;
  for (std::uint32_t s = 0; s < num_symbols; ++s) {
    const auto scaled =
        static_cast<std::uint32_t>((static_cast<std::uint64_t>(counts[s]) * kScale + total / 2) / total);
    frequency[s] = counts[s] > 0 && scaled == 0 ? 1U : scaled;
    sum += frequency[s];
  }
  while (sum != kScale) {
    std::uint32_t largest = 0;
    for (std::uint32_t s = 1; s < num_symbols; ++s) largest = frequency[s] > frequency[largest] ? s : largest;
    const std::uint32_t most = frequency[largest] / 16U > 1U ? frequency[largest] / 16U : 1U;
    const std::uint32_t missing = sum < kScale ? kScale - sum : sum - kScale;
    const std::uint32_t step = missing < most ? missing : most;
    frequency[largest] = sum < kScale ? frequency[largest] + step : frequency[largest] - step;
    sum = sum < kScale ? sum + step : sum - step;
  }
}

// How a symbol is encoded. Division by its frequency f is a product with `reciprocal`, exact for states, below 2^31:
// ceil(2^(31 + shift) / f) with shift = ceil(log2(f)).
struct EncodeEntry {
  std::uint32_t reciprocal;
  std::uint32_t packed;  // frequency, 13 bits; sum of the frequencies before, 12 bits; shift
};

ZCOMM_ULPS EncodeEntry MakeEncodeEntry(std::uint32_t frequency, std::uint32_t first) {
  const std::uint32_t shift = frequency > 1U ? Octave(frequency - 1U) + 1U : 0U;
  const auto reciprocal = static_cast<std::uint32_t>(((1ULL << (31U + shift)) + frequency - 1U) / frequency);
  return {reciprocal, frequency | first << 13 | shift << 25};
}

ZCOMM_ULPS std::uint32_t FrequencyOf(std::uint32_t packed) { return packed & 0x1FFFU; }

// Whether the lane must first give a word, the low half of its state.
ZCOMM_ULPS bool IsFull(std::uint32_t state, std::uint32_t packed) {
  return state >> (31U - kScaleBits) >= FrequencyOf(packed);
}

ZCOMM_ULPS std::uint32_t EncodeSymbol(std::uint32_t state, EncodeEntry entry) {
  const auto high = static_cast<std::uint32_t>(static_cast<std::uint64_t>(2U * state) * entry.reciprocal >> 32);
  const std::uint32_t quotient = high >> (entry.packed >> 25);
  return state + (entry.packed >> 13 & (kScale - 1U)) + quotient * (kScale - FrequencyOf(entry.packed));
}

ZCOMM_ULPS void FillEntries(const std::uint32_t* frequency, std::uint32_t num_symbols, EncodeEntry* entries) {
  std::uint32_t first = 0;
  for (std::uint32_t s = 0; s < num_symbols; ++s) {
    if (frequency[s] > 0) entries[s] = MakeEncodeEntry(frequency[s], first);
    first += frequency[s];
  }
}

// Writes a table, at most two bytes a symbol, and returns its end.
ZCOMM_ULPS std::uint8_t* WriteTable(const std::uint32_t* frequency, std::uint32_t num_symbols, std::uint8_t* out) {
  for (std::uint32_t s = 0; s < num_symbols;) {
    if (frequency[s] == 0) {
      const std::uint32_t begin = s;
      while (s < num_symbols && frequency[s] == 0) ++s;
      *out++ = 0;
      *out++ = static_cast<std::uint8_t>(s - begin);
      continue;
    }
    const bool is_large = frequency[s] >= 128;
    *out++ = static_cast<std::uint8_t>(is_large ? 128 + frequency[s] % 128 : frequency[s]);
    if (is_large) *out++ = static_cast<std::uint8_t>(frequency[s] / 128);
    ++s;
  }
  return out;
}

// Counts for `direct` from those for kMaxDirectBits; returns the extra bits of all.
ZCOMM_ULPS std::uint64_t CoarserCounts(const std::uint32_t* counts, std::uint32_t direct, std::uint32_t* coded) {
  for (std::uint32_t s = 0; s < kMaxSymbols; ++s) coded[s] = 0;
  std::uint64_t num_extra_bits = 0;
  for (std::uint32_t s = 0; s < kMaxSymbols; ++s) {
    const std::uint32_t symbol = Coarser(s, direct);
    coded[symbol] += counts[s];
    num_extra_bits += static_cast<std::uint64_t>(counts[s]) * Width(symbol, direct);
  }
  return num_extra_bits;
}

// A slot of the decoder's table: frequency - 1, 12 bits; the slot's number within its symbol, 12 bits; symbol.
ZCOMM_ULPS std::uint32_t MakeSlot(std::uint32_t symbol, std::uint32_t frequency, std::uint32_t number) {
  return (frequency - 1U) | number << 12 | symbol << 24;
}

// The state after a symbol; if it is below kLowestState, a word follows.
ZCOMM_ULPS std::uint32_t DecodeSymbol(std::uint32_t state, std::uint32_t slot) {
  return ((slot & 0xFFFU) + 1U) * (state >> kScaleBits) + (slot >> 12 & 0xFFFU);
}

}  // namespace zcomm::ulps
