#pragma once

#include <string>

#include "device.h"

namespace zcomm::nccl {

// A hop of one rank: exchanges are copies.
class SingleRank final : public Transport {
 public:
  explicit SingleRank(Device* device) : device_(device) {}

  std::size_t size() const override { return 1; }
  std::size_t rank() const override { return 0; }

  void Gather(const void* send, void* receive, std::size_t /*stride_nbytes*/, std::size_t nbytes,
              Stream stream) override {
    if (send != receive) device_->Copy(receive, send, nbytes, stream);
  }
  void Exchange(const Parts& send, const Parts& receive, std::size_t nbytes, std::size_t repeats,
                Stream stream) override {
    for (std::size_t r = 0; r < repeats; ++r) {
      device_->Copy(receive.data + r * receive.step_nbytes, send.data + r * send.step_nbytes, nbytes, stream);
    }
  }

  std::string AsyncError() override { return ""; }
  void Abort() noexcept override {}
  void* Register(void* /*data*/, std::size_t /*nbytes*/) override { return nullptr; }
  void Deregister(void* /*registration*/) noexcept override {}

 private:
  Device* device_;
};

}  // namespace zcomm::nccl
