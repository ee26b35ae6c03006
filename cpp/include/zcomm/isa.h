#pragma once

namespace zcomm {

// Instruction sets that the kernels are compiled for. Every level gives the same bits, but for the sign and the payload
// of a NaN: NaNs count as equal. On arm64 kBaseline is NEON.
enum class Isa : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// The best level that is in this binary and that both the CPU and the operating system support.
Isa DetectIsa();

// DetectIsa(), capped by the environment variable ZCOMM_ISA=avx512|avx2|baseline, which is read once. Throws
// std::invalid_argument on any other value.
Isa ActiveIsa();

// "avx512", "avx2", "baseline" or, for kBaseline on arm64, "neon".
const char* IsaName(Isa isa);

}  // namespace zcomm
