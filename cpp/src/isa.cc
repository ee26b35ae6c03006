#include "zcomm/isa.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "zcomm/check.h"

#ifdef ZCOMM_X86
#include <cpuid.h>
#endif

namespace zcomm {
namespace {

#ifdef ZCOMM_X86
bool HasF16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

Isa CapFromEnvironment() {
  const char* value = std::getenv("ZCOMM_ISA");
  const std::string name = value == nullptr ? "" : value;
  if (name.empty() || name == "avx512") return Isa::kAvx512;
  if (name == "avx2") return Isa::kAvx2;
  ZCOMM_CHECK(name == "baseline", "ZCOMM_ISA must be avx512, avx2 or baseline: ZCOMM_ISA=", name);
  return Isa::kBaseline;
}

}  // namespace

Isa DetectIsa() {
#ifdef ZCOMM_X86
  // __builtin_cpu_supports also checks that the operating system saves the wider registers: without that, the first
  // AVX instruction would raise SIGILL.
  __builtin_cpu_init();
  const bool bmi = __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (!__builtin_cpu_supports("avx2") || !HasF16c() || !bmi) return Isa::kBaseline;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? Isa::kAvx512 : Isa::kAvx2;
#else
  return Isa::kBaseline;
#endif
}

Isa ActiveIsa() {
  static const Isa active = std::min(CapFromEnvironment(), DetectIsa());
  return active;
}

const char* IsaName(Isa isa) {
  if (isa == Isa::kAvx512) return "avx512";
  if (isa == Isa::kAvx2) return "avx2";
#ifdef __aarch64__
  return "neon";
#else
  return "baseline";
#endif
}

}  // namespace zcomm
