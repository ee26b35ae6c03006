#pragma once

#include <string>
#include <vector>

#include "nccl_api.h"

namespace zcomm::nccl {

inline constexpr int kOldestVersion = 21400;  // the first with nonblocking communicators and ncclGetLastError

// "2.29.7" for 22907.
std::string VersionText(int version);

// A loaded NCCL whose version and functions were checked. Never unloaded: its threads would lose their code.
struct Library {
  std::string path;
  int version;
  Functions functions;

  bool is_emulated = false;  // cpp/emulated: buffers are in host memory, streams are those of host_stream.h

  // Whether NCCL can allocate and register buffers (since 2.19).
  bool can_register() const { return functions.mem_alloc != nullptr; }
};

// Loads NCCL from the first place that has one:
//
//   1. `path`, if it is not empty; then no other place is tried
//   2. a libnccl.so.2 that is already in this process: that of torch. A second NCCL would take memory and threads again
//   3. `candidates`, in this order
//   4. libnccl.so.2 on the dynamic loader's search path
//
// Throws std::runtime_error, with each place and why it failed, if there is none; and, with the library, its version
// and what is missing, if the one found lacks a function or is older than kOldestVersion. Thread-safe.
Library LoadLibrary(const std::string& path, const std::vector<std::string>& candidates);

}  // namespace zcomm::nccl
