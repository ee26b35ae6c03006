// AVX2. ulps_kernels_impl.h documents the functions.

#include "ulps_lookup_avx2.h"

constexpr bool kInterleaves = false;

inline __m256i LoadVector(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void StoreVector(void* to, __m256i vector) { _mm256_storeu_si256(static_cast<__m256i*>(to), vector); }

inline __m256i OrderVector(__m256i bits) {
  return _mm256_xor_si256(bits, _mm256_srli_epi16(_mm256_srai_epi16(bits, 15), 1));
}

// The low bytes, of values below 256, of 4 vectors of 8.
inline __m256i JoinBytes(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i joined = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
  return _mm256_permutevar8x32_epi32(joined, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// The even (kSelect 0x88) or odd (0xDD) words of two vectors.
template <int kSelect>
inline __m256i JoinWords(__m256i a, __m256i b) {
  const __m256 joined = _mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), kSelect);
  return _mm256_permute4x64_epi64(_mm256_castps_si256(joined), 0xD8);
}

inline __m256i ChangesOf(const std::uint16_t* new_bits, const std::uint16_t* old_bits) {
  const __m256i change = _mm256_sub_epi16(OrderVector(LoadVector(new_bits)), OrderVector(LoadVector(old_bits)));
  return _mm256_xor_si256(_mm256_slli_epi16(change, 1), _mm256_srai_epi16(change, 15));
}

// Symbols from 2^kMaxDirectBits on: the exponent and the highest fraction bit of a change as a float32.
inline __m256i CoarseSymbols(__m128i z) {
  constexpr int kOffset = 2 * (127 + static_cast<int>(kMaxDirectBits)) - (1 << kMaxDirectBits);
  const __m256i bits = _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(z)));
  // Changes below 2^kMaxDirectBits, whose symbols are not used, must not become negative.
  return _mm256_and_si256(_mm256_sub_epi32(_mm256_srli_epi32(bits, 22), _mm256_set1_epi32(kOffset)),
                          _mm256_set1_epi32(0xFF));
}

inline std::size_t SymbolsOfHalf(const std::uint16_t* new_bits, const std::uint16_t* old_bits, std::uint8_t* symbols) {
  const __m256i first = ChangesOf(new_bits, old_bits);
  const __m256i second = ChangesOf(new_bits + 16, old_bits + 16);
  const __m256i most = _mm256_set1_epi16(255);
  const __m256i packed = _mm256_packus_epi16(_mm256_min_epu16(first, most), _mm256_min_epu16(second, most));
  __m256i bytes = _mm256_permute4x64_epi64(packed, 0xD8);
  if (_mm256_movemask_epi8(bytes) != 0) {
    const __m256i coarse =
        JoinBytes(CoarseSymbols(_mm256_castsi256_si128(first)), CoarseSymbols(_mm256_extracti128_si256(first, 1)),
                  CoarseSymbols(_mm256_castsi256_si128(second)), CoarseSymbols(_mm256_extracti128_si256(second, 1)));
    bytes = _mm256_blendv_epi8(bytes, coarse, bytes);
  }
  StoreVector(symbols, bytes);
  const auto is_zero = static_cast<unsigned>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256())));
  return kGroup / 2 - static_cast<std::size_t>(__builtin_popcount(is_zero));
}

inline std::size_t SymbolsOfGroup(const std::uint16_t* new_bits, const std::uint16_t* old_bits, std::uint8_t* symbols) {
  return SymbolsOfHalf(new_bits, old_bits, symbols) +
         SymbolsOfHalf(new_bits + kGroup / 2, old_bits + kGroup / 2, symbols + kGroup / 2);
}

inline std::uint64_t AtLeast(const std::uint8_t* symbols, std::uint32_t least) {
  std::uint64_t mask = 0;
  for (std::size_t i = 0; i < kGroup; i += 32) {
    const __m256i bytes = LoadVector(symbols + i);
    const __m256i larger = _mm256_max_epu8(bytes, _mm256_set1_epi8(static_cast<char>(least)));
    const auto half = static_cast<unsigned>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, larger)));
    mask |= static_cast<std::uint64_t>(half) << i;
  }
  return mask;
}

inline void ApplyGroup(const std::uint16_t* zs, std::uint16_t* values) {
  for (std::size_t i = 0; i < kGroup; i += 16) {
    const __m256i z = LoadVector(zs + i);
    const __m256i sign = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_and_si256(z, _mm256_set1_epi16(1)));
    const __m256i change = _mm256_xor_si256(_mm256_srli_epi16(z, 1), sign);
    StoreVector(values + i, OrderVector(_mm256_add_epi16(OrderVector(LoadVector(values + i)), change)));
  }
}

// For each mask of lanes: how to move their words, in order, to the end of a vector (to_end), and how to move the next
// words of a stream to these lanes (to_lanes); the other lanes get words that are not used.
struct Shuffles {
  alignas(64) std::uint8_t to_end[256][16];
  alignas(64) std::uint8_t to_lanes[256][16];
};

constexpr Shuffles MakeShuffles() {
  Shuffles made{};
  for (int mask = 0; mask < 256; ++mask) {
    int count = 0;
    for (int lane = 0; lane < 8; ++lane) {
      made.to_lanes[mask][2 * lane] = static_cast<std::uint8_t>(2 * count);
      made.to_lanes[mask][2 * lane + 1] = static_cast<std::uint8_t>(2 * count + 1);
      count += mask >> lane & 1;
    }
    int at = 2 * (8 - count);
    for (int lane = 0; lane < 8; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      made.to_end[mask][at++] = static_cast<std::uint8_t>(2 * lane);
      made.to_end[mask][at++] = static_cast<std::uint8_t>(2 * lane + 1);
    }
  }
  return made;
}

constexpr Shuffles kShuffles = MakeShuffles();

struct Round {
  __m256i vectors[4];

  explicit Round(const std::uint32_t* from) {
    for (int i = 0; i < 4; ++i) vectors[i] = LoadVector(from + 8 * i);
  }

  void Save(std::uint32_t* to) const {
    for (int i = 0; i < 4; ++i) StoreVector(to + 8 * i, vectors[i]);
  }

  std::uint8_t* Encode(const EncodeEntry* entries, std::uint8_t* words) {
    for (int i = 3; i >= 0; --i) words = EncodeVector(entries + 8 * i, words, &vectors[i]);
    return words;
  }

  const std::uint8_t* Decode(const std::uint32_t* slots, const std::uint8_t* words, std::uint8_t* symbols) {
    __m256i parts[4];
    for (int i = 0; i < 4; ++i) words = DecodeVector(slots, words, &parts[i], &vectors[i]);
    StoreVector(symbols, JoinBytes(parts[0], parts[1], parts[2], parts[3]));
    return words;
  }

  static std::uint8_t* EncodeVector(const EncodeEntry* entries, std::uint8_t* words, __m256i* states) {
    const __m256i low = LoadVector(entries);
    const __m256i high = LoadVector(entries + 4);
    const __m256i reciprocal = JoinWords<0x88>(low, high);
    const __m256i packed = JoinWords<0xDD>(low, high);
    const __m256i frequency = _mm256_and_si256(packed, _mm256_set1_epi32(0x1FFF));
    const __m256i is_below = _mm256_cmpgt_epi32(frequency, _mm256_srli_epi32(*states, 31 - kScaleBits));
    const auto mask = static_cast<unsigned>(~_mm256_movemask_ps(_mm256_castsi256_ps(is_below))) & 0xFFU;
    const __m256i halves32 = _mm256_and_si256(*states, _mm256_set1_epi32(0xFFFF));
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(halves32), _mm256_extracti128_si256(halves32, 1));
    const __m128i to_end = _mm_load_si128(reinterpret_cast<const __m128i*>(kShuffles.to_end[mask]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words - 16), _mm_shuffle_epi8(halves, to_end));
    const __m256i state = _mm256_blendv_epi8(_mm256_srli_epi32(*states, 16), *states, is_below);
    const __m256i twice = _mm256_add_epi32(state, state);
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(twice, reciprocal), 32);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(twice, 32), _mm256_srli_epi64(reciprocal, 32));
    const __m256i quotient = _mm256_srlv_epi32(_mm256_blend_epi32(even, odd, 0xAA), _mm256_srli_epi32(packed, 25));
    const __m256i before = _mm256_and_si256(_mm256_srli_epi32(packed, 13), _mm256_set1_epi32(kScale - 1));
    const __m256i rest = _mm256_sub_epi32(_mm256_set1_epi32(kScale), frequency);
    *states = _mm256_add_epi32(_mm256_add_epi32(state, before), _mm256_mullo_epi32(quotient, rest));
    return words - 2 * static_cast<unsigned>(__builtin_popcount(mask));
  }

  static const std::uint8_t* DecodeVector(const std::uint32_t* slots, const std::uint8_t* words, __m256i* symbols,
                                          __m256i* states) {
    const __m256i mask = _mm256_set1_epi32(kScale - 1);
    const __m256i slot = SlotsAt(slots, _mm256_and_si256(*states, mask));
    const __m256i frequency = _mm256_add_epi32(_mm256_and_si256(slot, mask), _mm256_set1_epi32(1));
    const __m256i number = _mm256_and_si256(_mm256_srli_epi32(slot, 12), mask);
    const __m256i state =
        _mm256_add_epi32(_mm256_mullo_epi32(frequency, _mm256_srli_epi32(*states, kScaleBits)), number);
    const __m256i is_low = _mm256_cmpgt_epi32(_mm256_set1_epi32(kLowestState), state);
    const auto low = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(is_low)));
    const __m128i next = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words));
    const __m128i to_lanes = _mm_load_si128(reinterpret_cast<const __m128i*>(kShuffles.to_lanes[low]));
    const __m256i word = _mm256_cvtepu16_epi32(_mm_shuffle_epi8(next, to_lanes));
    const __m256i refilled = _mm256_or_si256(_mm256_slli_epi32(state, 16), word);
    *states = _mm256_blendv_epi8(state, refilled, is_low);
    *symbols = _mm256_srli_epi32(slot, 24);
    return words + 2 * static_cast<unsigned>(__builtin_popcount(low));
  }
};
