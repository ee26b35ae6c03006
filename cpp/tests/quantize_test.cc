#include "zcomm/quantize.h"

#include "test_util.h"
#include "zcomm/isa.h"

namespace zcomm {
namespace {

constexpr std::uint8_t kGuard = 0xAB;
constexpr std::uint32_t kHash = 0xDEADBEEF;

struct Case {
  Codec codec;
  DType dtype;
  std::size_t block;
  std::size_t num_messages;
  std::size_t num_segments;
  std::size_t segment_numel;
  std::size_t num_threads;
};

// Rows and messages with gaps between them; nothing may be written into the gaps.
void CheckAgainstReference(const Case& c, Kind kind, Random* random) {
  const MessageLayout layout = MakeMessageLayout(c.codec, c.block, c.num_segments, c.segment_numel);
  const std::size_t segment_stride = c.segment_numel + 3;
  const std::size_t message_stride = c.num_segments * segment_stride + 5;
  const auto x = MakeArray(c.dtype, c.num_messages * message_stride, kind, random);
  const std::size_t stride = layout.nbytes / 16 * 16 + 32;
  std::vector<std::uint8_t> got(c.num_messages * stride, kGuard);
  std::vector<std::uint8_t> expected = got;
  const ConstRows input{c.dtype, x.data(), message_stride, segment_stride};
  Quantize(layout, input, {got.data(), stride, c.num_messages, kHash}, c.num_threads);
  QuantizeRef(layout, input, {expected.data(), stride, c.num_messages, kHash});
  for (std::size_t i = 0; i < c.num_messages; ++i) {
    ExpectSameMessages(layout, got.data() + i * stride, expected.data() + i * stride, "Quantize");
    for (std::size_t b = layout.nbytes; b < stride; ++b) {
      EXPECT(got[i * stride + b] == kGuard && expected[i * stride + b] == kGuard, "wrote past message %zu", i);
    }
  }
}

void CheckAllSizes() {
  Random random(1);
  for (const Codec codec : kCodecs) {
    for (const DType dtype : kDTypes) {
      for (const std::size_t block : {2, 16, 30, 128, 256, 1024, 4096}) {
        if (!IsBlockCodec(codec) && block != 2) continue;
        for (const std::size_t size : SizesAround(block)) {
          const auto kind = static_cast<Kind>(random.Below(static_cast<std::uint32_t>(Kind::kNumKinds)));
          CheckAgainstReference({codec, dtype, block, 1 + random.Below(2), 1 + random.Below(3), size, 1}, kind,
                                &random);
        }
      }
    }
  }
}

void CheckAllKinds() {
  Random random(2);
  for (const Codec codec : kCodecs) {
    for (const DType dtype : kDTypes) {
      for (int kind = 0; kind < static_cast<int>(Kind::kNumKinds); ++kind) {
        for (const std::size_t block : {2, 64, 256}) {
          CheckAgainstReference({codec, dtype, block, 2, 2, 3 * 256 + 129, 1}, static_cast<Kind>(kind), &random);
        }
      }
    }
  }
}

// Large enough to be split among the threads, in rows that end inside a unit.
void CheckThreadCounts() {
  Random random(3);
  for (const Codec codec : kCodecs) {
    for (const std::size_t num_threads : {1, 2, 7}) {
      CheckAgainstReference({codec, DType::kFloat32, 256, 2, 3, 70001, num_threads}, Kind::kNans, &random);
      CheckAgainstReference({codec, DType::kBfloat16, 65536, 1, 1, 300001, num_threads}, Kind::kPlain, &random);
      CheckAgainstReference({codec, DType::kFloat16, 128, 400, 5, 101, num_threads}, Kind::kPlain, &random);
    }
  }
}

// Bytes worked out by hand from the contract.
void CheckKnownBytes() {
  const float x[] = {-127.0F, 0.0F, 63.5F, 2.5F, 1e-40F, 0.0F, std::numeric_limits<float>::infinity(), 1.0F};
  const MessageLayout int8 = MakeMessageLayout(Codec::kInt8, 4, 1, 8);
  std::vector<std::uint8_t> bytes(int8.nbytes, kGuard);
  Quantize(int8, {DType::kFloat32, x, 8, 8}, {bytes.data(), int8.nbytes, 1, kHash}, 1);
  const std::uint8_t expected[32] = {0x80, 0x3F, 0xC0, 0x7F, 0, 0, 0, 0, 0,    0,    0,    0,    0, 0, 0, 0,
                                     0x81, 0,    64,   2,    0, 0, 0, 0, 0xEF, 0xBE, 0xAD, 0xDE, 0, 0, 0, 0};
  EXPECT(std::memcmp(bytes.data(), expected, sizeof(expected)) == 0, "int8");

  // 7 / 7 = 1; the short last block of one segment has an odd tail.
  const float y[] = {7.0F, -3.5F, -7.0F};
  const MessageLayout int4 = MakeMessageLayout(Codec::kInt4, 2, 1, 3);
  bytes.assign(int4.nbytes, kGuard);
  Quantize(int4, {DType::kFloat32, y, 3, 3}, {bytes.data(), int4.nbytes, 1, kHash}, 1);
  EXPECT(bytes[0] == 0x80 && bytes[1] == 0x3F && bytes[2] == 0x80 && bytes[3] == 0x3F, "int4 scales");
  EXPECT(bytes[16] == 0xC7 && bytes[17] == 0x09 && bytes[18] == 0, "int4 codes %x %x", bytes[16], bytes[17]);
}

void CheckBadArguments() {
  const float x[4] = {};
  alignas(16) std::uint8_t bytes[64];
  const MessageLayout layout = MakeMessageLayout(Codec::kInt8, 2, 1, 4);
  MessageOfThrow([&] { Quantize(layout, {DType::kFloat32, x, 4, 4}, {bytes, 32, 1, 0}, 0); });
  MessageOfThrow([&] { Quantize(layout, {DType::kFloat32, nullptr, 4, 4}, {bytes, 32, 1, 0}, 1); });
  MessageOfThrow([&] { Quantize(layout, {DType::kFloat32, x, 4, 4}, {nullptr, 32, 1, 0}, 1); });
  MessageOfThrow([&] { Quantize(layout, {DType::kFloat32, x, 4, 4}, {bytes, 16, 2, 0}, 1); });
}

}  // namespace
}  // namespace zcomm

int main() {
  std::printf("isa %s\n", zcomm::IsaName(zcomm::ActiveIsa()));
  zcomm::CheckKnownBytes();
  zcomm::CheckAllSizes();
  zcomm::CheckAllKinds();
  zcomm::CheckThreadCounts();
  zcomm::CheckBadArguments();
  std::puts("ok");
  return 0;
}
