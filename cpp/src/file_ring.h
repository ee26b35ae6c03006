#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace zcomm {

// The kernel's queue of file operations, io_uring, where liburing was found at build time and the kernel allows it.
// Begin and WaitForSome are for one thread, Wake for any. Nothing is allocated after Make.
class FileRing {
 public:
  struct Operation {
    int descriptor = -1;
    bool is_write = false;
    std::uint64_t offset = 0;
    std::uint8_t* data = nullptr;
    std::size_t nbytes = 0;
  };

  // For `depth` operations at a time, or null.
  static std::unique_ptr<FileRing> Make(std::size_t depth);
  virtual ~FileRing() = default;

  // Begins an operation in a slot, 0 to depth - 1, that has none. Returns errno, or 0.
  virtual int Begin(std::size_t slot, const Operation& operation) = 0;
  // Returns when an operation has ended or Wake was called. Calls `ended` with each slot and the bytes moved, or minus
  // errno; it may begin another in that slot.
  virtual void WaitForSome(const std::function<void(std::size_t slot, int result)>& ended) = 0;
  virtual void Wake() = 0;
};

}  // namespace zcomm
