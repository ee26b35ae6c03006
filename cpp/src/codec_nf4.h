// nf4 (N5 of zcomm/quant.py): a code is the number of midpoints between levels that are below y.

constexpr float kNf4Levels[16] = {-8.0F,       -5.5625F, -4.1875F,    -3.15625F,  -2.28125F, -1.4765625F,
                                  -0.7265625F, 0.0F,     0.63671875F, 1.2890625F, 1.96875F,  2.703125F,
                                  3.53125F,    4.5F,     5.78125F,    8.0F};

// Exact.
constexpr float Nf4Midpoint(std::size_t i) { return (kNf4Levels[i] + kNf4Levels[i + 1]) / 2; }

template <>
struct Encoder<Codec::kNf4> {
  // A binary search: the bits of the code found so far choose the next midpoint.
  static constexpr float kSecond[8] = {Nf4Midpoint(3), Nf4Midpoint(11)};
  static constexpr float kThird[8] = {Nf4Midpoint(1), Nf4Midpoint(5), Nf4Midpoint(9), Nf4Midpoint(13)};
  static constexpr float kFourth[8] = {Nf4Midpoint(0), Nf4Midpoint(2),  Nf4Midpoint(4),  Nf4Midpoint(6),
                                       Nf4Midpoint(8), Nf4Midpoint(10), Nf4Midpoint(12), Nf4Midpoint(14)};

  F inverse;

  Encoder(const TileScales& scales, std::size_t block) : inverse(Splat(scales.inverses[block])) {}

  I Codes(F x) const {
    const F y = x * inverse;
    I code = AddGreater(SplatInt(0), y, Splat(Nf4Midpoint(7)));
    code = AddGreater(code + code, y, Lookup8(LoadTable8(kSecond), code));
    code = AddGreater(code + code, y, Lookup8(LoadTable8(kThird), code));
    return AddGreater(code + code, y, Lookup8(LoadTable8(kFourth), code));
  }
};

template <>
struct Decoder<Codec::kNf4> : NibbleDecoder {
  Decoder(const std::uint8_t* header, float limit)
      : NibbleDecoder(limit, [&](std::size_t i) { return Load(kNf4Levels + i) * Splat(ScaleOf(header)); }) {}
};
