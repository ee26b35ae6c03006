#include "zcomm/message_layout.h"

#include "test_util.h"

namespace zcomm {
namespace {

void CheckOffsets() {
  const MessageLayout int8 = MakeMessageLayout(Codec::kInt8, 256, 1, 1000);
  EXPECT(int8.blocks_per_segment == 4 && int8.codes_offset == 16 && int8.nbytes == 1024, "%zu", int8.nbytes);
  const MessageLayout int4 = MakeMessageLayout(Codec::kInt4, 128, 2, 129);
  EXPECT(int4.blocks_per_segment == 2 && int4.codes_offset == 16, "%zu", int4.codes_offset);
  EXPECT(int4.segment_codes_nbytes == 65 && int4.nbytes == 160, "%zu", int4.nbytes);
  const MessageLayout cast = MakeMessageLayout(Codec::kBfloat16, 0, 3, 5);
  EXPECT(cast.nbytes == 30 && cast.codes_offset == 0, "%zu", cast.nbytes);
  const MessageLayout asym = MakeMessageLayout(Codec::kInt4Asym, 64, 2, 129);
  EXPECT(asym.codes_offset == 32 && asym.segment_codes_nbytes == 65, "6 headers of 4 bytes: %zu", asym.codes_offset);
  const MessageLayout fp8 = MakeMessageLayout(Codec::kFp8E4m3, 128, 1, 129);
  EXPECT(fp8.codes_offset == 16 && fp8.segment_codes_nbytes == 129, "%zu", fp8.segment_codes_nbytes);
  EXPECT(MakeMessageLayout(Codec::kInt4, 128, 0, 0).nbytes == 16, "an empty message is its trailer");
  EXPECT(MakeMessageLayout(Codec::kFloat32, 0, 4, 0).nbytes == 0, "an empty array");
}

void CheckBadArguments() {
  for (const std::size_t block : {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{65538}}) {
    const std::string text = MessageOfThrow([&] { MakeMessageLayout(Codec::kInt8, block, 1, 1); });
    EXPECT(Contains(text, "block=" + std::to_string(block)), "%s", text.c_str());
  }
  MessageOfThrow([] { MakeMessageLayout(Codec::kFloat32, 0, 1, 1, true); });
  const std::string text = MessageOfThrow([] { MakeMessageLayout(Codec::kInt8, 48, 1, 1, true); });
  EXPECT(Contains(text, "power of two: block=48"), "%s", text.c_str());
  EXPECT(!IsCodec(5) && !IsCodec(-1) && !IsCodec(static_cast<int>(kNumCodecs)) && IsCodec(9), "codec ids");
  const std::size_t large = std::size_t{1} << 40;
  EXPECT(Contains(MessageOfThrow([&] { MakeMessageLayout(Codec::kFloat32, 0, large, large); }), "2^62"), "overflow");
  EXPECT(Contains(MessageOfThrow([&] { MakeMessageLayout(Codec::kInt4, 2, 1, ~std::size_t{0}); }), "2^62"), "overflow");

  const MessageLayout layout = MakeMessageLayout(Codec::kInt8, 2, 1, 4);
  alignas(16) std::uint8_t bytes[64] = {};
  MessageOfThrow([&] { CheckMessages(layout, {bytes + 1, 32, 1, 0}, "input"); });
  MessageOfThrow([&] { CheckMessages(layout, {nullptr, 32, 1, 0}, "input"); });
  MessageOfThrow([&] { CheckMessages(layout, {bytes, 16, 2, 0}, "input"); });
  CheckMessages(layout, {bytes, 32, 2, 0}, "input");
  MessageOfThrow([&] { CheckRows(layout, {DType::kFloat32, bytes + 2, 0, 0}, "x"); });
  MessageOfThrow([&] { CheckRows(layout, {DType::kFloat32, nullptr, 0, 0}, "x"); });
  CheckRows(MakeMessageLayout(Codec::kInt8, 2, 1, 0), {DType::kFloat32, nullptr, 0, 0}, "x");
  MessageOfThrow([] { CheckThreads(0); });
}

void CheckTrailer() {
  const MessageLayout layout = MakeMessageLayout(Codec::kInt4, 2, 1, 3);
  std::vector<std::uint8_t> bytes(2 * layout.nbytes, 0xAB);
  WriteTrailer(layout, 0x12345678, bytes.data());
  WriteTrailer(layout, 0x12345678, bytes.data() + layout.nbytes);
  EXPECT(bytes[3] == 0xAB && bytes[4] == 0 && bytes[15] == 0, "padding after the scales, and not the scales");
  EXPECT(bytes[17] == 0xAB && bytes[18] == 0, "padding after the codes, and not the codes");
  EXPECT(bytes[layout.trailer_offset()] == 0x78 && bytes[layout.nbytes - 1] == 0, "hash, then checksum 0");
  CheckTrailers(layout, {bytes.data(), layout.nbytes, 2, 0x12345678});
  bytes[layout.nbytes + layout.trailer_offset()] = 0x79;
  const std::string text = MessageOfThrow([&] { CheckTrailers(layout, {bytes.data(), layout.nbytes, 2, 0x12345678}); });
  EXPECT(Contains(text, "message 1 must carry layout hash 305419896, but has 305419897"), "%s", text.c_str());
  ClearTrailers(layout, {bytes.data(), layout.nbytes, 1, 0x12345678});
  EXPECT(
      Contains(MessageOfThrow([&] { CheckTrailers(layout, {bytes.data(), layout.nbytes, 1, 0x12345678}); }), "has 0"),
      "cleared");
  CheckTrailers(MakeMessageLayout(Codec::kFloat32, 0, 1, 3), {bytes.data(), layout.nbytes, 2, 1});
}

}  // namespace
}  // namespace zcomm

int main() {
  zcomm::CheckOffsets();
  zcomm::CheckBadArguments();
  zcomm::CheckTrailer();
  std::puts("ok");
  return 0;
}
