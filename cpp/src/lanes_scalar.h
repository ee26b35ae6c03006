// Element types, constants and the bits of floats. block_kernels_impl.h includes this in the ISA level's namespace.

struct Bfloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

// For |y| < 2^22, floats near y + kRoundMagic are 1 apart: the addition rounds half to even, and the low bits of the
// sum are the integer in two's complement.
constexpr float kRoundMagic = 12582912.0F;  // 1.5 * 2^23
constexpr std::int32_t kInfinityBits = 0x7F800000;
constexpr std::int32_t kTinyBits = 0x0D800000;  // 2^-100
constexpr std::uint32_t kNanScale = 0x7FC0;
// A float8 e4m3 code, sign-extended and shifted left by 7, holds in these bits a float16 of 2^-8 times its value.
constexpr std::int16_t kHalfOfFp8 = static_cast<std::int16_t>(0xBF80);
constexpr float kFp8OverHalf = 256.0F;

constexpr std::size_t Min(std::size_t a, std::size_t b) { return a < b ? a : b; }

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

inline float FromBfloat16Bits(std::uint32_t bits) { return FromBits(static_cast<std::int32_t>(bits << 16)); }

inline float Widen(Bfloat16 value) { return FromBfloat16Bits(value.bits); }

// Denormals come from an exact subtraction of normal numbers, so that the processor's denormal modes do not matter.
inline float Widen(Float16 value) {
  const std::int32_t magnitude = (value.bits & 0x7FFF) << 13;
  const std::int32_t denormal = Bits(FromBits(magnitude + (113 << 23)) - FromBits(113 << 23));
  const std::int32_t finite = magnitude < (1 << 23) ? denormal : magnitude + (112 << 23);
  const std::int32_t bits = magnitude >= (31 << 23) ? magnitude + (224 << 23) : finite;
  return FromBits(bits | static_cast<std::int32_t>(static_cast<std::uint32_t>(value.bits & 0x8000) << 16));
}
