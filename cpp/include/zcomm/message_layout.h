#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/arrays.h"

namespace zcomm {

// How elements are coded. The values are part of the interface to Python. The first three equal DType's: the message is
// a plain array of that type (a cast codec). The others are block codecs.
enum class Codec : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3, kInt4 = 4 };

inline constexpr std::size_t kNumCodecs = 5;
inline constexpr std::size_t kMinBlock = 2;
inline constexpr std::size_t kMaxBlock = 65536;

constexpr bool IsBlockCodec(Codec codec) { return codec == Codec::kInt8 || codec == Codec::kInt4; }

// The largest code of a block codec.
constexpr int QMax(Codec codec) { return codec == Codec::kInt8 ? 127 : 7; }

// Where the parts of a message lie. Sizes and offsets in bytes unless they end in _numel.
//
//   block codec:  | scales bf16 [num_segments][blocks_per_segment] | 0 to 16 | codes [num_segments] | 0 | trailer 8 |
//   cast codec:   | elements [num_segments][segment_numel] |
//
// A block never straddles two segments; a segment's last block may be short. int4 codes: two's complement nibbles, the
// even element in the low one; every segment starts on a byte. Trailer: uint32 layout hash, uint32 checksum (written as
// 0). All little endian.
struct MessageLayout {
  Codec codec;
  std::size_t block;  // 0 for cast codecs
  std::size_t num_segments;
  std::size_t segment_numel;
  std::size_t blocks_per_segment;    // 0 for cast codecs
  std::size_t codes_offset;          // 0 for cast codecs
  std::size_t segment_codes_nbytes;  // bytes of one segment's codes or elements
  std::size_t nbytes;                // of the whole message; a multiple of 16 for block codecs

  std::size_t numel() const { return num_segments * segment_numel; }
  std::size_t trailer_offset() const { return nbytes - 8; }
};

// Throws std::invalid_argument when the block of a block codec is odd or outside kMinBlock..kMaxBlock, or when a size
// exceeds 2^62 bytes. A cast codec ignores `block`.
MessageLayout MakeMessageLayout(Codec codec, std::size_t block, std::size_t num_segments, std::size_t segment_numel);

// Writes the zero padding and the trailer of a block-codec message; nothing for a cast codec.
void WriteTrailer(const MessageLayout& layout, std::uint32_t layout_hash, std::uint8_t* message);

// Throws std::invalid_argument, naming the message's index and both hashes, when a message of a block codec does not
// carry `messages.layout_hash`. Nothing to check for a cast codec.
void CheckTrailers(const MessageLayout& layout, const ConstMessages& messages);

// The checks that every operation makes of its arguments: pointers aligned and not null unless nothing is there, at
// least one thread. Throws std::invalid_argument.
void CheckRows(const MessageLayout& layout, const ConstRows& rows, const char* name);
void CheckMessages(const MessageLayout& layout, const ConstMessages& messages, const char* name);
void CheckThreads(std::size_t num_threads);

inline ConstRows AsConst(const MutableRows& rows) {
  return {rows.dtype, rows.data, rows.message_stride, rows.segment_stride};
}
inline ConstMessages AsConst(const MutableMessages& messages) {
  return {messages.data, messages.stride_nbytes, messages.count, messages.layout_hash};
}

}  // namespace zcomm
