#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda_warp.cuh"
#include "ulps_decode.h"
#include "ulps_encode.h"
#include "zcomm/check.h"
#include "zcomm/cuda_kernels.h"
#include "zcomm/ulps.h"

namespace zcomm::cuda {
namespace {

constexpr int kTileThreads = 128;
constexpr std::uint32_t kTileWarps = kTileThreads / 32;
constexpr std::uint64_t kMostTileBlocks = 8192;

ZCOMM_DEVICE std::uint32_t WarpOfGrid() { return blockIdx.x * kTileWarps + threadIdx.x / 32; }
ZCOMM_DEVICE std::uint32_t WarpsOfGrid() { return gridDim.x * kTileWarps; }

// Zeros in shared memory, which each warp has for itself.
template <std::uint32_t kCount>
ZCOMM_DEVICE std::uint32_t* CountsOfWarp() {
  __shared__ std::uint32_t counts[kTileWarps][kCount];
  std::uint32_t* own = counts[threadIdx.x / 32];
  for (std::uint32_t i = threadIdx.x % 32; i < kCount; i += 32) own[i] = 0;
  __syncwarp();
  return own;
}

__global__ void __launch_bounds__(kTileThreads) SampleKernel(const __grid_constant__ UlpsEncodeArguments arguments) {
  SampleUlps<CudaWarp>(arguments, WarpOfGrid(), WarpsOfGrid());
}

__global__ void __launch_bounds__(kTileThreads) CountKernel(const __grid_constant__ UlpsEncodeArguments arguments) {
  CountUlps<CudaWarp>(arguments, WarpOfGrid(), WarpsOfGrid(), CountsOfWarp<ulps::kMaxSymbols>());
}

__global__ void __launch_bounds__(kTileThreads) ListKernel(const __grid_constant__ UlpsEncodeArguments arguments) {
  ListUlps<CudaWarp>(arguments, WarpOfGrid(), WarpsOfGrid(), CountsOfWarp<ulps::kGapSymbols>());
}

__global__ void __launch_bounds__(32) EncodeKernel(const __grid_constant__ UlpsEncodeArguments arguments) {
  __shared__ UlpsEncodeShared shared;
  EncodeUlps<CudaWarp>(arguments, blockIdx.x, &shared);
}

__global__ void __launch_bounds__(kTileThreads) ExtraKernel(const __grid_constant__ UlpsEncodeArguments arguments) {
  ExtraUlps<CudaWarp>(arguments, WarpOfGrid(), WarpsOfGrid());
}

__global__ void __launch_bounds__(kTileThreads) PlaceKernel(const __grid_constant__ UlpsEncodeArguments arguments) {
  PlaceUlps<CudaWarp>(arguments, WarpOfGrid(), WarpsOfGrid());
}

__global__ void __launch_bounds__(32) FinishKernel(const __grid_constant__ UlpsEncodeArguments arguments) {
  FinishUlps<CudaWarp>(arguments);
}

__global__ void __launch_bounds__(kTileThreads) SumKernel(const __grid_constant__ UlpsDecodeArguments arguments) {
  SumUlps<CudaWarp>(arguments, WarpOfGrid(), WarpsOfGrid());
}

__global__ void __launch_bounds__(32) DecodeKernel(const __grid_constant__ UlpsDecodeArguments arguments) {
  __shared__ UlpsDecodeShared shared;
  DecodeUlps<CudaWarp>(arguments, blockIdx.x, &shared);
}

__global__ void __launch_bounds__(kTileThreads) ApplyKernel(const __grid_constant__ UlpsDecodeArguments arguments) {
  ApplyUlps<CudaWarp>(arguments, WarpOfGrid(), WarpsOfGrid());
}

void CheckCudaCall(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}

std::size_t Chunks(std::size_t numel) { return UlpsChunks(numel, ulps::kDenseChunkBits); }

// At least one: without elements there is a head.
unsigned ChunkBlocks(std::size_t numel) { return static_cast<unsigned>(std::max<std::size_t>(1, Chunks(numel))); }

// A warp for each tile, up to a limit.
unsigned TileBlocks(std::size_t numel) {
  const std::uint64_t blocks = (UlpsTiles(numel) + kTileWarps - 1) / kTileWarps;
  return static_cast<unsigned>(std::clamp<std::uint64_t>(blocks, 1, kMostTileBlocks));
}

// Hands out a workspace's parts, each aligned to 16 bytes; with null, it only adds up their bytes.
class Parts {
 public:
  explicit Parts(void* workspace) : data_(static_cast<std::uint8_t*>(workspace)) {}

  template <class T>
  T* Take(std::size_t count) {
    const std::size_t begin = nbytes_;
    nbytes_ += (count * sizeof(T) + 15) / 16 * 16;
    return data_ == nullptr ? nullptr : reinterpret_cast<T*>(data_ + begin);
  }
  std::size_t nbytes() const { return nbytes_; }

 private:
  std::uint8_t* data_;
  std::size_t nbytes_ = 0;
};

// Returns how many bytes there are, and through `zeroed` how many of the first must be 0.
std::size_t DivideWorkspace(void* workspace, UlpsEncodeArguments* a, std::size_t* zeroed) {
  Parts parts(workspace);
  const std::size_t chunks = Chunks(a->numel);
  a->sums = parts.Take<UlpsSums>(1);
  a->counts = parts.Take<UlpsCounts>(chunks);
  *zeroed = parts.nbytes();
  a->entries = parts.Take<std::uint32_t>(chunks);
  a->parts = parts.Take<UlpsParts>(chunks);
  a->tiles = parts.Take<UlpsTile>(UlpsTiles(a->numel));
  a->places = parts.Take<std::uint8_t>(UlpsPlacesNbytes(a->numel));
  return parts.nbytes();
}

std::size_t DivideWorkspace(void* workspace, UlpsDecodeArguments* a) {
  Parts parts(workspace);
  a->sums = parts.Take<UlpsSums>(1);
  a->decoded = parts.Take<UlpsDecoded>(Chunks(a->numel));
  a->extra_at = parts.Take<std::uint32_t>(UlpsTiles(a->numel));
  a->symbols = parts.Take<std::uint8_t>(UlpsSymbolsNbytes(a->numel));
  return parts.nbytes();
}

}  // namespace

std::size_t UlpsEncodeWorkspaceNbytes(std::size_t numel) {
  UlpsEncodeArguments arguments{};
  arguments.numel = numel;
  std::size_t zeroed = 0;
  return DivideWorkspace(nullptr, &arguments, &zeroed);
}

std::size_t UlpsDecodeWorkspaceNbytes(std::size_t numel) {
  UlpsDecodeArguments arguments{};
  arguments.numel = numel;
  return DivideWorkspace(nullptr, &arguments);
}

void EncodeUlps(const std::uint16_t* new_bits, const std::uint16_t* old_bits, std::size_t numel, std::uint8_t* message,
                void* workspace, Stream stream) {
  ZCOMM_CHECK(IsAligned(message, 4) && IsAligned(workspace, 16), "message and workspace must be aligned to 4 and 16");
  UlpsEncodeArguments arguments{};
  arguments.new_bits = new_bits;
  arguments.old_bits = old_bits;
  arguments.numel = numel;
  arguments.message = message;
  std::size_t zeroed = 0;
  DivideWorkspace(workspace, &arguments, &zeroed);
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  CheckCudaCall(cudaMemsetAsync(workspace, 0, zeroed, cuda_stream), "cudaMemsetAsync");
  const unsigned tiles = TileBlocks(numel);
  SampleKernel<<<ulps::kSamples / kTileWarps, kTileThreads, 0, cuda_stream>>>(arguments);
  CountKernel<<<tiles, kTileThreads, 0, cuda_stream>>>(arguments);
  ListKernel<<<tiles, kTileThreads, 0, cuda_stream>>>(arguments);
  EncodeKernel<<<ChunkBlocks(numel), 32, 0, cuda_stream>>>(arguments);
  ExtraKernel<<<tiles, kTileThreads, 0, cuda_stream>>>(arguments);
  PlaceKernel<<<tiles, kTileThreads, 0, cuda_stream>>>(arguments);
  FinishKernel<<<1, 32, 0, cuda_stream>>>(arguments);
  CheckCudaCall(cudaGetLastError(), "launch of a CUDA kernel");
}

void DecodeUlps(const std::uint8_t* message, std::size_t nbytes, std::uint16_t* values, std::size_t numel,
                void* workspace, std::int32_t* is_valid, Stream stream) {
  ZCOMM_CHECK(IsAligned(message, 4) && IsAligned(workspace, 16), "message and workspace must be aligned to 4 and 16");
  UlpsDecodeArguments arguments{};
  arguments.message = message;
  arguments.capacity = nbytes;
  arguments.values = values;
  arguments.numel = numel;
  arguments.is_valid = is_valid;
  DivideWorkspace(workspace, &arguments);
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  CheckCudaCall(cudaMemsetAsync(workspace, 0, sizeof(UlpsSums), cuda_stream), "cudaMemsetAsync");
  const unsigned tiles = TileBlocks(numel);
  SumKernel<<<tiles, kTileThreads, 0, cuda_stream>>>(arguments);
  DecodeKernel<<<ChunkBlocks(numel), 32, 0, cuda_stream>>>(arguments);
  ApplyKernel<<<tiles, kTileThreads, 0, cuda_stream>>>(arguments);
  CheckCudaCall(cudaGetLastError(), "launch of a CUDA kernel");
}

}  // namespace zcomm::cuda
