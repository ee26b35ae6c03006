// With a path as argument, also resolves that NCCL and prints its version. Needs no GPU.

#include "nccl_library.h"

#include <dlfcn.h>

#include "test_util.h"

namespace zcomm::nccl {
namespace {

std::string ErrorOf(const std::string& path, const std::vector<std::string>& candidates) {
  try {
    LoadLibrary(path, candidates);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  EXPECT(false, "%s was loaded", path.c_str());
  return "";
}

void CheckVersions() {
  EXPECT(VersionText(22907) == "2.29.7", "%s", VersionText(22907).c_str());
  EXPECT(VersionText(2804) == "2.8.4", "%s", VersionText(2804).c_str());
  EXPECT(VersionText(21400) == "2.14.0", "%s", VersionText(21400).c_str());
}

void CheckLoaded() {
  const Library library = LoadLibrary(STUB_NEW, {});
  EXPECT(library.version == 22907 && library.can_register(), "%d", library.version);
  EXPECT(library.path == STUB_NEW, "%s", library.path.c_str());
  const Functions& f = library.functions;
  EXPECT(f.all_gather && f.send && f.recv && f.get_last_error && f.comm_abort && f.comm_register, "resolved");
  const Library plain = LoadLibrary(STUB_PLAIN, {});
  EXPECT(plain.version == 21805 && !plain.can_register() && plain.functions.mem_free == nullptr, "2.18");
}

// The order: what is set, what is loaded, then the candidates.
void CheckOrder() {
  EXPECT(LoadLibrary("", {"/no/such/place.so", STUB_PLAIN, STUB_NEW}).version == 21805, "the first candidate");
  void* loaded = dlopen(STUB_SONAME, RTLD_NOW | RTLD_LOCAL);
  EXPECT(loaded != nullptr, "%s", dlerror());
  EXPECT(LoadLibrary("", {STUB_PLAIN}).version == 23001, "what is loaded goes first");
  EXPECT(LoadLibrary(STUB_PLAIN, {}).version == 21805, "what is set goes before what is loaded");
  dlclose(loaded);
}

void CheckErrors() {
  const std::string none = ErrorOf("", {"/no/such/candidate.so"});
  EXPECT(Contains(none, "loaded by torch") && Contains(none, "/no/such/candidate.so") && Contains(none, "system"), "%s",
         none.c_str());
  EXPECT(Contains(ErrorOf("/no/such/nccl.so", {STUB_NEW}), "/no/such/nccl.so"), "no other place");
  const std::string lacks = ErrorOf(STUB_LACKING, {});
  EXPECT(Contains(lacks, "NCCL 2.29.7 lacks ncclSend") && Contains(lacks, STUB_LACKING), "%s", lacks.c_str());
  const std::string old = ErrorOf(STUB_OLD, {});
  EXPECT(Contains(old, "NCCL 2.13.4 is too old: at least 2.14.0"), "%s", old.c_str());
  const std::string half = ErrorOf(STUB_HALF, {});
  EXPECT(Contains(half, "lacks ncclMemAlloc, ncclMemFree, ncclCommRegister, ncclCommDeregister"), "%s", half.c_str());
  EXPECT(Contains(ErrorOf("libm.so.6", {}), "is not an NCCL library"), "libm");
}

// What a real library can do without a GPU.
void CheckReal(const char* path) {
  const Library library = LoadLibrary(path, {});
  const std::string text = library.functions.get_error_string(Result::kRemoteError);
  EXPECT(Contains(text, "remote process"), "%s", text.c_str());
  EXPECT(library.functions.get_error_string(Result::kSuccess) == std::string("no error"), "success");
  EXPECT(library.functions.get_error_string(Result::kInProgress) == std::string("NCCL operation in progress"), "7");
  std::printf("NCCL %s, registration %d: %s\n", VersionText(library.version).c_str(), library.can_register(),
              library.path.c_str());
}

}  // namespace
}  // namespace zcomm::nccl

int main(int argc, char** argv) {
  zcomm::nccl::CheckVersions();
  zcomm::nccl::CheckErrors();
  zcomm::nccl::CheckLoaded();
  zcomm::nccl::CheckOrder();
  if (argc > 1) zcomm::nccl::CheckReal(argv[1]);
  std::puts("ok");
  return 0;
}
