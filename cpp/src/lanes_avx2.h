// 8 float32 lanes, AVX2 and F16C. Each *Lanes function does a prefix of its range, whole vectors, and returns how many
// elements that was; the scalar loop after it does the rest.

constexpr std::size_t kLanes = 8;

inline __m256 LoadLanes(const float* x) { return _mm256_loadu_ps(x); }

inline __m256 LoadLanes(const Bfloat16* x) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline __m256 LoadLanes(const Float16* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

inline void StoreLanes(float* out, __m256 value) { _mm256_storeu_ps(out, value); }

inline void StoreLanes(Bfloat16* out, __m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  const __m256 result = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(result), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}

inline void StoreLanes(Float16* out, __m256 value) {
  const __m128i half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), half);
}

inline void StoreLanes(Accumulator* out, __m256 value) {
  auto* sum = reinterpret_cast<float*>(out);
  _mm256_storeu_ps(sum, _mm256_add_ps(_mm256_loadu_ps(sum), value));
}

// The operand order keeps a NaN: min and max return their second operand then.
inline __m256 ClampLanes(__m256 value, float limit) {
  return _mm256_max_ps(_mm256_set1_ps(-limit), _mm256_min_ps(_mm256_set1_ps(limit), value));
}

// `absmax` is an OrderedMagnitude, raised to the largest of the prefix.
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
  // The one horizontal instruction finds a minimum; 0x7FFF - x turns the order around.
  const __m128i min = _mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(0x7FFF), half));
  *absmax = static_cast<std::int16_t>(0x7FFF - _mm_extract_epi16(min, 0));
  return i;
}

// 32 codes as bytes, in order. The saturation of the packs never acts: the codes fit.
template <class T>
inline __m256i Quantize32(const T* x, __m256 inverse) {
  __m256i code[4];
  for (std::size_t j = 0; j < 4; ++j) {
    const __m256 rounded =
        _mm256_add_ps(_mm256_mul_ps(LoadLanes(x + j * kLanes), inverse), _mm256_set1_ps(kRoundMagic));
    code[j] = _mm256_sub_epi32(_mm256_castps_si256(rounded), _mm256_castps_si256(_mm256_set1_ps(kRoundMagic)));
  }
  const __m256i words01 = _mm256_packs_epi32(code[0], code[1]);
  const __m256i words23 = _mm256_packs_epi32(code[2], code[3]);
  // The packs work within 128-bit halves: groups of 4 come out as 0 2 4 6 | 1 3 5 7.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words01, words23), order);
}

template <class T>
inline std::size_t QuantizeInt8Lanes(const T* x, std::size_t numel, float inverse, std::uint8_t* codes) {
  const __m256 factor = _mm256_set1_ps(inverse);
  std::size_t i = 0;
  for (; i + 32 <= numel; i += 32) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), Quantize32(x + i, factor));
  }
  return i;
}

// even + 16 * odd in each pair of nibbles, then the low bytes of the 16-bit sums.
template <class T>
inline std::size_t QuantizeInt4Lanes(const T* x, std::size_t numel, float inverse, std::uint8_t* codes) {
  const __m256 factor = _mm256_set1_ps(inverse);
  const __m256i nibble = _mm256_set1_epi8(0x0F);
  const __m256i weights = _mm256_set1_epi16(0x1001);
  std::size_t i = 0;
  for (; i + 32 <= numel; i += 32) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_and_si256(Quantize32(x + i, factor), nibble), weights);
    const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i / 2), packed);
  }
  return i;
}

template <class Out>
inline void DecodeEight(__m128i codes, __m256 scale, float limit, Out* out) {
  const __m256 code = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
  StoreLanes(out, ClampLanes(_mm256_mul_ps(code, scale), limit));
}

template <class Out>
inline std::size_t DecodeInt8Lanes(const std::int8_t* codes, std::size_t numel, float scale, float limit, Out* out) {
  const __m256 factor = _mm256_set1_ps(scale);
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    DecodeEight(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)), factor, limit, out + i);
  }
  return i;
}

// A byte shuffle maps nibbles to int8 codes; unpacking restores the order of the elements.
template <class Out>
inline std::size_t DecodeInt4Lanes(const std::uint8_t* codes, std::size_t numel, float scale, float limit, Out* out) {
  const __m128i code_values = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  const __m128i nibble = _mm_set1_epi8(0x0F);
  const __m256 factor = _mm256_set1_ps(scale);
  std::size_t i = 0;
  for (; i + 16 <= numel; i += 16) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i / 2));
    const __m128i even = _mm_and_si128(bytes, nibble);
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
    const __m128i signed_codes = _mm_shuffle_epi8(code_values, _mm_unpacklo_epi8(even, odd));
    DecodeEight(signed_codes, factor, limit, out + i);
    DecodeEight(_mm_srli_si128(signed_codes, 8), factor, limit, out + i + kLanes);
  }
  return i;
}

template <class In, class Out>
inline std::size_t ConvertLanes(const In* in, std::size_t numel, Out* out) {
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) StoreLanes(out + i, LoadLanes(in + i));
  return i;
}

// `out` and `in` are whole cache lines, `out` aligned to one.
inline void StreamLines(std::uint8_t* out, const std::uint8_t* in, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += sizeof(__m256i)) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i)));
  }
}
