// The loop that decodes messages and sums them in registers (N4 and N8 of zcomm/_formats/reference.py).

// The division of a sum: one IEEE division. For a power of two, multiplying by the reciprocal is faster and gives the
// same bits.
struct Divisor {
  enum Way { kNone, kMultiply, kDivide };

  F value;
  Way way;

  explicit Divisor(float divisor) : value(Splat(divisor)), way(divisor == 1.0F ? kNone : kDivide) {
    const bool is_power_of_two = (Bits(divisor) & 0x007FFFFF) == 0;
    if (way == kDivide && is_power_of_two && divisor > 1.0F && divisor <= kLargestAsymmetric) {
      value = Splat(1.0F / divisor);
      way = kMultiply;
    }
  }

  F Applied(F sum) const { return way == kNone ? sum : way == kMultiply ? sum * value : sum / value; }
};

inline float LoadHeaderPart(const std::uint8_t* bytes) {
  Bfloat16 value;
  std::memcpy(&value, bytes, sizeof(value));
  return Widen(value);
}

// Scales the levels of a block to values. The product of a level and a scale is exact (at most 8 bits by 8 bits) unless
// it overflows, so that a fused MultiplyAdd gives the same bits.
template <Codec kCodec>
struct Scaling {
  F scale;
  F zero;
  F limit;
  bool needs_clamp;  // some code could exceed the limit; also true for a NaN scale, which compares false

  Scaling(const std::uint8_t* header, float largest_value) : limit(Splat(largest_value)), needs_clamp(false) {
    if constexpr (IsBlockCodec(kCodec)) {
      const float factor = LoadHeaderPart(header);
      const float start = kHasZeroPoint<kCodec> ? LoadHeaderPart(header + sizeof(Bfloat16)) : 0.0F;
      scale = Splat(factor);
      zero = Splat(start);
      needs_clamp = !(Magnitude(factor) * Levels<kCodec>::kLargest + Magnitude(start) <= largest_value);
    }
  }

  static float Magnitude(float value) { return FromBits(Bits(value) & 0x7FFFFFFF); }

  template <bool kClamp>
  F Value(F level) const {
    if constexpr (!IsBlockCodec(kCodec)) return level;
    if constexpr (!kClamp) return kHasZeroPoint<kCodec> ? MultiplyAdd(level, scale, zero) : level * scale;
    return Clamp(kHasZeroPoint<kCodec> ? zero + level * scale : level * scale, limit);
  }

  template <bool kClamp>
  F Added(F sum, F level) const {
    if constexpr (kClamp || !IsBlockCodec(kCodec)) return sum + Value<kClamp>(level);
    return kHasZeroPoint<kCodec> ? sum + MultiplyAdd(level, scale, zero) : MultiplyAdd(level, scale, sum);
  }
};

// Stores or adds the values of one message to kPairs pairs of vectors.
template <Codec kCodec, bool kAdd, bool kClamp, std::size_t kPairs>
inline void AddClamped(const Scaling<kCodec>& scaling, const std::uint8_t* codes, F (*sum)[2]) {
  for (std::size_t p = 0; p < kPairs; ++p) {
    F level[2];
    Levels<kCodec>::Of(codes + p * NumBytes<kCodec>(2 * kLanes), &level[0], &level[1]);
    for (std::size_t j = 0; j < 2; ++j) {
      sum[p][j] = kAdd ? scaling.template Added<kClamp>(sum[p][j], level[j]) : scaling.template Value<kClamp>(level[j]);
    }
  }
}

template <Codec kCodec, bool kAdd, std::size_t kPairs>
inline void AddMessage(const std::uint8_t* header, const std::uint8_t* codes, float limit, F (*sum)[2]) {
  const Scaling<kCodec> scaling(header, limit);
  if (scaling.needs_clamp) {
    AddClamped<kCodec, kAdd, true, kPairs>(scaling, codes, sum);
  } else {
    AddClamped<kCodec, kAdd, false, kPairs>(scaling, codes, sum);
  }
}

// Stores 2 * kLanes elements in their order.
template <bool kIsSplit, class Out>
inline void StorePair(Out* out, F first, F second) {
  if constexpr (kIsSplit && std::is_same_v<Out, Bfloat16>) {
    const I low = Signed(Unsigned(Bfloat16Bits(first)) >> 16);
    const I pairs = low | (Bfloat16Bits(second) & SplatInt(-0x10000));
    std::memcpy(out, &pairs, sizeof(pairs));
  } else {
    if constexpr (kIsSplit) Interleave(&first, &second);
    Store(out, first);
    Store(out + kLanes, second);
  }
}

// Sums 2 * kLanes * kPairs elements of one block over the messages, in order. Unless kIsWhole there are only `numel`
// elements: then codes and values go through padded buffers, as a full vector would reach past the arrays.
template <Codec kCodec, std::size_t kPairs, bool kIsWhole, class Out>
inline void SumChunk(const CodeRange& range, const std::uint8_t* header, const std::uint8_t* codes, std::size_t numel,
                     float limit, const Divisor& divisor, Out* out) {
  constexpr std::size_t kNumel = kPairs * 2 * kLanes;
  std::uint8_t padded[NumBytes<kCodec>(kIsWhole ? 2 : kNumel)] = {};
  const auto readable = [&](const std::uint8_t* from) {
    if constexpr (kIsWhole) return from;
    std::memcpy(padded, from, NumBytes<kCodec>(numel));
    return static_cast<const std::uint8_t*>(padded);
  };
  F sum[kPairs][2];
  AddMessage<kCodec, false, kPairs>(header, readable(codes), limit, sum);
  for (std::size_t i = 1; i < range.count; ++i) {
    header += range.stride_nbytes;
    codes += range.stride_nbytes;
    AddMessage<kCodec, true, kPairs>(header, readable(codes), limit, sum);
  }
  Out values[kIsWhole ? 1 : kNumel];
  Out* to = kIsWhole ? out : values;
  for (std::size_t p = 0; p < kPairs; ++p) {
    StorePair<Levels<kCodec>::kIsSplit>(to + 2 * p * kLanes, divisor.Applied(sum[p][0]), divisor.Applied(sum[p][1]));
  }
  if constexpr (!kIsWhole) std::memcpy(out, values, numel * sizeof(Out));
}

// Decodes one message of 4-bit codes to 16-bit elements: converts the 16 possible values of a block once, then looks
// them up.
template <Codec kCodec, class Out>
void DecodeByTable(const CodeRange& range, float limit, Out* out) {
  constexpr std::size_t kNumel = WordTable<Out>::kNumel;
  constexpr std::uint8_t kEachNibble[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  F level;
  F unused;
  Levels<kCodec>::Of(kEachNibble, &level, &unused);
  const std::size_t end = range.begin + range.numel;
  for (std::size_t at = range.begin; at < end;) {
    const std::size_t block = at / range.block;
    const std::size_t block_end = Min((block + 1) * range.block, end);
    const Scaling<kCodec> scaling(range.headers + block * kHeaderNbytes<kCodec>, limit);
    const F value = scaling.needs_clamp ? scaling.template Value<true>(level) : scaling.template Value<false>(level);
    const WordTable<Out> table(value);
    const std::uint8_t* codes = range.codes + NumBytes<kCodec>(at);
    for (; at + kNumel <= block_end; at += kNumel, codes += kNumel / 2, out += kNumel) table.Lookup(codes, out);
    if (at < block_end) {
      const std::size_t numel = block_end - at;
      std::uint8_t padded[kNumel / 2] = {};
      std::memcpy(padded, codes, NumBytes<kCodec>(numel));
      Out values[kNumel];
      table.Lookup(padded, values);
      std::memcpy(out, values, numel * sizeof(Out));
      at += numel;
      out += numel;
    }
  }
}

template <Codec kCodec, class Out>
void DecodeSum(const CodeRange& range, float limit, float divisor_value, void* data) {
  if constexpr (WordTable<Out>::kExists && Levels<kCodec>::kIsSplit) {
    if (range.count == 1 && divisor_value == 1.0F) {
      return DecodeByTable<kCodec>(range, limit, static_cast<Out*>(data));
    }
  }
  constexpr std::size_t kPairs = 4;
  constexpr std::size_t kPair = 2 * kLanes;
  constexpr bool kIsBlock = IsBlockCodec(kCodec);
  const Divisor divisor(divisor_value);
  Out* out = static_cast<Out*>(data);
  const std::size_t end = range.begin + range.numel;
  const std::size_t block = kIsBlock ? range.block : end;
  for (std::size_t at = range.begin; at < end;) {
    const std::size_t block_end = Min((at / block + 1) * block, end);
    const std::uint8_t* header = range.headers + at / block * kHeaderNbytes<kCodec>;
    const auto sum = [&](auto pairs, auto is_whole, std::size_t numel) {
      SumChunk<kCodec, pairs(), is_whole()>(range, header, range.codes + NumBytes<kCodec>(at), numel, limit, divisor,
                                            out);
      at += numel;
      out += numel;
    };
    while (at + kPairs * kPair <= block_end)
      sum(std::integral_constant<std::size_t, kPairs>(), std::true_type(), kPairs * kPair);
    while (at + kPair <= block_end) sum(std::integral_constant<std::size_t, 1>(), std::true_type(), kPair);
    if (at < block_end) sum(std::integral_constant<std::size_t, 1>(), std::false_type(), block_end - at);
  }
}
