#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda_warp.cuh"
#include "ulps_encode.h"
#include "zcomm/check.h"
#include "zcomm/cuda_kernels.h"
#include "zcomm/ulps.h"

namespace zcomm::cuda {
namespace {

constexpr int kSumThreads = 128;
constexpr std::uint32_t kSumWarps = kSumThreads / 32;
constexpr std::uint64_t kMostSumBlocks = 1024;

ZCOMM_DEVICE std::uint32_t WarpOfGrid() { return blockIdx.x * kSumWarps + threadIdx.x / 32; }

__global__ void __launch_bounds__(kSumThreads) SampleKernel(const __grid_constant__ UlpsEncodeArguments arguments) {
  SampleUlps<CudaWarp>(arguments, WarpOfGrid(), gridDim.x * kSumWarps);
}

__global__ void __launch_bounds__(32) EncodeKernel(const __grid_constant__ UlpsEncodeArguments arguments) {
  __shared__ UlpsShared shared;
  EncodeUlps<CudaWarp>(arguments, blockIdx.x, &shared);
}

__global__ void __launch_bounds__(kSumThreads) PlaceKernel(const __grid_constant__ UlpsEncodeArguments arguments) {
  PlaceUlps<CudaWarp>(arguments, WarpOfGrid(), gridDim.x * kSumWarps);
}

__global__ void __launch_bounds__(32) FinishKernel(const __grid_constant__ UlpsEncodeArguments arguments) {
  FinishUlps<CudaWarp>(arguments);
}

__global__ void __launch_bounds__(kSumThreads) SumKernel(const __grid_constant__ UlpsDecodeArguments arguments) {
  SumUlps<CudaWarp>(arguments, WarpOfGrid(), gridDim.x * kSumWarps);
}

__global__ void __launch_bounds__(32) DecodeKernel(const __grid_constant__ UlpsDecodeArguments arguments) {
  __shared__ UlpsShared shared;
  DecodeUlps<CudaWarp>(arguments, blockIdx.x, &shared);
}

void CheckCudaCall(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}

// Chunks, at least one: without elements there is a head.
unsigned ChunkBlocks(std::size_t numel) {
  return static_cast<unsigned>(std::max<std::uint64_t>(1, UlpsChunks(numel, ulps::kDenseChunkBits)));
}

// Each warp has some pieces' worth of elements to sum or move.
unsigned SumBlocks(std::size_t numel) {
  const std::uint64_t pieces = numel / (2 * kUlpsPieceWords) + 1;
  return static_cast<unsigned>(std::min(kMostSumBlocks, (pieces + kSumWarps - 1) / kSumWarps));
}

std::size_t EntriesNbytes(std::size_t numel) { return (4 * UlpsChunks(numel, ulps::kDenseChunkBits) + 15) / 16 * 16; }

constexpr std::size_t kSumsNbytes = 16;

}  // namespace

std::size_t UlpsWorkspaceNbytes(std::size_t numel) {
  return kSumsNbytes + EntriesNbytes(numel) + UlpsPlacesNbytes(numel);
}

void EncodeUlps(const std::uint16_t* new_bits, const std::uint16_t* old_bits, std::size_t numel, std::uint8_t* message,
                void* workspace, Stream stream) {
  ZCOMM_CHECK(IsAligned(message, 4) && IsAligned(workspace, 16), "message and workspace must be aligned to 4 and 16");
  auto* bytes = static_cast<std::uint8_t*>(workspace);
  auto* entries = reinterpret_cast<std::uint32_t*>(bytes + kSumsNbytes);
  const UlpsEncodeArguments arguments{new_bits,
                                      old_bits,
                                      numel,
                                      message,
                                      reinterpret_cast<UlpsSums*>(bytes),
                                      entries,
                                      bytes + kSumsNbytes + EntriesNbytes(numel)};
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  CheckCudaCall(cudaMemsetAsync(workspace, 0, sizeof(UlpsSums), cuda_stream), "cudaMemsetAsync");
  SampleKernel<<<ulps::kSamples / kSumWarps, kSumThreads, 0, cuda_stream>>>(arguments);
  EncodeKernel<<<ChunkBlocks(numel), 32, 0, cuda_stream>>>(arguments);
  PlaceKernel<<<SumBlocks(numel), kSumThreads, 0, cuda_stream>>>(arguments);
  FinishKernel<<<1, 32, 0, cuda_stream>>>(arguments);
  CheckCudaCall(cudaGetLastError(), "launch of a CUDA kernel");
}

void DecodeUlps(const std::uint8_t* message, std::size_t nbytes, std::uint16_t* values, std::size_t numel,
                void* workspace, std::int32_t* is_valid, Stream stream) {
  ZCOMM_CHECK(IsAligned(message, 4) && IsAligned(workspace, 4), "message and workspace must be aligned to 4");
  const UlpsDecodeArguments arguments{message, nbytes, values, numel, static_cast<UlpsSums*>(workspace), is_valid};
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  CheckCudaCall(cudaMemsetAsync(workspace, 0, sizeof(UlpsSums), cuda_stream), "cudaMemsetAsync");
  SumKernel<<<SumBlocks(numel), kSumThreads, 0, cuda_stream>>>(arguments);
  DecodeKernel<<<ChunkBlocks(numel), 32, 0, cuda_stream>>>(arguments);
  CheckCudaCall(cudaGetLastError(), "launch of a CUDA kernel");
}

}  // namespace zcomm::cuda
