#include "zcomm/difference.h"

#include <algorithm>
#include <cmath>

#include "test_util.h"
#include "zcomm/decode.h"
#include "zcomm/isa.h"
#include "zcomm/quantize.h"

namespace zcomm {
namespace {

constexpr std::uint32_t kHash = 11;

Kind SomeKind(Random* random) { return static_cast<Kind>(random->Below(static_cast<std::uint32_t>(Kind::kNumKinds))); }

DType SomeDType(Random* random) { return kDTypes[random->Below(3)]; }

struct Case {
  MessageLayout layout;
  std::size_t num_messages;
  std::size_t num_threads;

  // Rows with gaps between them.
  std::size_t segment_stride() const { return layout.segment_numel + 3; }
  std::size_t message_stride() const { return layout.num_segments * segment_stride() + 5; }
  std::size_t array_numel() const { return num_messages * message_stride(); }
  std::size_t stride_nbytes() const { return layout.nbytes / 16 * 16 + 32; }
  bool IsOfARow(std::size_t element) const {
    const std::size_t inside = element % message_stride();
    return inside < layout.num_segments * segment_stride() && inside % segment_stride() < layout.segment_numel;
  }
};

// N11 of zcomm/_formats/reference.py: the message of RN(new - held), element by element.
void CheckQuantize(const Case& c, Random* random) {
  const DType dtype = SomeDType(random);
  const DType held_dtype = SomeDType(random);
  const auto x = MakeArray(dtype, c.array_numel(), SomeKind(random), random);
  const auto held = MakeArray(held_dtype, c.array_numel(), SomeKind(random), random);
  std::vector<float> difference(c.array_numel() + 1);
  for (std::size_t e = 0; e < c.array_numel(); ++e) {
    difference[e] = LoadElement(dtype, x.data(), e) - LoadElement(held_dtype, held.data(), e);
  }
  const std::optional<Draw> maybe = MaybeDraw(random);
  const Draw* draw = maybe ? &*maybe : nullptr;
  std::vector<std::uint8_t> got(c.num_messages * c.stride_nbytes(), 0xAB);
  std::vector<std::uint8_t> expected = got;
  QuantizeDifference(c.layout, {dtype, x.data(), c.message_stride(), c.segment_stride()}, held_dtype, held.data(),
                     {got.data(), c.stride_nbytes(), c.num_messages, kHash}, draw, c.num_threads);
  QuantizeRef(c.layout, {DType::kFloat32, difference.data(), c.message_stride(), c.segment_stride()},
              {expected.data(), c.stride_nbytes(), c.num_messages, kHash}, draw);
  for (std::size_t i = 0; i < c.num_messages; ++i) {
    const std::size_t at = i * c.stride_nbytes();
    ExpectSameMessages(c.layout, got.data() + at, expected.data() + at, "QuantizeDifference");
    for (std::size_t b = at + c.layout.nbytes; b < at + c.stride_nbytes(); ++b) {
      EXPECT(got[b] == 0xAB, "wrote past message %zu", i);
    }
  }
}

// The new held value is RN(RN(held + decoded)): rounded to float32, then to the dtype of `held`.
void CheckAdd(const Case& c, Random* random) {
  const DType dtype = SomeDType(random);
  const auto x = MakeArray(DType::kFloat32, c.array_numel(), SomeKind(random), random);
  std::vector<std::uint8_t> messages(c.num_messages * c.stride_nbytes());
  QuantizeRef(c.layout, {DType::kFloat32, x.data(), c.message_stride(), c.segment_stride()},
              {messages.data(), c.stride_nbytes(), c.num_messages, kHash}, nullptr);
  const ConstMessages input{messages.data(), c.stride_nbytes(), c.num_messages, kHash};
  std::vector<float> decoded(c.array_numel() + 1);
  DecodeRef(c.layout, input, {DType::kFloat32, decoded.data(), c.message_stride(), c.segment_stride()});
  auto got = MakeArray(dtype, c.array_numel(), SomeKind(random), random);
  auto expected = got;
  for (std::size_t e = 0; e < c.array_numel(); ++e) {
    if (!c.IsOfARow(e)) continue;
    const float sum = LoadElement(dtype, got.data(), e) + decoded[e];
    StoreElement(dtype, expected.data(), e, sum);
  }
  DecodeAdd(c.layout, input, {dtype, got.data(), c.message_stride(), c.segment_stride()}, c.num_threads);
  ExpectSameElements(dtype, got.data(), expected.data(), c.array_numel(), "DecodeAdd");
}

void CheckAllSizes() {
  Random random(1);
  for (const Codec codec : kCodecs) {
    for (const std::size_t block : {2, 30, 256, 4096}) {
      if (!IsBlockCodec(codec) && block != 2) continue;
      for (const std::size_t size : SizesAround(block)) {
        const bool is_rotated = MayRotate(codec, block) && random.Below(2) == 1;
        const MessageLayout layout = MakeMessageLayout(codec, block, 1 + random.Below(3), size, is_rotated);
        const Case c{layout, 1 + random.Below(2), 1};
        CheckQuantize(c, &random);
        CheckAdd(c, &random);
      }
    }
  }
}

void CheckThreadCounts() {
  Random random(2);
  for (const Codec codec : {Codec::kBfloat16, Codec::kInt8, Codec::kInt4}) {
    for (const std::size_t num_threads : {1, 2, 7}) {
      const Case c{MakeMessageLayout(codec, 256, 2, 70001), 2, num_threads};
      CheckQuantize(c, &random);
      CheckAdd(c, &random);
    }
  }
}

// By hand: the changes are 4 and 2, and arrive within half a scale: 4 / 127, rounded up to bf16, is 0.03173828125.
void CheckKnownValues() {
  const float values[] = {5.0F, 3.0F};
  float held[] = {1.0F, 1.0F};
  const MessageLayout layout = MakeMessageLayout(Codec::kInt8, 2, 1, 2);
  std::vector<std::uint8_t> bytes(layout.nbytes);
  QuantizeDifference(layout, {DType::kFloat32, values, 2, 2}, DType::kFloat32, held,
                     {bytes.data(), layout.nbytes, 1, kHash}, nullptr, 1);
  EXPECT(bytes[layout.codes_offset] == 126 && bytes[layout.codes_offset + 1] == 63, "codes %d %d",
         bytes[layout.codes_offset], bytes[layout.codes_offset + 1]);
  DecodeAdd(layout, {bytes.data(), layout.nbytes, 1, kHash}, {DType::kFloat32, held, 2, 2}, 1);
  for (int e = 0; e < 2; ++e) EXPECT(std::fabs(held[e] - values[e]) <= 0.016F, "%g", static_cast<double>(held[e]));
}

void CheckBadArguments() {
  const float x[4] = {};
  float held[4] = {1, 2, 3, 4};
  alignas(16) std::uint8_t bytes[64] = {};
  const MessageLayout layout = MakeMessageLayout(Codec::kInt8, 2, 1, 4);
  const ConstRows input{DType::kFloat32, x, 4, 4};
  const auto encode = [&](const ConstRows& rows, const void* y, std::uint8_t* out, std::size_t num_threads) {
    return MessageOfThrow(
        [&] { QuantizeDifference(layout, rows, DType::kFloat32, y, {out, 32, 1, kHash}, nullptr, num_threads); });
  };
  EXPECT(Contains(encode({DType::kFloat32, nullptr, 4, 4}, held, bytes, 1), "input"), "no input");
  EXPECT(Contains(encode(input, nullptr, bytes, 1), "held"), "nothing held");
  EXPECT(Contains(encode(input, held, nullptr, 1), "output"), "no output");
  encode(input, held, bytes, 0);
  EXPECT(std::all_of(bytes, bytes + sizeof(bytes), [](std::uint8_t b) { return b == 0; }), "nothing may be written");
  const auto add = [&](void* out, std::size_t num_threads) {
    return MessageOfThrow([&] { DecodeAdd(layout, {bytes, 32, 1, kHash}, {DType::kFloat32, out, 4, 4}, num_threads); });
  };
  EXPECT(Contains(add(held, 1), "message 0"), "a wrong trailer");
  EXPECT(Contains(add(nullptr, 1), "output"), "no output");
  add(held, 0);
  EXPECT(held[0] == 1 && held[3] == 4, "nothing may be written");
}

}  // namespace
}  // namespace zcomm

int main() {
  std::printf("isa %s\n", zcomm::IsaName(zcomm::ActiveIsa()));
  zcomm::CheckKnownValues();
  zcomm::CheckAllSizes();
  zcomm::CheckThreadCounts();
  zcomm::CheckBadArguments();
  std::puts("ok");
  return 0;
}
