#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace zcomm {

// io_uring, the kernel's queue of file operations, where liburing was found at build time and the kernel allows it.
// One thread calls StartOperation and WaitForSome: the submission and completion queues have no lock. Any thread may
// call Wake. Nothing is allocated after Make.
class FileRing {
 public:
  struct Operation {
    int descriptor = -1;
    bool is_write = false;
    std::uint64_t offset = 0;
    std::uint8_t* data = nullptr;
    std::size_t nbytes = 0;
  };

  // A ring for `depth` operations at a time; null if there is no io_uring.
  static std::unique_ptr<FileRing> Make(std::size_t depth);
  virtual ~FileRing() = default;

  // Starts an operation in a free slot, 0 to depth - 1. Its data must stay valid until it is complete. Returns errno,
  // or 0.
  virtual int StartOperation(std::size_t slot, const Operation& operation) = 0;
  // Returns when an operation is complete or Wake was called. Calls `ended` with the slot of each completed operation
  // and the bytes moved, or minus errno. `ended` may start another operation in that slot.
  virtual void WaitForSome(const std::function<void(std::size_t slot, int result)>& ended) = 0;
  virtual void Wake() = 0;
};

}  // namespace zcomm
