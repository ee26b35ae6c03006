// The range of a block's values, from which its scale is computed: the largest magnitude, or the lowest and the highest
// value. Compared as integers, so that NaN and infinity come out largest and denormal modes do not matter.

// Integers ordered as |x|: 16 bits for 16-bit types.
inline std::int32_t OrderedMagnitude(float value) { return Bits(value) & 0x7FFFFFFF; }
inline std::int16_t OrderedMagnitude(Bfloat16 value) { return static_cast<std::int16_t>(value.bits & 0x7FFF); }
inline std::int16_t OrderedMagnitude(Float16 value) { return static_cast<std::int16_t>(value.bits & 0x7FFF); }

// The float32 bits of the |x| with this OrderedMagnitude.
inline std::int32_t WidenMagnitude(std::int32_t magnitude, float /*type*/) { return magnitude; }
template <class T>
inline std::int32_t WidenMagnitude(std::int32_t magnitude, T /*type*/) {
  return Bits(Widen(T{static_cast<std::uint16_t>(magnitude)}));
}

// float32 bits of the largest |x|.
template <class T>
inline std::int32_t AbsMaxBits(const T* x, std::size_t numel) {
  auto absmax = OrderedMagnitude(T{});
  for (std::size_t i = AbsMaxLanes(x, numel, &absmax); i < numel; ++i) {
    const auto magnitude = OrderedMagnitude(x[i]);
    absmax = magnitude > absmax ? magnitude : absmax;
  }
  return WidenMagnitude(absmax, T{});
}

// Float bits as integers in the order of the floats, and back: the magnitude bits of negative numbers are inverted.
inline I OrderedBits(F value) {
  const I bits = BitsOf(value);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
inline std::int32_t FloatBitsOfOrdered(std::int32_t ordered) { return ordered ^ ((ordered >> 31) & 0x7FFFFFFF); }

template <std::size_t kStride = kLanes / 2>
inline std::int32_t MaxOfLanes(I value) {
  if constexpr (kStride == 0) {
    return value[0];
  } else {
    return MaxOfLanes<kStride / 2>(MaxInt(value, BitsOf(SwapLanes<kStride>(FloatOf(value)))));
  }
}

// float32 bits of the lowest and highest of at least one x.
template <class T>
inline void Extremes(const T* x, std::size_t numel, std::int32_t* low, std::int32_t* high) {
  T first[kLanes];
  if (numel < kLanes) {
    for (std::size_t i = 0; i < kLanes; ++i) first[i] = x[i < numel ? i : 0];
    x = first;
    numel = kLanes;
  }
  const std::size_t last = numel - kLanes;  // the last vector overlaps the one before: harmless for an extreme
  I min = OrderedBits(Load(x + last));
  I max = min;
  for (std::size_t i = 0; i < last; i += kLanes) {
    const I value = OrderedBits(Load(x + i));
    min = MinInt(min, value);
    max = MaxInt(max, value);
  }
  *low = FloatBitsOfOrdered(~MaxOfLanes(~min));
  *high = FloatBitsOfOrdered(MaxOfLanes(max));
}
