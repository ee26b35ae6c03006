#include "zcomm/isa.h"

#include "test_util.h"

int main() {
  using zcomm::Isa;
  EXPECT(std::string(zcomm::IsaName(Isa::kAvx2)) == "avx2" && std::string(zcomm::IsaName(Isa::kAvx512)) == "avx512",
         "names");
  setenv("ZCOMM_ISA", "sse9", 1);
  const std::string text = zcomm::MessageOfThrow([] { zcomm::ActiveIsa(); });
  EXPECT(zcomm::Contains(text, "ZCOMM_ISA=sse9") && zcomm::Contains(text, "baseline"), "%s", text.c_str());
  // After an invalid value the next call reads the variable again, and then keeps the level.
  setenv("ZCOMM_ISA", "baseline", 1);
  EXPECT(zcomm::ActiveIsa() == Isa::kBaseline, "the environment caps the level");
  setenv("ZCOMM_ISA", "avx512", 1);
  EXPECT(zcomm::ActiveIsa() == Isa::kBaseline, "read once");
  std::puts("ok");
  return 0;
}
