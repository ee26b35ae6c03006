#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "block_kernels.h"

namespace zcomm {

// Outputs of at least this many bytes are written past the caches. Measured with a last-level cache of 32 MiB: below
// about that size, the reader of a decoded tensor is faster if it finds it in the cache.
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

// The number of elements in the whole blocks that make about one tile; kTileNumel for cast codecs.
std::size_t TileOfBlocks(const MessageLayout& layout);

// Buffers for tiles of float32 values, reused from tile to tile. Each thread has its own.
struct Workspace {
  std::vector<float> values;
  std::vector<float> terms;
  std::vector<float> uniform;
};

// How values of messages are stored: each clamped to +-limit (block codecs), summed, divided, converted to `dtype`, and
// written past the caches if `stream`.
struct DecodeTarget {
  float limit;
  float divisor;
  DType dtype;
  bool stream;
};

// The target of a sum that is processed further in float32.
inline constexpr float kLargest = std::numeric_limits<float>::max();
inline constexpr DecodeTarget kToFloat{kLargest, 1.0F, DType::kFloat32, false};

// Decodes and sums elements [begin, end) of a segment of the messages. `out` points to the output of element `begin`,
// which is even.
void DecodeSumRange(const BlockKernels& kernels, const MessageLayout& layout, const ConstMessages& input,
                    std::size_t segment, std::size_t begin, std::size_t end, const DecodeTarget& target, void* out,
                    Workspace* workspace);

// Random numbers for stochastic rounding, starting with that of `element`.
struct DrawFrom {
  const Draw* draw;  // null: rounding to nearest
  std::uint64_t element;
};

// Quantizes elements [begin, end) of a segment of a message; `x` points to element `begin`. `begin` is a multiple of
// the block; so is `end`, unless it is the segment's end. A cast codec takes any range.
void QuantizeRange(const BlockKernels& kernels, const MessageLayout& layout, std::size_t segment, std::size_t begin,
                   std::size_t end, DType dtype, const void* x, const DrawFrom& from, std::uint8_t* message,
                   Workspace* workspace);

}  // namespace zcomm
