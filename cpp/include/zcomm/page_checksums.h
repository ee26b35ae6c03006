#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm {

inline constexpr std::size_t kPageNbytes = 4096;

// CRC-32C (Castagnoli; the check value of "123456789" is 0xE3069283) of `nbytes` bytes. `before` is the checksum of
// what precedes them.
std::uint32_t Crc32c(const void* data, std::size_t nbytes, std::uint32_t before = 0);

// The CRC-32C of each of `num_pages` pages of kPageNbytes, on this thread: with the instruction of SSE 4.2 or ARMv8
// where the CPU has it, several pages at a time, else by tables.
void PageChecksums(const void* data, std::size_t num_pages, std::uint32_t* checksums);

// The same by tables alone.
void PageChecksumsByTables(const void* data, std::size_t num_pages, std::uint32_t* checksums);

}  // namespace zcomm
