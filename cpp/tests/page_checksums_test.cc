#include "zcomm/page_checksums.h"

#include "test_util.h"

namespace zcomm {
namespace {

// One bit at a time, by the definition.
std::uint32_t ByBits(const std::uint8_t* data, std::size_t nbytes) {
  std::uint32_t crc = ~std::uint32_t{0};
  for (std::size_t i = 0; i < nbytes * 8; ++i) {
    const bool bit = (((data[i / 8] >> (i % 8)) ^ crc) & 1) != 0;
    crc = (crc >> 1) ^ (bit ? 0x82F63B78U : 0U);
  }
  return ~crc;
}

void TestChecksumOfBytes() {
  EXPECT(Crc32c("123456789", 9) == 0xE3069283U, "check value");
  Random random(1);
  std::uint8_t data[100];
  for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random.Next());
  for (std::size_t nbytes = 0; nbytes <= sizeof(data); ++nbytes) {
    EXPECT(Crc32c(data, nbytes) == ByBits(data, nbytes), "nbytes %zu", nbytes);
    EXPECT(Crc32c(data + nbytes / 3, nbytes - nbytes / 3, Crc32c(data, nbytes / 3)) == ByBits(data, nbytes),
           "in two parts, nbytes %zu", nbytes);
  }
}

void TestChecksumsOfPages() {
  Random random(2);
  for (std::size_t num_pages = 0; num_pages <= 9; ++num_pages) {
    std::vector<std::uint8_t> data(num_pages * kPageNbytes);
    for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random.Next());
    std::vector<std::uint32_t> fast(num_pages + 1, 7);
    std::vector<std::uint32_t> slow(num_pages + 1, 7);
    PageChecksums(data.data(), num_pages, fast.data());
    PageChecksumsByTables(data.data(), num_pages, slow.data());
    for (std::size_t page = 0; page < num_pages; ++page) {
      const std::uint32_t expected = ByBits(data.data() + page * kPageNbytes, kPageNbytes);
      EXPECT(fast[page] == expected && slow[page] == expected, "page %zu of %zu", page, num_pages);
    }
    EXPECT(fast[num_pages] == 7 && slow[num_pages] == 7, "beyond the end");
  }
}

}  // namespace
}  // namespace zcomm

int main() {
  zcomm::TestChecksumOfBytes();
  zcomm::TestChecksumsOfPages();
  return 0;
}
