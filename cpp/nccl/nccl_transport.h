#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>

#include "device.h"
#include "nccl_library.h"

namespace zcomm::nccl {

// A new name for a communicator. One rank makes it and sends it to the others.
UniqueId MakeUniqueId(const Library& library);

// A hop over NCCL. It uses two communicators of the same ranks, one after the other:
//
//   1. a nonblocking one, to connect: NCCL returns at once and is polled, for `timeout` at most. With a
//      blocking one, a rank that waits for a rank that never arrives could not be stopped
//   2. a blocking one, split off the first, for the exchanges: since NCCL 2.23 a nonblocking communicator starts a
//      thread for every group and has to be polled, about 100 us of host time for each exchange
//
// Abort() ends a call that hangs in the second, too.
//
// Before NCCL 2.18 there is no ncclCommSplit, and groups start no threads: there the first communicator is used for
// both.
class NcclTransport final : public Transport {
 public:
  // Joins the communicator `id` with the current GPU, as one of `size` ranks, all of which must do so. Throws
  // std::runtime_error with NCCL's text, also if the other ranks do not join within `timeout`. `library` must outlive
  // the transport. `enter` makes the GPU current on a thread that the transport starts: a new thread is on GPU 0.
  NcclTransport(
      const Library* library, const UniqueId& id, std::size_t size, std::size_t rank,
      std::chrono::duration<double> timeout, std::function<void()> enter = [] {});
  ~NcclTransport() override;
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;

  std::size_t size() const override { return size_; }
  std::size_t rank() const override { return rank_; }

  void Gather(const void* send, void* receive, std::size_t stride_nbytes, std::size_t nbytes, Stream stream) override;
  void Exchange(const Parts& send, const Parts& receive, std::size_t nbytes, std::size_t repeats,
                Stream stream) override;

  std::string AsyncError() override;
  void Abort() noexcept override;
  void* Register(void* data, std::size_t nbytes) override;
  void Deregister(void* registration) noexcept override;

 private:
  void Join(const UniqueId& id);
  void SplitOff();
  // Waits until `result`, which `call` returned for `comm`, is no longer kInProgress. Throws unless it is then
  // kSuccess.
  void WaitUntilComplete(Comm comm, Result result, const char* call);
  void WaitUntilComplete(Result result, const char* call) { WaitUntilComplete(comm_, result, call); }
  // The same for a nonblocking communicator, which is asked for its state whatever `call` returned: with a config that
  // blocks, ncclCommSplit of NCCL 2.28 returns kSuccess while the split is in progress.
  void WaitUntilReady(Comm nonblocking, Result result, const char* call);
  // Runs `work` on a new thread and returns its result. Throws if it does not return before the timeout: it may block.
  Result RunWithTimeout(std::function<Result()> work, const char* call) const;
  template <class Call>
  void InGroup(const char* name, const Call& call);
  std::string Text(Result result, const char* call) const;
  std::string TimeoutText(const char* call) const;

  const Functions& nccl_;
  std::size_t size_;
  std::size_t rank_;
  std::chrono::duration<double> timeout_;
  std::function<void()> enter_;
  Comm joined_ = nullptr;  // the first communicator, until the second has been split off
  Comm split_ = nullptr;   // the second; NCCL writes it at any time until the split is complete
  // The one in use; null once aborted. Atomic: Abort() takes it from another thread while a call hangs.
  std::atomic<Comm> comm_{nullptr};
};

}  // namespace zcomm::nccl
