#include "zcomm/file_queue.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "file_moves.h"
#include "zcomm/check.h"

namespace zcomm {
namespace {

constexpr std::size_t kMaxThreads = 256;

// Moves one request, with the checksums of a checked file. Returns errno, or 0; `done` counts the bytes that are right.
template <class Request>
int Move(const Request& request, std::size_t* done) {
  CheckedFile* checked = request.checked;
  const std::uint64_t page = request.offset / kPageNbytes;
  const std::size_t num_pages = request.nbytes / kPageNbytes;
  if (checked != nullptr && request.is_write) checked->Keep(page, request.data, num_pages);
  const std::uint64_t start = request.offset + (checked == nullptr ? 0 : CheckedFile::kDataOffset);
  const int error = MoveBytes(request.descriptor, request.is_write, start, request.data, request.nbytes, done);
  if (error != 0 || checked == nullptr || request.is_write) return error;
  *done = checked->FirstWrong(page, request.data, num_pages) * kPageNbytes;
  return *done == request.nbytes ? 0 : EBADMSG;
}

}  // namespace

FileError::FileError(int number, std::string path, const std::string& what)
    : std::runtime_error(what + ": " + std::strerror(number)), number_(number), path_(std::move(path)) {}

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

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
}

int FileQueue::Create(const std::string& path, std::uint64_t nbytes, FileKind kind) {
  std::shared_ptr<CheckedFile> checked;
  if (kind == FileKind::kChecked) checked = std::make_shared<CheckedFile>(nbytes);
  const std::uint64_t reserved = checked ? CheckedFile::FileNbytes(nbytes) : nbytes;
  const auto size = static_cast<off_t>(reserved);
  File file = OpenFile(path, O_RDWR | O_CREAT | O_EXCL);
  const int descriptor = file.descriptor.number();
  int error = reserved == 0 || ::fallocate(descriptor, 0, 0, size) == 0 ? 0 : errno;
  if (error == EOPNOTSUPP) error = ::ftruncate(descriptor, size) == 0 ? 0 : errno;
  if (error == 0 && checked) error = checked->WriteNew(descriptor);
  if (error != 0) {
    ::unlink(path.c_str());
    throw FileError(error, path, "cannot reserve " + std::to_string(reserved) + " bytes");
  }
  file.checked = std::move(checked);
  return Add(std::move(file));
}

int FileQueue::Open(const std::string& path, FileKind kind) {
  File file = OpenFile(path, O_RDWR);
  if (kind == FileKind::kChecked) {
    std::unique_ptr<CheckedFile> checked;
    const int error = CheckedFile::Load(file.descriptor.number(), &checked);
    if (error != 0) throw FileError(error, path, "this is not a file with checksums, or it is damaged");
    file.checked = std::move(checked);
  }
  return Add(std::move(file));
}

FileQueue::File FileQueue::OpenFile(const std::string& path, int flags) {
  File file;
  file.path = path;
  file.descriptor = Descriptor(::open(path.c_str(), flags | O_DIRECT | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (file.descriptor.number() < 0 && errno == EINVAL) {  // no direct I/O here; O_CREAT may have made the file
    file.is_direct = false;
    file.descriptor = Descriptor(::open(path.c_str(), (flags & ~O_EXCL) | O_CLOEXEC, S_IRUSR | S_IWUSR));
  }
  if (file.descriptor.number() < 0) throw FileError(errno, path, "cannot open the file");
  return file;
}

int FileQueue::Add(File file) {
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
  if (of.checked) return of.checked->data_nbytes();
  struct stat status{};
  if (::fstat(of.descriptor.number(), &status) != 0) throw FileError(errno, of.path, "cannot ask for the file's size");
  return static_cast<std::uint64_t>(status.st_size);
}

bool FileQueue::IsDirect(int file) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return At(file).is_direct;
}

void FileQueue::Sync(int file) {
  std::unique_lock<std::mutex> lock(mutex_);
  const File& of = At(file);  // which the caller does not close meanwhile
  lock.unlock();
  if (::fdatasync(of.descriptor.number()) != 0) throw FileError(errno, of.path, "cannot write to the disk");
}

void FileQueue::Close(int file) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const File& of = At(file);
  ZCOMM_CHECK(of.num_transfers == 0, "the file has transfers in flight: ", of.path);
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
  ZCOMM_CHECK(!of.checked || (offset <= of.checked->data_nbytes() && nbytes <= of.checked->data_nbytes() - offset),
              "a transfer must end within the data: offset=", offset, ", nbytes=", nbytes,
              ", data=", of.checked->data_nbytes(), ", file ", of.path);
  const std::uint64_t ticket = next_ticket_++;
  const std::size_t count = (nbytes + request_nbytes_ - 1) / request_nbytes_;
  const std::size_t num_before = requests_.size();
  try {
    for (std::size_t at = 0; at < nbytes; at += request_nbytes_) {
      const std::size_t part = std::min(request_nbytes_, nbytes - at);
      requests_.push_back({ticket, of.descriptor.number(), of.checked.get(), is_write, offset + at, data + at, part});
    }
    transfers_[ticket] = {file, is_write, offset, nbytes, count, 0, 0, 0, 0};
  } catch (...) {  // no memory: nothing of it was begun
    while (requests_.size() > num_before) requests_.pop_back();
    throw;
  }
  if (count > 0) ++of.num_transfers;
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
    const int error = Move(request, &done);
    lock.lock();
    Finish(request, error, done, &lock);
  }
}

void FileQueue::Finish(const Request& request, int error, std::size_t moved_nbytes,
                       std::unique_lock<std::mutex>* lock) {
  Transfer& transfer = transfers_.at(request.ticket);
  File& file = At(transfer.file);
  if (transfer.unfinished == 1 && error == 0 && transfer.error == 0 && request.is_write && file.checked) {
    lock->unlock();  // nobody erases the file or the transfer before it is finished
    error = file.checked->WriteTable(file.descriptor.number(), transfer.offset / kPageNbytes,
                                     transfer.nbytes / kPageNbytes);
    lock->lock();
  }
  if (error != 0 && transfer.error == 0) {
    transfer.error = error;
    transfer.failed_offset = request.offset;
    transfer.failed_nbytes = request.nbytes;
    transfer.moved_nbytes = moved_nbytes;
  }
  if (--transfer.unfinished > 0) return;
  --file.num_transfers;
  done_.notify_all();
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
  const bool is_wrong = transfer.error == EBADMSG;
  const std::string verb = is_wrong ? "read wrong bytes after " : transfer.is_write ? "wrote " : "read ";
  throw FileError(transfer.error, file == files_.end() ? "" : file->second.path,
                  verb + std::to_string(transfer.moved_nbytes) + " of " + std::to_string(transfer.failed_nbytes) +
                      " bytes at offset " + std::to_string(transfer.failed_offset) +
                      (is_wrong ? ", by the checksum kept when they were written" : ""));
}

}  // namespace zcomm
