#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>

#include "device.h"
#include "nccl_library.h"

namespace zcomm::nccl {

// A new name for a communicator; one rank makes it and tells the others.
UniqueId MakeUniqueId(const Library& library);

// A hop over NCCL. The ranks join one another without blocking the host: what NCCL has not finished is asked for again
// and again, for `timeout` at most, and can be aborted at any time. Calls then go over a second communicator of the
// same ranks, split off the first, that blocks: from NCCL 2.23 on, every group of a communicator that does not block
// starts a thread and is waited for by polling, some 100 us of the host for each exchange. A call that hangs in it is
// ended by Abort(). Before 2.18 there is no such split, and groups start no threads: there the first communicator is
// used.
class NcclTransport final : public Transport {
 public:
  // Joins the communicator `id` as one of `size` ranks, which all do so; the GPU is the current one. Throws
  // std::runtime_error with NCCL's text, also when the others have not come within `timeout`. `library` outlives it.
  // `enter` makes that GPU current for threads of its own: NCCL leaves a thread on the GPU that it came with.
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
  // Waits until `result`, which `call` has given for `comm`, is no longer "in progress"; throws unless it is then a
  // success.
  void Settle(Comm comm, Result result, const char* call);
  void Settle(Result result, const char* call) { Settle(comm_, result, call); }
  // What `work` returns, from a thread of its own, for it may block; throws when it has not returned in time.
  Result InTime(std::function<Result()> work, const char* call) const;
  template <class Call>
  void InGroup(const char* name, const Call& call);
  std::string Text(Result result, const char* call) const;
  std::string LateText(const char* call) const;

  const Functions& nccl_;
  std::size_t size_;
  std::size_t rank_;
  std::chrono::duration<double> timeout_;
  std::function<void()> enter_;
  Comm joined_ = nullptr;  // until its split has been made
  Comm split_ = nullptr;   // NCCL writes it when it has been
  std::atomic<Comm> comm_{nullptr};
};

}  // namespace zcomm::nccl
