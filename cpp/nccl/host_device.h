#pragma once

#include <memory>

#include "device.h"

namespace zcomm::nccl {

// The device of the emulated NCCL (cpp/emulated): memory of the host, streams that are threads (host_stream.h), so that
// work which events do not order runs in any order. Nothing is captured.
std::shared_ptr<Device> MakeHostDevice();

// The operations of the processor; layouts that the CUDA kernels do not serve are refused as by these.
std::shared_ptr<Kernels> MakeHostKernels();

}  // namespace zcomm::nccl
