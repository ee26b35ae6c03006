#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm {

// Changes of bfloat16 and float16 arrays in units in the last place, coded losslessly. The format and what each part
// means are in zcomm/_formats/ulps_reference.py. One thread. A message that is refused throws std::invalid_argument.

inline constexpr std::size_t kUlpsHeadNbytes = 28;

// The longest message of `numel` elements.
std::size_t UlpsMaxMessageNbytes(std::size_t numel);

// The length of the message of which `head` has the first `nbytes` bytes, at least kUlpsHeadNbytes.
std::size_t UlpsMessageNbytes(const std::uint8_t* head, std::size_t nbytes);

// Writes the change from the bits `old_bits` to `new_bits` and returns the bytes used. `message` has room for
// UlpsMaxMessageNbytes(numel) and overlaps neither array.
std::size_t EncodeUlps(const std::uint16_t* new_bits, const std::uint16_t* old_bits, std::size_t numel,
                       std::uint8_t* message, std::size_t capacity);

// Replaces the old bits in `values` by the new ones. `nbytes` is the length of the message or more. A message that
// does not fit its checksums leaves `values` as they are; one that does, but is none, may leave anything in them. Reads
// and writes nothing else in any case.
void DecodeUlps(const std::uint8_t* message, std::size_t nbytes, std::uint16_t* values, std::size_t numel);

}  // namespace zcomm
