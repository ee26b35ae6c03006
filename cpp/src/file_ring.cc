#include "file_ring.h"

#ifdef ZCOMM_HAS_URING
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#endif

namespace zcomm {

#ifdef ZCOMM_HAS_URING
namespace {

// Of one operation, whose length and result have 32 bits. The caller continues after it, as after any short count.
constexpr std::size_t kMaxNbytes = std::size_t{1} << 30;

// Errors after which the same submission can succeed.
bool IsPassing(int error) { return error == -EINTR || error == -EAGAIN || error == -EBUSY; }

class UringRing : public FileRing {
 public:
  ~UringRing() override {
    if (has_ring_) ::io_uring_queue_exit(&ring_);
    if (wake_ >= 0) ::close(wake_);
  }

  bool Init(std::size_t depth) {
    wake_ = ::eventfd(0, EFD_CLOEXEC);
    has_ring_ = wake_ >= 0 && ::io_uring_queue_init(static_cast<unsigned>(depth) + 1, &ring_, 0) == 0;
    return has_ring_ && ListenForWake() == 0;
  }

  int StartOperation(std::size_t slot, const Operation& of) override {
    if (broken_ != 0) return broken_;
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    if (entry == nullptr) return EBUSY;  // never: there is an entry for each slot, and each is submitted at once
    const auto nbytes = static_cast<unsigned>(std::min(of.nbytes, kMaxNbytes));
    if (of.is_write) {
      ::io_uring_prep_write(entry, of.descriptor, of.data, nbytes, of.offset);
    } else {
      ::io_uring_prep_read(entry, of.descriptor, of.data, nbytes, of.offset);
    }
    ::io_uring_sqe_set_data64(entry, slot);
    return Submit();
  }

  void WaitForSome(const std::function<void(std::size_t, int)>& ended) override {
    io_uring_cqe* entry = nullptr;
    if (broken_ != 0) {
      PollForSome();
      if (::io_uring_peek_cqe(&ring_, &entry) != 0) return;
    } else if (::io_uring_wait_cqe(&ring_, &entry) != 0) {
      return;  // interrupted by a signal
    }
    do {
      const std::uint64_t slot = ::io_uring_cqe_get_data64(entry);
      const int result = entry->res;
      ::io_uring_cqe_seen(&ring_, entry);  // the kernel may reuse the entry from here on: read it before
      if (slot == kWake) {
        ListenForWake();
      } else {
        ended(slot, result);
      }
    } while (::io_uring_peek_cqe(&ring_, &entry) == 0);
  }

  void Wake() override {
    const std::uint64_t one = 1;
    while (::write(wake_, &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

 private:
  static constexpr std::uint64_t kWake = ~std::uint64_t{0};

  // Keeps a read of the eventfd in the ring, so that Wake, from another thread, completes an operation and ends the
  // wait in WaitForSome. Without it, new requests would wait until one in flight completes; with none in flight, a
  // deadlock.
  int ListenForWake() {
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    if (entry == nullptr) return EBUSY;
    ::io_uring_prep_read(entry, wake_, &woken_, sizeof(woken_), 0);
    ::io_uring_sqe_set_data64(entry, kWake);
    return Submit();
  }

  // Waits on a broken ring, which reads the eventfd no more, until Wake is called or an operation that had started is
  // complete. The last read may still be under way and be the one that gets the count: ours must not wait for another.
  void PollForSome() {
    ::fcntl(wake_, F_SETFL, O_NONBLOCK);
    pollfd ready[] = {{wake_, POLLIN, 0}, {ring_.ring_fd, POLLIN, 0}};
    ::poll(ready, 2, -1);
    std::uint64_t count = 0;
    static_cast<void>(::read(wake_, &count, sizeof(count)) < 0);
  }

  // After a permanent error nothing more is submitted. An entry whose submission failed is still in the queue: a later
  // submission would start it, and write to a buffer whose owner has already got an error for it.
  int Submit() {
    int submitted = -EINTR;
    while (broken_ == 0 && IsPassing(submitted)) submitted = ::io_uring_submit(&ring_);
    if (broken_ == 0 && submitted < 0) broken_ = -submitted;
    return broken_;
  }

  io_uring ring_{};
  bool has_ring_ = false;
  int wake_ = -1;
  int broken_ = 0;
  std::uint64_t woken_ = 0;  // the kernel writes the eventfd's count here
};

}  // namespace

std::unique_ptr<FileRing> FileRing::Make(std::size_t depth) {
  auto ring = std::make_unique<UringRing>();
  return ring->Init(depth) ? std::move(ring) : nullptr;
}
#else
std::unique_ptr<FileRing> FileRing::Make(std::size_t) { return nullptr; }
#endif

}  // namespace zcomm
