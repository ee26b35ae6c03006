#include "zcomm/feedback.h"

#include <algorithm>
#include <cmath>

#include "test_util.h"
#include "zcomm/decode.h"
#include "zcomm/isa.h"
#include "zcomm/quantize.h"
#include "zcomm/reduce.h"

namespace zcomm {
namespace {

constexpr std::uint32_t kHash = 9;
constexpr std::uint32_t kOutHash = 10;
constexpr float kLargest = std::numeric_limits<float>::max();

// Rows of int8 blocks with gaps between them.
struct Blocks {
  std::vector<std::int8_t> codes;
  std::vector<std::uint16_t> scales;
  std::size_t codes_stride;
  std::size_t scales_stride;

  ResidualRows rows(float beta) { return {codes.data(), codes_stride, scales.data(), scales_stride, beta}; }
};

Blocks MakeBlocks(std::size_t num_rows, std::size_t numel, Random* random) {
  const std::size_t num_blocks = (numel + kResidualBlock - 1) / kResidualBlock;
  Blocks blocks{{}, {}, (num_blocks + 1) * kResidualBlock, num_blocks + 3};
  blocks.codes.resize(num_rows * blocks.codes_stride);
  blocks.scales.resize(num_rows * blocks.scales_stride);
  for (std::int8_t& code : blocks.codes) code = static_cast<std::int8_t>(static_cast<int>(random->Below(255)) - 127);
  // Finite, from 2^-110 to the largest.
  for (std::uint16_t& scale : blocks.scales) scale = static_cast<std::uint16_t>(0x0880 + random->Below(0x7700));
  return blocks;
}

// N10 of zcomm/_formats/reference.py for one row, step by step: u = RN(x + RN(beta * r)), and the new residual of
// u - `decoded`.
std::vector<float> Summed(const std::vector<float>& x, const Blocks& blocks, std::size_t row, float beta) {
  std::vector<float> u(x.size());
  for (std::size_t e = 0; e < x.size(); ++e) {
    const float scale = FloatFromBfloat16(blocks.scales[row * blocks.scales_stride + e / kResidualBlock]);
    const float r = static_cast<float>(blocks.codes[row * blocks.codes_stride + e]) * scale;
    const float damped = beta * std::clamp(r, -kLargest, kLargest);
    u[e] = x[e] + damped;
  }
  return u;
}

void StoreBlock(const float* lost, std::size_t numel, std::int8_t* codes, std::uint16_t* scale) {
  float absmax = 0;
  for (std::size_t e = 0; e < numel; ++e) {
    if (!(std::fabs(lost[e]) <= kLargest)) return;  // not finite: the block stays
    absmax = std::max(absmax, std::fabs(lost[e]));
  }
  *scale = 0;
  std::fill(codes, codes + numel, std::int8_t{0});
  if (absmax < FromBits(0x0D800000U)) return;  // 2^-100
  const float exact = absmax / 127.0F;
  std::uint32_t bits = 0;
  std::memcpy(&bits, &exact, sizeof(bits));
  *scale = static_cast<std::uint16_t>(std::min((bits + 0xFFFFU) >> 16, 0x7F7FU));
  const float inverse = 1.0F / FloatFromBfloat16(*scale);
  for (std::size_t e = 0; e < numel; ++e) {
    codes[e] = static_cast<std::int8_t>(std::clamp(std::nearbyint(lost[e] * inverse), -127.0F, 127.0F));
  }
}

void StoreResidual(const std::vector<float>& u, const float* decoded, Blocks* blocks, std::size_t row) {
  for (std::size_t at = 0; at < u.size(); at += kResidualBlock) {
    const std::size_t numel = std::min(kResidualBlock, u.size() - at);
    float lost[kResidualBlock];
    for (std::size_t e = 0; e < numel; ++e) lost[e] = u[at + e] - decoded[at + e];
    StoreBlock(lost, numel, blocks->codes.data() + row * blocks->codes_stride + at,
               blocks->scales.data() + row * blocks->scales_stride + at / kResidualBlock);
  }
}

// The values that become the rows' messages: row i at x[i * stride], float32.
struct Source {
  std::vector<float> x;
  std::size_t stride;
};

// The messages and the residual according to the definition.
std::vector<std::uint8_t> Expected(const MessageLayout& layout, const Source& source, std::size_t num_rows,
                                   std::size_t message_stride, float beta, const Draw* draw, Blocks* blocks) {
  std::vector<float> sums(num_rows * source.stride + 1);
  for (std::size_t i = 0; i < num_rows; ++i) {
    const float* x = source.x.data() + i * source.stride;
    const std::vector<float> u = Summed({x, x + layout.segment_numel}, *blocks, i, beta);
    std::copy(u.begin(), u.end(), sums.begin() + static_cast<std::ptrdiff_t>(i * source.stride));
  }
  std::vector<std::uint8_t> messages(num_rows * message_stride, 0xAB);
  QuantizeRef(layout, {DType::kFloat32, sums.data(), source.stride, 0},
              {messages.data(), message_stride, num_rows, kOutHash}, draw);
  std::vector<float> decoded(num_rows * source.stride + 1);
  DecodeRef(layout, {messages.data(), message_stride, num_rows, kOutHash},
            {DType::kFloat32, decoded.data(), source.stride, 0});
  for (std::size_t i = 0; i < num_rows; ++i) {
    const float* u = sums.data() + i * source.stride;
    StoreResidual({u, u + layout.segment_numel}, decoded.data() + i * source.stride, blocks, i);
  }
  return messages;
}

void ExpectSame(const MessageLayout& layout, std::size_t stride, const std::vector<std::uint8_t>& got,
                const std::vector<std::uint8_t>& expected, const Blocks& kept, const Blocks& expected_kept) {
  for (std::size_t at = 0; at + stride <= got.size(); at += stride) {
    ExpectSameMessages(layout, got.data() + at, expected.data() + at, "message");
    EXPECT(got[at + layout.nbytes] == 0xAB, "wrote past a message");
  }
  const int codec = static_cast<int>(layout.codec);
  EXPECT(kept.scales == expected_kept.scales, "scales: codec %d block %zu numel %zu", codec, layout.block,
         layout.segment_numel);
  EXPECT(kept.codes == expected_kept.codes, "codes: codec %d block %zu numel %zu", codec, layout.block,
         layout.segment_numel);
}

float SomeBeta(Random* random) {
  const float betas[] = {1.0F, 0.9F, 0.5F};
  return betas[random->Below(3)];
}

// Whether `encode` makes the messages of `source` and keeps the residuals that Expected says.
template <typename Encode>
void Check(const MessageLayout& layout, const Source& source, std::size_t num_rows, Random* random,
           const Encode& encode) {
  Blocks got = MakeBlocks(num_rows, layout.segment_numel, random);
  Blocks expected = got;
  const float beta = SomeBeta(random);
  const std::optional<Draw> maybe = MaybeDraw(random);
  const Draw* draw = maybe ? &*maybe : nullptr;
  const std::size_t stride = layout.nbytes + 16;
  std::vector<std::uint8_t> messages(num_rows * stride, 0xAB);
  encode(MutableMessages{messages.data(), stride, num_rows, kOutHash}, got.rows(beta), draw);
  const auto wanted = Expected(layout, source, num_rows, stride, beta, draw, &expected);
  ExpectSame(layout, stride, messages, wanted, got, expected);
}

void CheckArray(const MessageLayout& layout, DType dtype, std::size_t num_rows, Kind kind, std::size_t num_threads,
                Random* random) {
  const std::size_t row_stride = layout.segment_numel + 3;
  const auto x = MakeArray(dtype, num_rows * row_stride, kind, random);
  Source source{std::vector<float>(num_rows * row_stride), row_stride};
  for (std::size_t e = 0; e < source.x.size(); ++e) source.x[e] = LoadElement(dtype, x.data(), e);
  Check(layout, source, num_rows, random,
        [&](const MutableMessages& messages, const ResidualRows& rows, const Draw* draw) {
          QuantizeWithResidual(layout, {dtype, x.data(), row_stride, 0}, messages, rows, draw, num_threads);
        });
}

void CheckSum(const MessageLayout& in_layout, const MessageLayout& layout, Kind kind, std::size_t num_threads,
              Random* random) {
  const std::size_t num_rows = in_layout.num_segments;
  const std::size_t count = 1 + random->Below(3);
  const auto x = MakeArray(DType::kFloat32, count * in_layout.numel(), kind, random);
  const std::size_t in_stride = in_layout.nbytes / 16 * 16 + 32;
  std::vector<std::uint8_t> received(count * in_stride);
  QuantizeRef(in_layout, {DType::kFloat32, x.data(), in_layout.numel(), in_layout.segment_numel},
              {received.data(), in_stride, count, kHash}, nullptr);
  const ConstMessages input{received.data(), in_stride, count, kHash};
  Source source{std::vector<float>(in_layout.numel() + 1), in_layout.segment_numel};
  DecodeSumRef(in_layout, input, {DType::kFloat32, source.x.data(), 0, in_layout.segment_numel}, 1.0F);
  Check(layout, source, num_rows, random,
        [&](const MutableMessages& messages, const ResidualRows& rows, const Draw* draw) {
          DecodeSumRequantizeWithResidual(in_layout, input, layout, messages, rows, draw, num_threads);
        });
}

Kind SomeKind(Random* random) { return static_cast<Kind>(random->Below(static_cast<std::uint32_t>(Kind::kNumKinds))); }

MessageLayout SomeLayout(Codec codec, std::size_t block, std::size_t numel, Random* random) {
  return MakeMessageLayout(codec, block, 1, numel, MayRotate(codec, block) && random->Below(2) == 1);
}

void CheckAllSizes() {
  Random random(1);
  for (const Codec codec : kCodecs) {
    if (!IsBlockCodec(codec)) continue;
    for (const std::size_t block : {2, 64, 256, 768, 4096}) {
      for (const std::size_t numel : {0, 1, 255, 256, 257, 511, 769, 2048, 2049, 5000}) {
        const MessageLayout layout = SomeLayout(codec, block, numel, &random);
        CheckArray(layout, kDTypes[random.Below(3)], 1 + random.Below(3), SomeKind(&random), 1, &random);
        const Codec in_codec = kCodecs[random.Below(9)];
        const std::size_t in_block = IsBlockCodec(in_codec) ? (random.Below(2) == 1 ? 30 : 1024) : 0;
        const MessageLayout in_layout = MakeMessageLayout(in_codec, in_block, 1 + random.Below(3), numel);
        CheckSum(in_layout, layout, SomeKind(&random), 1, &random);
      }
    }
  }
}

void CheckThreadCounts() {
  Random random(2);
  for (const std::size_t num_threads : {1, 2, 7}) {
    const MessageLayout layout = SomeLayout(Codec::kInt4, 128, 70001, &random);
    CheckArray(layout, DType::kBfloat16, 3, Kind::kNans, num_threads, &random);
    CheckSum(MakeMessageLayout(Codec::kInt8, 512, 3, 70001, true), layout, Kind::kPlain, num_threads, &random);
  }
}

// By hand: int4 with scale 1 rounds a quarter to 0 until the residual has added up enough of them.
void CheckNothingIsLost() {
  const float x[] = {7.0F, 0.25F, -0.25F, 0.0F};
  const MessageLayout layout = MakeMessageLayout(Codec::kInt4, 4, 1, 4);
  std::vector<std::int8_t> codes(kResidualBlock);
  std::uint16_t scale = 0;
  float total[4] = {};
  for (int step = 1; step <= 40; ++step) {
    std::vector<std::uint8_t> message(layout.nbytes);
    const ConstMessages sent{message.data(), layout.nbytes, 1, kHash};
    QuantizeWithResidual(layout, {DType::kFloat32, x, 4, 0}, {message.data(), layout.nbytes, 1, kHash},
                         {codes.data(), kResidualBlock, &scale, 1, 1.0F}, nullptr, 1);
    EXPECT(step != 1 || (message[16] == 0x07 && message[17] == 0), "the first message %x %x", message[16], message[17]);
    float values[4];
    Decode(layout, sent, {DType::kFloat32, values, 4, 0}, 1);
    for (int e = 0; e < 4; ++e) {
      total[e] += values[e];
      const float expected = static_cast<float>(step) * x[e];
      EXPECT(std::fabs(total[e] - expected) < 0.6F, "step %d: %g of %g", step, static_cast<double>(total[e]),
             static_cast<double>(expected));
    }
  }
}

void CheckBadArguments() {
  Random random(3);
  const float x[512] = {};
  alignas(16) std::uint8_t bytes[1024] = {};
  Blocks blocks = MakeBlocks(2, 256, &random);
  const Blocks before = blocks;
  const ResidualRows rows = blocks.rows(1.0F);
  const ConstRows input{DType::kFloat32, x, 256, 0};
  const auto refused = [&](const MessageLayout& layout, const ResidualRows& residual, std::size_t num_threads) {
    return MessageOfThrow(
        [&] { QuantizeWithResidual(layout, input, {bytes, 512, 1, kHash}, residual, nullptr, num_threads); });
  };
  const MessageLayout layout = MakeMessageLayout(Codec::kInt8, 256, 1, 256);
  EXPECT(Contains(refused(MakeMessageLayout(Codec::kInt8, 48, 1, 256), rows, 1), "block=48"), "a block that straddles");
  EXPECT(Contains(refused(MakeMessageLayout(Codec::kFloat32, 0, 1, 64), rows, 1), "block=0"), "no blocks");
  EXPECT(Contains(refused(MakeMessageLayout(Codec::kInt8, 128, 2, 128), rows, 1), "num_segments=2"), "segments");
  EXPECT(Contains(refused(layout, {nullptr, 256, nullptr, 1, 1.0F}, 1), "no data"), "a null residual");
  refused(layout, rows, 0);
  const MessageLayout in_layout = MakeMessageLayout(Codec::kInt8, 256, 1, 256);
  alignas(16) std::uint8_t received[512] = {};  // without a trailer
  const ConstMessages wrong{received, 512, 1, kHash};
  const auto reduce = [&](const ConstMessages& messages, std::size_t out_count) {
    return MessageOfThrow([&] {
      DecodeSumRequantizeWithResidual(in_layout, messages, layout, {bytes, 512, out_count, kHash}, rows, nullptr, 1);
    });
  };
  EXPECT(Contains(reduce(wrong, 1), "message 0"), "a wrong trailer");
  EXPECT(Contains(reduce({received, 512, 0, kHash}, 1), "num_messages=0"), "no message");
  EXPECT(Contains(reduce(wrong, 2), "out messages=2"), "one message for each segment");
  EXPECT(blocks.codes == before.codes && blocks.scales == before.scales, "nothing may be written");
  EXPECT(std::all_of(bytes, bytes + sizeof(bytes), [](std::uint8_t b) { return b == 0; }), "nothing may be written");
}

}  // namespace
}  // namespace zcomm

int main() {
  std::printf("isa %s\n", zcomm::IsaName(zcomm::ActiveIsa()));
  zcomm::CheckNothingIsLost();
  zcomm::CheckAllSizes();
  zcomm::CheckThreadCounts();
  zcomm::CheckBadArguments();
  std::puts("ok");
  return 0;
}
