#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/arrays.h"
#include "zcomm/message_layout.h"

// The operations of quantize.h, decode.h and reduce.h on a GPU: the same bits, one kernel launch for each call. Defined
// in builds with CUDA (ZCOMM_HAS_CUDA); this header includes none of CUDA's.
//
// All pointers are to memory of the current device; alignments and strides are those of arrays.h. A call returns once
// its kernel is queued on `stream`. It neither waits for the device nor allocates, so it can be captured into a CUDA
// graph. Throws std::invalid_argument on bad arguments, before anything is launched, and std::runtime_error with CUDA's
// text when the launch fails. Thread-safe.
namespace zcomm::cuda {

// A cudaStream_t. nullptr is the default stream.
using Stream = void*;

// The error-feedback residual (N10 of zcomm/_formats/reference.py), in int8 blocks of 256. Row i * num_segments + s
// belongs to segment s of message i. The row, times beta, is added to the segment before it is encoded; then what the
// encoding loses replaces the row, except in blocks that are not finite. Element e of the segment is element e of the
// row. Row r has its codes at codes + r * codes_stride, in whole blocks and aligned to 8 bytes, and its bf16 scales at
// scales + r * scales_stride. Not owned.
struct Residual {
  std::int8_t* codes;
  std::uint16_t* scales;
  std::size_t codes_stride;
  std::size_t scales_stride;
  float beta;
};

// `count` contiguous messages that are still to be received, with the layout of a call's output. The call zeroes their
// trailers. Without that, a message that never arrives would leave an earlier call's message in the buffer, with a
// valid trailer, and the decoder would accept it; zeroed, it is refused. Messages that are part of the call's own
// output keep their trailers.
struct Expected {
  std::uint8_t* data = nullptr;
  std::size_t count = 0;
};

// Whether these kernels support `layout`: cast codecs, and int8, int4, nf4 and fp8_e4m3 with a block that is a power of
// two from kMinCudaBlock to kMaxCudaBlock, not rotated. Triton kernels serve all others, and stochastic rounding.
inline constexpr std::size_t kMinCudaBlock = 8;
inline constexpr std::size_t kMaxCudaBlock = 1024;
bool Serves(const MessageLayout& layout);

// Encodes `input`, or RN(input - held) if `held` is not null; `held` has input's strides and its own dtype. `residual`
// may be null. `residual` and `expected` need a block codec.
void Quantize(const MessageLayout& layout, const ConstRows& input, const ConstRows* held, const Residual* residual,
              const MutableMessages& output, Stream stream, const Expected& expected = {});

// The calls below cannot throw for what only the GPU reads. Where a message's hash differs from input.layout_hash, they
// set `is_valid` (an int32 in device memory, or null) to 0. The values in `output` are then meaningless; nothing
// outside `output` is written.

// Writes values into `output`; with `is_added`, RN(output + value) replaces output.
void Decode(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, bool is_added,
            std::int32_t* is_valid, Stream stream);

// Sums the messages in their order and divides by `divisor`. output.message_stride is unused.
void DecodeSum(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, float divisor,
               std::int32_t* is_valid, Stream stream);

// Segment s of the sum becomes message s of `output`, whose layout has one segment of layout.segment_numel. `residual`
// may be null; its row s belongs to message s. If an input message is refused, the messages of `output` get zero
// trailers, with or without `is_valid`: otherwise the ranks that receive them would accept the meaningless sum, as only
// this rank has the flag.
void DecodeSumRequantize(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                         const MutableMessages& output, const Residual* residual, std::int32_t* is_valid, Stream stream,
                         const Expected& expected = {});

// The changes of zcomm/ulps.h: the same bytes. They cannot refuse by an exception what they find on the device, and a
// message's length is known on the device alone: in its head, as zcomm/ulps.h reads it.

// About 2 bytes an element to encode, 1 to decode.
std::size_t UlpsEncodeWorkspaceNbytes(std::size_t numel);
std::size_t UlpsDecodeWorkspaceNbytes(std::size_t numel);

// Writes the change from `old_bits` to `new_bits`, which stay as they are until the kernels have run, to `message`,
// aligned to 4 bytes, with room for UlpsMaxMessageNbytes(numel). `workspace` has UlpsEncodeWorkspaceNbytes(numel), is
// aligned to 16, and free once the kernels have run.
void EncodeUlps(const std::uint16_t* new_bits, const std::uint16_t* old_bits, std::size_t numel, std::uint8_t* message,
                void* workspace, Stream stream);

// Replaces the old bits in `values`. `message`, aligned to 4 bytes, has `nbytes` or fewer. `is_valid`, not null, is 1,
// and becomes 0 if the message is refused: then `values` are as they were, unless the checksums fit. Each call has a
// flag of its own. `workspace` has UlpsDecodeWorkspaceNbytes(numel), aligned to 16.
void DecodeUlps(const std::uint8_t* message, std::size_t nbytes, std::uint16_t* values, std::size_t numel,
                void* workspace, std::int32_t* is_valid, Stream stream);

}  // namespace zcomm::cuda
