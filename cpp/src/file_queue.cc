#include "zcomm/file_queue.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "file_moves.h"
#include "file_ring.h"
#include "size_signal.h"
#include "zcomm/check.h"

namespace zcomm {
namespace {

constexpr std::size_t kMaxRequests = 256;
constexpr int kStart = -EINTR;  // a result after which the operation is submitted (again)

std::uint64_t Start(std::uint64_t offset, const CheckedFile* checked) {
  return offset + (checked == nullptr ? 0 : CheckedFile::kDataOffset);
}

}  // namespace

FileError::FileError(int number, std::string path, const std::string& what)
    : std::runtime_error(what + ": " + std::strerror(number)), number_(number), path_(std::move(path)) {}

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

const char* FileEngineName(FileEngine engine) { return engine == FileEngine::kIoUring ? "io_uring" : "threads"; }

FileQueue::FileQueue(std::size_t num_requests, std::size_t request_nbytes, bool may_use_ring)
    : request_nbytes_(request_nbytes),
      process_(::getpid()),
      ring_(may_use_ring && num_requests <= kMaxRequests ? FileRing::Make(num_requests) : nullptr) {
  ZCOMM_CHECK(num_requests >= 1 && num_requests <= kMaxRequests,
              "num_requests must be 1 to 256: num_requests=", num_requests);
  ZCOMM_CHECK(request_nbytes >= kFileAlignment && request_nbytes % kFileAlignment == 0,
              "request_nbytes must be a multiple of 4096: request_nbytes=", request_nbytes);
  const WithoutSizeSignal in_every_thread;  // threads inherit the signal mask
  // emplace_back must not throw for lack of memory once a thread has started: see below.
  threads_.reserve(ring_ ? 1 : num_requests);
  try {
    if (ring_) {
      threads_.emplace_back([this, slots = std::vector<Request>(num_requests)]() mutable { ServeRing(&slots); });
      return;
    }
    for (std::size_t i = 0; i < num_requests; ++i) threads_.emplace_back([this] { Serve(); });
  } catch (const std::system_error& error) {  // a limit of threads or memory
    // Join the threads first: destroying a std::thread that is joinable ends the process.
    StopThreads();
    throw FileError(error.code().value(), "",
                    "cannot start thread " + std::to_string(threads_.size() + 1) + " of " +
                        std::to_string(ring_ ? 1 : num_requests) + " for files");
  } catch (...) {
    StopThreads();
    throw;
  }
}

FileQueue::~FileQueue() {
  // In a forked child the threads do not exist, and one of them may have held the mutex at the fork. Joining the
  // threads or locking the mutex would deadlock, and so would destroying the condition variables, which waits for their
  // waiters.
  if (::getpid() != process_) {
    // Leaked: a handle of the parent's thread may by now be freed memory, or that of a thread of this process.
    static_cast<void>(new std::vector<std::thread>(std::move(threads_)));
    static_cast<void>(signals_.release());
    return;
  }
  StopThreads();
}

void FileQueue::StopThreads() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
    for (std::deque<Request>& lane : lanes_) lane.clear();
  }
  Notify();
  for (std::thread& thread : threads_) thread.join();
}

void FileQueue::Notify() {
  if (ring_) {
    ring_->Wake();  // the thread waits in io_uring, where a condition variable cannot reach it
  } else {
    signals_->work.notify_all();
  }
}

// Before the mutex, which one of the parent's threads may have held at the fork.
void FileQueue::CheckProcess() const {
  if (::getpid() == process_) return;
  throw std::runtime_error("a queue of files must be used by the process that made it: made by pid=" +
                           std::to_string(process_));
}

int FileQueue::Create(const std::string& path, std::uint64_t nbytes, FileKind kind) {
  CheckProcess();
  std::shared_ptr<CheckedFile> checked;
  if (kind == FileKind::kChecked) checked = std::make_shared<CheckedFile>(nbytes);
  const std::uint64_t reserved = checked ? CheckedFile::FileNbytes(nbytes) : nbytes;
  const auto size = static_cast<off_t>(reserved);
  const WithoutSizeSignal here;
  File file = OpenFile(path, O_RDWR | O_CREAT | O_EXCL);
  const int descriptor = file.descriptor.number();
  int error = reserved == 0 || ::fallocate(descriptor, 0, 0, size) == 0 ? 0 : errno;
  // Without fallocate (NFS, for example) the size is set, but no space is reserved.
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
  CheckProcess();
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
  // The file system has no O_DIRECT. O_CREAT may have made the file already, so that O_EXCL would now refuse it.
  if (file.descriptor.number() < 0 && errno == EINVAL) {
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
  CheckProcess();
  const std::lock_guard<std::mutex> lock(mutex_);
  const File& of = At(file);
  if (of.checked) return of.checked->data_nbytes();
  struct stat status{};
  if (::fstat(of.descriptor.number(), &status) != 0) throw FileError(errno, of.path, "cannot get the file's size");
  return static_cast<std::uint64_t>(status.st_size);
}

void FileQueue::Sync(int file) {
  CheckProcess();
  std::unique_lock<std::mutex> lock(mutex_);
  const File& of = At(file);  // valid without the lock: the caller must not close the file during Sync
  lock.unlock();              // a sync takes long; transfers of other files go on meanwhile
  const WithoutSizeSignal here;
  // The table first: fdatasync then covers both. In the other order a crash could leave durable data with old
  // checksums, and the next run would report them as damaged.
  int error = of.checked ? of.checked->WriteTable(of.descriptor.number()) : 0;
  if (error == 0 && ::fdatasync(of.descriptor.number()) != 0) error = errno;
  if (error != 0) throw FileError(error, of.path, "cannot sync the file to the disk");
}

void FileQueue::Close(int file) {
  CheckProcess();
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
  CheckProcess();
  const std::lock_guard<std::mutex> lock(mutex_);
  File& of = At(file);
  ZCOMM_CHECK(!of.checked || (offset <= of.checked->data_nbytes() && nbytes <= of.checked->data_nbytes() - offset),
              "a transfer must end within the data: offset=", offset, ", nbytes=", nbytes,
              ", data=", of.checked->data_nbytes(), ", file ", of.path);
  const std::uint64_t ticket = next_ticket_++;
  const std::size_t count = (nbytes + request_nbytes_ - 1) / request_nbytes_;
  std::deque<Request>& lane = lanes_[is_write];
  const std::size_t num_before = lane.size();
  try {
    for (std::size_t at = 0; at < nbytes; at += request_nbytes_) {
      const std::size_t part = std::min(request_nbytes_, nbytes - at);
      lane.push_back({ticket, of.descriptor.number(), of.checked.get(), is_write, offset + at, data + at, part});
    }
    transfers_[ticket] = {file, is_write, offset, nbytes, count, 0, 0, 0, 0};
  } catch (...) {  // no memory: withdraw the transfer's requests, none of which has started, as the lock is held
    while (lane.size() > num_before) lane.pop_back();
    throw;
  }
  if (count > 0) ++of.num_transfers;
  Notify();
  return ticket;
}

bool FileQueue::HasRequest() const { return !lanes_[0].empty() || !lanes_[1].empty(); }

FileQueue::Request FileQueue::TakeRequest() {
  if (lanes_[next_lane_].empty()) next_lane_ = !next_lane_;
  std::deque<Request>& lane = lanes_[next_lane_];
  next_lane_ = !next_lane_;
  const Request request = lane.front();
  lane.pop_front();
  return request;
}

void FileQueue::Serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    signals_->work.wait(lock, [this] { return is_closing_ || HasRequest(); });
    if (is_closing_) return;
    Request request = TakeRequest();
    lock.unlock();  // checksums and I/O run without the lock, in as many threads as there are requests in flight
    Prepare(request);
    int error = MoveBytes(request.descriptor, request.is_write, Start(request.offset, request.checked), request.data,
                          request.nbytes, &request.moved_nbytes);
    if (error == 0) error = Verify(&request);
    lock.lock();
    Finish(request, error);
  }
}

// The one thread of a queue with io_uring: it alone touches the ring, so that the ring needs no lock. It fills free
// slots from the lanes, then waits for a completion or a Wake.
void FileQueue::ServeRing(std::vector<Request>* slots) {
  std::size_t num_moving = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto ended = [&](std::size_t slot, int result) {
    if (Continue(slot, result, &(*slots)[slot])) --num_moving;
  };
  while (!is_closing_ || num_moving > 0) {  // the kernel still writes to the buffers of requests in flight
    for (std::size_t slot = 0; slot < slots->size() && HasRequest(); ++slot) {
      Request& request = (*slots)[slot];
      if (request.nbytes > 0) continue;
      request = TakeRequest();
      lock.unlock();
      Prepare(request);
      num_moving += Continue(slot, kStart, &request) ? 0 : 1;
      lock.lock();
    }
    lock.unlock();
    ring_->WaitForSome(std::ref(ended));  // not `ended` itself: a function of it would be allocated
    lock.lock();
  }
}

// Continues the request in a slot after its last operation, whose `result` is as FileRing reports it: a short read or
// write is continued where it stopped. Returns whether the request is complete; the slot is then free (0 bytes).
bool FileQueue::Continue(std::size_t slot, int result, Request* request) {
  int error = 0;
  if (result > 0) {
    request->moved_nbytes += static_cast<std::size_t>(result);
    if (request->moved_nbytes == request->nbytes) {
      error = Verify(request);
      return End(request, error);
    }
  } else if (result == 0) {
    return End(request, request->is_write ? ENOSPC : ENODATA);
  } else if (result != kStart && result != -EAGAIN) {
    return End(request, -result);
  }
  const std::size_t moved = request->moved_nbytes;
  error = ring_->StartOperation(
      slot, {request->descriptor, request->is_write, Start(request->offset, request->checked) + moved,
             request->data + moved, request->nbytes - moved});
  return error != 0 && End(request, error);
}

bool FileQueue::End(Request* request, int error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Finish(*request, error);
  *request = Request{};
  return true;
}

void FileQueue::Prepare(const Request& request) {
  if (request.checked == nullptr || !request.is_write) return;
  request.checked->RecordChecksums(request.offset / kPageNbytes, request.data, request.nbytes / kPageNbytes);
}

int FileQueue::Verify(Request* request) {
  if (request->checked == nullptr || request->is_write) return 0;
  const std::uint64_t page = request->offset / kPageNbytes;
  request->moved_nbytes =
      request->checked->FirstMismatch(page, request->data, request->nbytes / kPageNbytes) * kPageNbytes;
  return request->moved_nbytes == request->nbytes ? 0 : EBADMSG;
}

void FileQueue::Finish(const Request& request, int error) {
  Transfer& transfer = transfers_.at(request.ticket);
  // Requests complete in any order. The error with the lowest offset is reported, so that the text does not depend on
  // timing.
  if (error != 0 && (transfer.error == 0 || request.offset < transfer.failed_offset)) {
    transfer.error = error;
    transfer.failed_offset = request.offset;
    transfer.failed_nbytes = request.nbytes;
    transfer.moved_nbytes = request.moved_nbytes;
  }
  if (--transfer.unfinished > 0) return;
  --At(transfer.file).num_transfers;
  signals_->done.notify_all();
}

bool FileQueue::IsDone(std::uint64_t ticket) {
  CheckProcess();
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = transfers_.find(ticket);
  ZCOMM_CHECK(found != transfers_.end(), "no such transfer, or Wait has already returned for it: ticket=", ticket);
  return found->second.unfinished == 0;
}

void FileQueue::Wait(std::uint64_t ticket) {
  CheckProcess();
  std::unique_lock<std::mutex> lock(mutex_);
  auto found = transfers_.end();
  signals_->done.wait(lock, [&] {
    found = transfers_.find(ticket);
    return found == transfers_.end() || found->second.unfinished == 0;
  });
  ZCOMM_CHECK(found != transfers_.end(), "no such transfer, or Wait has already returned for it: ticket=", ticket);
  const Transfer transfer = found->second;
  transfers_.erase(found);
  if (transfer.error == 0) return;
  const auto file = files_.find(transfer.file);
  const bool is_wrong = transfer.error == EBADMSG;
  const std::string verb = is_wrong ? "checksum mismatch after " : transfer.is_write ? "wrote " : "read ";
  throw FileError(transfer.error, file == files_.end() ? "" : file->second.path,
                  verb + std::to_string(transfer.moved_nbytes) + " of " + std::to_string(transfer.failed_nbytes) +
                      " bytes at offset " + std::to_string(transfer.failed_offset) +
                      (is_wrong ? " (the data differ from what was written)" : ""));
}

}  // namespace zcomm
