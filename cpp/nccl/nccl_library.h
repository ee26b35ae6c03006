#pragma once

#include <string>
#include <vector>

#include "nccl_api.h"

namespace zcomm::nccl {

inline constexpr int kOldestVersion = 21400;  // communicators that do not block, and ncclGetLastError

// "2.29.7" for 22907.
std::string VersionText(int version);

// An NCCL that was found and checked. It stays loaded for the life of the process: it has threads of its own.
struct Library {
  std::string path;
  int version;
  Functions functions;

  bool is_emulated = false;  // cpp/emulated: buffers are memory of the host, streams are those of host_stream.h

  // Whether buffers can be allocated and registered by NCCL (2.19).
  bool can_register() const { return functions.mem_alloc != nullptr; }
};

// Loads NCCL from the first place that has one:
//
//   1. `path`, unless it is empty; then nowhere else
//   2. a libnccl.so.2 that this process has loaded already, as torch does
//   3. `candidates`, in this order
//   4. libnccl.so.2 where the dynamic loader looks
//
// Throws std::runtime_error, naming every place and why not, when there is none; and, naming the library, its version
// and what is missing, when the one found lacks a function or is older than kOldestVersion. Thread-safe.
Library LoadLibrary(const std::string& path, const std::vector<std::string>& candidates);

}  // namespace zcomm::nccl
