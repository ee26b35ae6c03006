#include "zcomm/random.h"

namespace zcomm {

std::array<std::uint32_t, 4> Philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key = {key[0] + 0x9E3779B9U, key[1] + 0xBB67AE85U};
  }
  return counter;
}

float Uniform24(const Draw& draw, std::uint64_t element) {
  const std::uint64_t index = draw.first + element;
  const std::uint64_t quad = index / 4;
  const auto high = static_cast<std::uint32_t>(quad >> 32);
  const auto words = Philox({static_cast<std::uint32_t>(quad), draw.step, draw.hop + (high << 8), draw.rank},
                            {draw.seed, draw.tensor});
  return static_cast<float>(words[index % 4] >> 8);
}

}  // namespace zcomm
