#include "zcomm/checked_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "test_util.h"
#include "zcomm/file_queue.h"

namespace zcomm {
namespace {

constexpr std::size_t kPage = kPageNbytes;

struct Free {
  void operator()(std::uint8_t* data) const { std::free(data); }
};
using Buffer = std::unique_ptr<std::uint8_t, Free>;

Buffer MakeBuffer(std::size_t nbytes, std::uint64_t seed) {
  Buffer buffer(static_cast<std::uint8_t*>(std::aligned_alloc(kPage, nbytes)));
  Random random(seed);
  for (std::size_t i = 0; i < nbytes; ++i) buffer.get()[i] = static_cast<std::uint8_t>(random.Next());
  return buffer;
}

// Direct access to a file's bytes, not through a queue.
class Raw {
 public:
  explicit Raw(const std::string& path) : number_(::open(path.c_str(), O_RDWR)) { EXPECT(number_ >= 0, "open"); }
  ~Raw() { ::close(number_); }
  void Flip(std::uint64_t at) {
    std::uint8_t byte = 0;
    EXPECT(::pread(number_, &byte, 1, static_cast<off_t>(at)) == 1, "pread");
    byte ^= 0x10;
    EXPECT(::pwrite(number_, &byte, 1, static_cast<off_t>(at)) == 1, "pwrite");
  }
  std::uint64_t Nbytes() {
    struct stat status{};
    EXPECT(::fstat(number_, &status) == 0, "fstat");
    return static_cast<std::uint64_t>(status.st_size);
  }

 private:
  int number_;
};

template <class Call>
std::string TextOfError(int number, const Call& call) {
  try {
    call();
  } catch (const FileError& error) {
    EXPECT(error.number() == number, "%d: %s", error.number(), error.what());
    return error.what();
  }
  EXPECT(false, "expected FileError %d", number);
  return "";
}

void TestWhatIsWrittenIsRead(const std::string& path, bool may_use_ring) {
  constexpr std::size_t kPages = 2000;  // two pages of checksums
  FileQueue queue(3, 8 * kPage, may_use_ring);
  const int file = queue.Create(path, kPages * kPage - 5, FileKind::kChecked);
  EXPECT(queue.Size(file) == kPages * kPage, "whole pages");
  EXPECT(
      Raw(path).Nbytes() == CheckedFile::FileNbytes(kPages * kPage) && Raw(path).Nbytes() == (1 + kPages + 2) * kPage,
      "bytes of the file");
  const Buffer data = MakeBuffer(kPages * kPage, 1);
  const Buffer back = MakeBuffer(kPages * kPage, 2);
  queue.Wait(queue.Read(file, 0, back.get(), kPages * kPage));
  EXPECT(std::all_of(back.get(), back.get() + kPages * kPage, [](std::uint8_t byte) { return byte == 0; }), "new");
  // Two threads at once, with neighboring entries in one page of checksums.
  std::thread odd([&] {
    for (std::size_t at = 100; at < kPages; at += 200)
      queue.Wait(queue.Write(file, at * kPage, data.get() + at * kPage, 100 * kPage));
  });
  for (std::size_t at = 0; at < kPages; at += 200)
    queue.Wait(queue.Write(file, at * kPage, data.get() + at * kPage, 100 * kPage));
  odd.join();
  queue.Wait(queue.Read(file, 0, back.get(), kPages * kPage));
  EXPECT(std::memcmp(data.get(), back.get(), kPages * kPage) == 0, "same queue");
  queue.Sync(file);
  queue.Close(file);
  const int again = queue.Open(path, FileKind::kChecked);
  EXPECT(queue.Size(again) == kPages * kPage, "size");
  queue.Wait(queue.Read(again, 3 * kPage, back.get(), 50 * kPage));
  EXPECT(std::memcmp(data.get() + 3 * kPage, back.get(), 50 * kPage) == 0, "opened again");
  EXPECT(
      Contains(MessageOfThrow([&] { queue.Read(again, (kPages - 1) * kPage, back.get(), 2 * kPage); }), "end within"),
      "beyond the data");
  queue.Wait(queue.Read(again, kPages * kPage, back.get(), 0));
  queue.Close(again);
  ::unlink(path.c_str());
}

void TestDamageIsFound(const std::string& path, bool may_use_ring) {
  constexpr std::size_t kPages = 12;
  FileQueue queue(2, 4 * kPage, may_use_ring);
  const int file = queue.Create(path, kPages * kPage, FileKind::kChecked);
  const Buffer data = MakeBuffer(kPages * kPage, 3);
  const Buffer back = MakeBuffer(kPages * kPage, 4);
  queue.Wait(queue.Write(file, 0, data.get(), kPages * kPage));
  const auto read = [&] { queue.Wait(queue.Read(file, 0, back.get(), kPages * kPage)); };
  Raw raw(path);
  for (std::size_t page = 0; page < kPages; ++page) {
    raw.Flip((1 + page) * kPage + 17 * page);
    const std::string text = TextOfError(EBADMSG, read);
    const std::string where =
        std::to_string(page % 4 * kPage) + " of 16384 bytes at offset " + std::to_string(page / 4 * 4 * kPage);
    EXPECT(Contains(text, "checksum mismatch after " + where), "%s", text.c_str());
    raw.Flip((1 + page) * kPage + 17 * page);
    read();
  }
  // A lost write: the old data are intact, but are not what was written last.
  const Buffer newer = MakeBuffer(kPage, 5);
  queue.Wait(queue.Write(file, 2 * kPage, newer.get(), kPage));
  const int descriptor = ::open(path.c_str(), O_RDWR);
  EXPECT(::pwrite(descriptor, data.get() + 2 * kPage, kPage, 3 * kPage) == kPage, "pwrite");
  TextOfError(EBADMSG, read);
  queue.Wait(queue.Write(file, 2 * kPage, newer.get(), kPage));
  read();
  // The file is truncated behind the queue's back. Two requests fail, the one at the higher offset first, because none
  // of its data are left. The error must always name the lower offset.
  EXPECT(::ftruncate(descriptor, 8 * kPage) == 0, "ftruncate");
  for (int i = 0; i < 100; ++i) {
    const std::string text = TextOfError(ENODATA, read);
    EXPECT(Contains(text, "read 12288 of 16384 bytes at offset 16384"), "%s", text.c_str());
  }
  ::close(descriptor);
  queue.Close(file);
  ::unlink(path.c_str());
}

void TestDamagedFilesAreNotOpened(const std::string& path) {
  FileQueue queue(1, kPage);
  const Buffer data = MakeBuffer(2 * kPage, 6);
  const int file = queue.Create(path, 2 * kPage, FileKind::kChecked);
  queue.Wait(queue.Write(file, 0, data.get(), 2 * kPage));
  queue.Sync(file);
  queue.Close(file);
  const auto open = [&] { queue.Close(queue.Open(path, FileKind::kChecked)); };
  open();
  Raw raw(path);
  for (const std::uint64_t at : {0, 7, 8, 12, 16, 23, 24, 27}) {  // magic, version, page, length, checksum
    raw.Flip(at);
    EXPECT(Contains(TextOfError(EBADMSG, open), "not a file with checksums"), "byte %d", static_cast<int>(at));
    raw.Flip(at);
  }
  raw.Flip(3 * kPage);  // the checksum of page 0
  const int again = queue.Open(path, FileKind::kChecked);
  TextOfError(EBADMSG, [&] { queue.Wait(queue.Read(again, 0, data.get(), kPage)); });
  queue.Wait(queue.Read(again, kPage, data.get(), kPage));
  queue.Close(again);
  EXPECT(::truncate(path.c_str(), 3 * kPage) == 0, "truncate");
  TextOfError(EBADMSG, open);
  EXPECT(::truncate(path.c_str(), 0) == 0, "truncate");
  TextOfError(EBADMSG, open);
  ::unlink(path.c_str());
}

}  // namespace
}  // namespace zcomm

int main() {
  char folder[] = "checked_file_test.XXXXXX";
  EXPECT(mkdtemp(folder) != nullptr, "mkdtemp");
  const std::string path = std::string(folder) + "/data";
  for (const bool may_use_ring : {false, true}) {  // without io_uring, this runs twice with threads
    zcomm::TestWhatIsWrittenIsRead(path, may_use_ring);
    zcomm::TestDamageIsFound(path, may_use_ring);
  }
  zcomm::TestDamagedFilesAreNotOpened(path);
  EXPECT(::rmdir(folder) == 0, "files were left in %s", folder);
  return 0;
}
