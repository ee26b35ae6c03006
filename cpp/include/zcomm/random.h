#pragma once

#include <array>
#include <cstdint>

namespace zcomm {

// Names the random numbers of one encoding (N6 of zcomm/_formats/reference.py): one for each element, by its position e
// in memory. With n = first + e, it is word n % 4 of Philox4x32-10 at the counter (n / 4 mod 2^32, step,
// hop + 256 * (n / 2^34), rank) under the key (seed, tensor), shifted right by 8. There is no state: any element can be
// encoded on any thread, in any order, with the same bits.
struct Draw {
  std::uint32_t seed;
  std::uint32_t tensor;
  std::uint32_t step;
  std::uint32_t hop;
  std::uint32_t rank;
  std::uint64_t first;
};

// Philox4x32-10 of "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
std::array<std::uint32_t, 4> Philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

// The random number of element `element`, an integer in [0, 2^24) as a float. The vector kernels must give these bits.
float Uniform24(const Draw& draw, std::uint64_t element);

}  // namespace zcomm
