#pragma once

#include <cstdint>
#include <cstring>

// The kernels' bodies compile for a GPU, and for the CPU, where cpp/tests/cuda_kernels_test.cc runs them on an emulated
// warp. What differs is in a policy P of static functions: CudaWarp (cuda_warp.cuh) or EmulatedWarp
// (cpp/tests/emulated_warp.h). "All lanes call": the lanes exchange words, so that a lane that does not call would
// leave the others without its word (on a GPU, a deadlock).
//
//   Lane()                        0..31
//   ShuffleXor(word, mask)        the word of lane (Lane() ^ mask); all lanes call, with one mask
//   ShuffleNext(word)             the word of lane (Lane() + 1) % 32; all lanes call
//   MaxOfWarp(word)               the largest word of all lanes; all lanes call
//   Shuffle(word, lane)           the word of that lane; all lanes call
//   Ballot(flag)                  bit i: lane i's flag; all lanes call
//   Sync()                        what lanes wrote before, all see after it; all lanes call
//   Add(pointer, word)            atomic, device memory; AddShared: the warp's shared memory
//   Load<W>, Store<W>(pointer)    device memory, aligned to sizeof(W)
//   StoreIf(flag, pointer, word)  16 bits, by the lanes whose flag is true, without a branch
//   Divide(a, b)                  IEEE division
//   MultiplyAdd(a, b, c)          a * b + c, rounded once
//   Permute(a, b, selector)       byte i of the result is byte d of a (d = 0..3) or b (d = 4..7), d digit i of selector
//   FromFloat16(bits)             float32
//   PackBfloat16, PackFloat16(low, high)    two float32 values to nearest, ties to even
#ifdef __CUDACC__
#define ZCOMM_DEVICE __device__ __forceinline__
#define ZCOMM_HOST_DEVICE __host__ __device__ inline
#define ZCOMM_UNROLL _Pragma("unroll")
#else
#define ZCOMM_DEVICE inline
#define ZCOMM_HOST_DEVICE inline
#define ZCOMM_UNROLL
#endif

namespace zcomm::cuda {

ZCOMM_DEVICE std::uint32_t BitsOf(float value) {
#ifdef __CUDACC__
  return __float_as_uint(value);
#else
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

ZCOMM_DEVICE float FloatOf(std::uint32_t bits) {
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

struct alignas(16) Words4 {
  std::uint32_t w[4];
};

struct alignas(8) Words2 {
  std::uint32_t w[2];
};

struct Words1 {
  std::uint32_t w[1];
};

ZCOMM_HOST_DEVICE bool IsAligned(const void* pointer, std::uintptr_t nbytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % nbytes == 0;
}

// Packs the low bytes of the four words, a's lowest.
template <class P>
ZCOMM_DEVICE std::uint32_t LowBytes(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  return P::Permute(P::Permute(a, b, 0x0040), P::Permute(c, d, 0x0040), 0x5410);
}

// Division of numbers below 2^31 by a divisor known before the launch, as a multiplication and a shift.
struct Divisor {
  std::uint32_t value;
  std::uint32_t factor;
  std::uint32_t shift;

  static Divisor Of(std::uint32_t value) {
    std::uint32_t shift = 0;
    while ((std::uint64_t{1} << shift) < value) ++shift;
    const std::uint64_t factor = ((std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift) - value)) / value + 1;
    return {value, static_cast<std::uint32_t>(factor), shift};
  }
};

ZCOMM_HOST_DEVICE std::uint32_t Quotient(std::uint32_t number, const Divisor& divisor) {
  const auto high = static_cast<std::uint32_t>((std::uint64_t{number} * divisor.factor) >> 32);
  return (high + number) >> divisor.shift;
}

}  // namespace zcomm::cuda
