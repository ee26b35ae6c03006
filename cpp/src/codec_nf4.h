// nf4 (N5 of zcomm/_formats/reference.py): a code is the number of midpoints between neighboring levels that are below
// y.

constexpr float kNf4Levels[16] = {-8.0F,       -5.5625F, -4.1875F,    -3.15625F,  -2.28125F, -1.4765625F,
                                  -0.7265625F, 0.0F,     0.63671875F, 1.2890625F, 1.96875F,  2.703125F,
                                  3.53125F,    4.5F,     5.78125F,    8.0F};

// The bits of a normal number.
constexpr std::int32_t BitsOfConstant(float value) {
  std::int32_t exponent = 127;
  float magnitude = value < 0 ? -value : value;
  for (; magnitude >= 2.0F; magnitude /= 2.0F) ++exponent;
  for (; magnitude < 1.0F; magnitude *= 2.0F) --exponent;
  const auto mantissa = static_cast<std::int32_t>((magnitude - 1.0F) * 8388608.0F);
  const std::int32_t bits = (exponent << 23) | mantissa;
  return value < 0 ? bits | INT32_MIN : bits;
}

// Divides the range of y, [-8, 8], into 32 cells, each with at most one midpoint, so that a table lookup and one
// comparison give the code. An entry is the cell's midpoint (or a number above all y) whose 4 lowest bits, which no
// midpoint needs, count the midpoints in the cells before. The cells of midpoints and of y are computed alike, so that
// rounding cannot put them on different sides.
struct Nf4Cells {
  static constexpr std::size_t kNumCells = 32;
  static constexpr float kPerUnit = 1.96875F;
  static constexpr float kMiddle = 15.875F;
  static constexpr std::int32_t kCountBits = 0x0F;

  std::int32_t entries[kNumCells];
  bool is_valid;

  constexpr Nf4Cells() : entries{}, is_valid(true) {
    for (std::size_t cell = 0; cell < kNumCells; ++cell) {
      std::int32_t count = 0;
      std::int32_t inside = 0;
      for (std::size_t i = 0; i < 15; ++i) {
        const float midpoint = (kNf4Levels[i] + kNf4Levels[i + 1]) / 2;  // exact
        const auto place = static_cast<std::size_t>(midpoint * kPerUnit + kMiddle);
        if (place < cell) ++count;
        if (place != cell) continue;
        is_valid = is_valid && inside == 0 && (BitsOfConstant(midpoint) & kCountBits) == 0;
        inside = BitsOfConstant(midpoint);
      }
      entries[cell] = (inside == 0 ? BitsOfConstant(1024.0F) : inside) | count;
    }
  }
};
constexpr Nf4Cells kNf4Cells;
static_assert(kNf4Cells.is_valid, "a cell with two midpoints, or a midpoint of too many bits");

template <>
struct Encoder<Codec::kNf4> {
  F inverse;

  Encoder(const TileScales& scales, std::size_t block) : inverse(Splat(scales.inverses[block])) {}

  I Codes(F x) const {
    const F y = x * inverse;
    const I cell = Truncate(y * Splat(Nf4Cells::kPerUnit) + Splat(Nf4Cells::kMiddle));
    const I entry = Lookup32(LoadTable32(kNf4Cells.entries), cell);
    return AddGreater(entry, y, FloatOf(entry & ~Nf4Cells::kCountBits));
  }
};

template <>
struct Levels<Codec::kNf4> {
  static constexpr bool kIsSplit = true;
  static constexpr float kLargest = 8.0F;

  static void Of(const std::uint8_t* codes, F* even, F* odd) {
    LookupNibbles(LoadTable16(kNf4Levels), codes, even, odd);
  }
};
