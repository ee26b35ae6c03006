#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ulps_kernels.h"

namespace zcomm::ulps {

struct Values {
  const std::uint16_t* new_bits;
  const std::uint16_t* old_bits;
};

struct Payload {
  std::size_t nbytes;  // a multiple of 4
  Kind kind;
};

inline std::uint32_t LoadU32(const std::uint8_t* from) {
  std::uint32_t word = 0;
  std::memcpy(&word, from, sizeof(word));
  return word;
}
inline void StoreU32(std::uint8_t* to, std::uint32_t word) { std::memcpy(to, &word, sizeof(word)); }

constexpr std::size_t RawNbytes(std::size_t numel) { return (2 * numel + 3) / 4 * 4; }

// The kernels of ActiveIsa(), chosen once in a process.
const UlpsKernels& ActiveUlpsKernels();

// Writes the payload of `numel` > 0 elements to `out`, which has room for RawNbytes(numel). `symbols` is scratch for
// them.
Payload EncodeChunk(const Values& values, std::size_t numel, std::uint8_t* symbols, std::uint8_t* out);

// Decodes chunks from their entries and the payloads behind them, whose sizes add up. Throws std::invalid_argument if a
// payload is none.
void DecodeChunks(const std::uint8_t* entries, std::size_t num_chunks, std::size_t chunk_numel, std::uint16_t* values,
                  std::size_t numel);

}  // namespace zcomm::ulps
