// Files of any content, opened as files with checksums: they are refused, or every page can be compared and the table
// written and read again.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "zcomm/checked_file.h"
#include "zcomm/page_checksums.h"

namespace {

constexpr std::size_t kCheckedNbytes = 24;  // of the header, before its checksum

void Expect(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

// One byte of switches, one of whole pages, then the file's beginning.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const bool fixes_checksum = (data[0] & 1) != 0, fixes_size = (data[0] & 2) != 0;
  const std::size_t num_pages = data[1] % 16;
  std::vector<std::uint8_t> content(data + 2, data + size);
  if (fixes_size && content.size() >= kCheckedNbytes) {
    const std::uint64_t nbytes = num_pages * zcomm::kPageNbytes;
    std::memcpy(content.data() + 16, &nbytes, sizeof(nbytes));
  }
  if (fixes_checksum && content.size() >= kCheckedNbytes + 4) {
    const std::uint32_t checksum = zcomm::Crc32c(content.data(), kCheckedNbytes);
    std::memcpy(content.data() + kCheckedNbytes, &checksum, sizeof(checksum));
  }
  const int descriptor = ::memfd_create("fuzz", 0);
  Expect(descriptor >= 0);
  Expect(::write(descriptor, content.data(), content.size()) == static_cast<ssize_t>(content.size()));
  if ((data[0] & 4) == 0) {
    const auto whole = static_cast<off_t>(zcomm::CheckedFile::FileNbytes(num_pages * zcomm::kPageNbytes));
    Expect(::ftruncate(descriptor, whole) == 0);
  }
  std::unique_ptr<zcomm::CheckedFile> file;
  if (zcomm::CheckedFile::Load(descriptor, &file) == 0) {
    const std::size_t count = file->data_nbytes() / zcomm::kPageNbytes;
    std::vector<std::uint8_t> pages(file->data_nbytes());
    const auto got = ::pread(descriptor, pages.data(), pages.size(), zcomm::CheckedFile::kDataOffset);
    Expect(got == static_cast<ssize_t>(pages.size()));
    Expect(file->FirstMismatch(0, pages.data(), count) <= count);
    file->RecordChecksums(0, pages.data(), count);
    Expect(file->FirstMismatch(0, pages.data(), count) == count);
    Expect(file->WriteTable(descriptor) == 0);
    std::unique_ptr<zcomm::CheckedFile> again;
    Expect(zcomm::CheckedFile::Load(descriptor, &again) == 0);
    Expect(again->FirstMismatch(0, pages.data(), count) == count);
  } else {
    Expect(file == nullptr);
  }
  ::close(descriptor);
  return 0;
}
