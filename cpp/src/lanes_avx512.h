// 16 lanes: AVX-512 F, BW, DQ, VL. lanes_generic.h documents the functions.

constexpr std::size_t kLanes = 16;
constexpr std::size_t kEncodeVectors = 2;

#include "lanes_common.h"

inline __m512i Raw(I value) { return reinterpret_cast<__m512i>(value); }
inline I Ints(__m512i value) { return reinterpret_cast<I>(value); }

inline F Splat(float value) { return _mm512_set1_ps(value); }
inline I SplatInt(std::int32_t value) { return Ints(_mm512_set1_epi32(value)); }

inline F Load(const float* x) { return _mm512_loadu_ps(x); }

inline F Load(const Bfloat16* x) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline F Load(const Float16* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }

inline void Store(float* out, F value) { _mm512_storeu_ps(out, value); }

// Does not use AVX512-BF16's conversion, which flushes denormals: the bits would differ from the other levels.
inline I Bfloat16Bits(F value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return Ints(_mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000)));
}

inline void Store(Bfloat16* out, F value) {
  const __m512i high = _mm512_srli_epi32(Raw(Bfloat16Bits(value)), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(high));
}

inline void Store(Float16* out, F value) {
  const __m256i half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), half);
}

// The operand order keeps a NaN: the instructions return their second operand if either is NaN.
inline F Clamp(F value, F limit) { return _mm512_max_ps(-limit, _mm512_min_ps(limit, value)); }
inline F MultiplyAdd(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F Max(F a, F b) { return _mm512_max_ps(a, b); }
inline I MaxInt(I a, I b) { return Ints(_mm512_max_epi32(Raw(a), Raw(b))); }
inline I MinInt(I a, I b) { return Ints(_mm512_min_epi32(Raw(a), Raw(b))); }

inline I AddGreater(I base, F a, F b) {
  const __mmask16 greater = _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
  return Ints(_mm512_mask_sub_epi32(Raw(base), greater, Raw(base), _mm512_set1_epi32(-1)));
}

inline I LoadBytes(const std::uint8_t* codes) {
  return Ints(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
}
inline I LoadSignedBytes(const std::uint8_t* codes) {
  return Ints(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
}

// One shuffle instead of two shifts and a conversion.
inline F SignedNibbles(I codes) {
  return _mm512_permutexvar_ps(Raw(codes), _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
}

inline F LoadFp8(const std::uint8_t* codes) {
  const __m256i codes16 = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(codes16, 7), _mm256_set1_epi16(kHalfOfFp8));
  return _mm512_cvtph_ps(half) * Splat(kFp8OverHalf);
}

struct Table16 {
  F values;
};
inline Table16 LoadTable16(const float* values) { return {Load(values)}; }

// A lane's index is its low 4 bits; the instruction ignores the others.
inline void LookupNibbles(const Table16& table, const std::uint8_t* codes, F* even, F* odd) {
  const __m512i bytes = Raw(LoadBytes(codes));
  *even = _mm512_permutexvar_ps(bytes, table.values);
  *odd = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table.values);
}

// An index has 5 bits, but the fifth is a bit of the other nibble: so the register holds the 16 values twice.
template <class Out>
struct WordTable16 {
  static constexpr bool kExists = true;
  static constexpr std::size_t kNumel = 2 * kLanes;

  __m512i words;

  explicit WordTable16(F values) {
    Out narrow[kLanes];
    Store(narrow, values);
    words = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(narrow)));
  }

  // kNumel elements from kNumel / 2 bytes of codes.
  void Lookup(const std::uint8_t* codes, Out* out) const {
    const __m512i bytes = Raw(LoadBytes(codes));
    const __m512i index = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, words));
  }
};
template <>
struct WordTable<Bfloat16> : WordTable16<Bfloat16> {
  using WordTable16::WordTable16;
};
template <>
struct WordTable<Float16> : WordTable16<Float16> {
  using WordTable16::WordTable16;
};

struct Table32 {
  __m512i low;
  __m512i high;
};
inline Table32 LoadTable32(const std::int32_t* entries) {
  return {_mm512_loadu_si512(entries), _mm512_loadu_si512(entries + kLanes)};
}
inline I Lookup32(const Table32& table, I index) {
  return Ints(_mm512_permutex2var_epi32(table.low, Raw(index), table.high));
}

inline void Interleave(F* even, F* odd) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  const F first = _mm512_permutex2var_ps(*even, low, *odd);
  *odd = _mm512_permutex2var_ps(*even, high, *odd);
  *even = first;
}

template <std::size_t kStride>
inline F SwapLanes(F value) {
  if constexpr (kStride == 1) return _mm512_permute_ps(value, 0xB1);
  if constexpr (kStride == 2) return _mm512_permute_ps(value, 0x4E);
  if constexpr (kStride == 4) return _mm512_shuffle_f32x4(value, value, 0xB1);
  if constexpr (kStride == 8) return _mm512_shuffle_f32x4(value, value, 0x4E);
}

inline void StoreBytes(std::uint8_t* out, const I (&codes)[kEncodeVectors]) {
  for (std::size_t j = 0; j < kEncodeVectors; ++j) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + j * kLanes), _mm512_cvtepi32_epi8(Raw(codes[j])));
  }
}

// Puts 32 codes into 16-bit lanes in order; then, in each pair (a 32-bit lane), moves the odd nibble from bit 16 to bit
// 4.
inline void StoreNibbles(std::uint8_t* out, const I (&codes)[kEncodeVectors]) {
  constexpr int kSelect = 0xCA;  // a ? b : c, bit by bit
  // Word k of the result is word 2k of the two registers together: the low word of element k.
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i low_words =
      _mm512_add_epi32(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x00040004)), _mm512_set1_epi32(0x00020000));
  const __m512i words = _mm512_permutex2var_epi16(Raw(codes[0]), low_words, Raw(codes[1]));
  const __m512i packed =
      _mm512_ternarylogic_epi32(_mm512_set1_epi32(0x0F), words, _mm512_srli_epi32(words, 12), kSelect);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(packed));
}

inline U MulHigh(U a, std::uint32_t b) {
  const __m512i wide = reinterpret_cast<__m512i>(a);
  const __m512i factor = _mm512_set1_epi32(static_cast<std::int32_t>(b));
  const __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(wide, factor), 32);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(wide, 32), factor);
  return reinterpret_cast<U>(_mm512_mask_blend_epi32(0xAAAA, even, odd));
}

inline std::size_t AbsMaxLanes(const float* x, std::size_t numel, std::int32_t* absmax) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i max0 = _mm512_setzero_si512();
  __m512i max1 = max0;
  std::size_t i = 0;
  for (; i + 2 * kLanes <= numel; i += 2 * kLanes) {
    max0 = _mm512_max_epi32(max0, _mm512_and_si512(magnitude, _mm512_loadu_si512(x + i)));
    max1 = _mm512_max_epi32(max1, _mm512_and_si512(magnitude, _mm512_loadu_si512(x + i + kLanes)));
  }
  *absmax = _mm512_reduce_max_epi32(_mm512_max_epi32(max0, max1));
  return i;
}

template <class T>
inline std::size_t AbsMaxLanes(const T* x, std::size_t numel, std::int16_t* absmax) {
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  __m512i max = _mm512_setzero_si512();
  std::size_t i = 0;
  for (; i + 2 * kLanes <= numel; i += 2 * kLanes) {
    max = _mm512_max_epi16(max, _mm512_and_si512(magnitude, _mm512_loadu_si512(x + i)));
  }
  const __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(max), _mm512_extracti64x4_epi64(max, 1));
  const __m128i quarter = _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // The only horizontal instruction finds a minimum; 0x7FFF - x reverses the order.
  const __m128i min = _mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(0x7FFF), quarter));
  *absmax = static_cast<std::int16_t>(0x7FFF - _mm_extract_epi16(min, 0));
  return i;
}

inline void StreamLines(std::uint8_t* out, const std::uint8_t* in, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += sizeof(__m512i)) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_loadu_si512(in + i));
  }
}
