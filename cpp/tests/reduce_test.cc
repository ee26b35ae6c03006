#include "zcomm/reduce.h"

#include "test_util.h"
#include "zcomm/isa.h"
#include "zcomm/quantize.h"

namespace zcomm {
namespace {

constexpr std::uint32_t kHash = 5;
constexpr std::uint32_t kOutHash = 6;

struct Messages {
  std::vector<std::uint8_t> bytes;
  std::size_t stride;
  std::size_t count;

  ConstMessages view() const { return {bytes.data(), stride, count, kHash}; }
};

Messages MakeMessages(const MessageLayout& layout, std::size_t count, Kind kind, Random* random) {
  const auto x = MakeArray(DType::kFloat32, count * layout.numel(), kind, random);
  Messages messages{{}, layout.nbytes / 16 * 16 + 32, count};
  messages.bytes.resize(count * messages.stride);
  Quantize(layout, {DType::kFloat32, x.data(), layout.numel(), layout.segment_numel},
           {messages.bytes.data(), messages.stride, count, kHash}, nullptr, 1);
  return messages;
}

void CheckSum(const MessageLayout& layout, const Messages& messages, float divisor, std::size_t num_threads) {
  for (const DType dtype : kDTypes) {
    const std::size_t segment_stride = layout.segment_numel + 3;
    const std::size_t out_numel = layout.num_segments * segment_stride;
    std::vector<std::uint8_t> got(out_numel * ItemSize(dtype) + 4, 0x3C);
    std::vector<std::uint8_t> expected = got;
    DecodeSum(layout, messages.view(), {dtype, got.data(), 0, segment_stride}, divisor, num_threads);
    DecodeSumRef(layout, messages.view(), {dtype, expected.data(), 0, segment_stride}, divisor);
    ExpectSameElements(dtype, got.data(), expected.data(), out_numel, "DecodeSum");
  }
}

void CheckRequantize(const MessageLayout& layout, const Messages& messages, Codec out_codec, std::size_t out_block,
                     std::size_t num_threads, Random* random) {
  const bool is_rotated = MayRotate(out_codec, out_block) && random->Below(2) == 1;
  const MessageLayout out_layout = MakeMessageLayout(out_codec, out_block, 1, layout.segment_numel, is_rotated);
  const std::optional<Draw> maybe = MaybeDraw(random);
  const Draw* draw = maybe ? &*maybe : nullptr;
  const std::size_t stride = out_layout.nbytes / 16 * 16 + 32;
  std::vector<std::uint8_t> got(layout.num_segments * stride, 0xAB);
  std::vector<std::uint8_t> expected = got;
  const std::size_t count = layout.num_segments;
  DecodeSumRequantize(layout, messages.view(), out_layout, {got.data(), stride, count, kOutHash}, draw, num_threads);
  DecodeSumRequantizeRef(layout, messages.view(), out_layout, {expected.data(), stride, count, kOutHash}, draw);
  for (std::size_t i = 0; i < count; ++i) {
    ExpectSameMessages(out_layout, got.data() + i * stride, expected.data() + i * stride, "DecodeSumRequantize");
    EXPECT(got[i * stride + out_layout.nbytes] == 0xAB, "wrote past message %zu", i);
  }
}

void CheckAllSizes() {
  Random random(1);
  for (const Codec codec : kCodecs) {
    for (const std::size_t block : {2, 30, 128, 4096}) {
      if (!IsBlockCodec(codec) && block != 2) continue;
      for (const std::size_t size : SizesAround(block)) {
        const auto kind = static_cast<Kind>(random.Below(static_cast<std::uint32_t>(Kind::kNumKinds)));
        const bool is_rotated = MayRotate(codec, block) && random.Below(2) == 1;
        const MessageLayout layout = MakeMessageLayout(codec, block, 1 + random.Below(3), size, is_rotated);
        const Messages messages = MakeMessages(layout, 1 + random.Below(4), kind, &random);
        CheckSum(layout, messages, static_cast<float>(1 + random.Below(4)), 1);
        for (const Codec out_codec : kCodecs) {
          const std::size_t out_block = random.Below(2) == 0 ? 128 : 2 * (1 + random.Below(3000));
          CheckRequantize(layout, messages, out_codec, out_block, 1, &random);
        }
      }
    }
  }
}

void CheckThreadCounts() {
  Random random(2);
  for (const Codec codec : kCodecs) {
    const MessageLayout layout = MakeMessageLayout(codec, 256, 3, 70001, IsBlockCodec(codec) && random.Below(2) == 1);
    const Messages messages = MakeMessages(layout, 3, Kind::kNans, &random);
    for (const std::size_t num_threads : {1, 2, 7}) {
      CheckSum(layout, messages, 3.0F, num_threads);
      CheckRequantize(layout, messages, Codec::kInt4, 128, num_threads, &random);
      CheckRequantize(layout, messages, Codec::kInt8, 65536, num_threads, &random);
    }
  }
}

// Values whose float32 sum depends on the order, and one that overflows.
void CheckOrderAndOverflow() {
  const float max = std::numeric_limits<float>::max();
  const float terms[4][4] = {
      {1e8F, max, -0.0F, 1.0F}, {1.0F, max, -0.0F, 2.0F}, {-1e8F, -max, -0.0F, 4.0F}, {0, 0, 0, 0}};
  const MessageLayout layout = MakeMessageLayout(Codec::kFloat32, 0, 1, 4);
  const ConstMessages input{reinterpret_cast<const std::uint8_t*>(terms), sizeof(terms[0]), 3, 0};
  float out[4];
  DecodeSum(layout, input, {DType::kFloat32, out, 0, 4}, 3.0F, 1);
  EXPECT(out[0] == 0.0F, "(1e8 + 1) - 1e8 in message order is 0, got %g", static_cast<double>(out[0]));
  EXPECT(out[1] == std::numeric_limits<float>::infinity(), "an overflow stays visible");
  EXPECT(out[2] == 0.0F && 1.0F / out[2] < 0, "the first term is taken as it is, not added to +0");
  EXPECT(out[3] == 7.0F / 3.0F, "one IEEE division");
}

void CheckBadArguments() {
  Random random(3);
  const MessageLayout layout = MakeMessageLayout(Codec::kInt8, 2, 2, 4);
  Messages messages = MakeMessages(layout, 2, Kind::kPlain, &random);
  float out[8];
  alignas(16) std::uint8_t bytes[128] = {};
  const MessageLayout out_layout = MakeMessageLayout(Codec::kInt8, 2, 1, 4);
  const MutableRows rows{DType::kFloat32, out, 0, 4};
  MessageOfThrow([&] { DecodeSum(layout, {bytes, 64, 0, kHash}, rows, 1.0F, 1); });
  MessageOfThrow([&] { DecodeSum(layout, messages.view(), rows, 1.0F, 0); });
  MessageOfThrow([&] { DecodeSumRequantize(layout, messages.view(), layout, {bytes, 64, 2, 0}, nullptr, 1); });
  MessageOfThrow([&] { DecodeSumRequantize(layout, messages.view(), out_layout, {bytes, 32, 1, 0}, nullptr, 1); });
  messages.bytes[messages.stride + layout.trailer_offset()] ^= 1;
  EXPECT(Contains(MessageOfThrow([&] { DecodeSum(layout, messages.view(), rows, 1.0F, 1); }), "message 1"), "trailer");
  MessageOfThrow([&] { DecodeSumRequantize(layout, messages.view(), out_layout, {bytes, 32, 2, 0}, nullptr, 1); });
  EXPECT(bytes[0] == 0 && bytes[16] == 0, "nothing may be written");
}

}  // namespace
}  // namespace zcomm

int main() {
  std::printf("isa %s\n", zcomm::IsaName(zcomm::ActiveIsa()));
  zcomm::CheckAllSizes();
  zcomm::CheckThreadCounts();
  zcomm::CheckOrderAndOverflow();
  zcomm::CheckBadArguments();
  std::puts("ok");
  return 0;
}
