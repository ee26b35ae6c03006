#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace zcomm {

// Reads or writes `nbytes`, continuing after short counts and signals. Returns 0, or the errno that stopped it: ENODATA
// at the end of the file. *done is the number of bytes moved.
inline int MoveBytes(int descriptor, bool is_write, std::uint64_t offset, std::uint8_t* data, std::size_t nbytes,
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

}  // namespace zcomm
