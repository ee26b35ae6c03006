#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "portable.h"

namespace zcomm::cuda {

// The policy P of portable.h on a GPU.
struct CudaWarp {
  static constexpr unsigned kAllLanes = 0xFFFFFFFFU;

  ZCOMM_DEVICE static int Lane() { return static_cast<int>(threadIdx.x % 32); }
  ZCOMM_DEVICE static std::uint32_t ShuffleXor(std::uint32_t word, int mask) {
    return __shfl_xor_sync(kAllLanes, word, mask);
  }
  ZCOMM_DEVICE static std::uint32_t ShuffleNext(std::uint32_t word) {
    return __shfl_sync(kAllLanes, word, Lane() + 1);  // modulo 32
  }
  ZCOMM_DEVICE static std::uint32_t MaxOfWarp(std::uint32_t word) { return __reduce_max_sync(kAllLanes, word); }
  ZCOMM_DEVICE static std::uint32_t Shuffle(std::uint32_t word, std::uint32_t lane) {
    return __shfl_sync(kAllLanes, word, static_cast<int>(lane));
  }
  ZCOMM_DEVICE static std::uint32_t Ballot(bool flag) { return __ballot_sync(kAllLanes, flag); }
  ZCOMM_DEVICE static void Sync() { __syncwarp(); }
  ZCOMM_DEVICE static void Add(std::uint32_t* pointer, std::uint32_t word) { atomicAdd(pointer, word); }
  ZCOMM_DEVICE static void AddShared(std::uint32_t* pointer, std::uint32_t word) { atomicAdd(pointer, word); }

  template <class W>
  ZCOMM_DEVICE static W Load(const void* pointer) {
    if constexpr (sizeof(W) == 16) {
      const uint4 raw = *static_cast<const uint4*>(pointer);
      return {{raw.x, raw.y, raw.z, raw.w}};
    } else if constexpr (sizeof(W) == 8) {
      const uint2 raw = *static_cast<const uint2*>(pointer);
      return {{raw.x, raw.y}};
    } else {
      return *static_cast<const W*>(pointer);
    }
  }

  template <class W>
  ZCOMM_DEVICE static void Store(void* pointer, W value) {
    if constexpr (sizeof(W) == 16) {
      *static_cast<uint4*>(pointer) = make_uint4(value.w[0], value.w[1], value.w[2], value.w[3]);
    } else if constexpr (sizeof(W) == 8) {
      *static_cast<uint2*>(pointer) = make_uint2(value.w[0], value.w[1]);
    } else {
      *static_cast<W*>(pointer) = value;
    }
  }

  ZCOMM_DEVICE static void StoreIf(bool flag, void* pointer, std::uint16_t word) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.u16 [%0], %1;\n}" ::"l"(pointer), "h"(word),
                 "r"(static_cast<std::uint32_t>(flag))
                 : "memory");
  }

  ZCOMM_DEVICE static float Divide(float a, float b) { return __fdiv_rn(a, b); }
  ZCOMM_DEVICE static float MultiplyAdd(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  ZCOMM_DEVICE static std::uint32_t Permute(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
    return __byte_perm(a, b, selector);
  }
  ZCOMM_DEVICE static float FromFloat16(std::uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
  ZCOMM_DEVICE static std::uint32_t PackBfloat16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return __bfloat16_as_ushort(pair.x) | static_cast<std::uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
  }
  ZCOMM_DEVICE static std::uint32_t PackFloat16(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return __half_as_ushort(__low2half(pair)) | static_cast<std::uint32_t>(__half_as_ushort(__high2half(pair))) << 16;
  }
};

}  // namespace zcomm::cuda
