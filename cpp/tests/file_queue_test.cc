#include "zcomm/file_queue.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

#include <atomic>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <new>
#include <thread>

#include "test_util.h"

namespace {

thread_local bool is_main = false;
std::atomic<std::size_t> allocations_of_others{0};

}  // namespace

// Not inlined: of a pair of which one is, GCC 12 warns that malloc and delete, or new and free, do not match.
[[gnu::noinline]] void* operator new(std::size_t nbytes) {
  if (!is_main) ++allocations_of_others;
  if (void* data = std::malloc(nbytes)) return data;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept { std::free(data); }

namespace zcomm {
namespace {

struct Free {
  void operator()(std::uint8_t* data) const { std::free(data); }
};
using Buffer = std::unique_ptr<std::uint8_t, Free>;

Buffer MakeBuffer(std::size_t nbytes) {
  return Buffer(static_cast<std::uint8_t*>(std::aligned_alloc(kFileAlignment, nbytes)));
}

std::string MakeFolder() {
  char name[] = "file_queue_test.XXXXXX";
  EXPECT(mkdtemp(name) != nullptr, "mkdtemp");
  return name;
}

std::size_t PagesOfProcess() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages;
}

std::size_t NumThreads() {
  const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

// The errno and text of the FileError that `call` throws.
template <class Call>
std::pair<int, std::string> ErrorOf(const Call& call) {
  try {
    call();
  } catch (const FileError& error) {
    return {error.number(), error.path() + ": " + error.what()};
  }
  EXPECT(false, "expected FileError");
  return {};
}

void TestTransfers(const std::string& folder, std::size_t num_requests, bool may_use_ring) {
  constexpr std::size_t kPart = 5 * kFileAlignment;
  constexpr std::size_t kParts = 7;
  FileQueue queue(num_requests, 2 * kFileAlignment, may_use_ring);
  const std::string path = folder + "/data";
  const int file = queue.Create(path, kPart * kParts);
  EXPECT(queue.Size(file) == kPart * kParts, "size %zu", static_cast<std::size_t>(queue.Size(file)));
  const Buffer written = MakeBuffer(kPart * kParts);
  for (std::size_t i = 0; i < kPart * kParts; ++i) written.get()[i] = static_cast<std::uint8_t>(i * 31 + i / 4096);
  std::vector<std::uint64_t> tickets;
  for (std::size_t p = kParts; p-- > 0;)
    tickets.push_back(queue.Write(file, p * kPart, written.get() + p * kPart, kPart));
  for (const std::uint64_t ticket : tickets) queue.Wait(ticket);
  queue.Sync(file);
  queue.Close(file);
  const int again = queue.Open(path);
  const Buffer read = MakeBuffer(kPart * kParts);
  const std::uint64_t ticket = queue.Read(again, 0, read.get(), kPart * kParts);
  queue.Wait(ticket);
  EXPECT(std::memcmp(written.get(), read.get(), kPart * kParts) == 0, "%s, requests %zu",
         FileEngineName(queue.engine()), num_requests);
  EXPECT(Contains(MessageOfThrow([&] { queue.Wait(ticket); }), "Wait has already returned"), "twice");
  queue.Wait(queue.Read(again, 0, read.get(), 0));
  queue.Close(again);
  EXPECT(::unlink(path.c_str()) == 0, "unlink");
}

void TestErrors(const std::string& folder, bool may_use_ring) {
  FileQueue queue(2, kFileAlignment, may_use_ring);
  const Buffer data = MakeBuffer(4 * kFileAlignment);
  const auto missing = ErrorOf([&] { queue.Open(folder + "/missing"); });
  EXPECT(missing.first == ENOENT && Contains(missing.second, "/missing"), "%s", missing.second.c_str());
  const std::string path = folder + "/short";
  const int file = queue.Create(path, 2 * kFileAlignment);
  EXPECT(ErrorOf([&] { queue.Create(path, 1); }).first == EEXIST, "existing");
  // Past the end: the error of the transfer, and the next one works.
  const auto past = ErrorOf([&] { queue.Wait(queue.Read(file, kFileAlignment, data.get(), 2 * kFileAlignment)); });
  EXPECT(past.first == ENODATA && Contains(past.second, "read 0 of 4096 bytes at offset 8192"), "%s",
         past.second.c_str());
  queue.Wait(queue.Read(file, 0, data.get(), 2 * kFileAlignment));
  EXPECT(Contains(MessageOfThrow([&] { queue.Read(file, 1, data.get(), kFileAlignment); }), "offset=1"), "offset");
  EXPECT(Contains(MessageOfThrow([&] { queue.Read(file, 0, data.get() + 1, kFileAlignment); }), "address="), "address");
  EXPECT(Contains(MessageOfThrow([&] { queue.Read(99, 0, data.get(), kFileAlignment); }), "file=99"), "file");
  EXPECT(Contains(MessageOfThrow([] { FileQueue(0, kFileAlignment); }), "num_requests=0"), "threads");
  EXPECT(Contains(MessageOfThrow([] { FileQueue(1, 1000); }), "request_nbytes=1000"), "request");
  ::unlink(path.c_str());
}

// A file size limit stands in for a full disk.
void TestNoSpace(const std::string& folder, bool may_use_ring) {
  std::signal(SIGXFSZ, SIG_DFL);  // would end the process if the queue did not block it
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  FileQueue queue(2, kFileAlignment, may_use_ring);
  const std::string path = folder + "/large";
  const int file = queue.Create(path, 0);
  const rlimit small{2 * kFileAlignment, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const auto reserve = ErrorOf([&] { queue.Create(folder + "/larger", 1 << 20); });
  EXPECT(Contains(reserve.second, "cannot reserve 1048576 bytes"), "%s", reserve.second.c_str());
  EXPECT(::access((folder + "/larger").c_str(), F_OK) != 0, "a file was left behind");
  const Buffer data = MakeBuffer(4 * kFileAlignment);
  const auto write = ErrorOf([&] { queue.Wait(queue.Write(file, 0, data.get(), 4 * kFileAlignment)); });
  EXPECT(write.first == EFBIG && Contains(write.second, "wrote 0 of 4096 bytes"), "%s", write.second.c_str());
  setrlimit(RLIMIT_FSIZE, &before);
  ::unlink(path.c_str());
}

// As in TestNoSpace; the table of checksums is beyond the limit.
void TestNoSpaceForChecksums(const std::string& folder, bool may_use_ring) {
  std::signal(SIGXFSZ, SIG_DFL);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  FileQueue queue(2, kFileAlignment, may_use_ring);
  const std::string path = folder + "/checked";
  const int file = queue.Create(path, 2 * kFileAlignment, FileKind::kChecked);
  const rlimit small{kFileAlignment, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const auto sync = ErrorOf([&] { queue.Sync(file); });
  EXPECT(sync.first == EFBIG && Contains(sync.second, "cannot sync"), "%s", sync.second.c_str());
  setrlimit(RLIMIT_FSIZE, &before);
  ::unlink(path.c_str());
}

// A request of 2^32 bytes: a length of 32 bits would be 0.
void TestLargeRequest(const std::string& folder, bool may_use_ring) {
  constexpr std::size_t kNbytes = std::size_t{1} << 32;
  void* data = ::mmap(nullptr, kNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  EXPECT(data != MAP_FAILED, "mmap");
  const std::string path = folder + "/small";
  {
    FileQueue queue(1, kNbytes, may_use_ring);
    const int file = queue.Create(path, 2 * kFileAlignment);
    const auto past = ErrorOf([&] { queue.Wait(queue.Read(file, 0, data, kNbytes)); });
    EXPECT(past.first == ENODATA && Contains(past.second, "read 8192 of 4294967296 bytes"), "%s", past.second.c_str());
  }
  ::munmap(data, kNbytes);
  ::unlink(path.c_str());
}

void TestTwoThreadsWait(const std::string& folder, bool may_use_ring) {
  const Buffer data = MakeBuffer(256 * kFileAlignment);
  const std::string path = folder + "/waited";
  FileQueue queue(2, kFileAlignment, may_use_ring);
  const int file = queue.Create(path, 256 * kFileAlignment);
  for (int repeat = 0; repeat < 10; ++repeat) {
    const std::uint64_t ticket = queue.Write(file, 0, data.get(), 256 * kFileAlignment);
    std::atomic<int> num_returned{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        const std::string error = MessageOf<std::invalid_argument>([&] { queue.Wait(ticket); });
        EXPECT(error.empty() || Contains(error, "Wait has already returned"), "%s", error.c_str());
        num_returned += error.empty();
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT(num_returned == 1, "%d of 3 have returned", num_returned.load());
  }
  ::unlink(path.c_str());
}

// Runs `call` in a forked child, which must return from it within 20 seconds.
template <class Call>
void InFork(const Call& call) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    call();
    std::fflush(stdout);
    ::_exit(0);
  }
  int status = 0;
  EXPECT(::waitpid(child, &status, 0) == child && status == 0, "status %d", status);
}

// The child has none of the threads, and the stack of one may be that of a thread of its own, or freed.
void TestFork(const std::string& folder, bool may_use_ring) {
  const Buffer data = MakeBuffer(kFileAlignment);
  const std::string path = folder + "/forked";
  auto queue = std::make_unique<FileQueue>(8, kFileAlignment, may_use_ring);
  const int file = queue->Create(path, kFileAlignment);
  const std::uint64_t ticket = queue->Write(file, 0, data.get(), kFileAlignment);
  InFork([&] {
    const auto refusal = [](const auto& call) { return MessageOf<std::runtime_error>(call); };
    const std::vector<std::string> refusals = {
        refusal([&] { queue->Wait(ticket); }),
        refusal([&] { queue->IsDone(ticket); }),
        refusal([&] { queue->Size(file); }),
        refusal([&] { queue->Sync(file); }),
        refusal([&] { queue->Close(file); }),
        refusal([&] { queue->Open(path); }),
        refusal([&] { queue->Create(path + "2", 1); }),
        refusal([&] { queue->Read(file, 0, data.get(), kFileAlignment); }),
    };
    for (const std::string& text : refusals) EXPECT(Contains(text, "the process that made it"), "%s", text.c_str());
    EXPECT(::access((path + "2").c_str(), F_OK) != 0, "a file was left behind");
#ifndef __SANITIZE_THREAD__  // which takes the parent's threads for living ones, and their stacks for used
    // These take over the stacks of the parent's threads, and free some of them.
    for (int repeat = 0; repeat < 3; ++repeat) {
      std::thread first([] {});
      std::thread second([] {});
      first.join();
      second.join();
    }
    std::atomic<bool> may_end{false};
    std::thread own([&] {
      while (!may_end) std::this_thread::yield();
    });
    queue.reset();
    may_end = true;
    own.join();  // throws if it has been detached
#endif
    queue.reset();
  });
  queue->Wait(ticket);
  queue.reset();
  ::unlink(path.c_str());
}

void TestThreadsDoNotAllocate(const std::string& folder, bool may_use_ring) {
  const Buffer data = MakeBuffer(2 * kFileAlignment);
  const std::string path = folder + "/unallocated";
  FileQueue queue(2, kFileAlignment, may_use_ring);
  const int file = queue.Create(path, 2 * kFileAlignment, FileKind::kChecked);
  const auto write = [&] { queue.Wait(queue.Write(file, 0, data.get(), 2 * kFileAlignment)); };
  write();
  const std::size_t before = allocations_of_others;
  for (int repeat = 0; repeat < 20; ++repeat) write();
  EXPECT(allocations_of_others == before, "%s: %zu allocations, which may fail", FileEngineName(queue.engine()),
         allocations_of_others - before);
  ::unlink(path.c_str());
}

#if defined(__linux__) && defined(__NR_io_uring_enter)
// From now on the kernel refuses every submission to a ring of this process, but not a wait.
bool RefuseSubmissions() {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_enter, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),  // how many are submitted
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{sizeof(code) / sizeof(code[0]), code};
  ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  return ::syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

void TestBrokenRing(const std::string& folder) {
  InFork([&] {
    FileQueue queue(2, kFileAlignment, true);
    const Buffer data = MakeBuffer(kFileAlignment);
    const int file = queue.Create(folder + "/broken", kFileAlignment);
    const auto write = [&] { queue.Wait(queue.Write(file, 0, data.get(), kFileAlignment)); };
    write();
    if (queue.engine() != FileEngine::kIoUring || !RefuseSubmissions()) {
      std::puts("skipped: a ring that breaks needs io_uring and seccomp");
      return;
    }
    for (int repeat = 0; repeat < 4; ++repeat) {
      EXPECT(ErrorOf(write).first == EPERM, "write %d after the ring broke", repeat);
    }
  });
  ::unlink((folder + "/broken").c_str());
}
#else
void TestBrokenRing(const std::string&) {}
#endif

void TestClosingDropsPendingRequests(const std::string& folder, bool may_use_ring) {
  const Buffer data = MakeBuffer(64 * kFileAlignment);
  const std::string path = folder + "/dropped";
  {
    FileQueue queue(1, kFileAlignment, may_use_ring);
    const int file = queue.Create(path, 64 * kFileAlignment);
    for (int i = 0; i < 20; ++i) queue.Write(file, 0, data.get(), 64 * kFileAlignment);
    EXPECT(Contains(MessageOfThrow([&] { queue.Close(file); }), "in flight"), "close");
  }
  ::unlink(path.c_str());
}

// Many interleaved transfers, each of many requests, some of which fail.
void TestManyTransfers(const std::string& folder, bool may_use_ring) {
  constexpr std::size_t kFiles = 8;
  constexpr std::size_t kNbytes = 40 * kFileAlignment;
  FileQueue queue(5, 3 * kFileAlignment, may_use_ring);
  const std::string path = folder + "/many";
  std::vector<int> files;
  std::vector<Buffer> buffers;
  for (std::size_t f = 0; f < kFiles; ++f) {
    files.push_back(queue.Create(path + std::to_string(f), kNbytes, f % 2 ? FileKind::kChecked : FileKind::kPlain));
    buffers.push_back(MakeBuffer(2 * kNbytes));
  }
  for (int round = 0; round < 20; ++round) {
    std::vector<std::uint64_t> tickets;
    for (std::size_t f = 0; f < kFiles; ++f) {
      std::memset(buffers[f].get(), static_cast<int>(f) + round, kNbytes);
      tickets.push_back(queue.Write(files[f], 0, buffers[f].get(), kNbytes));
    }
    for (const std::uint64_t ticket : tickets) queue.Wait(ticket);
    tickets.clear();
    for (std::size_t f = 0; f < kFiles; ++f) {
      tickets.push_back(queue.Read(files[f], 0, buffers[f].get() + kNbytes, kNbytes));
    }
    const std::uint64_t past = queue.Read(files[0], kNbytes, buffers[0].get(), kNbytes);
    for (const std::uint64_t ticket : tickets) queue.Wait(ticket);
    EXPECT(ErrorOf([&] { queue.Wait(past); }).first == ENODATA, "past the end");
    for (std::size_t f = 0; f < kFiles; ++f) {
      const bool is_right =
          buffers[f].get()[kNbytes] == static_cast<std::uint8_t>(f + static_cast<std::size_t>(round)) &&
          std::memcmp(buffers[f].get() + kNbytes, buffers[f].get() + kNbytes + 1, kNbytes - 1) == 0;
      EXPECT(is_right, "%s, file %zu, round %d", FileEngineName(queue.engine()), f, round);
    }
  }
  for (std::size_t f = 0; f < kFiles; ++f) ::unlink((path + std::to_string(f)).c_str());
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which need all the address space there is
// Runs `call` with `nbytes` more address space than is used now.
template <class Call>
void WithRoomFor(std::size_t nbytes, const Call& call) {
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  const rlimit now{PagesOfProcess() * kFileAlignment + nbytes, before.rlim_max};
  EXPECT(setrlimit(RLIMIT_AS, &now) == 0, "RLIMIT_AS");
  call();
  setrlimit(RLIMIT_AS, &before);
}

void TestNoThread(const std::string& folder) {
  const std::size_t before = NumThreads();
  WithRoomFor(40 << 20, [&] {  // a stack is 8 MiB
    const auto refused = ErrorOf([] { FileQueue(64, kFileAlignment, false); });
    EXPECT(refused.first == EAGAIN && Contains(refused.second, " of 64 for files"), "%s", refused.second.c_str());
    EXPECT(NumThreads() == before, "%zu threads were left", NumThreads() - before);
  });
  TestTransfers(folder, 8, false);
}
#else
void TestNoThread(const std::string&) {}
#endif

}  // namespace
}  // namespace zcomm

int main() {
  is_main = true;
  const std::string folder = zcomm::MakeFolder();
  for (const bool may_use_ring : {false, true}) {  // without io_uring, this runs twice with threads
    for (const std::size_t num_requests : {1, 2, 8}) zcomm::TestTransfers(folder, num_requests, may_use_ring);
    zcomm::TestErrors(folder, may_use_ring);
    zcomm::TestNoSpace(folder, may_use_ring);
    zcomm::TestClosingDropsPendingRequests(folder, may_use_ring);
    zcomm::TestManyTransfers(folder, may_use_ring);
    zcomm::TestNoSpaceForChecksums(folder, may_use_ring);
    zcomm::TestLargeRequest(folder, may_use_ring);
    zcomm::TestTwoThreadsWait(folder, may_use_ring);
    zcomm::TestFork(folder, may_use_ring);
    zcomm::TestThreadsDoNotAllocate(folder, may_use_ring);
  }
  zcomm::TestBrokenRing(folder);
  zcomm::TestNoThread(folder);
  EXPECT(::rmdir(folder.c_str()) == 0, "files were left in %s", folder.c_str());
  return 0;
}
