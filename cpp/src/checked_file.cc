#include "zcomm/checked_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "file_moves.h"

namespace zcomm {
namespace {

constexpr char kMagic[8] = {'Z', 'E', 'R', 'O', 'F', 'I', 'L', 'E'};
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kEntriesPerPage = kPageNbytes / sizeof(std::uint32_t);

struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint32_t page_nbytes;
  std::uint64_t data_nbytes;
  std::uint32_t checksum;  // of the fields before it
};
constexpr std::size_t kCheckedNbytes = offsetof(Header, checksum);

std::uint64_t PagesOf(std::uint64_t nbytes, std::uint64_t page) { return (nbytes + page - 1) / page; }

int Move(int descriptor, bool is_write, std::uint64_t offset, std::uint8_t* data, std::size_t nbytes) {
  std::size_t done = 0;
  return MoveBytes(descriptor, is_write, offset, data, nbytes, &done);
}

// Calls `body(first, checksums, count)` for the pages in order until it returns false. Allocates nothing: the threads
// of a FileQueue cannot report std::bad_alloc, which would end the process.
using Batch = std::array<std::uint32_t, 256>;
template <class Body>
void ForBatches(const void* data, std::size_t num_pages, const Body& body) {
  Batch checksums;
  for (std::size_t at = 0; at < num_pages; at += checksums.size()) {
    const std::size_t count = std::min(checksums.size(), num_pages - at);
    PageChecksums(static_cast<const std::uint8_t*>(data) + at * kPageNbytes, count, checksums.data());
    if (!body(at, checksums, count)) return;
  }
}

}  // namespace

void CheckedFile::Free::operator()(std::uint8_t* data) const { std::free(data); }

CheckedFile::Pages CheckedFile::MakePages(std::uint64_t nbytes) {
  auto* data =
      static_cast<std::uint8_t*>(std::aligned_alloc(kPageNbytes, std::max<std::uint64_t>(nbytes, kPageNbytes)));
  if (data == nullptr) throw std::bad_alloc();
  std::memset(data, 0, nbytes);
  return Pages(data);
}

CheckedFile::CheckedFile(std::uint64_t nbytes)
    : num_pages_(PagesOf(nbytes, kPageNbytes)), table_(MakePages(TableNbytes(num_pages_))) {
  const std::vector<std::uint8_t> zeros(kPageNbytes);
  std::fill_n(table(), num_pages_, Crc32c(zeros.data(), kPageNbytes));
}

std::uint64_t CheckedFile::TableNbytes(std::uint64_t num_pages) {
  return PagesOf(num_pages, kEntriesPerPage) * kPageNbytes;
}

std::uint64_t CheckedFile::FileNbytes(std::uint64_t nbytes) {
  const std::uint64_t num_pages = PagesOf(nbytes, kPageNbytes);
  return kDataOffset + num_pages * kPageNbytes + TableNbytes(num_pages);
}

int CheckedFile::WriteNew(int descriptor) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.page_nbytes = kPageNbytes;
  header.data_nbytes = data_nbytes();
  header.checksum = Crc32c(&header, kCheckedNbytes);
  const Pages page = MakePages(kPageNbytes);
  std::memcpy(page.get(), &header, sizeof(header));
  const int error = Move(descriptor, true, 0, page.get(), kPageNbytes);
  return error != 0 ? error : WriteTable(descriptor);
}

int CheckedFile::Load(int descriptor, std::unique_ptr<CheckedFile>* file) {
  const Pages page = MakePages(kPageNbytes);
  int error = Move(descriptor, false, 0, page.get(), kPageNbytes);
  if (error != 0) return error == ENODATA ? EBADMSG : error;
  Header header{};
  std::memcpy(&header, page.get(), sizeof(header));
  struct stat status{};
  if (::fstat(descriptor, &status) != 0) return errno;
  const bool is_ours = std::memcmp(header.magic, kMagic, sizeof(kMagic)) == 0 && header.version == kVersion &&
                       header.page_nbytes == kPageNbytes && header.checksum == Crc32c(&header, kCheckedNbytes) &&
                       header.data_nbytes <= static_cast<std::uint64_t>(status.st_size);
  if (!is_ours) return EBADMSG;
  if (FileNbytes(header.data_nbytes) != static_cast<std::uint64_t>(status.st_size)) return EBADMSG;
  auto loaded = std::make_unique<CheckedFile>(header.data_nbytes);
  const std::uint64_t table_offset = kDataOffset + loaded->data_nbytes();
  error = Move(descriptor, false, table_offset, loaded->table_.get(), TableNbytes(loaded->num_pages_));
  if (error == 0) *file = std::move(loaded);
  return error;
}

void CheckedFile::RecordChecksums(std::uint64_t first_page, const void* data, std::size_t num_pages) {
  ForBatches(data, num_pages, [&](std::size_t at, const Batch& checksums, std::size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::copy_n(checksums.begin(), count, table() + first_page + at);
    return true;
  });
}

std::size_t CheckedFile::FirstMismatch(std::uint64_t first_page, const void* data, std::size_t num_pages) {
  std::size_t num_right = 0;
  ForBatches(data, num_pages, [&](std::size_t at, const Batch& checksums, std::size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto end = checksums.begin() + static_cast<std::ptrdiff_t>(count);
    const auto wrong = std::mismatch(checksums.begin(), end, table() + first_page + at).first;
    num_right += static_cast<std::size_t>(wrong - checksums.begin());
    return wrong == end;
  });
  return num_right;
}

int CheckedFile::WriteTable(int descriptor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return Move(descriptor, true, kDataOffset + data_nbytes(), table_.get(), TableNbytes(num_pages_));
}

}  // namespace zcomm
