// Headers of blocks, and the factors that their codes are computed with (N1, N2 and N9 of zcomm/_formats/reference.py).
// The compiler vectorizes the loops over blocks.

// The most blocks in one tile of quantization.
constexpr std::size_t kMaxBlocks = 64;

// Entry i belongs to block i of the tile. A block with a value that is not finite has only 0 codes.
struct TileScales {
  std::uint32_t headers[kMaxBlocks];
  std::int32_t are_finite[kMaxBlocks];
  float inverses[kMaxBlocks];
  float zeros[kMaxBlocks];  // of codecs with a zero point
};

// float32 bits rounded up to bf16. A finite quotient stays below 0x7F7F. Unsigned, because the bits of a NaN may
// overflow.
inline std::int32_t RoundUpToBfloat16(float quotient) {
  return static_cast<std::int32_t>((static_cast<std::uint32_t>(Bits(quotient)) + 0xFFFFU) & 0xFFFF0000U);
}

// A block with absmax below 2^-100 gets scale and reciprocal 0; one with a NaN or an infinity gets the NaN scale.
inline void ComputeScales(const std::int32_t* __restrict absmax, std::size_t count, float qmax,
                          TileScales* __restrict scales) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t bits = RoundUpToBfloat16(FromBits(absmax[i]) / qmax);
    const float inverse = 1.0F / FromBits(bits);
    const std::uint32_t scale = absmax[i] >= kInfinityBits ? kNanScale : static_cast<std::uint32_t>(bits) >> 16;
    scales->headers[i] = absmax[i] < kTinyBits ? 0 : scale;
    scales->inverses[i] = absmax[i] < kTinyBits ? 0.0F : inverse;
    scales->are_finite[i] = absmax[i] < kInfinityBits ? 1 : 0;
  }
}

constexpr float kLargestAsymmetric = 8.507059173023462e37F;  // 2^126

// The same for codecs with a zero point, which goes into the header's upper half, from the float32 bits of the lowest
// and the highest values.
inline void ComputeScalesAndZeros(const std::int32_t* __restrict low, const std::int32_t* __restrict high,
                                  std::size_t count, float qmax, TileScales* __restrict scales) {
  constexpr std::int32_t kMagnitude = 0x7FFFFFFF;
  for (std::size_t i = 0; i < count; ++i) {
    const bool is_finite = (low[i] & kMagnitude) < kInfinityBits && (high[i] & kMagnitude) < kInfinityBits;
    const float lowest = is_finite ? FromBits(low[i]) : 0.0F;
    const float highest = is_finite ? FromBits(high[i]) : 0.0F;
    const std::int32_t bottom = Bits(lowest < -kLargestAsymmetric  ? -kLargestAsymmetric
                                     : lowest > kLargestAsymmetric ? kLargestAsymmetric
                                                                   : lowest);
    const float top = highest > kLargestAsymmetric ? kLargestAsymmetric : highest;
    // Rounding down increases the magnitude of a negative number.
    const std::uint32_t down = (static_cast<std::uint32_t>(bottom) + (bottom < 0 ? 0xFFFFU : 0U)) & 0xFFFF0000U;
    const std::uint32_t zero_bits = (bottom & kMagnitude) < kTinyBits ? 0 : down;
    const float zero = FromBits(static_cast<std::int32_t>(zero_bits));
    const float spread = (top < -kLargestAsymmetric ? -kLargestAsymmetric : top) - zero;
    const bool is_tiny = Bits(spread) < kTinyBits;  // negative ones too
    const std::int32_t bits = RoundUpToBfloat16((is_tiny ? 1.0F : spread) / qmax);
    const std::uint32_t scale = is_tiny ? 0 : static_cast<std::uint32_t>(bits) >> 16;
    scales->headers[i] = is_finite ? zero_bits | scale : kNanScale;
    scales->inverses[i] = is_tiny ? 0.0F : 1.0F / FromBits(bits);
    scales->zeros[i] = zero;
    scales->are_finite[i] = is_finite ? 1 : 0;
  }
}
