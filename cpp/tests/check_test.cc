#include "zcomm/check.h"

#include "test_util.h"

int main() {
  ZCOMM_CHECK(1 + 1 == 2, "unused");
  const int numel = 10;
  const std::string text =
      zcomm::MessageOfThrow([&] { ZCOMM_CHECK(numel % 4 == 0, "numel must be a multiple of 4: numel=", numel); });
  EXPECT(zcomm::Contains(text, "numel must be a multiple of 4: numel=10"), "%s", text.c_str());
  EXPECT(zcomm::Contains(text, "numel % 4 == 0") && zcomm::Contains(text, "check_test.cc:"), "%s", text.c_str());
  std::puts("ok");
  return 0;
}
