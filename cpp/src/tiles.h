#pragma once

#include <cstddef>
#include <cstdint>

#include "block_kernels.h"

namespace zcomm {

// Outputs of at least this many bytes bypass the caches: measured with a last-level cache of 32 MiB, a reader that
// comes right after the decode is served faster from there up to about that size.
inline constexpr std::size_t kStreamNbytes = std::size_t{32} << 20;

// Address of an element of an array of `dtype`.
inline const void* ElementAt(const void* data, DType dtype, std::size_t index) {
  return static_cast<const std::uint8_t*>(data) + index * ItemSize(dtype);
}
inline void* ElementAt(void* data, DType dtype, std::size_t index) {
  return static_cast<std::uint8_t*>(data) + index * ItemSize(dtype);
}

// One segment of one message as a CodeRange, of `numel` elements from `begin`.
inline CodeRange RangeOf(const MessageLayout& layout, const std::uint8_t* message, std::size_t segment,
                         std::size_t begin, std::size_t numel) {
  return {message + 2 * segment * layout.blocks_per_segment,
          message + layout.codes_offset + segment * layout.segment_codes_nbytes, layout.block, begin, numel};
}

template <class Enum>
constexpr std::size_t Index(Enum value) {
  return static_cast<std::size_t>(value);
}

// Rounds at most kTileNumel values to `dtype` and writes them to `out`.
void StoreTile(const BlockKernels& kernels, const float* values, std::size_t numel, DType dtype, void* out,
               bool stream);

// Quantizes elements [begin, end) of segment `segment` of a message from `x`, which points at element `begin`. `begin`
// is a multiple of the block; `end` too, or the segment's end. Cast codecs: any range.
void QuantizeRange(const BlockKernels& kernels, const MessageLayout& layout, std::size_t segment, std::size_t begin,
                   std::size_t end, DType dtype, const void* x, std::uint8_t* message);

}  // namespace zcomm
