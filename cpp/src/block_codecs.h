// What a codec brings to the loops of encode_blocks.h and decode_blocks.h. For each codec there are
//
//   Encoder<codec>  made from a block's scales; Codes(x), for int codecs RandomCodes(x, uniform), give the codes of
//                   kLanes values in the low bits of the lanes
//   Decoder<codec>  made from a block's header; Pair() gives the values of 2 * kLanes elements, within +-limit unless
//                   needs_clamp; kIsSplit: the even elements first, then the odd ones

template <Codec kCodec>
struct Encoder;

inline float ScaleOf(const std::uint8_t* header) {
  Bfloat16 scale;
  std::memcpy(&scale, header, sizeof(scale));
  return Widen(scale);
}

inline float ZeroPointOf(const std::uint8_t* header) { return ScaleOf(header + sizeof(Bfloat16)); }

// Codes of 8 bits; `largest` is the largest magnitude of what is multiplied with the scale.
struct ByteDecoder {
  static constexpr bool kIsSplit = false;

  F scale;
  bool needs_clamp;  // a NaN is never below the limit

  ByteDecoder(const std::uint8_t* header, float limit, float largest, float zero = 0.0F)
      : scale(Splat(ScaleOf(header))),
        needs_clamp(!(Magnitude(zero) + Magnitude(ScaleOf(header)) * largest <= limit)) {}

  static float Magnitude(float value) { return FromBits(Bits(value) & 0x7FFFFFFF); }
};

// Codes of 4 bits: the 16 values that a block can hold, clamped once.
struct NibbleDecoder {
  static constexpr bool kIsSplit = true;
  static constexpr bool needs_clamp = false;

  Table16 table;

  // `value(i)`: the values of the codes i .. i + kLanes - 1.
  template <class Value>
  NibbleDecoder(float limit, const Value& value) : table(MakeTable(limit, value)) {}

  void Pair(const std::uint8_t* codes, F* even, F* odd) const { LookupNibbles(table, codes, even, odd); }

  template <class Value>
  static Table16 MakeTable(float limit, const Value& value) {
    float values[16];
    for (std::size_t i = 0; i < 16; i += kLanes) Store(values + i, Clamp(value(i), Splat(limit)));
    return LoadTable16(values);
  }
};

// Cast codecs: an element is its value, infinite ones included.
template <class T>
struct CastDecoder {
  static constexpr bool kIsSplit = false;
  static constexpr bool needs_clamp = false;

  CastDecoder(const std::uint8_t* /*header*/, float /*limit*/) {}

  F Value(const std::uint8_t* codes) const { return Load(reinterpret_cast<const T*>(codes)); }
};

template <Codec kCodec>
struct Decoder;
template <>
struct Decoder<Codec::kFloat32> : CastDecoder<float> {
  using CastDecoder::CastDecoder;
};
template <>
struct Decoder<Codec::kBfloat16> : CastDecoder<Bfloat16> {
  using CastDecoder::CastDecoder;
};
template <>
struct Decoder<Codec::kFloat16> : CastDecoder<Float16> {
  using CastDecoder::CastDecoder;
};
