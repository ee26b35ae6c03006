#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

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

template <class Enum>
constexpr std::size_t Index(Enum value) {
  return static_cast<std::size_t>(value);
}

// Elements of whole blocks that make about a tile; kTileNumel for cast codecs.
std::size_t TileOfBlocks(const MessageLayout& layout);

// Room for tiles of float32 values, kept from one to the next. One a thread.
struct Workspace {
  std::vector<float> values;
  std::vector<float> terms;
  std::vector<float> uniform;
};

// What becomes of the values of messages: each within +-limit (block codecs), summed, divided, stored as `dtype`, past
// the caches or not.
struct DecodeTarget {
  float limit;
  float divisor;
  DType dtype;
  bool stream;
};

// Where a sum goes on in float32.
inline constexpr float kLargest = std::numeric_limits<float>::max();
inline constexpr DecodeTarget kToFloat{kLargest, 1.0F, DType::kFloat32, false};

// Decodes and sums elements [begin, end) of a segment of the messages; `out` points at element `begin`. `begin` is
// even.
void DecodeSumRange(const BlockKernels& kernels, const MessageLayout& layout, const ConstMessages& input,
                    std::size_t segment, std::size_t begin, std::size_t end, const DecodeTarget& target, void* out,
                    Workspace* workspace);

// Random numbers for stochastic rounding: of the elements from `element` on.
struct DrawFrom {
  const Draw* draw;  // null: rounding to nearest
  std::uint64_t element;
};

// Quantizes elements [begin, end) of segment `segment` of a message from `x`, which points at element `begin`. `begin`
// is a multiple of the block; `end` too, or the segment's end. Cast codecs: any range.
void QuantizeRange(const BlockKernels& kernels, const MessageLayout& layout, std::size_t segment, std::size_t begin,
                   std::size_t end, DType dtype, const void* x, const DrawFrom& from, std::uint8_t* message,
                   Workspace* workspace);

}  // namespace zcomm
