// Blocks of int8 moments; see zcomm/moment_blocks.h. Plain loops, which the compiler vectorizes at each level.

template <MomentKind kKind>
constexpr float kNumLevels = kKind == MomentKind::kSigned ? 127.0F * 127.0F : 255.0F * 255.0F;

template <MomentKind kKind>
void DecodeMoments(const std::uint8_t* __restrict records, std::size_t numel, float* __restrict values) {
  for (std::size_t begin = 0; begin < numel; begin += kMomentBlock, records += kMomentRecordNbytes) {
    const std::size_t count = Min(kMomentBlock, numel - begin);
    const std::uint8_t* __restrict codes = records + sizeof(float);
    float scale;
    std::memcpy(&scale, records, sizeof(scale));
    for (std::size_t i = 0; i < count; ++i) {
      const std::int32_t code = kKind == MomentKind::kSigned ? static_cast<std::int8_t>(codes[i]) : codes[i];
      const std::int32_t magnitude = code < 0 ? -code : code;
      const float value = scale * (static_cast<float>(code * magnitude) / kNumLevels<kKind>);
      values[begin + i] = kKind == MomentKind::kSigned ? value : value * value;
    }
  }
}

// |x|, or the root of a kNonNegative; returns the bits of the largest, with NaN and infinity on top.
template <MomentKind kKind>
inline std::int32_t Magnitudes(const float* __restrict values, std::size_t numel, float* __restrict magnitudes) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < numel; ++i) {
    const float magnitude = kKind == MomentKind::kSigned ? __builtin_fabsf(values[i]) : __builtin_sqrtf(values[i]);
    const std::int32_t bits = Bits(magnitude) & 0x7FFFFFFF;
    magnitudes[i] = magnitude;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

template <MomentKind kKind>
void EncodeMoments(const float* __restrict values, const float* __restrict uniform, std::size_t numel,
                   std::uint8_t* __restrict records) {
  constexpr std::int32_t kLeastScaleBits = 0x28800000;  // 2^-46
  for (std::size_t begin = 0; begin < numel; begin += kMomentBlock, records += kMomentRecordNbytes) {
    const std::size_t count = Min(kMomentBlock, numel - begin);
    const float* __restrict x = values + begin;
    const float* __restrict random = uniform + begin;
    std::uint8_t* __restrict codes = records + sizeof(float);
    float magnitudes[kMomentBlock];
    const std::int32_t largest = Magnitudes<kKind>(x, count, magnitudes);
    const bool is_finite = largest < kInfinityBits;
    const float scale = FromBits(!is_finite ? 0x7FC00000 : largest > kLeastScaleBits ? largest : kLeastScaleBits);
    std::memcpy(records, &scale, sizeof(scale));
    const std::size_t num_codes = is_finite ? count : 0;
    std::memset(codes + num_codes, 0, kMomentBlock - num_codes);
    for (std::size_t i = 0; i < num_codes; ++i) {
      const float square = magnitudes[i] / scale * kNumLevels<kKind>;
      const auto floor = static_cast<std::int32_t>(__builtin_sqrtf(square));
      const auto low = static_cast<float>(floor * floor);
      auto gap = static_cast<float>(2 * floor + 1);
      float above = square - low;
      if (kKind == MomentKind::kNonNegative) {
        gap = gap * static_cast<float>(2 * floor * floor + 2 * floor + 1);
        above = above * (square + low);
      }
      const std::int32_t code = floor + (random[i] * gap < above * 16777216.0F ? 1 : 0);
      if (kKind == MomentKind::kSigned) {
        codes[i] = static_cast<std::uint8_t>(x[i] < 0.0F ? -code : code);
      } else {
        const std::int32_t least = x[i] > 0.0F ? 1 : 0;
        codes[i] = static_cast<std::uint8_t>(code > least ? code : least);
      }
    }
  }
}
