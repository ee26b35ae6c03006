#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "zcomm/arrays.h"

namespace zcomm {

// How elements are coded. Python passes the values as integers: do not renumber them. The first three equal DType's:
// the message is a plain array of that type (a cast codec). The others are block codecs, listed in codecs.def. 5,
// float64, has no native kernels.
enum class Codec : int {
  kFloat32 = 0,
  kBfloat16 = 1,
  kFloat16 = 2,
#define ZCOMM_CODEC(id, name, number, ...) id = number,
#include "zcomm/codecs.def"
};

// One more than the largest number.
inline constexpr std::size_t kNumCodecs = 1 + std::max({
#define ZCOMM_CODEC(id, name, number, ...) number,
#include "zcomm/codecs.def"
                                              });
inline constexpr std::size_t kTrailerNbytes = 8;
inline constexpr std::size_t kMinBlock = 2;
inline constexpr std::size_t kMaxBlock = 65536;

// A line of codecs.def; for other codecs 0.
struct BlockCodec {
  std::size_t bits;
  int qmax;
  bool has_zero_point;
  bool is_int;
};

constexpr BlockCodec BlockCodecOf(Codec codec) {
  switch (codec) {
#define ZCOMM_CODEC(id, name, number, bits, qmax, has_zero_point, is_int) \
  case Codec::id:                                                         \
    return {bits, qmax, has_zero_point, is_int};
#include "zcomm/codecs.def"
    default:
      return {0, 0, false, false};
  }
}

constexpr bool IsBlockCodec(Codec codec) { return codec > Codec::kFloat16; }
constexpr bool IsCodec(int number) {
  const bool is_cast = number >= 0 && number < static_cast<int>(kNumDTypes);
  return is_cast || BlockCodecOf(static_cast<Codec>(number)).bits > 0;
}
// Whether codes count from a zero point, in [0, qmax].
constexpr bool HasZeroPoint(Codec codec) { return BlockCodecOf(codec).has_zero_point; }
// Whether the codec supports stochastic rounding.
constexpr bool IsIntCodec(Codec codec) { return BlockCodecOf(codec).is_int; }

constexpr std::size_t CodeBits(Codec codec) {
  return IsBlockCodec(codec) ? BlockCodecOf(codec).bits : 8 * ItemSize(static_cast<DType>(codec));
}

// Bytes of a block apart from its codes: a bf16 scale, then a bf16 zero point if the codec has one.
constexpr std::size_t HeaderNbytes(Codec codec) { return HasZeroPoint(codec) ? 4 : IsBlockCodec(codec) ? 2 : 0; }

// The largest magnitude of a scaled value: scale = absmax / QMax.
constexpr int QMax(Codec codec) { return BlockCodecOf(codec).qmax; }

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
// CheckMessages for `output`, of `out_layout`, which must also have one message for each segment of `layout`.
void CheckRequantized(const MessageLayout& layout, const MessageLayout& out_layout, const MutableMessages& output);
void CheckThreads(std::size_t num_threads);

inline ConstRows AsConst(const MutableRows& rows) {
  return {rows.dtype, rows.data, rows.message_stride, rows.segment_stride};
}
inline ConstMessages AsConst(const MutableMessages& messages) {
  return {messages.data, messages.stride_nbytes, messages.count, messages.layout_hash};
}

}  // namespace zcomm
