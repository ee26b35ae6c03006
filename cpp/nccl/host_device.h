#pragma once

#include <memory>

#include "device.h"

namespace zcomm::nccl {

// The device of the emulated NCCL (cpp/emulated): host memory, and a thread for each stream (host_stream.h), so that
// work that is not ordered by events runs in any order, as on a GPU. There is no capture.
std::shared_ptr<Device> MakeHostDevice();

// The CPU kernels. They refuse the layouts that the CUDA kernels do not support, so that tests see the same errors.
std::shared_ptr<Kernels> MakeHostKernels();

}  // namespace zcomm::nccl
