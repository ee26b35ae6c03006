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

// What a call of the operating system refused: errno, the file, and what was being done.
class FileError : public std::runtime_error {
 public:
  FileError(int number, std::string path, const std::string& what);

  int number() const { return number_; }
  const std::string& path() const { return path_; }

 private:
  int number_;
  std::string path_;
};

// An open file of the operating system, closed at the end.
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

// Of offsets, addresses and byte counts of direct I/O.
inline constexpr std::size_t kFileAlignment = kPageNbytes;

// Plain files hold the data alone; checked ones as CheckedFile says.
enum class FileKind { kPlain, kChecked };

// What carries the requests: the kernel's own queue and one thread beside it, or a thread for each request in flight.
enum class FileEngine { kIoUring, kThreads };
const char* FileEngineName(FileEngine engine);

class FileRing;

// Reads and writes files past the page cache (O_DIRECT; through it where the file system has none), many requests at a
// time. A transfer is cut into requests of `request_nbytes`, `num_requests` of which are in flight. Reads begin in the
// order of submission, and so do writes; where both wait they take turns: a disk moves more of both than of one.
//
// A checked file's pages are summed before they are written and compared after they were read, by the thread that
// has the request; what differs is a FileError of EBADMSG. After a failed write the data there are undefined: reading
// them fails unless they are what was to be written.
//
// Transfers of one file must not overlap while they are in flight. All functions may be called from several threads.
// An error never ends the process: it is thrown by Wait of the transfer, or by the call itself.
class FileQueue {
 public:
  // With io_uring where liburing was found at build time, the kernel has it and `may_use_ring`; else with threads, as
  // many as requests. FileError of EAGAIN, without a path, where the system allows no more threads: none is left then.
  FileQueue(std::size_t num_requests, std::size_t request_nbytes, bool may_use_ring = true);
  ~FileQueue();  // after the requests in flight; those not begun are dropped, files are closed
  FileQueue(const FileQueue&) = delete;
  FileQueue& operator=(const FileQueue&) = delete;

  FileEngine engine() const { return ring_ ? FileEngine::kIoUring : FileEngine::kThreads; }

  // Creates a file of `nbytes`, whose space is reserved so that later writes cannot run out of it, or throws and leaves
  // none. An existing file is an error (EEXIST). Readable by its owner alone.
  int Create(const std::string& path, std::uint64_t nbytes, FileKind kind = FileKind::kPlain);
  // Opens an existing file for reading and writing.
  int Open(const std::string& path, FileKind kind = FileKind::kPlain);
  // Bytes of an open file; of a checked one, of its data.
  std::uint64_t Size(int file);
  // Waits until what was written is on the disk; a checked file then also holds its checksums, as of the transfers that
  // had ended.
  void Sync(int file);
  // The file must have no transfer in flight.
  void Close(int file);

  // A ticket for Wait. `offset`, `nbytes` and the address of `data` are multiples of kFileAlignment; `data` stays where
  // it is until Wait has returned. A checked file's transfers end within its data.
  std::uint64_t Read(int file, std::uint64_t offset, void* data, std::size_t nbytes);
  std::uint64_t Write(int file, std::uint64_t offset, const void* data, std::size_t nbytes);
  bool IsDone(std::uint64_t ticket);
  // Returns when the transfer has ended, or throws its first FileError. Once for each ticket.
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
    int error = 0;  // of the request at the lowest offset that failed, whose numbers follow
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

  static File OpenFile(const std::string& path, int flags);
  int Add(File file);
  File& At(int file);
  std::uint64_t Submit(int file, bool is_write, std::uint64_t offset, std::uint8_t* data, std::size_t nbytes);
  bool HasRequest() const;
  Request TakeRequest();  // there is one
  void Serve();
  void ServeRing(std::vector<Request>* slots);
  bool MoveOn(std::size_t slot, int result, Request* request);
  bool End(Request* request, int error);
  void Notify();
  void EndThreads();  // after the requests that they have
  static void Prepare(const Request& request);
  static int Verify(Request* request);
  void Finish(const Request& request, int error);

  const std::size_t request_nbytes_;
  const pid_t process_;
  const std::unique_ptr<FileRing> ring_;  // null: threads
  struct Signals {
    std::condition_variable work;
    std::condition_variable done;
  };

  std::mutex mutex_;
  std::unique_ptr<Signals> signals_ = std::make_unique<Signals>();
  std::map<int, File> files_;
  std::map<std::uint64_t, Transfer> transfers_;
  std::deque<Request> lanes_[2];  // reads and writes that have not begun
  bool next_lane_ = false;
  std::uint64_t next_ticket_ = 1;
  int next_file_ = 1;
  bool is_closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace zcomm
