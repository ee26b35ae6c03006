#pragma once

#include <memory>

#include "device.h"
#include "nccl_library.h"

namespace zcomm::nccl {

// GPU number `index` of this process. Memory comes from NCCL where it offers some (2.19), which its communicators can
// register; else from CUDA. `library` outlives it. In builds with CUDA alone.
std::shared_ptr<Device> MakeCudaDevice(int index, const Library* library);

// The kernels of zcomm/cuda_kernels.h, on the current GPU.
std::shared_ptr<Kernels> MakeCudaKernels();

}  // namespace zcomm::nccl
