// The kernels of one ISA level. Each block_kernels_<level>.cc defines ZCOMM_ISA_NAMESPACE, ZCOMM_ISA_TABLE and
// ZCOMM_ISA_LANES (its lanes_*.h), includes this file once, and is compiled with that level's flags. Everything is in
// the level's own namespace, and no inline function of another header is called at run time. Otherwise the linker,
// which keeps one copy of an inline function, could keep the AVX-512 one, and older CPUs would stop with SIGILL.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "block_kernels.h"

#ifdef ZCOMM_X86
#include <immintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The kernels copy the little-endian fields of messages without swapping bytes: only little-endian CPUs will do."
#endif

namespace zcomm {
namespace ZCOMM_ISA_NAMESPACE {
namespace {

template <Codec kCodec>
constexpr std::size_t kCodeBits = CodeBits(kCodec);
template <Codec kCodec>
constexpr std::size_t kHeaderNbytes = HeaderNbytes(kCodec);
template <Codec kCodec>
constexpr bool kHasZeroPoint = HasZeroPoint(kCodec);

// Size in bytes of the codes of `numel` elements.
template <Codec kCodec>
constexpr std::size_t NumBytes(std::size_t numel) {
  return (numel * kCodeBits<kCodec> + 7) / 8;
}

// Each layer uses those above it: the order matters.
// clang-format off
#include "lanes_scalar.h"
#include ZCOMM_ISA_LANES
#include "block_range.h"
#include "block_scales.h"
#include "block_codecs.h"
#include "codec_int.h"
#include "codec_nf4.h"
#include "codec_fp8.h"
#include "encode_blocks.h"
#include "decode_blocks.h"
#include "rotate_blocks.h"
#include "uniform_numbers.h"
#include "plain_arrays.h"
#include "optimizer_rules.h"
// clang-format on

template <Codec kCodec>
constexpr void AddDecoder(BlockKernels* table) {
  constexpr auto kIndex = static_cast<std::size_t>(kCodec);
  table->decode_sum[kIndex][0] = DecodeSum<kCodec, float>;
  table->decode_sum[kIndex][1] = DecodeSum<kCodec, Bfloat16>;
  table->decode_sum[kIndex][2] = DecodeSum<kCodec, Float16>;
}

template <Codec kCodec>
constexpr void AddBlockCodec(BlockKernels* table) {
  constexpr auto kIndex = static_cast<std::size_t>(kCodec);
  AddDecoder<kCodec>(table);
  table->quantize[kIndex][0] = Quantize<kCodec, float>;
  table->quantize[kIndex][1] = Quantize<kCodec, Bfloat16>;
  table->quantize[kIndex][2] = Quantize<kCodec, Float16>;
  if constexpr (IsIntCodec(kCodec)) table->quantize_at_random[kIndex] = QuantizeAtRandom<kCodec>;
}

constexpr BlockKernels MakeTable() {
  BlockKernels table{};
  AddDecoder<Codec::kFloat32>(&table);
  AddDecoder<Codec::kBfloat16>(&table);
  AddDecoder<Codec::kFloat16>(&table);
#define ZCOMM_CODEC(id, ...) AddBlockCodec<Codec::id>(&table);
#include "zcomm/codecs.def"
  AddConversions<float>(&table, 0);
  AddConversions<Bfloat16>(&table, 1);
  AddConversions<Float16>(&table, 2);
  table.uniform = Uniform;
  table.rotate = Rotate;
  table.scale = Scale;
  table.add = Add;
  table.subtract = Subtract;
  table.divide = Divide;
  table.stream = Stream;
  table.step[static_cast<std::size_t>(Rule::kAdam)] = StepAdam<true>;
  table.step[static_cast<std::size_t>(Rule::kAdamW)] = StepAdam<false>;
  table.step[static_cast<std::size_t>(Rule::kAdagrad)] = StepAdagrad;
  table.step[static_cast<std::size_t>(Rule::kLion)] = StepLion;
  table.step[static_cast<std::size_t>(Rule::kTraffic)] = StepTraffic;
  table.round_at_random = RoundAtRandom;
  return table;
}

}  // namespace

constexpr BlockKernels kTable = MakeTable();

}  // namespace ZCOMM_ISA_NAMESPACE

const BlockKernels& ZCOMM_ISA_TABLE() { return ZCOMM_ISA_NAMESPACE::kTable; }

}  // namespace zcomm
