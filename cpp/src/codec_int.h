// int8 and int4, symmetric or with a zero point (N3, N4, N6 and N9 of zcomm/_formats/reference.py).

// Stochastic rounding: rounds |y| up iff uniform < fraction * 2^24 (both exact), and keeps the sign of y.
inline I RoundAtRandom(F y, F uniform) {
  const I sign = BitsOf(y) >> 31;
  const F magnitude = FloatOf(BitsOf(y) & 0x7FFFFFFF);
  const I floor = Truncate(magnitude);
  const I rounded = AddGreater(floor, (magnitude - ToFloat(floor)) * Splat(16777216.0F), uniform);
  return (rounded ^ sign) - sign;
}

// Codes are in the low bits of the lanes.
template <std::int32_t kQMax>
struct SymmetricEncoder {
  F inverse;

  SymmetricEncoder(const TileScales& scales, std::size_t block) : inverse(Splat(scales.inverses[block])) {}

  // Needs no clamp: scale >= absmax / qmax up to a rounding error of 2^-24, so that |y| < qmax + 1/2.
  I Codes(F x) const { return BitsOf(x * inverse + Splat(kRoundMagic)); }

  I RandomCodes(F x, F uniform) const {
    const I code = RoundAtRandom(x * inverse, uniform);
    return MaxInt(MinInt(code, SplatInt(kQMax)), SplatInt(-kQMax));
  }
};

template <std::int32_t kQMax>
struct AsymmetricEncoder {
  F inverse;
  F zero;

  AsymmetricEncoder(const TileScales& scales, std::size_t block)
      : inverse(Splat(scales.inverses[block])), zero(Splat(scales.zeros[block])) {}

  F Scaled(F x) const { return (Clamp(x, Splat(kLargestAsymmetric)) - zero) * inverse; }

  // Scaled(x) is below 0 where a zero point under 2^-100 was replaced by +0. The upper end needs no clamp, as above.
  I Codes(F x) const { return BitsOf(Max(Scaled(x), Splat(0.0F)) + Splat(kRoundMagic)); }

  I RandomCodes(F x, F uniform) const {
    return MaxInt(MinInt(RoundAtRandom(Scaled(x), uniform), SplatInt(kQMax)), SplatInt(0));
  }
};

template <>
struct Encoder<Codec::kInt8> : SymmetricEncoder<127> {
  using SymmetricEncoder::SymmetricEncoder;
};
template <>
struct Encoder<Codec::kInt4> : SymmetricEncoder<7> {
  using SymmetricEncoder::SymmetricEncoder;
};
template <>
struct Encoder<Codec::kInt8Asym> : AsymmetricEncoder<255> {
  using AsymmetricEncoder::AsymmetricEncoder;
};
template <>
struct Encoder<Codec::kInt4Asym> : AsymmetricEncoder<15> {
  using AsymmetricEncoder::AsymmetricEncoder;
};

template <>
struct Levels<Codec::kInt8> {
  static constexpr bool kIsSplit = false;
  static constexpr float kLargest = 128.0F;

  static void Of(const std::uint8_t* codes, F* first, F* second) {
    *first = ToFloat(LoadSignedBytes(codes));
    *second = ToFloat(LoadSignedBytes(codes + kLanes));
  }
};

template <>
struct Levels<Codec::kInt8Asym> {
  static constexpr bool kIsSplit = false;
  static constexpr float kLargest = 255.0F;

  static void Of(const std::uint8_t* codes, F* first, F* second) {
    *first = ToFloat(LoadBytes(codes));
    *second = ToFloat(LoadBytes(codes + kLanes));
  }
};

template <>
struct Levels<Codec::kInt4> {
  static constexpr bool kIsSplit = true;
  static constexpr float kLargest = 8.0F;

  static void Of(const std::uint8_t* codes, F* even, F* odd) {
    const I bytes = LoadSignedBytes(codes);
    *even = SignedNibbles(bytes);
    *odd = ToFloat(bytes >> 4);
  }
};

template <>
struct Levels<Codec::kInt4Asym> {
  static constexpr bool kIsSplit = true;
  static constexpr float kLargest = 15.0F;

  static void Of(const std::uint8_t* codes, F* even, F* odd) {
    const I bytes = LoadBytes(codes);
    *even = ToFloat(bytes & 0x0F);
    *odd = ToFloat(bytes >> 4);
  }
};
