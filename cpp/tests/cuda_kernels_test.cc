// Compares the bodies of the CUDA kernels on an emulated grid with the reference, bit for bit. The GPU's own
// instructions, behind the policy of portable.h, are tested by the Python tests marked gpu.

#include <algorithm>
#include <cmath>
#include <optional>

#include "emulated_warp.h"
#include "kernels.h"
#include "reference_codecs.h"
#include "zcomm/decode.h"
#include "zcomm/quantize.h"
#include "zcomm/reduce.h"

namespace zcomm::cuda {
namespace {

constexpr std::uint8_t kGuard = 0xAB;
constexpr std::uint32_t kHash = 0xDEADBEEF;
constexpr std::uint32_t kOutHash = 0x12345678;
constexpr Codec kServed[] = {Codec::kFloat32, Codec::kBfloat16, Codec::kFloat16, Codec::kInt8,
                             Codec::kInt4,    Codec::kNf4,      Codec::kFp8E4m3};
constexpr Codec kBlockServed[] = {Codec::kInt8, Codec::kInt4, Codec::kNf4, Codec::kFp8E4m3};

// Bytes at an address that is a multiple of 16, plus `shift`.
class Buffer {
 public:
  Buffer(std::size_t nbytes, std::size_t shift, std::uint8_t fill = kGuard)
      : bytes_(nbytes + 32 + shift, fill), nbytes_(nbytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    data_ = bytes_.data() + (16 - address % 16) % 16 + shift;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::uint8_t* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  void CopyFrom(const Buffer& other) { std::memcpy(data_, other.data(), nbytes_); }

 private:
  std::vector<std::uint8_t> bytes_;
  std::size_t nbytes_;
  std::uint8_t* data_;
};

void FillArray(DType dtype, Kind kind, Random* random, Buffer* buffer) {
  for (std::size_t i = 0; i < buffer->nbytes() / ItemSize(dtype); ++i) {
    StoreElement(dtype, buffer->data(), i, Sample(kind, i, random));
  }
}

const Tables& FilledTables() {
  static const Tables tables = [] {
    Tables filled;
    for (int i = 0; i < 64; ++i) FillTables(i, &filled);
    return filled;
  }();
  return tables;
}

// A grid of a few warps, as many as a launch may have.
template <class Body>
void RunGrid(Random* random, const Body& body) {
  const std::uint32_t num_warps = 1 + random->Below(3);
  for (std::uint32_t warp = 0; warp < num_warps; ++warp) {
    EmulatedWarp::Run([&] { body(warp, num_warps); }, random);
  }
}

void RunQuantize(const QuantizeArguments& a, Random* random) {
  RunGrid(random, [&](std::uint32_t warp, std::uint32_t num_warps) {
    switch (a.output.codec) {
      case Codec::kInt8:
        return QuantizeTiles<EmulatedWarp, Int8Codec>(a, warp, num_warps, FilledTables());
      case Codec::kInt4:
        return QuantizeTiles<EmulatedWarp, Int4Codec>(a, warp, num_warps, FilledTables());
      case Codec::kNf4:
        return QuantizeTiles<EmulatedWarp, Nf4Codec>(a, warp, num_warps, FilledTables());
      default:
        return QuantizeTiles<EmulatedWarp, Fp8Codec>(a, warp, num_warps, FilledTables());
    }
  });
}

void RunDecode(const DecodeArguments& a, Random* random) {
  RunGrid(random, [&](std::uint32_t warp, std::uint32_t num_warps) {
    switch (a.input.codec) {
      case Codec::kInt8:
        return DecodeTiles<EmulatedWarp, Int8Codec>(a, warp, num_warps, FilledTables());
      case Codec::kInt4:
        return DecodeTiles<EmulatedWarp, Int4Codec>(a, warp, num_warps, FilledTables());
      case Codec::kNf4:
        return DecodeTiles<EmulatedWarp, Nf4Codec>(a, warp, num_warps, FilledTables());
      case Codec::kFp8E4m3:
        return DecodeTiles<EmulatedWarp, Fp8Codec>(a, warp, num_warps, FilledTables());
      default:
        return DecodeTiles<EmulatedWarp, CastCodec>(a, warp, num_warps, FilledTables());
    }
  });
}

void RunRequantize(const RequantizeArguments& a, Random* random) {
  RunGrid(random, [&](std::uint32_t warp, std::uint32_t num_warps) {
    switch (a.output.codec) {
      case Codec::kInt8:
        return RequantizeTiles<EmulatedWarp, Int8Codec>(a, warp, num_warps, FilledTables());
      case Codec::kInt4:
        return RequantizeTiles<EmulatedWarp, Int4Codec>(a, warp, num_warps, FilledTables());
      case Codec::kNf4:
        return RequantizeTiles<EmulatedWarp, Nf4Codec>(a, warp, num_warps, FilledTables());
      default:
        return RequantizeTiles<EmulatedWarp, Fp8Codec>(a, warp, num_warps, FilledTables());
    }
  });
}

struct Case {
  Codec codec;
  DType dtype;
  std::size_t block;
  std::size_t num_messages;
  std::size_t num_segments;
  std::size_t segment_numel;
  std::optional<std::size_t> shift = {};  // of the rows' start behind a multiple of 16 bytes; any, when it is not given
};

std::size_t Shift(DType dtype, Random* random) {
  return random->Below(3) == 0 ? ItemSize(dtype) * random->Below(8) : 0;
}

std::size_t Shift(const Case& c, Random* random) { return c.shift.has_value() ? *c.shift : Shift(c.dtype, random); }

// While it lives, a kernel that accesses anything except these rows and messages fails the test.
class Bounds {
 public:
  Bounds(const ConstRows& rows, const Case& c, std::size_t num_messages, const MessageLayout& layout,
         const std::uint8_t* messages, std::size_t stride, const std::int32_t* is_valid = nullptr) {
    for (std::size_t i = 0; i < num_messages * c.num_segments; ++i) {
      const std::size_t first = i / c.num_segments * rows.message_stride + i % c.num_segments * rows.segment_stride;
      EmulatedWarp::allowed.push_back({static_cast<const std::uint8_t*>(rows.data) + first * ItemSize(c.dtype),
                                       c.segment_numel * ItemSize(c.dtype)});
    }
    for (std::size_t i = 0; i < c.num_messages; ++i) {
      EmulatedWarp::allowed.push_back({messages + i * stride, layout.nbytes});
    }
    EmulatedWarp::allowed.push_back({is_valid, sizeof(*is_valid)});
  }
  Bounds(const Bounds&) = delete;
  Bounds& operator=(const Bounds&) = delete;
  ~Bounds() { EmulatedWarp::allowed.clear(); }
};

void ExpectSameBytes(const Buffer& got, const Buffer& expected, const Case& c, const char* what) {
  for (std::size_t i = 0; i < got.nbytes(); ++i) {
    EXPECT(got.data()[i] == expected.data()[i],
           "%s: byte %zu of %zu is %d, expected %d; codec %d block %zu dtype %d, %zu x %zu x %zu", what, i,
           got.nbytes(), got.data()[i], expected.data()[i], static_cast<int>(c.codec), c.block,
           static_cast<int>(c.dtype), c.num_messages, c.num_segments, c.segment_numel);
  }
}

// Rows with gaps between them, or none, and messages with guards between them.
void CheckQuantize(const Case& c, Kind kind, Random* random) {
  const MessageLayout layout = MakeMessageLayout(c.codec, c.block, c.num_segments, c.segment_numel);
  const std::size_t gap = random->Below(2) == 0 ? 0 : 3;
  const std::size_t segment_stride = c.segment_numel + gap;
  const std::size_t message_stride = c.num_segments * segment_stride + 8 * gap;
  Buffer x(c.num_messages * message_stride * ItemSize(c.dtype), Shift(c, random));
  FillArray(c.dtype, kind, random, &x);
  const std::size_t stride = layout.nbytes / 16 * 16 + 32;
  Buffer got(c.num_messages * stride, IsBlockCodec(c.codec) ? 4 * random->Below(4) : 0);
  Buffer expected(c.num_messages * stride, 0);
  const ConstRows input{c.dtype, x.data(), message_stride, segment_stride};
  const MutableMessages output{got.data(), stride, c.num_messages, kHash};
  const Bounds bounds(input, c, c.num_messages, layout, got.data(), stride);
  if (IsBlockCodec(c.codec)) {
    RunQuantize(MakeQuantizeArguments(layout, input, nullptr, nullptr, output), random);
  } else {
    RunDecode(MakeCastArguments(layout, input, output), random);
  }
  QuantizeRef(layout, input, {expected.data(), stride, c.num_messages, kHash}, nullptr);
  for (std::size_t i = 0; i < c.num_messages; ++i) {
    ExpectSameMessages(layout, got.data() + i * stride, expected.data() + i * stride, "Quantize");
    for (std::size_t b = layout.nbytes; b < stride; ++b) {
      EXPECT(got.data()[i * stride + b] == kGuard, "Quantize wrote past message %zu", i);
    }
  }
}

// Messages of random bytes with valid trailers, so that there are headers and codes that no encoder writes.
void FillMessages(const MessageLayout& layout, std::size_t stride, std::size_t count, Kind kind, Random* random,
                  Buffer* messages) {
  if (IsBlockCodec(layout.codec) && random->Below(2) == 0) {
    for (std::size_t i = 0; i < messages->nbytes(); ++i)
      messages->data()[i] = static_cast<std::uint8_t>(random->Next());
    for (std::size_t i = 0; i < count; ++i) WriteTrailer(layout, kHash, messages->data() + i * stride);
    return;
  }
  const auto x = MakeArray(DType::kFloat32, count * layout.numel(), kind, random);
  QuantizeRef(layout, {DType::kFloat32, x.data(), layout.numel(), layout.segment_numel},
              {messages->data(), stride, count, kHash}, nullptr);
}

void CheckDecode(const Case& c, Kind kind, Random* random) {
  const MessageLayout layout = MakeMessageLayout(c.codec, c.block, c.num_segments, c.segment_numel);
  const std::size_t stride = layout.nbytes / 16 * 16 + 32;
  Buffer messages(c.num_messages * stride, IsBlockCodec(c.codec) ? 4 * random->Below(4) : 0);
  FillMessages(layout, stride, c.num_messages, kind, random, &messages);
  const std::size_t gap = random->Below(2) == 0 ? 0 : 3;
  const std::size_t segment_stride = c.segment_numel + gap;
  const std::size_t message_stride = c.num_segments * segment_stride + 8 * gap;
  const std::size_t numel = c.num_messages * message_stride;
  Buffer got(numel * ItemSize(c.dtype), Shift(c, random));
  FillArray(c.dtype, Kind::kPlain, random, &got);
  Buffer expected(got.nbytes(), 0);
  expected.CopyFrom(got);
  const ConstMessages input{messages.data(), stride, c.num_messages, kHash};
  const bool is_added = random->Below(3) == 0;
  std::int32_t is_valid = 1;
  const Bounds bounds({c.dtype, got.data(), message_stride, segment_stride}, c, c.num_messages, layout, messages.data(),
                      stride, &is_valid);
  const MutableRows output{c.dtype, got.data(), message_stride, segment_stride};
  RunDecode(MakeDecodeArguments(layout, input, output, is_added, &is_valid), random);
  EXPECT(is_valid == 1, "messages of the right hash");
  if (!is_added) {
    DecodeRef(layout, input, {c.dtype, expected.data(), message_stride, segment_stride});
  } else {
    std::vector<float> values(numel);
    DecodeRef(layout, input, {DType::kFloat32, values.data(), message_stride, segment_stride});
    for (std::size_t row = 0; row < c.num_messages * c.num_segments; ++row) {
      const std::size_t first = row / c.num_segments * message_stride + row % c.num_segments * segment_stride;
      for (std::size_t e = first; e < first + c.segment_numel; ++e) {
        StoreElement(c.dtype, expected.data(), e, LoadElement(c.dtype, expected.data(), e) + values[e]);
      }
    }
  }
  ExpectSameElements(c.dtype, got.data(), expected.data(), numel, "Decode");
}

void CheckDecodeSum(const Case& c, Kind kind, Random* random) {
  const MessageLayout layout = MakeMessageLayout(c.codec, c.block, c.num_segments, c.segment_numel);
  const std::size_t stride = layout.nbytes / 16 * 16 + 32;
  Buffer messages(c.num_messages * stride, 0);
  FillMessages(layout, stride, c.num_messages, kind, random, &messages);
  const std::size_t segment_stride = c.segment_numel + 3;
  const std::size_t numel = c.num_segments * segment_stride;
  Buffer got(numel * ItemSize(c.dtype), Shift(c, random));
  FillArray(c.dtype, Kind::kPlain, random, &got);
  Buffer expected(got.nbytes(), 0);
  expected.CopyFrom(got);
  const ConstMessages input{messages.data(), stride, c.num_messages, kHash};
  const auto divisor = static_cast<float>(1 + random->Below(4));
  const Bounds bounds({c.dtype, got.data(), 0, segment_stride}, c, 1, layout, messages.data(), stride);
  const MutableRows output{c.dtype, got.data(), 0, segment_stride};
  RunDecode(MakeDecodeSumArguments(layout, input, output, divisor, nullptr), random);
  DecodeSumRef(layout, input, {c.dtype, expected.data(), 0, segment_stride}, divisor);
  ExpectSameElements(c.dtype, got.data(), expected.data(), numel, "DecodeSum");
}

void CheckRequantize(const Case& c, Codec out_codec, std::size_t out_block, Kind kind, Random* random) {
  const MessageLayout layout = MakeMessageLayout(c.codec, c.block, c.num_segments, c.segment_numel);
  const MessageLayout out_layout = MakeMessageLayout(out_codec, out_block, 1, c.segment_numel);
  const std::size_t stride = layout.nbytes / 16 * 16 + 32;
  const std::size_t out_stride = out_layout.nbytes + 32;
  Buffer messages(c.num_messages * stride, 0);
  FillMessages(layout, stride, c.num_messages, kind, random, &messages);
  Buffer got(c.num_segments * out_stride, 0);
  Buffer expected(c.num_segments * out_stride, 0);
  const ConstMessages input{messages.data(), stride, c.num_messages, kHash};
  const MutableMessages output{got.data(), out_stride, c.num_segments, kOutHash};
  RunRequantize(MakeRequantizeArguments(layout, input, out_layout, output, nullptr, nullptr), random);
  DecodeSumRequantizeRef(layout, input, out_layout, {expected.data(), out_stride, c.num_segments, kOutHash}, nullptr);
  ExpectSameBytes(got, expected, c, "DecodeSumRequantize");
}

// N10 in plain steps on the reference: u = x + beta * r, the message, and what it lost in int8 blocks of 256.
struct ResidualRows {
  std::size_t num_blocks;
  Buffer codes;
  Buffer scales;

  ResidualRows(std::size_t rows, std::size_t numel)
      : num_blocks((numel + 255) / 256), codes(rows * num_blocks * 256, 0, 0), scales(rows * num_blocks * 2, 0, 0) {}

  Residual view(float beta) const {
    return {reinterpret_cast<std::int8_t*>(codes.data()), reinterpret_cast<std::uint16_t*>(scales.data()),
            num_blocks * 256, num_blocks, beta};
  }
  float Value(std::size_t row, std::size_t e) const {
    const float scale = LoadElement(DType::kBfloat16, scales.data(), row * num_blocks + e / 256);
    return ClampRef(static_cast<float>(view(0).codes[row * num_blocks * 256 + e]) * scale,
                    std::numeric_limits<float>::max());
  }
  void Encode(std::size_t row, const std::vector<float>& values) {
    for (std::size_t b = 0; b * 256 < values.size(); ++b) {
      const auto first = values.begin() + static_cast<std::ptrdiff_t>(b * 256);
      const std::vector<float> block(
          first, first + static_cast<std::ptrdiff_t>(std::min<std::size_t>(256, values.size() - b * 256)));
      const EncodedBlock encoded = EncodeBlockRef(Codec::kInt8, block, {});
      if (encoded.header == 0x7FC0) continue;
      view(0).scales[row * num_blocks + b] = static_cast<std::uint16_t>(encoded.header);
      for (std::size_t i = 0; i < block.size(); ++i) {
        view(0).codes[(row * num_blocks + b) * 256 + i] = static_cast<std::int8_t>(encoded.codes[i]);
      }
    }
  }
};

void ExpectSameResiduals(const ResidualRows& got, const ResidualRows& expected, const Case& c) {
  ExpectSameBytes(got.codes, expected.codes, c, "residual's codes");
  ExpectSameBytes(got.scales, expected.scales, c, "residual's scales");
}

// u replaces the rows of `sums`, `messages` become the reference's, `rows` the new residual.
void ReferenceWithResidual(const MessageLayout& layout, std::vector<float>* sums, float beta, std::size_t count,
                           std::uint8_t* messages, std::size_t stride, std::uint32_t hash, ResidualRows* rows) {
  const std::size_t numel = layout.segment_numel;
  const std::size_t num_rows = count * layout.num_segments;
  for (std::size_t i = 0; i < sums->size(); ++i) {
    const float added = rows->Value(i / numel, i % numel) * beta;
    (*sums)[i] += added;
  }
  const ConstRows input{DType::kFloat32, sums->data(), layout.numel(), numel};
  QuantizeRef(layout, input, {messages, stride, count, hash}, nullptr);
  std::vector<float> decoded(sums->size());
  DecodeRef(layout, {messages, stride, count, hash}, {DType::kFloat32, decoded.data(), layout.numel(), numel});
  for (std::size_t row = 0; row < num_rows; ++row) {
    std::vector<float> lost(numel);
    for (std::size_t e = 0; e < numel; ++e) lost[e] = (*sums)[row * numel + e] - decoded[row * numel + e];
    rows->Encode(row, lost);
  }
}

void CheckResidual(const Case& c, Kind kind, Random* random) {
  const MessageLayout layout = MakeMessageLayout(c.codec, c.block, c.num_segments, c.segment_numel);
  const std::size_t numel = c.num_messages * layout.numel();
  const float beta = random->Below(2) == 0 ? 1.0F : 0.9F;
  ResidualRows got_rows(c.num_messages * c.num_segments, c.segment_numel);
  ResidualRows rows(c.num_messages * c.num_segments, c.segment_numel);
  Buffer got(c.num_messages * layout.nbytes, 0);
  Buffer expected(c.num_messages * layout.nbytes, 0);
  for (int step = 0; step < 2; ++step) {
    Buffer x(numel * ItemSize(c.dtype), 0);
    FillArray(c.dtype, kind, random, &x);
    std::vector<float> values(numel);
    for (std::size_t i = 0; i < numel; ++i) values[i] = LoadElement(c.dtype, x.data(), i);
    const Residual residual = got_rows.view(beta);
    const ConstRows input{c.dtype, x.data(), layout.numel(), layout.segment_numel};
    const MutableMessages output{got.data(), layout.nbytes, c.num_messages, kHash};
    RunQuantize(MakeQuantizeArguments(layout, input, nullptr, &residual, output), random);
    ReferenceWithResidual(layout, &values, beta, c.num_messages, expected.data(), layout.nbytes, kHash, &rows);
    ExpectSameBytes(got, expected, c, "Quantize with a residual");
    ExpectSameResiduals(got_rows, rows, c);
  }
}

void CheckRequantizeWithResidual(const Case& c, Codec out_codec, std::size_t out_block, Kind kind, Random* random) {
  const MessageLayout layout = MakeMessageLayout(c.codec, c.block, c.num_segments, c.segment_numel);
  const MessageLayout out_layout = MakeMessageLayout(out_codec, out_block, 1, c.segment_numel);
  ResidualRows got_rows(c.num_segments, c.segment_numel);
  ResidualRows rows(c.num_segments, c.segment_numel);
  Buffer got(c.num_segments * out_layout.nbytes, 0);
  Buffer expected(c.num_segments * out_layout.nbytes, 0);
  for (int step = 0; step < 2; ++step) {
    Buffer messages(c.num_messages * layout.nbytes, 0);
    FillMessages(layout, layout.nbytes, c.num_messages, kind, random, &messages);
    const ConstMessages input{messages.data(), layout.nbytes, c.num_messages, kHash};
    const Residual residual = got_rows.view(1.0F);
    const MutableMessages output{got.data(), out_layout.nbytes, c.num_segments, kOutHash};
    RunRequantize(MakeRequantizeArguments(layout, input, out_layout, output, &residual, nullptr), random);
    std::vector<float> sums(layout.numel());
    DecodeSumRef(layout, input, {DType::kFloat32, sums.data(), 0, layout.segment_numel}, 1.0F);
    ReferenceWithResidual(out_layout, &sums, 1.0F, c.num_segments, expected.data(), out_layout.nbytes, kOutHash, &rows);
    ExpectSameBytes(got, expected, c, "DecodeSumRequantize with a residual");
    ExpectSameResiduals(got_rows, rows, c);
  }
}

void CheckDelta(const Case& c, DType held_dtype, Kind kind, Random* random) {
  const MessageLayout layout = MakeMessageLayout(c.codec, c.block, 1, c.segment_numel);
  Buffer x(c.segment_numel * ItemSize(c.dtype), Shift(c.dtype, random));
  Buffer held(c.segment_numel * ItemSize(held_dtype), Shift(held_dtype, random));
  FillArray(c.dtype, kind, random, &x);
  FillArray(held_dtype, Kind::kPlain, random, &held);
  std::vector<float> difference(c.segment_numel);
  for (std::size_t e = 0; e < c.segment_numel; ++e) {
    difference[e] = LoadElement(c.dtype, x.data(), e) - LoadElement(held_dtype, held.data(), e);
  }
  Buffer got(layout.nbytes, 0);
  Buffer expected(layout.nbytes, 0);
  const ConstRows input{c.dtype, x.data(), 0, 0};
  const ConstRows held_rows{held_dtype, held.data(), 0, 0};
  const MutableMessages output{got.data(), layout.nbytes, 1, kHash};
  RunQuantize(MakeQuantizeArguments(layout, input, &held_rows, nullptr, output), random);
  QuantizeRef(layout, {DType::kFloat32, difference.data(), 0, 0}, {expected.data(), layout.nbytes, 1, kHash}, nullptr);
  ExpectSameBytes(got, expected, c, "Quantize of a difference");
}

Kind AnyKind(Random* random) { return static_cast<Kind>(random->Below(static_cast<std::uint32_t>(Kind::kNumKinds))); }

std::size_t AnyBlock(Random* random) { return std::size_t{8} << random->Below(8); }

std::vector<std::size_t> Sizes(std::size_t block) {
  return {0, 1, 2, 7, 8, 9, 255, 257, block - 1, block, block + 1, 2 * block + 3, 1023, 1024, 1025, 2048, 3333};
}

void CheckAllSizes() {
  Random random(1);
  for (const Codec codec : kServed) {
    for (const DType dtype : kDTypes) {
      for (const std::size_t block : {8, 16, 32, 64, 128, 256, 512, 1024}) {
        if (!IsBlockCodec(codec) && block != 8) continue;
        for (const std::size_t size : Sizes(block)) {
          const Case c{codec, dtype, block, 1 + random.Below(2), 1 + random.Below(3), size};
          CheckQuantize(c, AnyKind(&random), &random);
          CheckDecode(c, AnyKind(&random), &random);
        }
      }
    }
  }
}

void CheckAllKinds() {
  Random random(2);
  for (const Codec codec : kServed) {
    for (const DType dtype : kDTypes) {
      for (int kind = 0; kind < static_cast<int>(Kind::kNumKinds); ++kind) {
        for (const std::size_t block : {64, 128, 256}) {
          CheckQuantize({codec, dtype, block, 2, 2, 2048 + 130}, static_cast<Kind>(kind), &random);
          CheckDecode({codec, dtype, block, 2, 1, 2048 + 130}, static_cast<Kind>(kind), &random);
        }
      }
    }
  }
}

void CheckSums() {
  Random random(3);
  for (const Codec codec : kServed) {
    for (const DType dtype : kDTypes) {
      for (const std::size_t size : Sizes(128)) {
        CheckDecodeSum({codec, dtype, AnyBlock(&random), 1 + random.Below(5), 1 + random.Below(3), size},
                       AnyKind(&random), &random);
      }
    }
    for (const Codec out_codec : kBlockServed) {
      for (const std::size_t size : Sizes(256)) {
        const Case c{codec, DType::kFloat32, AnyBlock(&random), 1 + random.Below(4), 1 + random.Below(3), size};
        CheckRequantize(c, out_codec, AnyBlock(&random), AnyKind(&random), &random);
      }
    }
  }
}

void CheckResiduals() {
  Random random(4);
  for (const Codec codec : kBlockServed) {
    for (const std::size_t size : Sizes(256)) {
      const auto dtype = static_cast<DType>(random.Below(3));
      const Case c{codec, dtype, AnyBlock(&random), 1 + random.Below(2), 1 + random.Below(2), size};
      CheckResidual(c, AnyKind(&random), &random);
      CheckRequantizeWithResidual(c, kBlockServed[random.Below(4)], AnyBlock(&random), AnyKind(&random), &random);
      CheckDelta(c, static_cast<DType>(random.Below(3)), AnyKind(&random), &random);
    }
  }
}

// Rows and codes that begin at every distance from an aligned word: a whole tile of each, and an odd rest.
void CheckMisaligned() {
  Random random(10);
  for (const DType dtype : kDTypes) {
    for (std::size_t shift = 0; shift < 16; shift += ItemSize(dtype)) {
      const std::size_t numel = 1025 + shift + 2 * random.Below(2);
      for (const Codec codec : kServed) {
        const Case c{codec, dtype, AnyBlock(&random), 1, 2, numel, shift};
        CheckQuantize(c, Kind::kPlain, &random);
        CheckDecode(c, Kind::kAnyBits, &random);
      }
      const Case c{kServed[random.Below(7)], dtype, AnyBlock(&random), 2, 2, numel, shift};
      CheckDecodeSum(c, Kind::kPlain, &random);
      CheckRequantize(c, kBlockServed[random.Below(4)], AnyBlock(&random), Kind::kPlain, &random);
    }
  }
}

// Values that are scaled to every place near each midpoint and each cell border, and to the ties of every codec.
void CheckEdgesOfCodes() {
  Random random(5);
  for (const Codec codec : kBlockServed) {
    const auto qmax = static_cast<float>(QMax(codec));
    std::vector<float> x;
    for (int step = -16 * QMax(codec); step <= 16 * QMax(codec); ++step) {
      if (step * step > 1000000 && step % 16 != 0) continue;
      const float value = static_cast<float>(step) / 16.0F;
      for (const float near : {value, std::nextafter(value, 1e30F), std::nextafter(value, -1e30F)}) {
        x.push_back(std::clamp(near, -qmax, qmax));
      }
    }
    for (int i = 0; codec == Codec::kNf4 && i < 15; ++i) {
      const float midpoint = (Nf4Level(i) + Nf4Level(i + 1)) / 2.0F;
      for (const float near : {midpoint, std::nextafter(midpoint, 9.0F), std::nextafter(midpoint, -9.0F)}) {
        x.push_back(near);
      }
    }
    for (std::size_t i = 0; i < x.size(); i += 8) x[i] = qmax;  // scale 1 in every block
    const MessageLayout layout = MakeMessageLayout(codec, 8, 1, x.size());
    Buffer got(layout.nbytes, 0);
    Buffer expected(layout.nbytes, 0);
    const ConstRows input{DType::kFloat32, x.data(), 0, 0};
    RunQuantize(MakeQuantizeArguments(layout, input, nullptr, nullptr, {got.data(), layout.nbytes, 1, kHash}), &random);
    QuantizeRef(layout, input, {expected.data(), layout.nbytes, 1, kHash}, nullptr);
    ExpectSameBytes(got, expected, {codec, DType::kFloat32, 8, 1, 1, x.size()}, "edges");
  }
}

// The largest value of a block, for magnitudes whose quotient, inverse and product round in every way: no clamp needed.
void CheckLargestOfBlocks() {
  Random random(6);
  for (const Codec codec : kBlockServed) {
    std::vector<float> x(8 * 20000, 0.0F);
    for (std::size_t i = 0; i < x.size(); i += 8) {
      x[i] = FromBits(0x0D800000U + random.Below(0x7F800000U - 0x0D800000U));
      x[i + 1] = -x[i];
      if (random.Below(2) == 0)
        x[i] = static_cast<float>(QMax(codec)) * FromBits((random.Next() % 0x6000U + 0x1000U) << 16);
      if (!(x[i] < std::numeric_limits<float>::infinity())) x[i] = 1.0F;
    }
    const MessageLayout layout = MakeMessageLayout(codec, 8, 1, x.size());
    Buffer got(layout.nbytes, 0);
    Buffer expected(layout.nbytes, 0);
    const ConstRows input{DType::kFloat32, x.data(), 0, 0};
    RunQuantize(MakeQuantizeArguments(layout, input, nullptr, nullptr, {got.data(), layout.nbytes, 1, kHash}), &random);
    QuantizeRef(layout, input, {expected.data(), layout.nbytes, 1, kHash}, nullptr);
    ExpectSameBytes(got, expected, {codec, DType::kFloat32, 8, 1, 1, x.size()}, "largest");
  }
}

// Of expected messages the trailers are cleared and nothing else; messages that the call writes keep theirs.
void CheckExpected() {
  Random random(8);
  for (const Codec codec : kBlockServed) {
    for (const std::size_t count : {1, 2, 31, 70}) {
      const MessageLayout layout = MakeMessageLayout(codec, 16, 1, 40);
      const std::vector<float> x(40, 1.0F);
      const ConstRows input{DType::kFloat32, x.data(), 0, 0};
      const std::size_t own = random.Below(static_cast<std::uint32_t>(count));
      const std::size_t nbytes = (count + 1) * layout.nbytes;  // another behind them
      Buffer messages(nbytes, 0);
      Buffer expected(nbytes, 0);
      const auto trailer = [&](std::size_t i) { return expected.data() + i * layout.nbytes + layout.trailer_offset(); };
      for (std::size_t i = 0; i < count; ++i) std::memset(trailer(i), 0, kTrailerNbytes);
      const MutableMessages written{messages.data() + own * layout.nbytes, layout.nbytes, 1, kHash};
      QuantizeRef(layout, input, {expected.data() + own * layout.nbytes, layout.nbytes, 1, kHash}, nullptr);
      const Expected expected_messages{messages.data(), count};
      RunQuantize(MakeQuantizeArguments(layout, input, nullptr, nullptr, written, expected_messages), &random);
      EXPECT(std::memcmp(messages.data(), expected.data(), nbytes) == 0, "codec %d, %zu messages, own %zu",
             static_cast<int>(codec), count, own);

      const Buffer again(nbytes, 0);
      messages.CopyFrom(again);
      Buffer summed(layout.nbytes, 0);
      QuantizeRef(layout, input, {summed.data(), layout.nbytes, 1, kHash}, nullptr);
      RunRequantize(MakeRequantizeArguments(layout, {summed.data(), layout.nbytes, 1, kHash}, layout, written, nullptr,
                                            nullptr, expected_messages),
                    &random);
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint8_t* at = messages.data() + i * layout.nbytes + layout.trailer_offset();
        EXPECT(i == own || std::memcmp(at, trailer(i), kTrailerNbytes) == 0, "message %zu of %zu", i, count);
      }
    }
  }
  const MessageLayout layout = MakeMessageLayout(Codec::kInt8, 16, 1, 40);
  Buffer messages(layout.nbytes, 0);
  const std::vector<float> x(40, 1.0F);
  const std::string error = MessageOfThrow([&] {
    MakeQuantizeArguments(layout, {DType::kFloat32, x.data(), 0, 0}, nullptr, nullptr,
                          {messages.data(), layout.nbytes, 1, kHash}, {messages.data() + 8, 1});
  });
  EXPECT(Contains(error, "must begin at a multiple of 16 bytes: count=1"), "%s", error.c_str());
}

// If one input message is refused, the output messages carry no hash, with or without a flag, and the reference refuses
// all of them. Every warp that writes a trailer must do so.
void CheckRefusedSums() {
  Random random(10);
  for (const Codec codec : kBlockServed) {
    for (const std::size_t count : {1, 2, 33, 70}) {
      const MessageLayout layout = MakeMessageLayout(codec, 16, 5, 40);
      const MessageLayout out_layout = MakeMessageLayout(Codec::kInt8, 8, 1, 40);
      const std::vector<float> x(count * layout.numel(), 1.0F);
      Buffer messages(count * layout.nbytes, 0);
      QuantizeRef(layout, {DType::kFloat32, x.data(), layout.numel(), layout.segment_numel},
                  {messages.data(), layout.nbytes, count, kHash}, nullptr);
      const ConstMessages input{messages.data(), layout.nbytes, count, kHash};
      Buffer out(5 * out_layout.nbytes, 0);
      DecodeSumRequantizeRef(layout, input, out_layout, {out.data(), out_layout.nbytes, 5, kOutHash}, nullptr);

      const std::size_t wrong = random.Below(static_cast<std::uint32_t>(count));
      const std::size_t bit = random.Below(32);
      messages.data()[wrong * layout.nbytes + layout.trailer_offset() + bit / 8] ^=
          static_cast<std::uint8_t>(1U << bit % 8);
      std::int32_t is_valid = 1;
      const bool has_flag = random.Below(2) == 0;
      RunRequantize(MakeRequantizeArguments(layout, input, out_layout, {out.data(), out_layout.nbytes, 5, kOutHash},
                                            nullptr, has_flag ? &is_valid : nullptr),
                    &random);
      EXPECT(is_valid == (has_flag ? 0 : 1), "codec %d, %zu messages", static_cast<int>(codec), count);
      for (std::size_t i = 0; i < 5; ++i) {
        std::vector<float> values(40);
        const std::string error = MessageOfThrow([&] {
          DecodeRef(out_layout, {out.data() + i * out_layout.nbytes, out_layout.nbytes, 1, kOutHash},
                    {DType::kFloat32, values.data(), 0, 0});
        });
        EXPECT(Contains(error, "but has 0"), "message %zu of %zu, %zu summed: %s", i, std::size_t{5}, count,
               error.c_str());
      }
    }
  }
}

void CheckDivisor() {
  Random random(7);
  for (int i = 0; i < 200000; ++i) {
    const std::uint32_t value = 1 + (random.Next() >> (1 + random.Below(31)));
    const std::uint32_t number = random.Next() >> (1 + random.Below(31));
    const Divisor divisor = Divisor::Of(value);
    EXPECT(Quotient(number, divisor) == number / value, "%u / %u", number, value);
    EXPECT(Quotient(0x7FFFFFFFU, divisor) == 0x7FFFFFFFU / value, "2^31 - 1 over %u", value);
    const std::uint32_t product = value * (0x7FFFFFFFU / value);
    EXPECT(Quotient(product, divisor) == 0x7FFFFFFFU / value, "%u / %u", product, value);
    EXPECT(Quotient(product - 1, divisor) == (product - 1) / value, "%u / %u", product - 1, value);
  }
}

using Counts = std::array<std::size_t, 17>;

void ExpectCounts(const Counts& expected, const char* what, DType dtype, Codec codec, std::size_t shift) {
  for (const std::size_t width : {1, 2, 4, 8, 16}) {
    EXPECT(EmulatedWarp::num_accesses[width] == expected[width],
           "%s: %zu accesses of %zu bytes, expected %zu; dtype %d, codec %d, shift %zu", what,
           EmulatedWarp::num_accesses[width], width, expected[width], static_cast<int>(dtype), static_cast<int>(codec),
           shift);
  }
}

// Whole tiles move in the widest accesses, wherever they start: anything else would be slow on a GPU. Only the two ends
// of a tile that starts inside a word, one word together, move element by element, and so does a row's last tile of one
// element.
void CheckWidths(DType dtype, Codec codec, std::size_t shift) {
  Random random(8);
  const std::size_t item = ItemSize(dtype);
  const std::size_t bits = CodeBits(codec);
  const MessageLayout layout = MakeMessageLayout(codec, 256, 2, 2049);  // the second row begins elsewhere
  Buffer x(2 * 2049 * item, shift);
  FillArray(dtype, Kind::kPlain, &random, &x);
  Buffer message(layout.nbytes, 0);
  Counts expected{};
  for (const std::size_t row : {0, 1}) {
    const std::size_t of_array = (shift + row * 2049 * item) % 16 != 0 ? 2 : 0;
    const std::size_t of_codes = (layout.codes_offset + row * layout.segment_codes_nbytes) % bits != 0 ? 2 : 0;
    expected[16] += 2048 * item / 16 - of_array;
    expected[item] += of_array * 16 / item + 1;
    expected[bits] += 2048 / 8 - of_codes;
    expected[1] += of_codes * bits + 1;
  }
  const std::size_t num_headers = 2 * layout.blocks_per_segment;
  Counts with_headers = expected;
  with_headers[2] += num_headers;
  with_headers[1] += layout.trailer_offset() - 2 * num_headers - 2 * layout.segment_codes_nbytes;  // padding
  with_headers[4] += kTrailerNbytes / 4;
  EmulatedWarp::num_accesses = {};
  RunQuantize(MakeQuantizeArguments(layout, {dtype, x.data(), 0, 2049}, nullptr, nullptr,
                                    {message.data(), layout.nbytes, 1, kHash}),
              &random);
  ExpectCounts(with_headers, "quantize", dtype, codec, shift);
  with_headers = expected;
  with_headers[2] += 2 * (2048 / 8 + 1);
  EmulatedWarp::num_accesses = {};
  RunDecode(MakeDecodeArguments(layout, {message.data(), layout.nbytes, 1, kHash}, {dtype, x.data(), 0, 2049}, false,
                                nullptr),
            &random);
  ExpectCounts(with_headers, "decode", dtype, codec, shift);
}

void CheckAllWidths() {
  for (const DType dtype : kDTypes) {
    for (const Codec codec : kBlockServed) {
      for (std::size_t shift = 0; shift < 16; shift += ItemSize(dtype)) CheckWidths(dtype, codec, shift);
    }
  }
}

void CheckTrailersAndArguments() {
  Random random(9);
  const MessageLayout layout = MakeMessageLayout(Codec::kInt8, 256, 1, 1024);
  Buffer messages(40 * layout.nbytes, 0, 0);
  for (std::size_t i = 0; i < 40; ++i) WriteTrailer(layout, kHash, messages.data() + i * layout.nbytes);
  float out[1024];
  const ConstMessages input{messages.data(), layout.nbytes, 40, kHash};
  const MutableRows rows{DType::kFloat32, out, 0, 1024};
  std::int32_t is_valid = 1;
  RunDecode(MakeDecodeSumArguments(layout, input, rows, 1.0F, &is_valid), &random);
  EXPECT(is_valid == 1, "40 right trailers");
  messages.data()[36 * layout.nbytes + layout.trailer_offset()] ^= 1;
  RunDecode(MakeDecodeSumArguments(layout, input, rows, 1.0F, &is_valid), &random);
  EXPECT(is_valid == 0, "message 36 has another hash");

  const auto decode = [&](const MessageLayout& of) {
    return MessageOfThrow([&] { MakeDecodeSumArguments(of, input, rows, 1.0F, nullptr); });
  };
  EXPECT(Contains(decode(MakeMessageLayout(Codec::kInt8, 30, 1, 1024)), "block=30"), "block");
  EXPECT(Contains(decode(MakeMessageLayout(Codec::kInt8Asym, 64, 1, 1024)), "codec=8"), "codec");
  EXPECT(!Serves(MakeMessageLayout(Codec::kInt8, 64, 1, 64, true)), "rotated");
  const auto requantize = [&](const MessageLayout& out_layout, std::size_t count) {
    return MessageOfThrow([&] {
      MakeRequantizeArguments(layout, input, out_layout, {messages.data(), layout.nbytes, count, kOutHash}, nullptr,
                              nullptr);
    });
  };
  EXPECT(Contains(requantize(layout, 2), "out messages=2"), "a message for each segment");
  EXPECT(Contains(requantize(MakeMessageLayout(Codec::kInt8, 64, 2, 1024), 1), "out num_segments=2"), "segments");
  const Residual odd{reinterpret_cast<std::int8_t*>(out) + 4, reinterpret_cast<std::uint16_t*>(out), 256, 1, 1.0F};
  EXPECT(Contains(MessageOfThrow([&] {
                    MakeQuantizeArguments(layout, {DType::kFloat32, out, 0, 1024}, nullptr, &odd,
                                          {messages.data(), layout.nbytes, 1, kHash});
                  }),
                  "aligned"),
         "residual");
}

}  // namespace
}  // namespace zcomm::cuda

int main() {
  zcomm::cuda::CheckExpected();
  zcomm::cuda::CheckRefusedSums();
  zcomm::cuda::CheckDivisor();
  zcomm::cuda::CheckAllWidths();
  zcomm::cuda::CheckMisaligned();
  zcomm::cuda::CheckTrailersAndArguments();
  zcomm::cuda::CheckEdgesOfCodes();
  zcomm::cuda::CheckLargestOfBlocks();
  zcomm::cuda::CheckAllSizes();
  zcomm::cuda::CheckAllKinds();
  zcomm::cuda::CheckSums();
  zcomm::cuda::CheckResiduals();
  std::puts("ok");
  return 0;
}
