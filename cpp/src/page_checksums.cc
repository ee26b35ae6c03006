#include "zcomm/page_checksums.h"

#include <array>
#include <cstring>

#ifdef ZCOMM_X86
#include <nmmintrin.h>
#define ZCOMM_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define ZCOMM_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace zcomm {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected
constexpr std::size_t kSlices = 8;
using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

// tables[k][b]: the contribution of byte b, followed by k zero bytes, to the checksum (slicing by 8).
constexpr Tables MakeTables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < kSlices; ++slice) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

std::uint32_t Advance(std::uint32_t crc, const std::uint8_t* data, std::size_t nbytes) {
  for (; nbytes >= kSlices; nbytes -= kSlices, data += kSlices) {
    std::uint32_t next = 0;
    for (std::size_t i = 0; i < kSlices; ++i) {
      const std::uint32_t mixed = data[i] ^ (i < 4 ? crc >> (8 * i) : 0);
      next ^= kTables[kSlices - 1 - i][mixed & 0xFF];
    }
    crc = next;
  }
  for (; nbytes > 0; --nbytes, ++data) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xFF];
  return crc;
}

#ifdef ZCOMM_CRC_TARGET
#ifdef ZCOMM_X86
bool HasInstruction() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2");
}
ZCOMM_CRC_TARGET inline std::uint32_t Step(std::uint32_t crc, std::uint64_t word) {
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
#else
bool HasInstruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
ZCOMM_CRC_TARGET inline std::uint32_t Step(std::uint32_t crc, std::uint64_t word) { return __crc32cd(crc, word); }
#endif

std::uint64_t WordAt(const std::uint8_t* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

ZCOMM_CRC_TARGET std::uint32_t ChecksumPage(const std::uint8_t* page) {
  std::uint32_t crc = ~std::uint32_t{0};
  for (std::size_t at = 0; at < kPageNbytes; at += sizeof(std::uint64_t)) crc = Step(crc, WordAt(page + at));
  return ~crc;
}

// The instruction has a latency of three cycles and a throughput of one: four independent pages keep it busy.
ZCOMM_CRC_TARGET void ChecksumFourPages(const std::uint8_t* first, std::uint32_t* checksums) {
  std::uint32_t a = ~std::uint32_t{0};
  std::uint32_t b = a;
  std::uint32_t c = a;
  std::uint32_t d = a;
  for (const std::uint8_t* at = first; at != first + kPageNbytes; at += sizeof(std::uint64_t)) {
    a = Step(a, WordAt(at));
    b = Step(b, WordAt(at + kPageNbytes));
    c = Step(c, WordAt(at + 2 * kPageNbytes));
    d = Step(d, WordAt(at + 3 * kPageNbytes));
  }
  checksums[0] = ~a;
  checksums[1] = ~b;
  checksums[2] = ~c;
  checksums[3] = ~d;
}

void ChecksumByInstruction(const std::uint8_t* data, std::size_t num_pages, std::uint32_t* checksums) {
  std::size_t page = 0;
  for (; page + 4 <= num_pages; page += 4) ChecksumFourPages(data + page * kPageNbytes, checksums + page);
  for (; page < num_pages; ++page) checksums[page] = ChecksumPage(data + page * kPageNbytes);
}
#endif

}  // namespace

std::uint32_t Crc32c(const void* data, std::size_t nbytes, std::uint32_t before) {
  return ~Advance(~before, static_cast<const std::uint8_t*>(data), nbytes);
}

void PageChecksumsByTables(const void* data, std::size_t num_pages, std::uint32_t* checksums) {
  for (std::size_t page = 0; page < num_pages; ++page) {
    checksums[page] = Crc32c(static_cast<const std::uint8_t*>(data) + page * kPageNbytes, kPageNbytes);
  }
}

void PageChecksums(const void* data, std::size_t num_pages, std::uint32_t* checksums) {
#ifdef ZCOMM_CRC_TARGET
  static const bool has_instruction = HasInstruction();
  if (has_instruction) {
    ChecksumByInstruction(static_cast<const std::uint8_t*>(data), num_pages, checksums);
    return;
  }
#endif
  PageChecksumsByTables(data, num_pages, checksums);
}

}  // namespace zcomm
