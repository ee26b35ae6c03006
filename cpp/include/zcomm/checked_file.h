#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "zcomm/page_checksums.h"

namespace zcomm {

// A file with a checksum for each page, so that a read finds data that differ from what was written:
//
//     page 0     magic "ZEROFILE", version, bytes of a page (uint32 each), bytes of data (uint64), CRC-32C of these
//     data       whole pages
//     table      the CRC-32C of each page of data, uint32, padded with zeros to whole pages
//
// Integers are little-endian. Reads are compared with the table in memory, so that a lost write is found, too: the page
// on the disk then matches the old checksum and not the new one. The table in the file is as of the last WriteTable.
// After a crash, pages written since then are reported as damaged, and never accepted.
//
// Thread-safe for pages that do not overlap.
class CheckedFile {
 public:
  // For a new file with `nbytes` of data, all zeros, rounded up to whole pages. Writes nothing: see WriteNew.
  explicit CheckedFile(std::uint64_t nbytes);

  static constexpr std::size_t kDataOffset = kPageNbytes;
  // Size in bytes of a file with `nbytes` of data: page 0, data and table.
  static std::uint64_t FileNbytes(std::uint64_t nbytes);
  std::uint64_t data_nbytes() const { return num_pages_ * kPageNbytes; }

  // Writes page 0 and the table of a new file. Returns errno, or 0.
  int WriteNew(int descriptor);
  // Reads page 0 and the table of an existing file into *file. Returns errno, or 0; EBADMSG if page 0 or the file's
  // size is wrong.
  static int Load(int descriptor, std::unique_ptr<CheckedFile>* file);

  // Records the checksums of pages that are about to be written. Call it before the write starts.
  void RecordChecksums(std::uint64_t first_page, const void* data, std::size_t num_pages);
  // The index, counted from `first_page`, of the first page whose checksum differs from the recorded one; `num_pages`
  // if none does.
  std::size_t FirstMismatch(std::uint64_t first_page, const void* data, std::size_t num_pages);
  // Writes the table into the file, without syncing it. Returns errno, or 0.
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
  // Guards table_ and its copy in the file. Several threads call RecordChecksums and FirstMismatch while
  // FileQueue::Sync is in WriteTable; without the lock these race, and the file may get a half-updated table.
  std::mutex mutex_;
  Pages table_;
};

}  // namespace zcomm
