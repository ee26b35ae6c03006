#pragma once

#include <cstddef>

// Our own declarations of the part of NCCL that we use: building needs no nccl.h, and the library is loaded at run time
// (nccl_library.h). Where there is an nccl.h, cpp/tests/nccl_declarations_test.cc compares the two at compile time.
// "since" is the NCCL version that introduced a function.

namespace zcomm::nccl {

using Comm = void*;    // ncclComm_t
using Stream = void*;  // cudaStream_t

inline constexpr std::size_t kUniqueIdNbytes = 128;

struct UniqueId {  // ncclUniqueId
  char internal[kUniqueIdNbytes];
};

enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,  // since 2.13
  kInProgress = 7,   // since 2.14
};

enum class DataType : int { kUint8 = 1 };  // all messages are sent as bytes

// ncclConfig_t of 2.14. Later versions accept it: `size` and `version` tell them which fields it has.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 1;
};

// The functions that we call. Those of the last group are null if the library is older.
struct Functions {
  Result (*get_version)(int* version);
  Result (*get_unique_id)(UniqueId* id);
  const char* (*get_error_string)(Result result);
  const char* (*get_last_error)(Comm comm);                                                           // since 2.13
  Result (*comm_init_rank_config)(Comm* comm, int num_ranks, UniqueId id, int rank, Config* config);  // since 2.14
  Result (*comm_finalize)(Comm comm);                                                                 // since 2.14
  Result (*comm_destroy)(Comm comm);
  Result (*comm_abort)(Comm comm);                            // since 2.4
  Result (*comm_get_async_error)(Comm comm, Result* result);  // since 2.4
  Result (*group_start)();
  Result (*group_end)();
  Result (*all_gather)(const void* send, void* receive, std::size_t count, DataType type, Comm comm, Stream stream);
  Result (*send)(const void* data, std::size_t count, DataType type, int peer, Comm comm, Stream stream);  // since 2.7
  Result (*recv)(void* data, std::size_t count, DataType type, int peer, Comm comm, Stream stream);        // since 2.7

  // since 2.18
  Result (*comm_split)(Comm comm, int color, int key, Comm* split, Config* config);
  Result (*mem_alloc)(void** data, std::size_t nbytes);                                     // since 2.19
  Result (*mem_free)(void* data);                                                           // since 2.19
  Result (*comm_register)(Comm comm, void* data, std::size_t nbytes, void** registration);  // since 2.19
  Result (*comm_deregister)(Comm comm, void* registration);                                 // since 2.19
};

}  // namespace zcomm::nccl
