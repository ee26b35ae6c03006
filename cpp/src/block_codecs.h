// What a codec must provide for the loops of encode_blocks.h and decode_blocks.h:
//
//   Encoder<codec>  constructed from a block's scales; Codes(x), and RandomCodes(x, uniform) of int codecs, return the
//                   codes of kLanes values in the low bits of the lanes
//   Levels<codec>   Of() returns the unscaled values of the codes of 2 * kLanes elements, |level| <= kLargest; with
//                   kIsSplit the even elements come first, then the odd ones. A level has at most 8 significant bits,
//                   so that its product with a scale is exact

template <Codec kCodec>
struct Encoder;

template <Codec kCodec>
struct Levels;

// Cast codecs: an element is its own level.
template <class T>
struct CastLevels {
  static constexpr bool kIsSplit = false;

  static void Of(const std::uint8_t* codes, F* first, F* second) {
    const T* values = reinterpret_cast<const T*>(codes);
    *first = Load(values);
    *second = Load(values + kLanes);
  }
};

template <>
struct Levels<Codec::kFloat32> : CastLevels<float> {};
template <>
struct Levels<Codec::kBfloat16> : CastLevels<Bfloat16> {};
template <>
struct Levels<Codec::kFloat16> : CastLevels<Float16> {};
