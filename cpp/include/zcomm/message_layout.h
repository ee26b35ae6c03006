#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/arrays.h"

namespace zcomm {

// How elements are coded. Python passes the values as integers: do not renumber them. The first three equal DType's:
// the message is a plain array of that type (a cast codec). The others are block codecs. 5, float64, has no native
// kernels.
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
// Whether codes count from a zero point, in [0, qmax].
constexpr bool HasZeroPoint(Codec codec) { return codec == Codec::kInt8Asym || codec == Codec::kInt4Asym; }
// Whether the codec supports stochastic rounding.
constexpr bool IsIntCodec(Codec codec) { return codec == Codec::kInt8 || codec == Codec::kInt4 || HasZeroPoint(codec); }

constexpr std::size_t CodeBits(Codec codec) {
  if (!IsBlockCodec(codec)) return 8 * ItemSize(static_cast<DType>(codec));
  return codec == Codec::kInt4 || codec == Codec::kNf4 || codec == Codec::kInt4Asym ? 4 : 8;
}

// Bytes of a block apart from its codes: a bf16 scale, then a bf16 zero point if the codec has one.
constexpr std::size_t HeaderNbytes(Codec codec) { return HasZeroPoint(codec) ? 4 : IsBlockCodec(codec) ? 2 : 0; }

// The largest magnitude of a scaled value: scale = absmax / QMax.
constexpr int QMax(Codec codec) {
  return codec == Codec::kInt8       ? 127
         : codec == Codec::kInt4     ? 7
         : codec == Codec::kNf4      ? 8
         : codec == Codec::kFp8E4m3  ? 448
         : codec == Codec::kInt8Asym ? 255
                                     : 15;
}

// Where the parts of a message lie. Sizes and offsets are in bytes unless their names end in _numel.
//
//   block codec:  | headers [num_segments][blocks_per_segment] | 0 to 16 | codes [num_segments] | 0 | trailer 8 |
//   cast codec:   | elements [num_segments][segment_numel] |
//
// A block never straddles two segments; a segment's last block may be short. With 4-bit codes, the even element is in
// the low nibble, int4 codes are in two's complement, and every segment starts on a byte. The trailer is a uint32
// layout hash and a uint32 checksum (written as 0). Everything is little-endian.
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
// block is not a power of two, or when the message could exceed 2^62 bytes. A cast codec ignores `block` and cannot be
// rotated.
MessageLayout MakeMessageLayout(Codec codec, std::size_t block, std::size_t num_segments, std::size_t segment_numel,
                                bool is_rotated = false);

// Writes the zero padding and the trailer of a block-codec message. Does nothing for a cast codec.
void WriteTrailer(const MessageLayout& layout, std::uint32_t layout_hash, std::uint8_t* message);

// WriteTrailer for each of `messages`, with messages.layout_hash.
void WriteTrailers(const MessageLayout& layout, const MutableMessages& messages);

// Zeroes the trailers of block-codec messages, so that decoders refuse them until WriteTrailers. Does nothing for a
// cast codec.
void ClearTrailers(const MessageLayout& layout, const MutableMessages& messages);

// Throws std::invalid_argument, naming the message's index and both hashes, when a block-codec message does not carry
// messages.layout_hash. Checks nothing for a cast codec, whose messages have no trailer.
void CheckTrailers(const MessageLayout& layout, const ConstMessages& messages);

// The argument checks that all operations share: pointers are aligned, and not null unless there are no elements; there
// is at least one thread. Throw std::invalid_argument, which names the argument by `name`.
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
