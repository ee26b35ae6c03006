#pragma once

#include <cstdint>

#ifdef ZCOMM_X86
#include <immintrin.h>
#endif

namespace zcomm {

// Sets IEEE arithmetic on the current thread while the object lives: denormals are neither flushed nor read as zero,
// whatever the caller has set (torch.set_flush_denormal), and rounding is to nearest even. Without it, messages would
// have other bits on ranks or threads with another mode.
class IeeeFloatMode {
 public:
#if defined(ZCOMM_X86)
  IeeeFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~IeeeFloatMode() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefault = 0x1F80;  // all exceptions masked
  unsigned saved_;
#elif defined(__aarch64__)
  IeeeFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{0}));
  }
  ~IeeeFloatMode() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  std::uint64_t saved_ = 0;
#else
  IeeeFloatMode() = default;
  ~IeeeFloatMode() = default;
#endif

 public:
  IeeeFloatMode(const IeeeFloatMode&) = delete;
  IeeeFloatMode& operator=(const IeeeFloatMode&) = delete;
};

}  // namespace zcomm
