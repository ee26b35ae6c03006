#include "zcomm/feedback.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "parallel_rows.h"
#include "tiles.h"
#include "zcomm/check.h"

namespace zcomm {
namespace {

// The number of elements that are whole blocks of both the message and the residual, about one tile.
std::size_t TileOf(const MessageLayout& layout) {
  const std::size_t unit = std::max(layout.block, kResidualBlock);
  return std::max<std::size_t>(1, kTileNumel / unit) * unit;
}

bool IsNan(std::uint16_t bfloat16) { return (bfloat16 & 0x7FFFU) > 0x7F80U; }

// One row's message and residual, encoded tile by tile.
class Row {
 public:
  Row(const BlockKernels& kernels, const MessageLayout& layout, const ResidualRows& residual, std::size_t index,
      std::uint8_t* message)
      : kernels_(kernels),
        layout_(layout),
        codes_(residual.codes + index * residual.codes_stride),
        scales_(residual.scales + index * residual.scales_stride),
        beta_(residual.beta),
        message_(message) {}

  // Encodes elements [begin, begin + numel) and updates their residual. Overwrites `values`.
  void Encode(std::size_t begin, std::size_t numel, float* values, const DrawFrom& from, Workspace* workspace) {
    terms_.resize(numel);
    float* terms = terms_.data();
    std::int8_t* codes = codes_ + begin;
    std::uint16_t* scales = scales_ + begin / kResidualBlock;
    const CodeRange held{reinterpret_cast<const std::uint8_t*>(scales),
                         reinterpret_cast<const std::uint8_t*>(codes),
                         0,
                         1,
                         kResidualBlock,
                         0,
                         numel};
    kernels_.decode_sum[Index(Codec::kInt8)][Index(DType::kFloat32)](held, kLargest, 1.0F, terms);
    if (beta_ != 1.0F) kernels_.scale(terms, numel, beta_, kLargest);
    kernels_.add(values, terms, numel);
    QuantizeRange(kernels_, layout_, 0, begin, begin + numel, DType::kFloat32, values, from, message_, workspace);
    DecodeSumRange(kernels_, layout_, {message_, 0, 1, 0}, 0, begin, begin + numel, kToFloat, terms, workspace);
    kernels_.subtract(values, terms, numel);
    StoreResidual(numel, values, codes, scales);
  }

 private:
  void StoreResidual(std::size_t numel, const float* values, std::int8_t* codes, std::uint16_t* scales) {
    const std::size_t num_blocks = (numel + kResidualBlock - 1) / kResidualBlock;
    new_scales_.resize(num_blocks);
    new_codes_.resize(numel);
    kernels_.quantize[Index(Codec::kInt8)][Index(DType::kFloat32)](
        values, numel, kResidualBlock, reinterpret_cast<std::uint8_t*>(new_scales_.data()), new_codes_.data());
    for (std::size_t b = 0; b < num_blocks; ++b) {
      if (IsNan(new_scales_[b])) continue;
      const std::size_t at = b * kResidualBlock;
      scales[b] = new_scales_[b];
      std::memcpy(codes + at, new_codes_.data() + at, std::min(kResidualBlock, numel - at));
    }
  }

  const BlockKernels& kernels_;
  const MessageLayout& layout_;
  std::int8_t* codes_;
  std::uint16_t* scales_;
  float beta_;
  std::uint8_t* message_;
  std::vector<float> terms_;
  std::vector<std::uint16_t> new_scales_;
  std::vector<std::uint8_t> new_codes_;
};

void CheckOutput(const MessageLayout& layout, const MutableMessages& output, const ResidualRows& residual,
                 std::size_t num_threads) {
  CheckThreads(num_threads);
  CheckMessages(layout, AsConst(output), "output");
  ZCOMM_CHECK(layout.num_segments == 1, "a residual has a row for each message: num_segments=", layout.num_segments);
  ZCOMM_CHECK(CanHaveResidual(layout), "these messages cannot have a residual: block=", layout.block);
  ZCOMM_CHECK(
      output.count == 0 || layout.segment_numel == 0 || (residual.codes != nullptr && residual.scales != nullptr),
      "the residual has no data");
}

// For every tile: fill(row, begin, end, values, workspace) computes the values, which are then encoded.
template <class Fill>
void EncodeRows(const MessageLayout& layout, const MutableMessages& output, const ResidualRows& residual,
                const Draw* draw, std::size_t row_stride, std::size_t tile_numel, std::size_t num_threads,
                const Fill& fill) {
  const BlockKernels& kernels = ActiveKernels();
  ParallelOverRows(output.count, layout.segment_numel, tile_numel, num_threads,
                   [&](std::size_t index, std::size_t begin, std::size_t end) {
                     std::vector<float> values(std::min(tile_numel, end - begin));
                     Workspace workspace;
                     Row row(kernels, layout, residual, index, output.data + index * output.stride_nbytes);
                     for (std::size_t at = begin; at < end; at += tile_numel) {
                       const std::size_t numel = std::min(tile_numel, end - at);
                       fill(kernels, index, at, at + numel, values.data(), &workspace);
                       row.Encode(at, numel, values.data(), {draw, index * row_stride + at}, &workspace);
                     }
                   });
  WriteTrailers(layout, output);
}

}  // namespace

bool CanHaveResidual(const MessageLayout& layout) {
  return IsBlockCodec(layout.codec) && (kResidualBlock % layout.block == 0 || layout.block % kResidualBlock == 0);
}

void QuantizeWithResidual(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output,
                          const ResidualRows& residual, const Draw* draw, std::size_t num_threads) {
  CheckOutput(layout, output, residual, num_threads);
  if (output.count != 0) CheckRows(layout, input, "input");
  EncodeRows(
      layout, output, residual, draw, input.message_stride, TileOf(layout), num_threads,
      [&](const BlockKernels& kernels, std::size_t row, std::size_t begin, std::size_t end, float* values, Workspace*) {
        const void* x = ElementAt(input.data, input.dtype, row * input.message_stride + begin);
        kernels.convert[Index(input.dtype)][Index(DType::kFloat32)](x, end - begin, values);
      });
}

void DecodeSumRequantizeWithResidual(const MessageLayout& layout, const ConstMessages& input,
                                     const MessageLayout& out_layout, const MutableMessages& output,
                                     const ResidualRows& residual, const Draw* draw, std::size_t num_threads) {
  CheckOutput(out_layout, output, residual, num_threads);
  ZCOMM_CHECK(input.count >= 1, "a sum needs at least one message: num_messages=", input.count);
  ZCOMM_CHECK(out_layout.segment_numel == layout.segment_numel && output.count == layout.num_segments,
              "each segment must become one message: out segment_numel=", out_layout.segment_numel,
              ", segment_numel=", layout.segment_numel, ", out messages=", output.count,
              ", num_segments=", layout.num_segments);
  CheckMessages(layout, input, "input");
  CheckTrailers(layout, input);
  // At least a whole block of the input, which a rotation needs.
  const std::size_t unit = TileOf(out_layout);
  const std::size_t least = layout.is_rotated ? layout.block : 1;
  EncodeRows(out_layout, output, residual, draw, layout.segment_numel, (least + unit - 1) / unit * unit, num_threads,
             [&](const BlockKernels& kernels, std::size_t segment, std::size_t begin, std::size_t end, float* values,
                 Workspace* workspace) {
               DecodeSumRange(kernels, layout, input, segment, begin, end, kToFloat, values, workspace);
             });
}

}  // namespace zcomm
