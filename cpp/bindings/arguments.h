#pragma once

#include <cstdint>

#include "zcomm/arrays.h"
#include "zcomm/check.h"
#include "zcomm/message_layout.h"

// Converts arguments from Python to those of the operations.
namespace zcomm::bindings {

// Python ints arrive as signed integers, so that a negative one is an error instead of wrapping around.
inline std::size_t Size(const char* name, std::int64_t value) {
  ZCOMM_CHECK(value >= 0, name, " must not be negative: ", name, "=", value);
  return static_cast<std::size_t>(value);
}

inline MessageLayout Layout(int codec, std::int64_t block, bool is_rotated, std::int64_t num_segments,
                            std::int64_t segment_numel) {
  ZCOMM_CHECK(IsCodec(codec), "unknown codec id: codec=", codec);
  return MakeMessageLayout(static_cast<Codec>(codec), Size("block", block), Size("num_segments", num_segments),
                           Size("segment_numel", segment_numel), is_rotated);
}

inline DType MakeDType(int dtype) {
  ZCOMM_CHECK(dtype >= 0 && dtype < static_cast<int>(kNumDTypes), "unknown dtype id: dtype=", dtype);
  return static_cast<DType>(dtype);
}

template <class Rows>
Rows MakeRows(int dtype, std::uintptr_t pointer, std::int64_t message_stride, std::int64_t segment_stride) {
  return {MakeDType(dtype), reinterpret_cast<void*>(pointer), Size("message_stride", message_stride),
          Size("segment_stride", segment_stride)};
}

template <class Messages>
Messages MakeMessages(std::uintptr_t pointer, std::int64_t stride_nbytes, std::int64_t count, std::uint32_t hash) {
  return {reinterpret_cast<std::uint8_t*>(pointer), Size("stride_bytes", stride_nbytes), Size("num_messages", count),
          hash};
}

}  // namespace zcomm::bindings
