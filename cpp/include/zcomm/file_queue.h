#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "zcomm/checked_file.h"

namespace zcomm {

// A failed system call: errno, the file's path, and what was being done. Python sees an OSError.
class FileError : public std::runtime_error {
 public:
  FileError(int number, std::string path, const std::string& what);

  int number() const { return number_; }
  const std::string& path() const { return path_; }

 private:
  int number_;
  std::string path_;
};

// Owns a file descriptor, and closes it.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();

  int number() const { return number_; }

 private:
  int number_ = -1;
};

// Direct I/O needs offsets, addresses and byte counts that are multiples of this.
inline constexpr std::size_t kFileAlignment = kPageNbytes;

// A plain file holds nothing but the data. A checked one has checksums: see CheckedFile.
enum class FileKind { kPlain, kChecked };

// How requests are executed: by the kernel's io_uring and one thread that serves it, or by a thread for each request in
// flight.
enum class FileEngine { kIoUring, kThreads };
const char* FileEngineName(FileEngine engine);

class FileRing;

// Reads and writes files asynchronously, bypassing the page cache with O_DIRECT (or through it, on file systems that
// have no O_DIRECT). A transfer is split into requests of `request_nbytes`, of which up to `num_requests` are in
// flight. Reads start in the order of submission, and so do writes. When both are waiting they alternate: a disk moves
// more bytes when it reads and writes at once.
//
// The thread that has a request computes the checksums of a checked file's pages before it writes them, and compares
// them after it has read them. A mismatch is a FileError of EBADMSG. After a failed write the data there are undefined:
// a read fails unless they are what was to be written.
//
// Transfers of one file that overlap must not be in flight together: their requests run in any order. Thread-safe.
// No error ends the process: Wait throws the errors of a transfer, other calls throw their own. In a forked child,
// which has none of the threads, every call throws std::runtime_error, and the destructor only closes the child's
// files.
class FileQueue {
 public:
  // Uses io_uring if `may_use_ring`, liburing was found at build time and the kernel allows it; otherwise threads, one
  // for each of `num_requests`. Throws FileError of EAGAIN, without a path, if the system cannot start the threads;
  // those already started have then ended.
  FileQueue(std::size_t num_requests, std::size_t request_nbytes, bool may_use_ring = true);
  // Waits for the requests in flight, drops those that have not started, and closes the files.
  ~FileQueue();
  FileQueue(const FileQueue&) = delete;
  FileQueue& operator=(const FileQueue&) = delete;

  FileEngine engine() const { return ring_ ? FileEngine::kIoUring : FileEngine::kThreads; }

  // Creates a file of `nbytes` that only its owner can read, and reserves its space on the disk, so that later writes
  // do not fail with ENOSPC in the middle of training. An existing file is an error (EEXIST). If it throws, it leaves
  // no file. Returns the number by which the other functions know the file.
  int Create(const std::string& path, std::uint64_t nbytes, FileKind kind = FileKind::kPlain);
  // Opens an existing file for reading and writing. Returns its number.
  int Open(const std::string& path, FileKind kind = FileKind::kPlain);
  // Size in bytes of an open file; of a checked one, the size of its data.
  std::uint64_t Size(int file);
  // Makes completed writes durable (fdatasync). For a checked file it first writes the checksums of those writes.
  // Wait for a transfer before Sync: one that is still in flight may or may not be covered.
  void Sync(int file);
  // Closes the file, which must have no transfer in flight. Does not sync it.
  void Close(int file);

  // Start a transfer and return its ticket for Wait. `offset`, `nbytes` and the address of `data` are multiples of
  // kFileAlignment. `data` must stay valid, and for a write unchanged, until Wait has returned. A transfer of a checked
  // file must end within its data.
  std::uint64_t Read(int file, std::uint64_t offset, void* data, std::size_t nbytes);
  std::uint64_t Write(int file, std::uint64_t offset, const void* data, std::size_t nbytes);
  bool IsDone(std::uint64_t ticket);
  // Returns when the transfer is complete, or throws the FileError of its first failed request by offset. Call it once
  // for each ticket: of several calls, one returns and the others throw std::invalid_argument.
  void Wait(std::uint64_t ticket);

 private:
  struct File {
    std::string path;
    Descriptor descriptor;
    std::size_t num_transfers = 0;
    std::shared_ptr<CheckedFile> checked;  // null: plain
  };
  struct Transfer {
    int file = 0;
    bool is_write = false;
    std::uint64_t offset = 0;
    std::size_t nbytes = 0;
    std::size_t unfinished = 0;
    int error = 0;  // errno of the failed request with the lowest offset; the next three describe that request
    std::uint64_t failed_offset = 0;
    std::size_t failed_nbytes = 0;
    std::size_t moved_nbytes = 0;
  };
  struct Request {
    std::uint64_t ticket = 0;
    int descriptor = -1;
    CheckedFile* checked = nullptr;  // null: plain
    bool is_write = false;
    std::uint64_t offset = 0;
    std::uint8_t* data = nullptr;
    std::size_t nbytes = 0;
    std::size_t moved_nbytes = 0;
  };

  void CheckProcess() const;
  static File OpenFile(const std::string& path, int flags);
  int Add(File file);
  File& At(int file);
  std::uint64_t Submit(int file, bool is_write, std::uint64_t offset, std::uint8_t* data, std::size_t nbytes);
  bool HasRequest() const;
  Request TakeRequest();  // HasRequest() must hold
  void Serve();
  void ServeRing(std::vector<Request>* slots);
  bool Continue(std::size_t slot, int result, Request* request);
  bool End(Request* request, int error);
  void Notify();
  void StopThreads();  // each thread finishes its request first
  static void Prepare(const Request& request);
  static int Verify(Request* request);
  void Finish(const Request& request, int error);

  const std::size_t request_nbytes_;
  const pid_t process_;                   // tells a forked child, which has no threads: see ~FileQueue
  const std::unique_ptr<FileRing> ring_;  // null: threads
  // On the heap, so that a forked child can leak them: destroying a condition variable waits for its waiters.
  struct Signals {
    std::condition_variable work;  // lanes_ have a request, or is_closing_; unused with io_uring
    std::condition_variable done;  // a transfer is complete
  };

  std::mutex mutex_;  // guards everything below; released during system calls, which would stall Read and Write
  std::unique_ptr<Signals> signals_ = std::make_unique<Signals>();
  std::map<int, File> files_;
  std::map<std::uint64_t, Transfer> transfers_;
  std::deque<Request> lanes_[2];  // reads, and writes, that have not started
  bool next_lane_ = false;
  std::uint64_t next_ticket_ = 1;
  int next_file_ = 1;
  bool is_closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace zcomm
