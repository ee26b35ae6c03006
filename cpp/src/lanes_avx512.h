// 16 float32 lanes, AVX-512 F, BW, DQ, VL. Each *Lanes function does a prefix of its range, whole vectors, and returns
// how many elements that was; the scalar loop after it does the rest.

constexpr std::size_t kLanes = 16;

inline __m512 LoadLanes(const float* x) { return _mm512_loadu_ps(x); }

inline __m512 LoadLanes(const Bfloat16* x) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m512 LoadLanes(const Float16* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

inline void StoreLanes(float* out, __m512 value) { _mm512_storeu_ps(out, value); }

// Not AVX512-BF16's conversion, which flushes denormals.
inline void StoreLanes(Bfloat16* out, __m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i result = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16)));
}

inline void StoreLanes(Float16* out, __m512 value) {
  const __m256i half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), half);
}

inline void StoreLanes(Accumulator* out, __m512 value) {
  auto* sum = reinterpret_cast<float*>(out);
  _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), value));
}

// The operand order keeps a NaN: min and max return their second operand then.
inline __m512 ClampLanes(__m512 value, float limit) {
  return _mm512_max_ps(_mm512_set1_ps(-limit), _mm512_min_ps(_mm512_set1_ps(limit), value));
}

// `absmax` is an OrderedMagnitude, raised to the largest of the prefix.
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
  // The one horizontal instruction finds a minimum; 0x7FFF - x turns the order around.
  const __m128i min = _mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(0x7FFF), quarter));
  *absmax = static_cast<std::int16_t>(0x7FFF - _mm_extract_epi16(min, 0));
  return i;
}

// The codes are in the low bits of each lane.
template <class T>
inline __m512i QuantizeLanes(const T* x, __m512 inverse) {
  return _mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(LoadLanes(x), inverse), _mm512_set1_ps(kRoundMagic)));
}

template <class T>
inline std::size_t QuantizeInt8Lanes(const T* x, std::size_t numel, float inverse, std::uint8_t* codes) {
  const __m512 factor = _mm512_set1_ps(inverse);
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(QuantizeLanes(x + i, factor)));
  }
  return i;
}

// 32 codes as 16-bit lanes in order; then each pair, a 32-bit lane, brings its odd nibble down from bit 16 to bit 4.
template <class T>
inline std::size_t QuantizeInt4Lanes(const T* x, std::size_t numel, float inverse, std::uint8_t* codes) {
  constexpr int kSelect = 0xCA;  // a ? b : c, bit by bit
  const __m512 factor = _mm512_set1_ps(inverse);
  const __m512i low_nibble = _mm512_set1_epi32(0x0F);
  // Word k of the result is word 2k of both: the low word of element k.
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i low_words =
      _mm512_add_epi32(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x00040004)), _mm512_set1_epi32(0x00020000));
  std::size_t i = 0;
  for (; i + 2 * kLanes <= numel; i += 2 * kLanes) {
    const __m512i words =
        _mm512_permutex2var_epi16(QuantizeLanes(x + i, factor), low_words, QuantizeLanes(x + i + kLanes, factor));
    const __m512i packed = _mm512_ternarylogic_epi32(low_nibble, words, _mm512_srli_epi32(words, 12), kSelect);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i / 2), _mm512_cvtepi32_epi8(packed));
  }
  return i;
}

template <class Out>
inline std::size_t DecodeInt8Lanes(const std::int8_t* codes, std::size_t numel, float scale, float limit, Out* out) {
  const __m512 factor = _mm512_set1_ps(scale);
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    const __m512i code = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
    StoreLanes(out + i, ClampLanes(_mm512_mul_ps(_mm512_cvtepi32_ps(code), factor), limit));
  }
  return i;
}

// The 16 values that a block's int4 codes can decode to, in the order of the nibbles 0..15.
inline __m512 Int4Values(float scale, float limit) {
  const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return ClampLanes(_mm512_mul_ps(codes, _mm512_set1_ps(scale)), limit);
}

// Each nibble selects its value from one register. The index is in the low bits of a lane, the rest is ignored.
template <class Out>
inline std::size_t DecodeInt4Lanes(const std::uint8_t* codes, std::size_t numel, float scale, float limit, Out* out) {
  const __m512 values = Int4Values(scale, limit);
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    const __m512i byte = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i / 2)));
    const __m512i index = _mm512_or_si512(byte, _mm512_slli_epi64(byte, 28));
    StoreLanes(out + i, _mm512_permutexvar_ps(index, values));
  }
  return i;
}

// The same with 32 lanes of 16 bits and the values converted once. An index has 5 bits, of which the fifth is a bit of
// the other nibble: the register holds the 16 values twice.
template <class Out>
inline std::size_t DecodeInt4Words(const std::uint8_t* codes, std::size_t numel, float scale, float limit, Out* out) {
  Out values[16];
  StoreLanes(values, Int4Values(scale, limit));
  const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
  std::size_t i = 0;
  for (; i + 2 * kLanes <= numel; i += 2 * kLanes) {
    const __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2)));
    const __m512i index = _mm512_or_si512(byte, _mm512_slli_epi32(byte, 12));
    _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(index, table));
  }
  return i;
}

inline std::size_t DecodeInt4Lanes(const std::uint8_t* codes, std::size_t numel, float scale, float limit,
                                   Bfloat16* out) {
  return DecodeInt4Words(codes, numel, scale, limit, out);
}

inline std::size_t DecodeInt4Lanes(const std::uint8_t* codes, std::size_t numel, float scale, float limit,
                                   Float16* out) {
  return DecodeInt4Words(codes, numel, scale, limit, out);
}

template <class In, class Out>
inline std::size_t ConvertLanes(const In* in, std::size_t numel, Out* out) {
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) StoreLanes(out + i, LoadLanes(in + i));
  return i;
}

// `out` and `in` are whole cache lines, `out` aligned to one.
inline void StreamLines(std::uint8_t* out, const std::uint8_t* in, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += sizeof(__m512i)) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_loadu_si512(in + i));
  }
}
