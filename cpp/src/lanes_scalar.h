// One element at a time: bit casts, conversions, rounding, clamping. Included by block_kernels_impl.h inside the ISA
// level's namespace. The loops over these vectorize without help on every level; the lanes_*.h files only replace those
// where the compiler's version is slow.

struct Bfloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

// y + kRoundMagic has unit spacing for |y| < 2^22: adding rounds half to even, and the low bits of the sum's
// representation are the integer in two's complement.
constexpr float kRoundMagic = 12582912.0F;  // 1.5 * 2^23
constexpr std::int32_t kInfinityBits = 0x7F800000;
constexpr std::int32_t kTinyBits = 0x0D800000;  // 2^-100
constexpr std::uint16_t kNanScale = 0x7FC0;

inline std::int32_t Bits(float value) {
  std::int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FromBits(std::int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float Widen(float value) { return value; }

inline float Widen(Bfloat16 value) {
  return FromBits(static_cast<std::int32_t>(static_cast<std::uint32_t>(value.bits) << 16));
}

// Denormals by an exact subtraction of normal numbers, so the processor's denormal modes do not matter.
inline float Widen(Float16 value) {
  const std::int32_t magnitude = (value.bits & 0x7FFF) << 13;
  const std::int32_t denormal = Bits(FromBits(magnitude + (113 << 23)) - FromBits(113 << 23));
  const std::int32_t finite = magnitude < (1 << 23) ? denormal : magnitude + (112 << 23);
  const std::int32_t bits = magnitude >= (31 << 23) ? magnitude + (224 << 23) : finite;
  return FromBits(bits | static_cast<std::int32_t>(static_cast<std::uint32_t>(value.bits & 0x8000) << 16));
}

// Where a decoded value is added instead of stored.
struct Accumulator {
  float value;
};

inline void Narrow(float value, float* out) { *out = value; }
inline void Narrow(float value, Accumulator* out) { out->value += value; }

inline void Narrow(float value, Bfloat16* out) {
  const auto bits = static_cast<std::uint32_t>(Bits(value));
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40U;
  out->bits = static_cast<std::uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? nan : rounded);
}

// Denormals by an addition that leaves the rounded half-precision integer in the low bits (0.5 has spacing 2^-24).
inline void Narrow(float value, Float16* out) {
  const std::int32_t magnitude = Bits(value) & 0x7FFFFFFF;
  const std::int32_t denormal = Bits(FromBits(magnitude) + 0.5F) - Bits(0.5F);
  const std::int32_t normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  const std::int32_t finite = magnitude < (113 << 23) ? denormal : normal;
  const std::int32_t special = magnitude > kInfinityBits ? 0x7E00 : 0x7C00;
  const std::int32_t half = magnitude >= (143 << 23) ? special : finite;
  out->bits = static_cast<std::uint16_t>(half | ((Bits(value) >> 16) & 0x8000));
}

// Bits whose order is that of |x|, and the float32 bits of a largest |x|. Integers, so that NaN and infinity come out
// on top and no denormal mode matters; 16 bits where those suffice.
inline std::int32_t OrderedMagnitude(float value) { return Bits(value) & 0x7FFFFFFF; }
inline std::int16_t OrderedMagnitude(Bfloat16 value) { return static_cast<std::int16_t>(value.bits & 0x7FFF); }
inline std::int16_t OrderedMagnitude(Float16 value) { return static_cast<std::int16_t>(value.bits & 0x7FFF); }

// float32 bits of the |x| that has this magnitude.
inline std::int32_t WidenMagnitude(std::int32_t magnitude, float /*type*/) { return magnitude; }
template <class T>
inline std::int32_t WidenMagnitude(std::int32_t magnitude, T /*type*/) {
  return Bits(Widen(T{static_cast<std::uint16_t>(magnitude)}));
}

inline float LoadScale(const std::uint8_t* scales, std::size_t index) {
  Bfloat16 scale;
  std::memcpy(&scale, scales + 2 * index, sizeof(scale));
  return Widen(scale);
}

// The low bits are the code. No clamp: scale >= absmax / qmax up to a rounding error of 2^-24, so |x * inverse| stays
// below qmax + 1/2.
inline std::uint8_t QuantizeOne(float x, float inverse) {
  return static_cast<std::uint8_t>(Bits(x * inverse + kRoundMagic));
}

// `value > limit ? limit : value` keeps a NaN.
inline float Clamp(float value, float limit) {
  const float below = value > limit ? limit : value;
  return below < -limit ? -limit : below;
}

inline float DecodeOne(int code, float scale, float limit) { return Clamp(static_cast<float>(code) * scale, limit); }
