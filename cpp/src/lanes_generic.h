// 4 lanes with the compiler's vector extensions: SSE2 on x86-64, NEON on arm64. Every lanes_<level>.h has the functions
// of this file; the comments here hold for all.

constexpr std::size_t kLanes = 4;
// How many vectors of codes StoreBytes and StoreNibbles take.
constexpr std::size_t kEncodeVectors = 4;

#include "lanes_common.h"

inline F Splat(float value) { return F{value, value, value, value}; }
inline I SplatInt(std::int32_t value) { return I{value, value, value, value}; }

// Loads kLanes elements as float32.
inline F Load(const float* x) {
  F value;
  std::memcpy(&value, x, sizeof(value));
  return value;
}

inline U LoadWords(const void* words) {
  using Words = std::uint16_t __attribute__((vector_size(2 * kLanes)));
  Words value;
  std::memcpy(&value, words, sizeof(value));
  return __builtin_convertvector(value, U);
}

inline F Load(const Bfloat16* x) { return FloatOf(Signed(LoadWords(x) << 16)); }

// The scalar Widen (lanes_scalar.h) on lanes.
inline F Load(const Float16* x) {
  const U half = LoadWords(x);
  const I magnitude = Signed((half & 0x7FFF) << 13);
  const F smallest = FloatOf(SplatInt(113 << 23));
  const I denormal = BitsOf(FloatOf(magnitude + (113 << 23)) - smallest);
  const I finite = magnitude < SplatInt(1 << 23) ? denormal : magnitude + (112 << 23);
  const I bits = magnitude >= SplatInt(31 << 23) ? magnitude + (224 << 23) : finite;
  return FloatOf(bits | Signed((half & 0x8000) << 16));
}

// Store kLanes values, rounded to the element type: to nearest, ties to even, overflow to infinity.
inline void Store(float* out, F value) { std::memcpy(out, &value, sizeof(value)); }

inline void StoreWords(void* out, I words) {
  using Words = std::uint16_t __attribute__((vector_size(2 * kLanes)));
  const Words value = __builtin_convertvector(Unsigned(words), Words);
  std::memcpy(out, &value, sizeof(value));
}

// The upper half of each lane is the value as bf16; the lower half is undefined.
inline I Bfloat16Bits(F value) {
  const U bits = Unsigned(BitsOf(value));
  const U rounded = bits + 0x7FFF + ((bits >> 16) & 1);
  return Signed(value == value ? rounded : bits | 0x400000U);
}
inline void Store(Bfloat16* out, F value) { StoreWords(out, Signed(Unsigned(Bfloat16Bits(value)) >> 16)); }

// Denormals: adding 0.5, whose unit in the last place is 2^-24, leaves the rounded float16 bits in the low bits.
inline void Store(Float16* out, F value) {
  const I magnitude = BitsOf(value) & 0x7FFFFFFF;
  const I denormal = BitsOf(FloatOf(magnitude) + Splat(0.5F)) - BitsOf(Splat(0.5F));
  const I normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  const I finite = magnitude < SplatInt(113 << 23) ? denormal : normal;
  const I special = magnitude > SplatInt(kInfinityBits) ? SplatInt(0x7E00) : SplatInt(0x7C00);
  const I half = magnitude >= SplatInt(143 << 23) ? special : finite;
  StoreWords(out, half | ((BitsOf(value) >> 16) & 0x8000));
}

// Clamps to +-limit; a NaN stays a NaN.
inline F Clamp(F value, F limit) {
  const F below = value > limit ? limit : value;
  return below < -limit ? -limit : below;
}
// a * b + c. Levels may fuse it or not: only for products that are exact, so that all levels give the same bits.
inline F MultiplyAdd(F a, F b, F c) { return a * b + c; }
inline F Max(F a, F b) { return a > b ? a : b; }  // no NaNs
inline I MaxInt(I a, I b) { return a > b ? a : b; }
inline I MinInt(I a, I b) { return a < b ? a : b; }

// base + 1 where a > b.
inline I AddGreater(I base, F a, F b) { return base - (a > b); }

// Loads kLanes bytes, each into the upper 8 bits of its lane.
inline U LoadBytesHigh(const std::uint8_t* codes) {
  std::uint32_t bytes;
  std::memcpy(&bytes, codes, sizeof(bytes));
#ifdef ZCOMM_X86
  const __m128i zero = _mm_setzero_si128();
  const __m128i words = _mm_unpacklo_epi8(zero, _mm_cvtsi32_si128(static_cast<std::int32_t>(bytes)));
  return reinterpret_cast<U>(_mm_unpacklo_epi16(zero, words));
#else
  return (U{bytes, bytes, bytes, bytes} << U{24, 16, 8, 0}) & 0xFF000000U;
#endif
}

// Load kLanes unsigned or signed bytes.
inline I LoadBytes(const std::uint8_t* codes) { return Signed(LoadBytesHigh(codes) >> 24); }
inline I LoadSignedBytes(const std::uint8_t* codes) { return Signed(LoadBytesHigh(codes)) >> 24; }

// The low nibble of each lane, in two's complement, as float32; the other bits are ignored.
inline F SignedNibbles(I codes) { return ToFloat((codes << 28) >> 28); }

// Loads kLanes fp8_e4m3 codes as their values. Denormals come from an exact subtraction of normal numbers.
inline F LoadFp8(const std::uint8_t* codes) {
  const I bits = LoadBytes(codes);
  const I magnitude = (bits & 0x7F) << 20;
  const I denormal = BitsOf(FloatOf(magnitude + (121 << 23)) - FloatOf(SplatInt(121 << 23)));
  const I finite = magnitude < SplatInt(1 << 23) ? denormal : magnitude + (120 << 23);
  return FloatOf(finite | Signed(Unsigned(bits & 0x80) << 24));
}

// A table of 16 floats that 4-bit codes index. LookupNibbles gives the values of the low (even) and the high (odd)
// nibbles of kLanes bytes.
struct Table16 {
  float values[16];
};
inline Table16 LoadTable16(const float* values) {
  Table16 table;
  std::memcpy(table.values, values, sizeof(table.values));
  return table;
}
inline void LookupNibbles(const Table16& table, const std::uint8_t* codes, F* even, F* odd) {
  const float* v = table.values;
  *even = F{v[codes[0] & 15], v[codes[1] & 15], v[codes[2] & 15], v[codes[3] & 15]};
  *odd = F{v[codes[0] >> 4], v[codes[1] >> 4], v[codes[2] >> 4], v[codes[3] >> 4]};
}

// A table of 32 entries that lanes in [0, 32) index.
struct Table32 {
  const std::int32_t* entries;
};
inline Table32 LoadTable32(const std::int32_t* entries) { return {entries}; }
inline I Lookup32(const Table32& table, I index) {
  const std::int32_t* e = table.entries;
  return I{e[index[0]], e[index[1]], e[index[2]], e[index[3]]};
}

// From a0 a1 .. and b0 b1 .. to a0 b0 a1 b1 ..
inline void Interleave(F* even, F* odd) {
  const F a = *even;
  const F b = *odd;
  *even = F{a[0], b[0], a[1], b[1]};
  *odd = F{a[2], b[2], a[3], b[3]};
}

// Lane j gets lane j ^ kStride.
template <std::size_t kStride>
inline F SwapLanes(F value) {
  return F{value[0 ^ kStride], value[1 ^ kStride], value[2 ^ kStride], value[3 ^ kStride]};
}

// Packs the low 8 or 4 bits of the lanes; the other bits are ignored.
#ifdef ZCOMM_X86
inline __m128i PackBytes(const I (&codes)[kEncodeVectors]) {
  __m128i low[kEncodeVectors];
  for (std::size_t j = 0; j < kEncodeVectors; ++j) low[j] = reinterpret_cast<__m128i>(codes[j] & 0xFF);
  return _mm_packus_epi16(_mm_packs_epi32(low[0], low[1]), _mm_packs_epi32(low[2], low[3]));
}
inline void StoreBytes(std::uint8_t* out, const I (&codes)[kEncodeVectors]) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), PackBytes(codes));
}
inline void StoreNibbles(std::uint8_t* out, const I (&codes)[kEncodeVectors]) {
  const __m128i pairs = PackBytes(codes);
  const __m128i low = _mm_and_si128(pairs, _mm_set1_epi16(0x0F));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(pairs, 4), _mm_set1_epi16(0xF0));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(_mm_or_si128(low, high), _mm_setzero_si128()));
}
#else
inline void StoreBytes(std::uint8_t* out, const I (&codes)[kEncodeVectors]) {
  std::int32_t lanes[kEncodeVectors * kLanes];
  std::memcpy(lanes, codes, sizeof(lanes));
  for (std::size_t j = 0; j < kEncodeVectors * kLanes; ++j) out[j] = static_cast<std::uint8_t>(lanes[j]);
}
inline void StoreNibbles(std::uint8_t* out, const I (&codes)[kEncodeVectors]) {
  std::uint8_t bytes[kEncodeVectors * kLanes];
  StoreBytes(bytes, codes);
  for (std::size_t j = 0; j < kEncodeVectors * kLanes / 2; ++j) {
    out[j] = static_cast<std::uint8_t>((bytes[2 * j] & 0x0F) | (bytes[2 * j + 1] << 4));
  }
}
#endif

// The upper halves of the 64-bit products.
inline U MulHigh(U a, std::uint32_t b) {
#ifdef ZCOMM_X86
  const __m128i factor = _mm_set1_epi32(static_cast<std::int32_t>(b));
  const __m128i even = _mm_mul_epu32(reinterpret_cast<__m128i>(a), factor);
  const __m128i odd = _mm_mul_epu32(_mm_srli_epi64(reinterpret_cast<__m128i>(a), 32), factor);
  return reinterpret_cast<U>(_mm_or_si128(
      _mm_srli_epi64(even, 32), _mm_and_si128(odd, _mm_set1_epi64x(static_cast<long long>(0xFFFFFFFF00000000ULL)))));
#else
  const auto high = [b](std::uint32_t lane) { return static_cast<std::uint32_t>((std::uint64_t{lane} * b) >> 32); };
  return U{high(a[0]), high(a[1]), high(a[2]), high(a[3])};
#endif
}

// Raises *absmax, an OrderedMagnitude, to the largest of a prefix of x, and returns the prefix's length.
template <class T, class Magnitude>
inline std::size_t AbsMaxLanes(const T* /*x*/, std::size_t /*numel*/, Magnitude* /*absmax*/) {
  return 0;  // the compiler vectorizes the caller's loop over the rest
}

// Copies whole cache lines with non-temporal stores where the level has them; `out` is aligned to a line.
inline void StreamLines(std::uint8_t* out, const std::uint8_t* in, std::size_t nbytes) { std::memcpy(out, in, nbytes); }
