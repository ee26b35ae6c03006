#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm {

// Element types of arrays. Python passes the values as integers: do not renumber them.
enum class DType : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

inline constexpr std::size_t kNumDTypes = 3;

// Bytes of one element.
constexpr std::size_t ItemSize(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Rows of elements: segment s of message i is data[i * message_stride + s * segment_stride + (0 .. segment_numel)].
// Strides are in elements. `data` is aligned to ItemSize(dtype) and not owned. Rows that are written must not overlap.
struct ConstRows {
  DType dtype;
  const void* data;
  std::size_t message_stride;
  std::size_t segment_stride;
};

struct MutableRows {
  DType dtype;
  void* data;
  std::size_t message_stride;
  std::size_t segment_stride;
};

// `count` messages of one layout. Message i starts at data + i * stride_nbytes, aligned to 4 bytes. `layout_hash` is
// what the trailer of a block-codec message holds. `data` is not owned. Messages that are written must not overlap.
struct ConstMessages {
  const std::uint8_t* data;
  std::size_t stride_nbytes;
  std::size_t count;
  std::uint32_t layout_hash;
};

struct MutableMessages {
  std::uint8_t* data;
  std::size_t stride_nbytes;
  std::size_t count;
  std::uint32_t layout_hash;
};

}  // namespace zcomm
