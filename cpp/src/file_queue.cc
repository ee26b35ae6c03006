#include "zcomm/file_queue.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "zcomm/check.h"

namespace zcomm {
namespace {

constexpr std::size_t kMaxThreads = 256;

// The errno of a transfer that ended before all bytes had moved, or 0; `done` counts those that moved.
int Move(int descriptor, bool is_write, std::uint64_t offset, std::uint8_t* data, std::size_t nbytes,
         std::size_t* done) {
  for (*done = 0; *done < nbytes;) {
    const auto at = static_cast<off_t>(offset + *done);
    const ssize_t moved = is_write ? ::pwrite(descriptor, data + *done, nbytes - *done, at)
                                   : ::pread(descriptor, data + *done, nbytes - *done, at);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    if (moved == 0) return is_write ? ENOSPC : ENODATA;
    *done += static_cast<std::size_t>(moved);
  }
  return 0;
}

}  // namespace

FileError::FileError(int number, std::string path, const std::string& what)
    : std::runtime_error(what + ": " + std::strerror(number)), number_(number), path_(std::move(path)) {}

FileQueue::FileQueue(std::size_t num_threads, std::size_t request_nbytes) : request_nbytes_(request_nbytes) {
  ZCOMM_CHECK(num_threads >= 1 && num_threads <= kMaxThreads,
              "num_threads must be 1 to 256: num_threads=", num_threads);
  ZCOMM_CHECK(request_nbytes >= kFileAlignment && request_nbytes % kFileAlignment == 0,
              "request_nbytes must be a multiple of 4096: request_nbytes=", request_nbytes);
  for (std::size_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Serve(); });
}

FileQueue::~FileQueue() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
    requests_.clear();
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  for (const auto& entry : files_) ::close(entry.second.descriptor);
}

int FileQueue::Create(const std::string& path, std::uint64_t nbytes) {
  const int file = Add(path, O_RDWR | O_CREAT | O_EXCL);
  const int descriptor = At(file).descriptor;
  int error = nbytes == 0 ? 0 : ::posix_fallocate(descriptor, 0, static_cast<off_t>(nbytes));
  if (error == EOPNOTSUPP || error == EINVAL) error = ::ftruncate(descriptor, static_cast<off_t>(nbytes)) ? errno : 0;
  if (error == 0) return file;
  Close(file);
  ::unlink(path.c_str());
  throw FileError(error, path, "cannot reserve " + std::to_string(nbytes) + " bytes");
}

int FileQueue::Open(const std::string& path) { return Add(path, O_RDWR); }

int FileQueue::Add(const std::string& path, int flags) {
  File file;
  file.path = path;
  file.descriptor = ::open(path.c_str(), flags | O_DIRECT | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (file.descriptor < 0 && errno == EINVAL) {  // no direct I/O here; O_CREAT may have made the file
    file.is_direct = false;
    file.descriptor = ::open(path.c_str(), (flags & ~O_EXCL) | O_CLOEXEC, S_IRUSR | S_IWUSR);
  }
  if (file.descriptor < 0) throw FileError(errno, path, "cannot open the file");
  const std::lock_guard<std::mutex> lock(mutex_);
  files_.emplace(next_file_, std::move(file));
  return next_file_++;
}

FileQueue::File& FileQueue::At(int file) {
  const auto found = files_.find(file);
  ZCOMM_CHECK(found != files_.end(), "no such open file: file=", file);
  return found->second;
}

std::uint64_t FileQueue::Size(int file) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const File& of = At(file);
  struct stat status{};
  if (::fstat(of.descriptor, &status) != 0) throw FileError(errno, of.path, "cannot ask for the file's size");
  return static_cast<std::uint64_t>(status.st_size);
}

bool FileQueue::IsDirect(int file) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return At(file).is_direct;
}

void FileQueue::Sync(int file) {
  std::unique_lock<std::mutex> lock(mutex_);
  const File of = At(file);
  lock.unlock();
  if (::fdatasync(of.descriptor) != 0) throw FileError(errno, of.path, "cannot write to the disk");
}

void FileQueue::Close(int file) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const File& of = At(file);
  ZCOMM_CHECK(of.num_transfers == 0, "the file has transfers in flight: ", of.path);
  ::close(of.descriptor);
  files_.erase(file);
}

std::uint64_t FileQueue::Read(int file, std::uint64_t offset, void* data, std::size_t nbytes) {
  return Submit(file, false, offset, static_cast<std::uint8_t*>(data), nbytes);
}

std::uint64_t FileQueue::Write(int file, std::uint64_t offset, const void* data, std::size_t nbytes) {
  return Submit(file, true, offset, static_cast<std::uint8_t*>(const_cast<void*>(data)), nbytes);
}

std::uint64_t FileQueue::Submit(int file, bool is_write, std::uint64_t offset, std::uint8_t* data, std::size_t nbytes) {
  ZCOMM_CHECK(offset % kFileAlignment == 0 && nbytes % kFileAlignment == 0 &&
                  reinterpret_cast<std::uintptr_t>(data) % kFileAlignment == 0,
              "offset, byte count and address must be multiples of 4096: offset=", offset, ", nbytes=", nbytes,
              ", address=", reinterpret_cast<std::uintptr_t>(data));
  const std::lock_guard<std::mutex> lock(mutex_);
  File& of = At(file);
  const std::uint64_t ticket = next_ticket_++;
  const std::size_t count = (nbytes + request_nbytes_ - 1) / request_nbytes_;
  transfers_[ticket] = {file, is_write, count, 0, ""};
  if (count > 0) ++of.num_transfers;
  for (std::size_t at = 0; at < nbytes; at += request_nbytes_) {
    requests_.push_back(
        {ticket, of.descriptor, is_write, offset + at, data + at, std::min(request_nbytes_, nbytes - at)});
  }
  work_.notify_all();
  return ticket;
}

void FileQueue::Serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return is_closing_ || !requests_.empty(); });
    if (is_closing_) return;
    const Request request = requests_.front();
    requests_.pop_front();
    lock.unlock();
    std::size_t done = 0;
    const int error = Move(request.descriptor, request.is_write, request.offset, request.data, request.nbytes, &done);
    lock.lock();
    Finish(request, error, done);
  }
}

void FileQueue::Finish(const Request& request, int error, std::size_t done) {
  Transfer& transfer = transfers_.at(request.ticket);
  if (error != 0 && transfer.error == 0) {
    transfer.error = error;
    transfer.message = std::string(request.is_write ? "wrote " : "read ") + std::to_string(done) + " of " +
                       std::to_string(request.nbytes) + " bytes at offset " + std::to_string(request.offset);
  }
  if (--transfer.unfinished == 0) {
    --At(transfer.file).num_transfers;
    done_.notify_all();
  }
}

bool FileQueue::IsDone(std::uint64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = transfers_.find(ticket);
  ZCOMM_CHECK(found != transfers_.end(), "no such transfer, or it was waited for: ticket=", ticket);
  return found->second.unfinished == 0;
}

void FileQueue::Wait(std::uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  ZCOMM_CHECK(transfers_.count(ticket) == 1, "no such transfer, or it was waited for: ticket=", ticket);
  done_.wait(lock, [&] { return transfers_.at(ticket).unfinished == 0; });
  const Transfer transfer = transfers_.at(ticket);
  transfers_.erase(ticket);
  if (transfer.error == 0) return;
  const auto file = files_.find(transfer.file);
  throw FileError(transfer.error, file == files_.end() ? "" : file->second.path, transfer.message);
}

}  // namespace zcomm
