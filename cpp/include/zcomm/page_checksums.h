#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm {

inline constexpr std::size_t kPageNbytes = 4096;

// CRC-32C (Castagnoli; the check value of "123456789" is 0xE3069283) of `nbytes` bytes. `before` is the checksum of the
// bytes that precede them.
std::uint32_t Crc32c(const void* data, std::size_t nbytes, std::uint32_t before = 0);

// The CRC-32C of each of `num_pages` pages of kPageNbytes, on the calling thread. Uses the CRC instruction of SSE 4.2
// or ARMv8, several pages at a time, where the CPU has it; otherwise tables.
void PageChecksums(const void* data, std::size_t num_pages, std::uint32_t* checksums);

// The same with tables, whatever the CPU has.
void PageChecksumsByTables(const void* data, std::size_t num_pages, std::uint32_t* checksums);

}  // namespace zcomm
