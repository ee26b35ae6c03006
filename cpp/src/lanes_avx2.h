// 8 lanes: AVX2 and F16C. lanes_generic.h documents the functions.

constexpr std::size_t kLanes = 8;
constexpr std::size_t kEncodeVectors = 4;

#include "lanes_common.h"

inline __m256i Raw(I value) { return reinterpret_cast<__m256i>(value); }
inline I Ints(__m256i value) { return reinterpret_cast<I>(value); }

inline F Splat(float value) { return _mm256_set1_ps(value); }
inline I SplatInt(std::int32_t value) { return Ints(_mm256_set1_epi32(value)); }

inline F Load(const float* x) { return _mm256_loadu_ps(x); }

inline F Load(const Bfloat16* x) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline F Load(const Float16* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }

inline void Store(float* out, F value) { _mm256_storeu_ps(out, value); }

inline I Bfloat16Bits(F value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  return BitsOf(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan));
}

inline void Store(Bfloat16* out, F value) {
  const __m256i high = _mm256_srli_epi32(Raw(Bfloat16Bits(value)), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}

inline void Store(Float16* out, F value) {
  const __m128i half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), half);
}

// The operand order keeps a NaN: the instructions return their second operand if either is NaN.
inline F Clamp(F value, F limit) { return _mm256_max_ps(-limit, _mm256_min_ps(limit, value)); }
inline F MultiplyAdd(F a, F b, F c) { return a * b + c; }
inline F Max(F a, F b) { return _mm256_max_ps(a, b); }
inline I MaxInt(I a, I b) { return Ints(_mm256_max_epi32(Raw(a), Raw(b))); }
inline I MinInt(I a, I b) { return Ints(_mm256_min_epi32(Raw(a), Raw(b))); }

inline I AddGreater(I base, F a, F b) { return base - (a > b); }

inline I LoadBytes(const std::uint8_t* codes) {
  return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
}
inline I LoadSignedBytes(const std::uint8_t* codes) {
  return Ints(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
}

inline F SignedNibbles(I codes) { return ToFloat((codes << 28) >> 28); }

inline F LoadFp8(const std::uint8_t* codes) {
  const __m128i codes16 = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  const __m128i half = _mm_and_si128(_mm_slli_epi16(codes16, 7), _mm_set1_epi16(kHalfOfFp8));
  return _mm256_cvtph_ps(half) * Splat(kFp8OverHalf);
}

struct Table16 {
  F low;
  F high;
};
inline Table16 LoadTable16(const float* values) { return {Load(values), Load(values + kLanes)}; }

// A lane's index is its low 4 bits: 3 select within each shuffle; the fourth, moved to the sign, blends the two.
inline F Lookup16(const Table16& table, __m256i index) {
  const __m256 low = _mm256_permutevar8x32_ps(table.low, index);
  const __m256 high = _mm256_permutevar8x32_ps(table.high, index);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
inline void LookupNibbles(const Table16& table, const std::uint8_t* codes, F* even, F* odd) {
  const __m256i bytes = Raw(LoadBytes(codes));
  *even = Lookup16(table, bytes);
  *odd = Lookup16(table, _mm256_srli_epi32(bytes, 4));
}

struct Table32 {
  F quarters[4];
};
inline Table32 LoadTable32(const std::int32_t* entries) {
  Table32 table;
  std::memcpy(table.quarters, entries, sizeof(table.quarters));
  return table;
}
// 3 bits of the index select within each shuffle; the other two, moved to the sign, blend the results.
inline I Lookup32(const Table32& table, I index) {
  F found[4];
  for (std::size_t j = 0; j < 4; ++j) found[j] = _mm256_permutevar8x32_ps(table.quarters[j], Raw(index));
  const __m256 bit3 = _mm256_castsi256_ps(_mm256_slli_epi32(Raw(index), 28));
  const __m256 bit4 = _mm256_castsi256_ps(_mm256_slli_epi32(Raw(index), 27));
  const __m256 low = _mm256_blendv_ps(found[0], found[1], bit3);
  const __m256 high = _mm256_blendv_ps(found[2], found[3], bit3);
  return BitsOf(_mm256_blendv_ps(low, high, bit4));
}

inline void Interleave(F* even, F* odd) {
  const __m256 low = _mm256_unpacklo_ps(*even, *odd);
  const __m256 high = _mm256_unpackhi_ps(*even, *odd);
  *even = _mm256_permute2f128_ps(low, high, 0x20);
  *odd = _mm256_permute2f128_ps(low, high, 0x31);
}

template <std::size_t kStride>
inline F SwapLanes(F value) {
  if constexpr (kStride == 1) return _mm256_permute_ps(value, 0xB1);
  if constexpr (kStride == 2) return _mm256_permute_ps(value, 0x4E);
  if constexpr (kStride == 4) return _mm256_permute2f128_ps(value, value, 0x01);
}

// 32 codes, the low bits of the lanes, as bytes in order. The packs never saturate: masked codes fit into a byte.
inline __m256i PackBytes(const I (&codes)[kEncodeVectors], std::int32_t mask) {
  const __m256i low_bits = _mm256_set1_epi32(mask);
  const __m256i words01 =
      _mm256_packus_epi32(_mm256_and_si256(Raw(codes[0]), low_bits), _mm256_and_si256(Raw(codes[1]), low_bits));
  const __m256i words23 =
      _mm256_packus_epi32(_mm256_and_si256(Raw(codes[2]), low_bits), _mm256_and_si256(Raw(codes[3]), low_bits));
  // The packs work within 128-bit halves, so that groups of 4 come out as 0 2 4 6 | 1 3 5 7.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words01, words23), order);
}

inline void StoreBytes(std::uint8_t* out, const I (&codes)[kEncodeVectors]) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), PackBytes(codes, 0xFF));
}

// even + 16 * odd in each pair of nibbles, then the low bytes of the 16-bit sums.
inline void StoreNibbles(std::uint8_t* out, const I (&codes)[kEncodeVectors]) {
  const __m256i pairs = _mm256_maddubs_epi16(PackBytes(codes, 0x0F), _mm256_set1_epi16(0x1001));
  const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), packed);
}

inline U MulHigh(U a, std::uint32_t b) {
  const __m256i wide = reinterpret_cast<__m256i>(a);
  const __m256i factor = _mm256_set1_epi32(static_cast<std::int32_t>(b));
  const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(wide, factor), 32);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(wide, 32), factor);
  return reinterpret_cast<U>(_mm256_blend_epi32(even, odd, 0xAA));
}

inline std::size_t AbsMaxLanes(const float* x, std::size_t numel, std::int32_t* absmax) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i max0 = _mm256_setzero_si256();
  __m256i max1 = max0;
  std::size_t i = 0;
  for (; i + 2 * kLanes <= numel; i += 2 * kLanes) {
    const auto* bits = reinterpret_cast<const __m256i*>(x + i);
    max0 = _mm256_max_epi32(max0, _mm256_and_si256(magnitude, _mm256_loadu_si256(bits)));
    max1 = _mm256_max_epi32(max1, _mm256_and_si256(magnitude, _mm256_loadu_si256(bits + 1)));
  }
  const __m256i max = _mm256_max_epi32(max0, max1);
  __m128i quarter = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
  quarter = _mm_max_epi32(quarter, _mm_shuffle_epi32(quarter, 0x4E));
  quarter = _mm_max_epi32(quarter, _mm_shuffle_epi32(quarter, 0xB1));
  *absmax = _mm_cvtsi128_si32(quarter);
  return i;
}

template <class T>
inline std::size_t AbsMaxLanes(const T* x, std::size_t numel, std::int16_t* absmax) {
  const __m256i magnitude = _mm256_set1_epi16(0x7FFF);
  __m256i max = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; i + 2 * kLanes <= numel; i += 2 * kLanes) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    max = _mm256_max_epi16(max, _mm256_and_si256(magnitude, bits));
  }
  const __m128i half = _mm_max_epi16(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
  // The only horizontal instruction finds a minimum; 0x7FFF - x reverses the order.
  const __m128i min = _mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(0x7FFF), half));
  *absmax = static_cast<std::int16_t>(0x7FFF - _mm_extract_epi16(min, 0));
  return i;
}

inline void StreamLines(std::uint8_t* out, const std::uint8_t* in, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += sizeof(__m256i)) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i)));
  }
}
