#include "zcomm/random.h"

#include "test_util.h"

namespace zcomm {
namespace {

using Words = std::array<std::uint32_t, 4>;

// The known answers that come with the paper's code, Random123.
void CheckKnownAnswers() {
  const Words zeros = Philox({0, 0, 0, 0}, {0, 0});
  EXPECT((zeros == Words{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}), "zeros: %x", zeros[0]);
  const std::uint32_t ones = ~std::uint32_t{0};
  const Words of_ones = Philox({ones, ones, ones, ones}, {ones, ones});
  EXPECT((of_ones == Words{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}), "ones: %x", of_ones[0]);
  const Words of_pi = Philox({0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}, {0xA4093822, 0x299F31D0});
  EXPECT((of_pi == Words{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}), "pi: %x", of_pi[0]);
}

// Element by element: which counter, which word, which bits.
void CheckElements() {
  const Draw draw{7, 8, 9, 10, 11, 5};
  const std::uint64_t element = (std::uint64_t{3} << 34) + 4 * 77 + 1;  // with `first`, word 2 of quad 78
  const Words words = Philox({78, 9, 10 + 256 * 3, 11}, {7, 8});
  EXPECT(Uniform24(draw, element) == static_cast<float>(words[2] >> 8), "word");
}

}  // namespace
}  // namespace zcomm

int main() {
  zcomm::CheckKnownAnswers();
  zcomm::CheckElements();
  std::puts("ok");
  return 0;
}
