// fp8_e4m3 (N5 of zcomm/_formats/reference.py): bias 7, no infinities, largest value 448.

template <>
struct Encoder<Codec::kFp8E4m3> {
  F inverse;

  Encoder(const TileScales& scales, std::size_t block) : inverse(Splat(scales.inverses[block])) {}

  // Counts |y| in eighths of its power of two (at least 2^-6, the power of the denormals): adding 2^20 times that power
  // leaves the count, rounded half to even, in the low bits. The count is 8 to 16 for normal numbers; 16 correctly
  // carries into the exponent. |y| stays below 464, from where on the code would be too large (see SymmetricEncoder).
  I Codes(F x) const {
    constexpr std::int32_t kSmallest = (127 - 6) << 23;
    const I bits = BitsOf(x * inverse);
    const I power = MaxInt(bits & 0x7F800000, SplatInt(kSmallest));
    const I unit = power + (20 << 23);
    const I count = BitsOf(FloatOf(bits & 0x7FFFFFFF) + FloatOf(unit)) - unit;
    const I code = count + ((power - kSmallest) >> 20);
    return code | ((bits >> 24) & (-code >> 31) & 0x80);  // never a negative zero
  }
};

template <>
struct Levels<Codec::kFp8E4m3> {
  static constexpr bool kIsSplit = false;
  static constexpr float kLargest = 480.0F;  // the value of a code that no encoder writes, but that a message may hold

  static void Of(const std::uint8_t* codes, F* first, F* second) {
    *first = LoadFp8(codes);
    *second = LoadFp8(codes + kLanes);
  }
};
