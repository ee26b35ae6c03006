#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "zcomm/page_checksums.h"

namespace zcomm {

// A file that carries what is needed to tell whether its data are those that were written:
//
//     page 0     magic "ZEROFILE", version, bytes of a page (uint32 each), bytes of data (uint64), CRC-32C of these
//     data       whole pages
//     table      the CRC-32C of each page of data, uint32, padded with zeros to whole pages
//
// Integers are little-endian. The table in memory is the one that data are compared with: it also finds a write that
// was lost. The file's own is as of the last WriteTable; what was written since is then taken for damaged, never for
// right. The functions may be called from several threads, for pages that do not overlap.
class CheckedFile {
 public:
  // Of a new file with `nbytes` of data, rounded up to whole pages: zeros.
  explicit CheckedFile(std::uint64_t nbytes);

  static constexpr std::size_t kDataOffset = kPageNbytes;
  // Bytes of a file with `nbytes` of data.
  static std::uint64_t FileNbytes(std::uint64_t nbytes);
  std::uint64_t data_nbytes() const { return num_pages_ * kPageNbytes; }

  // Page 0 and the table of a new file. Returns errno, or 0.
  int WriteNew(int descriptor);
  // From a file that exists. EBADMSG if it is none of these files, or is damaged.
  static int Load(int descriptor, std::unique_ptr<CheckedFile>* file);

  // Keeps the checksums of pages that are about to be written.
  void Keep(std::uint64_t first_page, const void* data, std::size_t num_pages);
  // The first page whose data differ from what was kept, counted from `first_page`; `num_pages` if none does.
  std::size_t FirstWrong(std::uint64_t first_page, const void* data, std::size_t num_pages);
  // Writes the table. Returns errno, or 0.
  int WriteTable(int descriptor);

 private:
  struct Free {
    void operator()(std::uint8_t* data) const;
  };
  using Pages = std::unique_ptr<std::uint8_t, Free>;
  static Pages MakePages(std::uint64_t nbytes);

  static std::uint64_t TableNbytes(std::uint64_t num_pages);
  std::uint32_t* table() { return reinterpret_cast<std::uint32_t*>(table_.get()); }

  const std::uint64_t num_pages_;
  std::mutex mutex_;  // of the table, in memory and in the file
  Pages table_;
};

}  // namespace zcomm
