#pragma once

#include <chrono>
#include <string>

#include "device.h"
#include "nccl_library.h"

namespace zcomm::nccl {

// A new name for a communicator; one rank makes it and tells the others.
UniqueId MakeUniqueId(const Library& library);

// A hop over NCCL. Its communicator does not block the host: what NCCL has not finished by itself (connections are made
// at the first use) is asked for again and again, for `timeout` at most.
class NcclTransport final : public Transport {
 public:
  // Joins the communicator `id` as one of `size` ranks, which all do so; the GPU is the current one. Throws
  // std::runtime_error with NCCL's text, also when the others have not come within `timeout`. `library` outlives it.
  NcclTransport(const Library* library, const UniqueId& id, std::size_t size, std::size_t rank,
                std::chrono::duration<double> timeout);
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
  // Waits until `result`, which `call` has given, is no longer "in progress"; throws unless it is then a success.
  void Settle(Result result, const char* call);
  template <class Call>
  void InGroup(const char* name, const Call& call);
  std::string Text(Result result, const char* call) const;

  const Functions& nccl_;
  std::size_t size_;
  std::size_t rank_;
  std::chrono::duration<double> timeout_;
  Comm comm_ = nullptr;
};

}  // namespace zcomm::nccl
