// nccl_api.h against NVIDIA's nccl.h, at compile time. Built where nccl.h and the CUDA headers are found.

#include <nccl.h>

#include <cstddef>
#include <cstdio>
#include <type_traits>

#include "nccl_api.h"

namespace zcomm::nccl {
namespace {

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && alignof(UniqueId) == alignof(ncclUniqueId));
static_assert(static_cast<int>(Result::kUnhandledCudaError) == ncclUnhandledCudaError);
static_assert(static_cast<int>(Result::kSystemError) == ncclSystemError);
static_assert(static_cast<int>(Result::kInternalError) == ncclInternalError);
static_assert(static_cast<int>(Result::kInvalidArgument) == ncclInvalidArgument);
static_assert(static_cast<int>(Result::kInvalidUsage) == ncclInvalidUsage);
static_assert(static_cast<int>(Result::kRemoteError) == ncclRemoteError);
static_assert(static_cast<int>(Result::kInProgress) == ncclInProgress);
static_assert(static_cast<int>(DataType::kUint8) == ncclUint8);
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(Config{}.magic == NCCL_API_MAGIC && sizeof(Config) <= sizeof(ncclConfig_t));

// The same function except for the names of its types: as many parameters, of the same widths.
template <class Ours, class Theirs>
struct IsSameCall : std::false_type {};
template <class R, class... A, class S, class... B>
struct IsSameCall<R (*)(A...), S(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) != sizeof...(B)) {
      return false;
    } else {
      return sizeof(R) == sizeof(S) &&
             ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>) && ...);
    }
  }();
};
static_assert(IsSameCall<decltype(Functions::get_version), decltype(ncclGetVersion)>::value);
static_assert(IsSameCall<decltype(Functions::get_unique_id), decltype(ncclGetUniqueId)>::value);
static_assert(IsSameCall<decltype(Functions::get_error_string), decltype(ncclGetErrorString)>::value);
static_assert(IsSameCall<decltype(Functions::get_last_error), decltype(ncclGetLastError)>::value);
static_assert(IsSameCall<decltype(Functions::comm_init_rank_config), decltype(ncclCommInitRankConfig)>::value);
static_assert(IsSameCall<decltype(Functions::comm_finalize), decltype(ncclCommFinalize)>::value);
static_assert(IsSameCall<decltype(Functions::comm_destroy), decltype(ncclCommDestroy)>::value);
static_assert(IsSameCall<decltype(Functions::comm_abort), decltype(ncclCommAbort)>::value);
static_assert(IsSameCall<decltype(Functions::comm_get_async_error), decltype(ncclCommGetAsyncError)>::value);
static_assert(IsSameCall<decltype(Functions::group_start), decltype(ncclGroupStart)>::value);
static_assert(IsSameCall<decltype(Functions::group_end), decltype(ncclGroupEnd)>::value);
static_assert(IsSameCall<decltype(Functions::all_gather), decltype(ncclAllGather)>::value);
static_assert(IsSameCall<decltype(Functions::send), decltype(ncclSend)>::value);
static_assert(IsSameCall<decltype(Functions::recv), decltype(ncclRecv)>::value);
#if NCCL_VERSION_CODE >= 21800
static_assert(IsSameCall<decltype(Functions::comm_split), decltype(ncclCommSplit)>::value);
#endif
#if NCCL_VERSION_CODE >= 21900
static_assert(IsSameCall<decltype(Functions::mem_alloc), decltype(ncclMemAlloc)>::value);
static_assert(IsSameCall<decltype(Functions::mem_free), decltype(ncclMemFree)>::value);
static_assert(IsSameCall<decltype(Functions::comm_register), decltype(ncclCommRegister)>::value);
static_assert(IsSameCall<decltype(Functions::comm_deregister), decltype(ncclCommDeregister)>::value);
#endif

}  // namespace
}  // namespace zcomm::nccl

int main() {
  std::printf("declarations as in nccl.h of NCCL %d\n", NCCL_VERSION_CODE);
  return 0;
}
