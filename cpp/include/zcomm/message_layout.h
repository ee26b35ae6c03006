#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/arrays.h"

namespace zcomm {

// How elements are coded. The values are part of the interface to Python. The first three equal DType's: the message is
// a plain array of that type (a cast codec). The others are block codecs. 5, float64, has no native kernels.
enum class Codec : int {
  kFloat32 = 0,
  kBfloat16 = 1,
  kFloat16 = 2,
  kInt8 = 3,
  kInt4 = 4,
  kNf4 = 6,
  kFp8E4m3 = 7,
  kInt8Asym = 8,
  kInt4Asym = 9,
};

inline constexpr std::size_t kNumCodecs = 10;
inline constexpr std::size_t kTrailerNbytes = 8;
inline constexpr std::size_t kMinBlock = 2;
inline constexpr std::size_t kMaxBlock = 65536;

constexpr bool IsCodec(int number) { return number >= 0 && number < static_cast<int>(kNumCodecs) && number != 5; }
constexpr bool IsBlockCodec(Codec codec) { return codec >= Codec::kInt8; }
// Codes lie in [0, qmax] above a zero point.
constexpr bool HasZeroPoint(Codec codec) { return codec == Codec::kInt8Asym || codec == Codec::kInt4Asym; }
// Codecs that may round stochastically.
constexpr bool IsIntCodec(Codec codec) { return codec == Codec::kInt8 || codec == Codec::kInt4 || HasZeroPoint(codec); }

constexpr std::size_t CodeBits(Codec codec) {
  if (!IsBlockCodec(codec)) return 8 * ItemSize(static_cast<DType>(codec));
  return codec == Codec::kInt4 || codec == Codec::kNf4 || codec == Codec::kInt4Asym ? 4 : 8;
}

// Bytes of a block beside its codes: a bf16 scale, and after it a bf16 zero point.
constexpr std::size_t HeaderNbytes(Codec codec) { return HasZeroPoint(codec) ? 4 : IsBlockCodec(codec) ? 2 : 0; }

// What the scale of a block codec divides by: the largest magnitude of a scaled value.
constexpr int QMax(Codec codec) {
  return codec == Codec::kInt8       ? 127
         : codec == Codec::kInt4     ? 7
         : codec == Codec::kNf4      ? 8
         : codec == Codec::kFp8E4m3  ? 448
         : codec == Codec::kInt8Asym ? 255
                                     : 15;
}

// Where the parts of a message lie. Sizes and offsets in bytes unless they end in _numel.
//
//   block codec:  | headers [num_segments][blocks_per_segment] | 0 to 16 | codes [num_segments] | 0 | trailer 8 |
//   cast codec:   | elements [num_segments][segment_numel] |
//
// A block never straddles two segments; a segment's last block may be short. Codes of 4 bits: the even element in the
// low nibble, int4 in two's complement; every segment starts on a byte. Trailer: uint32 layout hash, uint32 checksum
// (written as 0). All little endian.
struct MessageLayout {
  Codec codec;
  std::size_t block;  // 0 for cast codecs
  std::size_t num_segments;
  std::size_t segment_numel;
  bool is_rotated;                   // whole blocks are Hadamard-rotated
  std::size_t blocks_per_segment;    // 0 for cast codecs
  std::size_t codes_offset;          // 0 for cast codecs
  std::size_t segment_codes_nbytes;  // bytes of one segment's codes or elements
  std::size_t nbytes;                // of the whole message; a multiple of 16 for block codecs

  std::size_t numel() const { return num_segments * segment_numel; }
  std::size_t trailer_offset() const { return nbytes - kTrailerNbytes; }
};

// Throws std::invalid_argument when the block of a block codec is odd or outside kMinBlock..kMaxBlock, when a rotated
// one is not a power of two, or when a size exceeds 2^62 bytes. A cast codec ignores `block` and cannot be rotated.
MessageLayout MakeMessageLayout(Codec codec, std::size_t block, std::size_t num_segments, std::size_t segment_numel,
                                bool is_rotated = false);

// Writes the zero padding and the trailer of a block-codec message; nothing for a cast codec.
void WriteTrailer(const MessageLayout& layout, std::uint32_t layout_hash, std::uint8_t* message);

// The same for every one of `messages`, with their hash.
void WriteTrailers(const MessageLayout& layout, const MutableMessages& messages);

// Makes messages of a block codec ones that are refused, until their trailers are written. Nothing for a cast codec.
void ClearTrailers(const MessageLayout& layout, const MutableMessages& messages);

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
