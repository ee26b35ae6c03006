// Philox4x32-10 on kLanes counters at a time; see zcomm/random.h.

// The random numbers of kLanes quads of elements: 4 * kLanes numbers, in order.
inline void UniformQuads(const Draw& draw, std::uint64_t first_quad, float* out) {
  constexpr int kRounds = 10;
  constexpr std::uint32_t kMultipliers[2] = {0xD2511F53, 0xCD9E8D57};
  const auto splat = [](std::uint32_t value) { return Unsigned(SplatInt(static_cast<std::int32_t>(value))); };
  const auto low = static_cast<std::uint32_t>(first_quad);
  const auto high = static_cast<std::uint32_t>(first_quad >> 32);
  std::uint32_t lanes[kLanes];
  for (std::size_t j = 0; j < kLanes; ++j) lanes[j] = static_cast<std::uint32_t>(j);
  U c0;
  std::memcpy(&c0, lanes, sizeof(c0));
  c0 += low;
  const U carry = Unsigned(I(c0 < splat(low))) & (1U << 8);
  U c2 = splat(draw.hop + (high << 8)) + carry;
  U c1 = splat(draw.step);
  U c3 = splat(draw.rank);
  std::uint32_t k0 = draw.seed;
  std::uint32_t k1 = draw.tensor;
  for (int round = 0; round < kRounds; ++round) {
    const U high0 = MulHigh(c0, kMultipliers[0]);
    const U high2 = MulHigh(c2, kMultipliers[1]);
    const U low0 = c0 * kMultipliers[0];
    const U low2 = c2 * kMultipliers[1];
    c0 = high2 ^ c1 ^ k0;
    c1 = low2;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  F even[2] = {ToFloat(Signed(c0 >> 8)), ToFloat(Signed(c2 >> 8))};
  F odd[2] = {ToFloat(Signed(c1 >> 8)), ToFloat(Signed(c3 >> 8))};
  Interleave(&even[0], &even[1]);
  Interleave(&odd[0], &odd[1]);
  for (std::size_t j = 0; j < 2; ++j) {
    Interleave(&even[j], &odd[j]);
    Store(out + 2 * j * kLanes, even[j]);
    Store(out + (2 * j + 1) * kLanes, odd[j]);
  }
}

void Uniform(const Draw& draw, std::uint64_t element, std::size_t numel, float* out) {
  constexpr std::size_t kGroup = 4 * kLanes;
  const std::uint64_t index = draw.first + element;
  std::size_t skip = index % 4;
  std::uint64_t quad = index / 4;
  for (std::size_t i = 0; i < numel; quad += kLanes) {
    if (skip == 0 && i + kGroup <= numel) {
      UniformQuads(draw, quad, out + i);
      i += kGroup;
      continue;
    }
    float group[kGroup];
    UniformQuads(draw, quad, group);
    const std::size_t count = Min(kGroup - skip, numel - i);
    std::memcpy(out + i, group + skip, count * sizeof(float));
    i += count;
    skip = 0;
  }
}
