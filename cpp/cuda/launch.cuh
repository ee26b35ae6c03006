#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda_warp.cuh"
#include "kernels.h"

namespace zcomm::cuda {

constexpr int kThreads = 128;
constexpr std::uint32_t kWarps = kThreads / 32;
// Thread blocks on a multiprocessor. This bounds the registers of a thread to 96, so that 20 warps have loads in
// flight. A kernel that both decodes and encodes would spill with 96, and gets 128.
template <class Operation>
constexpr int kBlocksAtOnce = 5;

struct Quantizing {
  using Arguments = QuantizeArguments;
  template <class C>
  ZCOMM_DEVICE static void Run(const Arguments& a, std::uint32_t warp, std::uint32_t num_warps, const Tables& tables) {
    QuantizeTiles<CudaWarp, C>(a, warp, num_warps, tables);
  }
};

struct Decoding {
  using Arguments = DecodeArguments;
  template <class C>
  ZCOMM_DEVICE static void Run(const Arguments& a, std::uint32_t warp, std::uint32_t num_warps, const Tables& tables) {
    DecodeTiles<CudaWarp, C>(a, warp, num_warps, tables);
  }
};

struct Requantizing {
  using Arguments = RequantizeArguments;
  template <class C>
  ZCOMM_DEVICE static void Run(const Arguments& a, std::uint32_t warp, std::uint32_t num_warps, const Tables& tables) {
    RequantizeTiles<CudaWarp, C>(a, warp, num_warps, tables);
  }
};

template <>
constexpr int kBlocksAtOnce<Requantizing> = 4;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000  // there quantizing to int4 needs some more than 96 registers
template <>
constexpr int kBlocksAtOnce<Quantizing> = 4;
#endif

template <class Operation, class C>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<Operation>)
    Kernel(const __grid_constant__ typename Operation::Arguments arguments) {
  __shared__ Tables tables;
  if (threadIdx.x < 64) FillTables(static_cast<int>(threadIdx.x), &tables);
  __syncthreads();
  Operation::template Run<C>(arguments, blockIdx.x * kWarps + threadIdx.x / 32, gridDim.x * kWarps, tables);
}

inline void CheckCuda(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}

// The number of thread blocks of the kernel that the current device runs at once. Asks CUDA once for each device.
// Atomic, because several threads launch; if two ask at once, both get and store the same number.
template <class Operation, class C>
std::uint32_t ResidentBlocks() {
  constexpr int kMaxDevices = 64;
  static std::atomic<std::uint32_t> known[kMaxDevices];
  int device = 0;
  CheckCuda(cudaGetDevice(&device), "cudaGetDevice");
  std::atomic<std::uint32_t>& blocks = known[device % kMaxDevices];
  if (device < kMaxDevices && blocks.load() != 0) return blocks.load();
  int multiprocessors = 0;
  int resident = 0;
  CheckCuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  CheckCuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, Kernel<Operation, C>, kThreads, 0),
            "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  const auto total = static_cast<std::uint32_t>(std::max(1, multiprocessors * resident));
  if (device < kMaxDevices) blocks.store(total);
  return total;
}

// Launches the kernel once, with at least one thread block: even without elements, the messages have trailers.
template <class Operation, class C>
void Launch(const typename Operation::Arguments& arguments, Stream stream) {
  const std::uint32_t wanted = (arguments.tiles.count + kWarps - 1) / kWarps;
  const std::uint32_t blocks = std::max<std::uint32_t>(1, std::min(wanted, ResidentBlocks<Operation, C>()));
  Kernel<Operation, C><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(arguments);
  CheckCuda(cudaGetLastError(), "launch of a CUDA kernel");
}

// For the four block codecs.
template <class Operation>
void LaunchFor(Codec codec, const typename Operation::Arguments& arguments, Stream stream) {
  switch (codec) {
    case Codec::kInt8:
      return Launch<Operation, Int8Codec>(arguments, stream);
    case Codec::kInt4:
      return Launch<Operation, Int4Codec>(arguments, stream);
    case Codec::kNf4:
      return Launch<Operation, Nf4Codec>(arguments, stream);
    default:
      return Launch<Operation, Fp8Codec>(arguments, stream);
  }
}

// Defined in decode.cu.
void LaunchDecode(const DecodeArguments& arguments, Stream stream);

}  // namespace zcomm::cuda
