#include "arguments.h"

#include <cmath>
#include <limits>

#include "zcomm/check.h"
#include "zcomm/float_formats.h"

namespace zcomm::cuda {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

// The inverse of a power of two; 0 for other numbers.
float ExactInverse(float divisor) {
  int exponent = 0;
  const bool is_power = std::frexp(divisor, &exponent) == 0.5F && exponent > -100 && exponent < 100;
  return is_power ? 1.0F / divisor : 0.0F;
}

void CheckServed(const MessageLayout& layout) {
  ZCOMM_CHECK(Serves(layout),
              "the CUDA kernels support cast codecs, and int8, int4, nf4 and fp8_e4m3 not rotated with a ",
              "block that is a power of two in ", kMinCudaBlock, "..", kMaxCudaBlock,
              ": codec=", static_cast<int>(layout.codec), ", block=", layout.block);
}

Tiles TilesOf(const MessageLayout& layout, std::size_t num_messages) {
  const std::size_t per_segment = (layout.segment_numel + kTile - 1) / kTile;
  const std::size_t most = std::numeric_limits<std::int32_t>::max();
  const std::size_t segments = num_messages * layout.num_segments;
  ZCOMM_CHECK(segments <= most && (per_segment == 0 || segments <= most / per_segment), "a launch has at most ", most,
              " tiles of ", kTile, " elements: num_messages=", num_messages, ", num_segments=", layout.num_segments,
              ", elements of a segment=", layout.segment_numel);
  const auto divisor = [](std::size_t value) { return Divisor::Of(static_cast<std::uint32_t>(value > 0 ? value : 1)); };
  return {static_cast<std::uint32_t>(segments * per_segment), divisor(per_segment), divisor(layout.num_segments),
          layout.segment_numel};
}

Array ArrayOf(DType dtype, const void* data, std::size_t message_stride, std::size_t segment_stride) {
  return {static_cast<std::uint8_t*>(const_cast<void*>(data)), static_cast<std::int64_t>(message_stride),
          static_cast<std::int64_t>(segment_stride), dtype};
}

Array ArrayOf(const MessageLayout& layout, const ConstRows& rows, const char* name) {
  CheckRows(layout, rows, name);
  return ArrayOf(rows.dtype, rows.data, rows.message_stride, rows.segment_stride);
}

Wire WireOf(const MessageLayout& layout, const ConstMessages& messages, const char* name) {
  CheckServed(layout);
  CheckMessages(layout, messages, name);
  ZCOMM_CHECK(messages.count <= std::numeric_limits<std::int32_t>::max(),
              "a call must have fewer than 2^31 messages: count=", messages.count);
  int block_log2 = 0;
  while ((std::size_t{2} << block_log2) <= layout.block) ++block_log2;
  return {const_cast<std::uint8_t*>(messages.data),
          static_cast<std::int64_t>(messages.stride_nbytes),
          static_cast<std::uint32_t>(messages.count),
          layout.codec,
          block_log2,
          static_cast<std::int64_t>(layout.num_segments),
          static_cast<std::int64_t>(layout.blocks_per_segment),
          static_cast<std::int64_t>(layout.codes_offset),
          static_cast<std::int64_t>(layout.segment_codes_nbytes),
          static_cast<std::int64_t>(layout.nbytes),
          messages.layout_hash,
          IsBlockCodec(layout.codec)};
}

Residual ResidualOf(const MessageLayout& layout, const Residual* residual) {
  if (residual == nullptr) return {nullptr, nullptr, 0, 0, 0.0F};
  ZCOMM_CHECK(IsBlockCodec(layout.codec), "a residual needs a block codec: codec=", static_cast<int>(layout.codec));
  ZCOMM_CHECK(residual->codes != nullptr && residual->scales != nullptr && IsAligned(residual->codes, 8) &&
                  residual->codes_stride % 8 == 0 && IsAligned(residual->scales, 2),
              "a residual's codes must be aligned to 8 bytes, its scales to 2: codes_stride=", residual->codes_stride);
  return *residual;
}

Expected ExpectedOf(const Expected& expected) {
  ZCOMM_CHECK(expected.count == 0 || (expected.data != nullptr && IsAligned(expected.data, 16)),
              "expected messages must begin at a multiple of 16 bytes: count=", expected.count);
  return expected;
}

}  // namespace

bool Serves(const MessageLayout& layout) {
  if (!IsBlockCodec(layout.codec)) return true;
  return !HasZeroPoint(layout.codec) && !layout.is_rotated && layout.block >= kMinCudaBlock &&
         layout.block <= kMaxCudaBlock && (layout.block & (layout.block - 1)) == 0;
}

QuantizeArguments MakeQuantizeArguments(const MessageLayout& layout, const ConstRows& input, const ConstRows* held,
                                        const Residual* residual, const MutableMessages& output,
                                        const Expected& expected) {
  const Wire wire = WireOf(layout, AsConst(output), "output");
  ZCOMM_CHECK(IsBlockCodec(layout.codec), "quantizing needs a block codec: codec=", static_cast<int>(layout.codec));
  const Array held_array = held == nullptr ? Array{nullptr, 0, 0, DType::kFloat32} : ArrayOf(layout, *held, "held");
  return {
      TilesOf(layout, output.count), ArrayOf(layout, input, "input"), held_array, wire, ResidualOf(layout, residual),
      ExpectedOf(expected)};
}

DecodeArguments MakeCastArguments(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output) {
  const Wire wire = WireOf(layout, AsConst(output), "output");
  ZCOMM_CHECK(!IsBlockCodec(layout.codec), "a cast needs a cast codec: codec=", static_cast<int>(layout.codec));
  const Array source = ArrayOf(layout, input, "input");
  const auto itemsize = static_cast<std::int64_t>(ItemSize(input.dtype));
  const auto out_itemsize = ItemSize(static_cast<DType>(layout.codec));
  // The input as messages of its own dtype, the output as an array.
  Wire messages = wire;
  messages.data = source.data;
  messages.pitch = source.message_stride * itemsize;
  messages.codec = static_cast<Codec>(input.dtype);
  messages.segment_nbytes = source.segment_stride * itemsize;
  return {
      TilesOf(layout, output.count),
      messages,
      1,
      ArrayOf(static_cast<DType>(layout.codec), output.data, output.stride_nbytes / out_itemsize, layout.segment_numel),
      kLargest,
      1.0F,
      1.0F,
      false,
      nullptr};
}

DecodeArguments MakeDecodeArguments(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output,
                                    bool is_added, std::int32_t* is_valid) {
  return {TilesOf(layout, input.count),
          WireOf(layout, input, "input"),
          1,
          input.count == 0 ? Array{nullptr, 0, 0, output.dtype} : ArrayOf(layout, AsConst(output), "output"),
          is_added ? kLargest : MaxFinite(output.dtype),
          1.0F,
          1.0F,
          is_added,
          is_valid};
}

DecodeArguments MakeDecodeSumArguments(const MessageLayout& layout, const ConstMessages& input,
                                       const MutableRows& output, float divisor, std::int32_t* is_valid) {
  ZCOMM_CHECK(input.count >= 1, "a sum needs at least one message: num_messages=", input.count);
  return {TilesOf(layout, 1),
          WireOf(layout, input, "input"),
          static_cast<std::uint32_t>(input.count),
          ArrayOf(layout, AsConst(output), "output"),
          kLargest,
          divisor,
          ExactInverse(divisor),
          false,
          is_valid};
}

RequantizeArguments MakeRequantizeArguments(const MessageLayout& layout, const ConstMessages& input,
                                            const MessageLayout& out_layout, const MutableMessages& output,
                                            const Residual* residual, std::int32_t* is_valid,
                                            const Expected& expected) {
  ZCOMM_CHECK(input.count >= 1, "a sum needs at least one message: num_messages=", input.count);
  CheckRequantized(layout, out_layout, output);
  ZCOMM_CHECK(IsBlockCodec(out_layout.codec),
              "quantizing needs a block codec: codec=", static_cast<int>(out_layout.codec));
  return {TilesOf(layout, 1),
          WireOf(layout, input, "input"),
          WireOf(out_layout, AsConst(output), "output"),
          ResidualOf(out_layout, residual),
          is_valid,
          ExpectedOf(expected)};
}

}  // namespace zcomm::cuda
