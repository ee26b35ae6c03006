#include "zcomm/message_layout.h"

#include <cstring>

#include "zcomm/check.h"

namespace zcomm {
namespace {

constexpr std::size_t kAlign = 16;
constexpr std::size_t kMaxNbytes = std::size_t{1} << 62;

std::size_t RoundUp(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

bool IsAligned(const void* pointer, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0;
}

}  // namespace

MessageLayout MakeMessageLayout(Codec codec, std::size_t block, std::size_t num_segments, std::size_t segment_numel,
                                bool is_rotated) {
  // Bounds every sum and product below, so that none wraps around: at most 8 bytes for each element and segment.
  ZCOMM_CHECK(segment_numel <= kMaxNbytes / 32 && num_segments <= kMaxNbytes / 32 &&
                  (num_segments == 0 || segment_numel + 1 <= kMaxNbytes / 32 / num_segments),
              "a message's size must stay below 2^62 bytes: num_segments=", num_segments,
              ", segment_numel=", segment_numel);
  MessageLayout layout{codec, 0, num_segments, segment_numel, is_rotated, 0, 0, 0, 0};
  if (!IsBlockCodec(codec)) {
    ZCOMM_CHECK(!is_rotated, "rotation needs a block codec: codec=", static_cast<int>(codec));
    layout.segment_codes_nbytes = segment_numel * ItemSize(static_cast<DType>(codec));
    layout.nbytes = num_segments * layout.segment_codes_nbytes;
    return layout;
  }
  ZCOMM_CHECK(block % 2 == 0 && block >= kMinBlock && block <= kMaxBlock, "block must be even and in ", kMinBlock, "..",
              kMaxBlock, ": block=", block);
  ZCOMM_CHECK(!is_rotated || (block & (block - 1)) == 0,
              "rotation needs a block that is a power of two: block=", block);
  layout.block = block;
  layout.blocks_per_segment = (segment_numel + block - 1) / block;
  layout.codes_offset = RoundUp(num_segments * layout.blocks_per_segment * HeaderNbytes(codec), kAlign);
  layout.segment_codes_nbytes = (segment_numel * CodeBits(codec) + 7) / 8;
  const std::size_t codes_nbytes = num_segments * layout.segment_codes_nbytes;
  layout.nbytes = RoundUp(layout.codes_offset + codes_nbytes + kTrailerNbytes, kAlign);
  return layout;
}

void WriteTrailer(const MessageLayout& layout, std::uint32_t layout_hash, std::uint8_t* message) {
  if (!IsBlockCodec(layout.codec)) return;
  const std::size_t headers_nbytes = layout.num_segments * layout.blocks_per_segment * HeaderNbytes(layout.codec);
  std::memset(message + headers_nbytes, 0, layout.codes_offset - headers_nbytes);
  const std::size_t codes_end = layout.codes_offset + layout.num_segments * layout.segment_codes_nbytes;
  std::memset(message + codes_end, 0, layout.nbytes - codes_end);
  std::memcpy(message + layout.trailer_offset(), &layout_hash, sizeof(layout_hash));
}

void WriteTrailers(const MessageLayout& layout, const MutableMessages& messages) {
  for (std::size_t i = 0; i < messages.count; ++i) {
    WriteTrailer(layout, messages.layout_hash, messages.data + i * messages.stride_nbytes);
  }
}

void ClearTrailers(const MessageLayout& layout, const MutableMessages& messages) {
  if (!IsBlockCodec(layout.codec)) return;
  for (std::size_t i = 0; i < messages.count; ++i) {
    std::memset(messages.data + i * messages.stride_nbytes + layout.trailer_offset(), 0, kTrailerNbytes);
  }
}

void CheckTrailers(const MessageLayout& layout, const ConstMessages& messages) {
  if (!IsBlockCodec(layout.codec)) return;
  for (std::size_t i = 0; i < messages.count; ++i) {
    std::uint32_t got = 0;
    std::memcpy(&got, messages.data + i * messages.stride_nbytes + layout.trailer_offset(), sizeof(got));
    ZCOMM_CHECK(got == messages.layout_hash, "message ", i, " must carry layout hash ", messages.layout_hash,
                ", but has ", got, ": sender and receiver differ in operation, format, block or sizes");
  }
}

void CheckRows(const MessageLayout& layout, const ConstRows& rows, const char* name) {
  if (layout.numel() == 0) return;
  ZCOMM_CHECK(rows.data != nullptr, name, " must not be null: numel=", layout.numel());
  ZCOMM_CHECK(IsAligned(rows.data, ItemSize(rows.dtype)), name,
              " must be aligned to its element: itemsize=", ItemSize(rows.dtype));
}

void CheckMessages(const MessageLayout& layout, const ConstMessages& messages, const char* name) {
  if (messages.count == 0 || layout.nbytes == 0) return;
  ZCOMM_CHECK(messages.data != nullptr, name, " must not be null: count=", messages.count);
  const std::size_t alignment = IsBlockCodec(layout.codec) ? 4 : ItemSize(static_cast<DType>(layout.codec));
  ZCOMM_CHECK(IsAligned(messages.data, alignment) && messages.stride_nbytes % alignment == 0, name,
              " must be aligned to ", alignment, " bytes: stride=", messages.stride_nbytes);
  ZCOMM_CHECK(messages.count == 1 || messages.stride_nbytes >= layout.nbytes, name,
              "' stride must be at least a message: stride=", messages.stride_nbytes, ", nbytes=", layout.nbytes);
}

void CheckRequantized(const MessageLayout& layout, const MessageLayout& out_layout, const MutableMessages& output) {
  ZCOMM_CHECK(out_layout.num_segments == 1 && out_layout.segment_numel == layout.segment_numel &&
                  output.count == layout.num_segments,
              "each segment must become one message: out num_segments=", out_layout.num_segments,
              ", out segment_numel=", out_layout.segment_numel, ", segment_numel=", layout.segment_numel,
              ", out messages=", output.count, ", num_segments=", layout.num_segments);
  CheckMessages(out_layout, AsConst(output), "output");
}

void CheckThreads(std::size_t num_threads) {
  ZCOMM_CHECK(num_threads >= 1, "num_threads must be at least 1: num_threads=", num_threads);
}

}  // namespace zcomm
