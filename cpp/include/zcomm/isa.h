#pragma once

namespace zcomm {

// Instruction sets the kernels are compiled for. Every level gives the same bits. On arm64 kBaseline is NEON.
enum class Isa : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// The best level that this binary holds and this CPU and operating system run.
Isa DetectIsa();

// DetectIsa(), capped by the environment variable ZCOMM_ISA=avx512|avx2|baseline; read once. Throws
// std::invalid_argument on any other value of it.
Isa ActiveIsa();

// "avx512", "avx2", "baseline" or, for kBaseline on arm64, "neon".
const char* IsaName(Isa isa);

}  // namespace zcomm
