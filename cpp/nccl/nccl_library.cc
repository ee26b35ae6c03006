#include "nccl_library.h"

#include <dlfcn.h>
#include <link.h>

#include <stdexcept>

namespace zcomm::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr const char* kEmulatedName = "zcommNcclIsEmulated";
constexpr int kOldestWithSplit = 21800;
constexpr int kOldestWithRegistration = 21900;

std::string PathOf(void* handle, const std::string& asked) {
  link_map* map = nullptr;
  const bool is_known = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name[0] != '\0';
  return is_known ? map->l_name : asked;
}

// Returns the handle; or null, after appending a line to *failures.
void* Open(const std::string& path, int flags, const char* where, std::string* failures) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
  if (handle == nullptr) {
    const char* reason = dlerror();
    *failures += "\n  " + std::string(where) + ": " + (reason != nullptr ? reason : path + " is not loaded");
  }
  return handle;
}

void* OpenFirst(const std::string& path, const std::vector<std::string>& candidates) {
  std::string failures;
  if (!path.empty()) {
    if (void* handle = Open(path, 0, "the given path", &failures)) return handle;
    throw std::runtime_error("NCCL cannot be loaded:" + failures);
  }
  if (void* handle = Open(kName, RTLD_NOLOAD, "loaded by torch", &failures)) return handle;
  for (const std::string& candidate : candidates) {
    if (void* handle = Open(candidate, 0, "nvidia-nccl wheel", &failures)) return handle;
  }
  if (void* handle = Open(kName, 0, "system", &failures)) return handle;
  throw std::runtime_error("no NCCL library was found:" + failures);
}

// Resolves functions of one library, and collects the names that are missing.
class Resolver {
 public:
  explicit Resolver(void* handle) : handle_(handle) {}

  template <class Function>
  void operator()(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(handle_, name));
    if (*function == nullptr) missing_ += (missing_.empty() ? "" : ", ") + std::string(name);
  }

  const std::string& missing() const { return missing_; }

 private:
  void* handle_;
  std::string missing_;
};

int VersionOf(void* handle, const std::string& path, Functions* functions) {
  Resolver resolve(handle);
  resolve("ncclGetVersion", &functions->get_version);
  int version = 0;
  if (!resolve.missing().empty() || functions->get_version(&version) != Result::kSuccess) {
    throw std::runtime_error(path + " is not an NCCL library: ncclGetVersion is missing or fails");
  }
  return version;
}

}  // namespace

std::string VersionText(int version) {
  const int major = version >= 10000 ? 10000 : 1000;  // 2.8.4 was 2804, 2.9.6 is 20906
  return std::to_string(version / major) + "." + std::to_string(version % major / 100) + "." +
         std::to_string(version % 100);
}

Library LoadLibrary(const std::string& path, const std::vector<std::string>& candidates) {
  void* handle = OpenFirst(path, candidates);
  Library library{PathOf(handle, path), 0, {}, false};
  Functions& functions = library.functions;
  library.version = VersionOf(handle, library.path, &functions);
  const std::string found = library.path + ", NCCL " + VersionText(library.version);
  if (library.version < kOldestVersion) {
    throw std::runtime_error(found + " is too old: at least " + VersionText(kOldestVersion) + " is needed");
  }
  Resolver resolve(handle);
  resolve("ncclGetUniqueId", &functions.get_unique_id);
  resolve("ncclGetErrorString", &functions.get_error_string);
  resolve("ncclGetLastError", &functions.get_last_error);
  resolve("ncclCommInitRankConfig", &functions.comm_init_rank_config);
  resolve("ncclCommFinalize", &functions.comm_finalize);
  resolve("ncclCommDestroy", &functions.comm_destroy);
  resolve("ncclCommAbort", &functions.comm_abort);
  resolve("ncclCommGetAsyncError", &functions.comm_get_async_error);
  resolve("ncclGroupStart", &functions.group_start);
  resolve("ncclGroupEnd", &functions.group_end);
  resolve("ncclAllGather", &functions.all_gather);
  resolve("ncclSend", &functions.send);
  resolve("ncclRecv", &functions.recv);
  if (library.version >= kOldestWithSplit) resolve("ncclCommSplit", &functions.comm_split);
  if (library.version >= kOldestWithRegistration) {
    resolve("ncclMemAlloc", &functions.mem_alloc);
    resolve("ncclMemFree", &functions.mem_free);
    resolve("ncclCommRegister", &functions.comm_register);
    resolve("ncclCommDeregister", &functions.comm_deregister);
  }
  if (!resolve.missing().empty()) throw std::runtime_error(found + " lacks " + resolve.missing());
  library.is_emulated = dlsym(handle, kEmulatedName) != nullptr;
  return library;
}

}  // namespace zcomm::nccl
