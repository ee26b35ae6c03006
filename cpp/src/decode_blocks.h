// The loop that decodes messages and sums them in registers (N4 and N8 of zcomm/quant.py).

// One IEEE division at the end. Multiplying with the reciprocal of a power of two gives the same bits.
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

// Values of 2 * kLanes elements, clamped or not; see kIsSplit for their order.
template <Codec kCodec, bool kClamp>
inline void DecodePair(const Decoder<kCodec>& decoder, const std::uint8_t* codes, F limit, F* first, F* second) {
  if constexpr (Decoder<kCodec>::kIsSplit) {
    decoder.Pair(codes, first, second);
  } else {
    *first = decoder.Value(codes);
    *second = decoder.Value(codes + NumBytes<kCodec>(kLanes));
  }
  if constexpr (kClamp) {
    *first = Clamp(*first, limit);
    *second = Clamp(*second, limit);
  }
}

// Stores or adds the values of one message to kPairs pairs of vectors.
template <Codec kCodec, bool kAdd, bool kClamp, std::size_t kPairs>
inline void AddClamped(const Decoder<kCodec>& decoder, const std::uint8_t* codes, F limit, F (*sum)[2]) {
  for (std::size_t p = 0; p < kPairs; ++p) {
    F value[2];
    DecodePair<kCodec, kClamp>(decoder, codes + p * NumBytes<kCodec>(2 * kLanes), limit, &value[0], &value[1]);
    for (std::size_t j = 0; j < 2; ++j) sum[p][j] = kAdd ? sum[p][j] + value[j] : value[j];
  }
}

template <Codec kCodec, bool kAdd, std::size_t kPairs>
inline void AddMessage(const std::uint8_t* header, const std::uint8_t* codes, float limit, F (*sum)[2]) {
  const Decoder<kCodec> decoder(header, limit);
  if (decoder.needs_clamp) {
    AddClamped<kCodec, kAdd, true, kPairs>(decoder, codes, Splat(limit), sum);
  } else {
    AddClamped<kCodec, kAdd, false, kPairs>(decoder, codes, Splat(limit), sum);
  }
}

// 2 * kLanes * kPairs elements of one block, summed over the messages in order; or fewer, `numel`: then the codes are
// moved to where all can be read, and the values from where all can be written.
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
    for (F& vector : sum[p]) vector = divisor.Applied(vector);
    if constexpr (Decoder<kCodec>::kIsSplit) Interleave(&sum[p][0], &sum[p][1]);
    for (std::size_t j = 0; j < 2; ++j) Store(to + (2 * p + j) * kLanes, sum[p][j]);
  }
  if constexpr (!kIsWhole) std::memcpy(out, values, numel * sizeof(Out));
}

template <Codec kCodec, class Out>
void DecodeSum(const CodeRange& range, float limit, float divisor_value, void* data) {
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
