#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/arrays.h"
#include "zcomm/message_layout.h"

// The operations of quantize.h, decode.h and reduce.h on a GPU: the same bits, one launch a call. Defined in builds
// with CUDA (ZCOMM_HAS_CUDA); this header needs none of CUDA's.
//
// All pointers are to memory of the current device, alignments as in arrays.h, strides as there. Calls return once the
// kernel is in `stream`'s queue: they neither wait for the device nor allocate, so they can be captured into a graph.
// They throw std::invalid_argument on bad arguments, before anything is launched, and std::runtime_error with CUDA's
// text where the launch fails. Thread-safe.
namespace zcomm::cuda {

// A cudaStream_t. nullptr is the default stream.
using Stream = void*;

// The elements [begin, end) of every segment of every message of the call. `begin` is a multiple of 256 and of each
// block of the call; so is `end`, or it is segment_numel. Launches over ranges that make up [0, segment_numel), in any
// order and on any streams, write the bytes of one launch over the whole. The headers and codes of a range are those of
// its blocks: CodesOfRange and HeadersOfRange. The range that ends at segment_numel also writes the messages' padding
// and trailers, or checks them.
struct Range {
  std::size_t begin;
  std::size_t end;
};

inline Range WholeOf(const MessageLayout& layout) { return {0, layout.segment_numel}; }

// Where the bytes of `range` of segment `segment` lie in a message of a block codec. Padding and trailer are neither's.
struct Bytes {
  std::size_t offset;
  std::size_t nbytes;
};

inline Bytes HeadersOfRange(const MessageLayout& layout, std::size_t segment, const Range& range) {
  const std::size_t first = segment * layout.blocks_per_segment + range.begin / layout.block;
  const std::size_t count = (range.end - range.begin + layout.block - 1) / layout.block;
  return {first * HeaderNbytes(layout.codec), count * HeaderNbytes(layout.codec)};
}

inline Bytes CodesOfRange(const MessageLayout& layout, std::size_t segment, const Range& range) {
  const std::size_t bits = CodeBits(layout.codec);
  const std::size_t first = range.begin * bits / 8;
  return {layout.codes_offset + segment * layout.segment_codes_nbytes + first, (range.end * bits + 7) / 8 - first};
}

// What earlier messages lost (N10 of zcomm/_formats/reference.py), int8 blocks of 256: row i * num_segments + s belongs to segment s
// of message i and is added, times beta, before it is encoded; what encoding loses replaces it, but for blocks that are
// not finite. Row r has its codes from codes + r * codes_stride on, in whole blocks and aligned to 8 bytes, and its
// bf16 scales from scales + r * scales_stride on; element e of the segment is element e of the row.
struct Residual {
  std::int8_t* codes;
  std::uint16_t* scales;
  std::size_t codes_stride;
  std::size_t scales_stride;
  float beta;
};

// Messages yet to come, `count` of them in a row, of the layout of a call's output, whose trailers the call clears:
// what is not received from then on is refused by the decoder, and never taken for an earlier message in the same
// place. Those that the output itself is, if any, stay.
struct Expected {
  std::uint8_t* data = nullptr;
  std::size_t count = 0;
};

// Whether these kernels serve `layout`: cast codecs, and int8, int4, nf4 and fp8_e4m3 with a block that is a power of
// two from kMinCudaBlock to kMaxCudaBlock, not rotated. What they do not serve (also: stochastic rounding) has Triton
// kernels.
inline constexpr std::size_t kMinCudaBlock = 8;
inline constexpr std::size_t kMaxCudaBlock = 1024;
bool Serves(const MessageLayout& layout);

// Messages from `input`, or from RN(input - held) where `held` is not null: it has input's strides, and a dtype of its
// own. `residual` may be null; it needs a block codec, and so do messages that are expected.
void Quantize(const MessageLayout& layout, const Range& range, const ConstRows& input, const ConstRows* held,
              const Residual* residual, const MutableMessages& output, Stream stream, const Expected& expected = {});

// `is_valid` (an int32 in device memory, or null) is set to 0 by the calls below where a message carries another hash
// than input.layout_hash; what they write is then of no use, but inside `output`.

// Values into `output`; with `is_added` RN(output + value) replaces what is there.
void Decode(const MessageLayout& layout, const Range& range, const ConstMessages& input, const MutableRows& output,
            bool is_added, std::int32_t* is_valid, Stream stream);

// The sum of the messages in their order, over `divisor`. output.message_stride is unused.
void DecodeSum(const MessageLayout& layout, const Range& range, const ConstMessages& input, const MutableRows& output,
               float divisor, std::int32_t* is_valid, Stream stream);

// Segment s of the sum becomes message s of `output`, whose layout has one segment of layout.segment_numel. `residual`
// may be null: row s is that of message s. Where a message carries another hash, those of `output` get a trailer of
// zeros, with or without `is_valid`: whoever receives them refuses them, too.
void DecodeSumRequantize(const MessageLayout& layout, const Range& range, const ConstMessages& input,
                         const MessageLayout& out_layout, const MutableMessages& output, const Residual* residual,
                         std::int32_t* is_valid, Stream stream, const Expected& expected = {});

}  // namespace zcomm::cuda
