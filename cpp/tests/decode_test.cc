#include "zcomm/decode.h"

#include "test_util.h"
#include "zcomm/isa.h"

namespace zcomm {
namespace {

constexpr std::uint32_t kHash = 77;

// Messages of random bytes with valid trailers: every code and scale occurs, even those that no encoder writes.
std::vector<std::uint8_t> RandomMessages(const MessageLayout& layout, std::size_t count, std::size_t stride,
                                         Random* random) {
  std::vector<std::uint8_t> bytes(count * stride + 16);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random->Next() >> 24);
  for (std::size_t i = 0; i < count; ++i) WriteTrailer(layout, kHash, bytes.data() + i * stride);
  return bytes;
}

void CheckAgainstReference(const MessageLayout& layout, std::size_t num_messages, DType dtype, std::size_t num_threads,
                           Random* random) {
  const std::size_t stride = layout.nbytes / 16 * 16 + 32;
  const auto bytes = RandomMessages(layout, num_messages, stride, random);
  const ConstMessages input{bytes.data(), stride, num_messages, kHash};
  const std::size_t segment_stride = layout.segment_numel + 1;
  const std::size_t message_stride = layout.num_segments * segment_stride + 3;
  const std::size_t out_numel = num_messages * message_stride;
  std::vector<std::uint8_t> got(out_numel * ItemSize(dtype) + 4, 0x3C);  // the gaps keep this value
  std::vector<std::uint8_t> expected = got;
  Decode(layout, input, {dtype, got.data(), message_stride, segment_stride}, num_threads);
  DecodeRef(layout, input, {dtype, expected.data(), message_stride, segment_stride});
  ExpectSameElements(dtype, got.data(), expected.data(), out_numel, "Decode");
  EXPECT(std::memcmp(got.data() + out_numel * ItemSize(dtype), "\x3C\x3C\x3C\x3C", 4) == 0, "wrote past the end");
}

void CheckAllSizes() {
  Random random(1);
  for (const Codec codec : kCodecs) {
    for (const DType dtype : kDTypes) {
      for (const std::size_t block : {2, 16, 30, 128, 256, 1024, 4096}) {
        if (!IsBlockCodec(codec) && block != 2) continue;
        for (const std::size_t size : SizesAround(block)) {
          for (const bool is_rotated : {false, true}) {
            if (is_rotated && !MayRotate(codec, block)) continue;
            const MessageLayout layout = MakeMessageLayout(codec, block, 1 + random.Below(3), size, is_rotated);
            CheckAgainstReference(layout, 1 + random.Below(3), dtype, 1, &random);
          }
        }
      }
    }
  }
}

void CheckThreadCounts() {
  Random random(2);
  for (const Codec codec : kCodecs) {
    for (const std::size_t num_threads : {1, 2, 7}) {
      CheckAgainstReference(MakeMessageLayout(codec, 256, 3, 70001), 2, DType::kFloat32, num_threads, &random);
      CheckAgainstReference(MakeMessageLayout(codec, 65536, 1, 300001), 1, DType::kBfloat16, num_threads, &random);
      CheckAgainstReference(MakeMessageLayout(codec, 128, 5, 101), 400, DType::kFloat16, num_threads, &random);
      if (!IsBlockCodec(codec)) continue;
      CheckAgainstReference(MakeMessageLayout(codec, 256, 3, 70001, true), 2, DType::kBfloat16, num_threads, &random);
    }
  }
}

// Outputs large enough for non-temporal stores, in rows that begin anywhere within a cache line.
void CheckLargeOutputs() {
  Random random(3);
  CheckAgainstReference(MakeMessageLayout(Codec::kInt8, 256, 2, (5 << 20) + 77), 1, DType::kFloat32, 2, &random);
  CheckAgainstReference(MakeMessageLayout(Codec::kNf4, 64, 3, (6 << 20) + 77, true), 1, DType::kFloat16, 2, &random);
  CheckAgainstReference(MakeMessageLayout(Codec::kInt4, 128, 3, (6 << 20) + 77), 1, DType::kBfloat16, 2, &random);
}

// Conversions over the whole range of bit patterns.
void CheckConversions() {
  constexpr std::size_t kCount = std::size_t{1} << 21;
  for (const Codec codec : {Codec::kFloat32, Codec::kBfloat16, Codec::kFloat16}) {
    const bool wide = codec == Codec::kFloat32;
    const MessageLayout layout = MakeMessageLayout(codec, 0, 1, wide ? kCount : 65536);
    std::vector<std::uint8_t> bytes(layout.nbytes);
    for (std::size_t i = 0; i < layout.segment_numel; ++i) {
      const auto pattern = static_cast<std::uint32_t>(wide ? i * 2047 + i % 3 : i);
      std::memcpy(bytes.data() + i * (wide ? 4 : 2), &pattern, wide ? 4 : 2);
    }
    for (const DType dtype : kDTypes) {
      std::vector<std::uint8_t> got(layout.segment_numel * 4);
      std::vector<std::uint8_t> expected = got;
      const ConstMessages input{bytes.data(), layout.nbytes, 1, 0};
      Decode(layout, input, {dtype, got.data(), 0, 0}, 1);
      DecodeRef(layout, input, {dtype, expected.data(), 0, 0});
      ExpectSameElements(dtype, got.data(), expected.data(), layout.segment_numel, "conversion");
    }
  }
}

// 127 * 0x7F7F (the largest scale) overflows every type: block codecs stay finite, cast codecs keep what they carry.
void CheckClamping() {
  const MessageLayout layout = MakeMessageLayout(Codec::kInt8, 2, 1, 4);
  std::vector<std::uint8_t> bytes(layout.nbytes, 0);
  const std::uint8_t scales[] = {0x7F, 0x7F, 0xC0, 0x7F};
  std::memcpy(bytes.data(), scales, sizeof(scales));
  bytes[layout.codes_offset] = 127;
  bytes[layout.codes_offset + 1] = 0x81;
  WriteTrailer(layout, kHash, bytes.data());
  for (const DType dtype : kDTypes) {
    float storage[4];
    Decode(layout, {bytes.data(), layout.nbytes, 1, kHash}, {dtype, storage, 0, 0}, 1);
    EXPECT(LoadElement(dtype, storage, 0) == MaxFinite(dtype), "clamped");
    EXPECT(LoadElement(dtype, storage, 1) == -MaxFinite(dtype), "clamped");
    const float nan = LoadElement(dtype, storage, 2);
    EXPECT(nan != nan, "a NaN scale");
  }
  const float infinity[] = {std::numeric_limits<float>::infinity(), 1e30F};
  std::uint16_t half[2];
  Decode(MakeMessageLayout(Codec::kFloat32, 0, 1, 2), {reinterpret_cast<const std::uint8_t*>(infinity), 8, 1, 0},
         {DType::kFloat16, half, 0, 0}, 1);
  EXPECT(half[0] == 0x7C00 && half[1] == 0x7C00, "cast codecs do not clamp");
}

void CheckWrongTrailer() {
  Random random(4);
  const MessageLayout layout = MakeMessageLayout(Codec::kInt4, 2, 1, 5);
  auto bytes = RandomMessages(layout, 3, layout.nbytes, &random);
  bytes[2 * layout.nbytes + layout.trailer_offset()] ^= 1;
  float out[15];
  for (float& value : out) value = 7.0F;
  for (const bool is_ref : {false, true}) {
    const std::string text = MessageOfThrow([&] {
      const ConstMessages input{bytes.data(), layout.nbytes, 3, kHash};
      if (is_ref) {
        DecodeRef(layout, input, {DType::kFloat32, out, 5, 5});
      } else {
        Decode(layout, input, {DType::kFloat32, out, 5, 5}, 1);
      }
    });
    EXPECT(Contains(text, "message 2 must carry layout hash 77, but has 76"), "%s", text.c_str());
    for (const float value : out) EXPECT(value == 7.0F, "nothing may be written");
  }
}

}  // namespace
}  // namespace zcomm

int main() {
  std::printf("isa %s\n", zcomm::IsaName(zcomm::ActiveIsa()));
  zcomm::CheckAllSizes();
  zcomm::CheckThreadCounts();
  zcomm::CheckLargeOutputs();
  zcomm::CheckConversions();
  zcomm::CheckClamping();
  zcomm::CheckWrongTrailer();
  std::puts("ok");
  return 0;
}
