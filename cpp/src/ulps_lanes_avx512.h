// AVX-512 F, BW, DQ, VL. ulps_kernels_impl.h documents the functions.

#include "ulps_lookup_avx2.h"

constexpr bool kInterleaves = true;

inline __m512i OrderVector(__m512i bits) {
  return _mm512_xor_si512(bits, _mm512_srli_epi16(_mm512_srai_epi16(bits, 15), 1));
}

// Symbols from 2^kMaxDirectBits on: the exponent and the highest fraction bit of a change as a float32.
inline __m128i CoarseSymbols(__m256i z) {
  constexpr int kOffset = 2 * (127 + static_cast<int>(kMaxDirectBits)) - (1 << kMaxDirectBits);
  const __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(z)));
  return _mm512_cvtepi32_epi8(_mm512_sub_epi32(_mm512_srli_epi32(bits, 22), _mm512_set1_epi32(kOffset)));
}

inline std::size_t SymbolsOfGroup(const std::uint16_t* new_bits, const std::uint16_t* old_bits, std::uint8_t* symbols) {
  std::size_t nonzero = 0;
  for (std::size_t i = 0; i < kGroup; i += 32) {
    const __m512i order = OrderVector(_mm512_loadu_si512(new_bits + i));
    const __m512i change = _mm512_sub_epi16(order, OrderVector(_mm512_loadu_si512(old_bits + i)));
    const __m512i z = _mm512_xor_si512(_mm512_slli_epi16(change, 1), _mm512_srai_epi16(change, 15));
    nonzero += static_cast<std::size_t>(__builtin_popcount(_mm512_test_epi16_mask(z, z)));
    __m256i bytes = _mm512_cvtusepi16_epi8(z);
    const __mmask32 is_coarse = _mm256_movepi8_mask(bytes);
    if (is_coarse != 0) {
      const __m128i low = CoarseSymbols(_mm512_castsi512_si256(z));
      const __m128i high = CoarseSymbols(_mm512_extracti64x4_epi64(z, 1));
      bytes = _mm256_mask_blend_epi8(is_coarse, bytes, _mm256_set_m128i(high, low));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(symbols + i), bytes);
  }
  return nonzero;
}

inline std::uint64_t AtLeast(const std::uint8_t* symbols, std::uint32_t least) {
  return _mm512_cmpge_epu8_mask(_mm512_loadu_si512(symbols), _mm512_set1_epi8(static_cast<char>(least)));
}

inline void ApplyGroup(const std::uint16_t* zs, std::uint16_t* values) {
  for (std::size_t i = 0; i < kGroup; i += 32) {
    const __m512i z = _mm512_loadu_si512(zs + i);
    const __m512i sign = _mm512_sub_epi16(_mm512_setzero_si512(), _mm512_and_si512(z, _mm512_set1_epi16(1)));
    const __m512i change = _mm512_xor_si512(_mm512_srli_epi16(z, 1), sign);
    const __m512i order = _mm512_add_epi16(OrderVector(_mm512_loadu_si512(values + i)), change);
    _mm512_storeu_si512(values + i, OrderVector(order));
  }
}

inline __m512i SlotsAt(const std::uint32_t* slots, __m512i index) {
  const __m512i low = _mm512_castsi256_si512(SlotsAt(slots, _mm512_castsi512_si256(index)));
  return _mm512_inserti64x4(low, SlotsAt(slots, _mm512_extracti64x4_epi64(index, 1)), 1);
}

// Word i of a vector with n words to keep comes from word (i + n) % 16: they move to its end.
alignas(64) constexpr std::uint16_t kToEnd[32] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                                  0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct Round {
  __m512i low;
  __m512i high;

  explicit Round(const std::uint32_t* from) : low(_mm512_loadu_si512(from)), high(_mm512_loadu_si512(from + 16)) {}

  void Save(std::uint32_t* to) const {
    _mm512_storeu_si512(to, low);
    _mm512_storeu_si512(to + 16, high);
  }

  std::uint8_t* Encode(const EncodeEntry* entries, std::uint8_t* words) {
    words = EncodeVector(entries + 16, words, &high);
    return EncodeVector(entries, words, &low);
  }

  const std::uint8_t* Decode(const std::uint32_t* slots, const std::uint8_t* words, std::uint8_t* symbols) {
    words = DecodeVector(slots, words, symbols, &low);
    return DecodeVector(slots, words, symbols + 16, &high);
  }

  static std::uint8_t* EncodeVector(const EncodeEntry* entries, std::uint8_t* words, __m512i* states) {
    const __m512i some = _mm512_load_si512(entries);
    const __m512i others = _mm512_load_si512(entries + 8);
    const __m512i even_words = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd_words = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const __m512i reciprocal = _mm512_permutex2var_epi32(some, even_words, others);
    const __m512i packed = _mm512_permutex2var_epi32(some, odd_words, others);
    const __m512i frequency = _mm512_and_si512(packed, _mm512_set1_epi32(0x1FFF));
    const __mmask16 is_full = _mm512_cmpge_epi32_mask(_mm512_srli_epi32(*states, 31 - kScaleBits), frequency);
    const auto count = static_cast<unsigned>(__builtin_popcount(is_full));
    const __m256i first = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(is_full, *states));
    const __m256i to_end = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kToEnd + count));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words - 32), _mm256_permutexvar_epi16(to_end, first));
    const __m512i state = _mm512_mask_srli_epi32(*states, is_full, *states, 16);
    const __m512i twice = _mm512_add_epi32(state, state);
    const __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(twice, reciprocal), 32);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(twice, 32), _mm512_srli_epi64(reciprocal, 32));
    const __m512i product = _mm512_mask_blend_epi32(0xAAAA, even, odd);
    const __m512i quotient = _mm512_srlv_epi32(product, _mm512_srli_epi32(packed, 25));
    const __m512i before = _mm512_and_si512(_mm512_srli_epi32(packed, 13), _mm512_set1_epi32(kScale - 1));
    const __m512i rest = _mm512_sub_epi32(_mm512_set1_epi32(kScale), frequency);
    *states = _mm512_add_epi32(_mm512_add_epi32(state, before), _mm512_mullo_epi32(quotient, rest));
    return words - 2 * count;
  }

  static const std::uint8_t* DecodeVector(const std::uint32_t* slots, const std::uint8_t* words, std::uint8_t* symbols,
                                          __m512i* states) {
    const __m512i mask = _mm512_set1_epi32(kScale - 1);
    const __m512i slot = SlotsAt(slots, _mm512_and_si512(*states, mask));
    const __m512i frequency = _mm512_add_epi32(_mm512_and_si512(slot, mask), _mm512_set1_epi32(1));
    const __m512i number = _mm512_and_si512(_mm512_srli_epi32(slot, 12), mask);
    const __m512i state =
        _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(*states, kScaleBits)), number);
    const __mmask16 is_low = _mm512_cmplt_epi32_mask(state, _mm512_set1_epi32(kLowestState));
    const __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
    const __m512i word = _mm512_maskz_expand_epi32(is_low, next);
    *states = _mm512_or_si512(_mm512_mask_slli_epi32(state, is_low, state, 16), word);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols), _mm512_cvtepi32_epi8(_mm512_srli_epi32(slot, 24)));
    return words + 2 * static_cast<unsigned>(__builtin_popcount(is_low));
  }
};
