#include "zcomm/quantize.h"

#include "test_util.h"
#include "zcomm/isa.h"

#ifdef ZCOMM_X86
#include <immintrin.h>
#endif

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
  const bool is_rotated = MayRotate(c.codec, c.block) && random->Below(2) == 1;
  const MessageLayout layout = MakeMessageLayout(c.codec, c.block, c.num_segments, c.segment_numel, is_rotated);
  const std::optional<Draw> maybe = MaybeDraw(random);
  const Draw* draw = maybe ? &*maybe : nullptr;
  const std::size_t segment_stride = c.segment_numel + 3;
  const std::size_t message_stride = c.num_segments * segment_stride + 5;
  const auto x = MakeArray(c.dtype, c.num_messages * message_stride, kind, random);
  const std::size_t stride = layout.nbytes / 16 * 16 + 32;
  std::vector<std::uint8_t> got(c.num_messages * stride, kGuard);
  std::vector<std::uint8_t> expected = got;
  const ConstRows input{c.dtype, x.data(), message_stride, segment_stride};
  Quantize(layout, input, {got.data(), stride, c.num_messages, kHash}, draw, c.num_threads);
  QuantizeRef(layout, input, {expected.data(), stride, c.num_messages, kHash}, draw);
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
  Quantize(int8, {DType::kFloat32, x, 8, 8}, {bytes.data(), int8.nbytes, 1, kHash}, nullptr, 1);
  const std::uint8_t expected[32] = {0x80, 0x3F, 0xC0, 0x7F, 0, 0, 0, 0, 0,    0,    0,    0,    0, 0, 0, 0,
                                     0x81, 0,    64,   2,    0, 0, 0, 0, 0xEF, 0xBE, 0xAD, 0xDE, 0, 0, 0, 0};
  EXPECT(std::memcmp(bytes.data(), expected, sizeof(expected)) == 0, "int8");

  // 7 / 7 = 1; the short last block of one segment has an odd tail.
  const float y[] = {7.0F, -3.5F, -7.0F};
  const MessageLayout int4 = MakeMessageLayout(Codec::kInt4, 2, 1, 3);
  bytes.assign(int4.nbytes, kGuard);
  Quantize(int4, {DType::kFloat32, y, 3, 3}, {bytes.data(), int4.nbytes, 1, kHash}, nullptr, 1);
  EXPECT(bytes[0] == 0x80 && bytes[1] == 0x3F && bytes[2] == 0x80 && bytes[3] == 0x3F, "int4 scales");
  EXPECT(bytes[16] == 0xC7 && bytes[17] == 0x09 && bytes[18] == 0, "int4 codes %x %x", bytes[16], bytes[17]);
}

// One message of `codec`, of one segment.
std::vector<std::uint8_t> QuantizedOne(const MessageLayout& layout, const std::vector<float>& x) {
  std::vector<std::uint8_t> bytes(layout.nbytes, kGuard);
  Quantize(layout, {DType::kFloat32, x.data(), 0, 0}, {bytes.data(), layout.nbytes, 1, kHash}, nullptr, 1);
  return bytes;
}

void CheckKnownBytesOfOtherCodecs() {
  // Scale 1; 0.3 is below the midpoint 0.318359375, which goes down itself, and -8 is the first level.
  const auto nf4 =
      QuantizedOne(MakeMessageLayout(Codec::kNf4, 4, 1, 4), {8.0F, -8.0F, 0.318359375F, 0.3183594048023224F});
  EXPECT(nf4[0] == 0x80 && nf4[1] == 0x3F && nf4[16] == 0x0F && nf4[17] == 0x87, "nf4 %x %x", nf4[16], nf4[17]);
  // Scale 1; 17 is half way from 16 (even) to 18; 2^-10 half way from 0 to the smallest denormal.
  const auto fp8 = QuantizedOne(MakeMessageLayout(Codec::kFp8E4m3, 6, 1, 6),
                                {448.0F, -448.0F, 17.0F, -0.0009765625F, -0.001953125F, 1.0F});
  const std::uint8_t fp8_codes[] = {0x7E, 0xFE, 0x58, 0x00, 0x81, 0x38};
  EXPECT(std::memcmp(fp8.data() + 16, fp8_codes, sizeof(fp8_codes)) == 0, "fp8 %x %x", fp8[18], fp8[19]);
  // Scale 1 and zero point -5: codes 0, 5, 15; 2.5 above the zero point is half way.
  const auto asym = QuantizedOne(MakeMessageLayout(Codec::kInt4Asym, 4, 1, 4), {-5.0F, 0.0F, 10.0F, -2.5F});
  const std::uint8_t header[] = {0x80, 0x3F, 0xA0, 0xC0};
  EXPECT(std::memcmp(asym.data(), header, sizeof(header)) == 0, "asymmetric header");
  EXPECT(asym[16] == 0x50 && asym[17] == 0x2F, "asymmetric codes %x %x", asym[16], asym[17]);
}

// Rotation of (1, 0, 0, 0) is (1, 1, 1, 1): one scale, and all codes alike.
void CheckKnownRotation() {
  const auto bytes = QuantizedOne(MakeMessageLayout(Codec::kInt8, 4, 1, 4, true), {127.0F, 0.0F, 0.0F, 0.0F});
  const std::uint8_t codes[] = {127, 127, 127, 127};
  EXPECT(bytes[0] == 0x80 && bytes[1] == 0x3F && std::memcmp(bytes.data() + 16, codes, 4) == 0, "rotation");
}

// The first and last block of each length that the rotation handles differently.
void CheckRotations() {
  Random random(4);
  for (std::size_t block = 2; block <= 8192; block *= 2) {
    for (const Codec codec : {Codec::kInt8, Codec::kInt4Asym}) {
      const MessageLayout layout = MakeMessageLayout(codec, block, 1, 3 * block + 1, true);
      const auto x = MakeArray(DType::kBfloat16, layout.numel(), Kind::kPlain, &random);
      std::vector<std::uint8_t> got(layout.nbytes);
      std::vector<std::uint8_t> expected(layout.nbytes);
      const ConstRows input{DType::kBfloat16, x.data(), 0, 0};
      Quantize(layout, input, {got.data(), layout.nbytes, 1, kHash}, nullptr, 1);
      QuantizeRef(layout, input, {expected.data(), layout.nbytes, 1, kHash}, nullptr);
      ExpectSameMessages(layout, got.data(), expected.data(), "rotation");
    }
  }
}

#ifdef ZCOMM_X86
// A caller that flushes denormals gets the same bytes.
void CheckDenormalModes() {
  constexpr unsigned kFlushed = 0x8040;
  Random random(5);
  const auto x = MakeArray(DType::kFloat32, 4096, Kind::kDenormals, &random);
  std::vector<float> values(4096);
  std::memcpy(values.data(), x.data(), 4096 * sizeof(float));
  for (std::size_t i = 0; i < values.size(); i += 64) values[i] = FromBits(0x0D800000U);  // 2^-100: not a tiny block
  const Draw draw{1, 2, 3, 4, 5, 6};
  for (const Codec codec : kCodecs) {
    const MessageLayout layout = MakeMessageLayout(codec, 64, 1, 4096, IsBlockCodec(codec));
    std::vector<std::uint8_t> bytes[2];
    for (std::vector<std::uint8_t>& message : bytes) {
      const unsigned mode = _mm_getcsr();
      if (&message == &bytes[1]) _mm_setcsr(mode | kFlushed);
      message.resize(layout.nbytes);
      Quantize(layout, {DType::kFloat32, values.data(), 0, 0}, {message.data(), layout.nbytes, 1, kHash}, &draw, 1);
      EXPECT(&message == &bytes[0] || (_mm_getcsr() & kFlushed) == kFlushed, "the caller's mode is restored");
      _mm_setcsr(mode);
    }
    EXPECT(bytes[0] == bytes[1], "codec %d", static_cast<int>(codec));
  }
}
#endif

void CheckBadArguments() {
  const float x[4] = {};
  alignas(16) std::uint8_t bytes[64];
  const MessageLayout layout = MakeMessageLayout(Codec::kInt8, 2, 1, 4);
  MessageOfThrow([&] { Quantize(layout, {DType::kFloat32, x, 4, 4}, {bytes, 32, 1, 0}, nullptr, 0); });
  MessageOfThrow([&] { Quantize(layout, {DType::kFloat32, nullptr, 4, 4}, {bytes, 32, 1, 0}, nullptr, 1); });
  MessageOfThrow([&] { Quantize(layout, {DType::kFloat32, x, 4, 4}, {nullptr, 32, 1, 0}, nullptr, 1); });
  MessageOfThrow([&] { Quantize(layout, {DType::kFloat32, x, 4, 4}, {bytes, 16, 2, 0}, nullptr, 1); });
}

}  // namespace
}  // namespace zcomm

int main() {
  std::printf("isa %s\n", zcomm::IsaName(zcomm::ActiveIsa()));
  zcomm::CheckKnownBytes();
  zcomm::CheckKnownBytesOfOtherCodecs();
  zcomm::CheckKnownRotation();
  zcomm::CheckRotations();
#ifdef ZCOMM_X86
  zcomm::CheckDenormalModes();
#endif
  zcomm::CheckAllSizes();
  zcomm::CheckAllKinds();
  zcomm::CheckThreadCounts();
  zcomm::CheckBadArguments();
  std::puts("ok");
  return 0;
}
