#pragma once

#include <memory>

#include "device.h"
#include "nccl_library.h"

namespace zcomm::nccl {

// GPU number `index` of this process. Memory comes from ncclMemAlloc (since NCCL 2.19), so that communicators can
// register it; otherwise from cudaMalloc. `library` must outlive the device. Only in builds with CUDA.
std::shared_ptr<Device> MakeCudaDevice(int index, const Library* library);

// The kernels of zcomm/cuda_kernels.h, on the current GPU.
std::shared_ptr<Kernels> MakeCudaKernels();

}  // namespace zcomm::nccl
