#pragma once

#include <cstdint>

#include "portable.h"
#include "zcomm/arrays.h"
#include "zcomm/cuda_kernels.h"
#include "zcomm/message_layout.h"

// The arguments of a kernel, passed by value: the same for a GPU and for the emulated grid of the tests.
namespace zcomm::cuda {

// A warp processes one tile at a time: 32 lanes times 4 vectors of 8 elements, which are whole blocks of every codec.
constexpr int kVector = 8;
constexpr int kVectors = 4;
constexpr int kVectorStride = 32 * kVector;
constexpr int kTile = kVectors * kVectorStride;

// The tiles of a call, numbered by message, then by segment.
struct Tiles {
  std::uint32_t count;
  Divisor per_segment;
  Divisor segments_per_message;
  std::uint64_t segment_numel;
};

// An array; null data if the call has none.
struct Array {
  std::uint8_t* data;
  std::int64_t message_stride;
  std::int64_t segment_stride;
  DType dtype;
};

// Messages. Those of a cast codec are arrays of its dtype, with headers of 0 bytes.
struct Wire {
  std::uint8_t* data;
  std::int64_t pitch;  // bytes from message to message
  std::uint32_t count;
  Codec codec;
  int block_log2;
  std::int64_t num_segments;
  std::int64_t headers_per_segment;
  std::int64_t codes_offset;
  std::int64_t segment_nbytes;
  std::int64_t nbytes;
  std::uint32_t hash;
  bool has_ends;  // padding and trailers: those of block codecs
};

struct QuantizeArguments {
  Tiles tiles;
  Array input;
  Array held;
  Wire output;
  Residual residual;
  Expected expected;
};

struct DecodeArguments {
  Tiles tiles;
  Wire input;
  std::uint32_t num_terms;  // messages that are summed; the tiles are those of input.count / num_terms messages
  Array output;
  float limit;
  float divisor;
  float inverse;  // of a divisor that is a power of two: the product with it has the bits of the quotient; else 0
  bool is_added;
  std::int32_t* is_valid;
};

struct RequantizeArguments {
  Tiles tiles;
  Wire input;
  Wire output;
  Residual residual;
  std::int32_t* is_valid;
  Expected expected;
};

// Each throws std::invalid_argument on arguments that the kernels do not support.
QuantizeArguments MakeQuantizeArguments(const MessageLayout& layout, const ConstRows& input, const ConstRows* held,
                                        const Residual* residual, const MutableMessages& output,
                                        const Expected& expected = {});
// The arguments of a decoding kernel that writes a cast codec's messages.
DecodeArguments MakeCastArguments(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output);
DecodeArguments MakeDecodeArguments(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output,
                                    bool is_added, std::int32_t* is_valid);
DecodeArguments MakeDecodeSumArguments(const MessageLayout& layout, const ConstMessages& input,
                                       const MutableRows& output, float divisor, std::int32_t* is_valid);
RequantizeArguments MakeRequantizeArguments(const MessageLayout& layout, const ConstMessages& input,
                                            const MessageLayout& out_layout, const MutableMessages& output,
                                            const Residual* residual, std::int32_t* is_valid,
                                            const Expected& expected = {});

}  // namespace zcomm::cuda
