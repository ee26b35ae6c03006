// The kernels of one ISA level. Each block_kernels_<level>.cc defines ZCOMM_ISA_NAMESPACE, ZCOMM_ISA_TABLE and
// ZCOMM_ISA_LANES (its lanes_*.h), includes this file once, and is compiled with that level's flags. Everything lives
// in the level's own namespace and no inline function of another header is called: otherwise the linker could keep the
// AVX-512 copy of a function that all levels share.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "block_kernels.h"

#ifdef ZCOMM_X86
#include <immintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The kernels store the message's little-endian fields as they are in memory."
#endif

namespace zcomm {
namespace ZCOMM_ISA_NAMESPACE {
namespace {

#include "lanes_scalar.h"
#include ZCOMM_ISA_LANES

// Elements whose int4 codes wait, one a byte, between rounding and packing.
constexpr std::size_t kNibbleTile = 512;
// Quantization goes twice over a tile of a few blocks in the first-level cache, and on the way asks for the elements
// kPrefetchNbytes ahead: the second pass would otherwise leave the memory idle (1.3 times faster on large arrays).
constexpr std::size_t kMaxBlocks = 64;
constexpr std::size_t kQuantizeTile = 768;
constexpr std::size_t kPrefetchNbytes = 8192;

constexpr std::size_t Min(std::size_t a, std::size_t b) { return a < b ? a : b; }

template <class T>
inline void QuantizeInt8(const T* __restrict x, std::size_t numel, float inverse, std::uint8_t* __restrict codes) {
  for (std::size_t i = QuantizeInt8Lanes(x, numel, inverse, codes); i < numel; ++i) {
    codes[i] = QuantizeOne(Widen(x[i]), inverse);
  }
}

// Packs the low nibbles of pairs of codes. A last odd code gets a zero high nibble.
inline void PackNibbles(const std::uint8_t* __restrict codes, std::size_t numel, std::uint8_t* __restrict packed) {
  for (std::size_t i = 0; i < numel / 2; ++i) {
    std::uint16_t pair;
    std::memcpy(&pair, codes + 2 * i, sizeof(pair));
    packed[i] = static_cast<std::uint8_t>((pair & 0x0F) | ((pair >> 4) & 0xF0));
  }
  if (numel % 2 != 0) packed[numel / 2] = codes[numel - 1] & 0x0F;
}

template <class T>
inline void QuantizeInt4(const T* x, std::size_t numel, float inverse, std::uint8_t* codes) {
  std::uint8_t tile[kNibbleTile];
  for (std::size_t i = QuantizeInt4Lanes(x, numel, inverse, codes); i < numel; i += kNibbleTile) {
    const std::size_t count = Min(kNibbleTile, numel - i);
    for (std::size_t j = 0; j < count; ++j) tile[j] = QuantizeOne(Widen(x[i + j]), inverse);
    PackNibbles(tile, count, codes + i / 2);
  }
}

template <class T>
inline std::int32_t AbsMaxBits(const T* x, std::size_t numel) {
  auto absmax = OrderedMagnitude(T{});
  for (std::size_t i = AbsMaxLanes(x, numel, &absmax); i < numel; ++i) {
    const auto magnitude = OrderedMagnitude(x[i]);
    absmax = magnitude > absmax ? magnitude : absmax;
  }
  return WidenMagnitude(absmax, T{});
}

// Scales (bf16 bits) and their reciprocals of `count` blocks from float32 bits of their absmax. A block below 2^-100
// gets scale and reciprocal 0, so its codes are 0; one with a NaN or infinity the NaN scale.
inline void ComputeScales(const std::int32_t* __restrict absmax, std::size_t count, float qmax,
                          std::uint16_t* __restrict scales, float* __restrict inverses) {
  for (std::size_t i = 0; i < count; ++i) {
    // Rounded up to bf16; never past 0x7F7F, as absmax / qmax <= max / 7. Unsigned: the bits of a NaN may carry over.
    const auto quotient = static_cast<std::uint32_t>(Bits(FromBits(absmax[i]) / qmax));
    const auto bits = static_cast<std::int32_t>((quotient + 0xFFFFU) & 0xFFFF0000U);
    const float inverse = 1.0F / FromBits(bits);
    const std::int32_t scale = absmax[i] >= kInfinityBits ? kNanScale : bits >> 16;
    scales[i] = static_cast<std::uint16_t>(absmax[i] < kTinyBits ? 0 : scale);
    inverses[i] = absmax[i] < kTinyBits ? 0.0F : inverse;
  }
}

inline void Prefetch(const void* data, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += 64) __builtin_prefetch(static_cast<const std::uint8_t*>(data) + i);
}

template <Codec kCodec, class T>
void QuantizeBlocks(const void* data, std::size_t numel, std::size_t block, std::uint8_t* scales, std::uint8_t* codes) {
  constexpr float kQMax = kCodec == Codec::kInt8 ? 127.0F : 7.0F;
  constexpr std::size_t kCodesPerByte = kCodec == Codec::kInt8 ? 1 : 2;
  const T* x = static_cast<const T*>(data);
  const std::size_t num_blocks = (numel + block - 1) / block;
  const std::size_t blocks_per_tile = block < kQuantizeTile ? Min(kMaxBlocks, kQuantizeTile / block) : 1;
  std::int32_t absmax[kMaxBlocks];
  std::uint16_t tile_scales[kMaxBlocks];
  float inverses[kMaxBlocks];
  for (std::size_t first = 0; first < num_blocks; first += blocks_per_tile) {
    const std::size_t count = Min(blocks_per_tile, num_blocks - first);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t begin = (first + i) * block;
      absmax[i] = AbsMaxBits(x + begin, Min(block, numel - begin));
    }
    ComputeScales(absmax, count, kQMax, tile_scales, inverses);
    std::memcpy(scales + 2 * first, tile_scales, 2 * count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t begin = (first + i) * block;
      const std::size_t block_numel = Min(block, numel - begin);
      const std::size_t ahead = begin + kPrefetchNbytes / sizeof(T);
      if (ahead < numel) Prefetch(x + ahead, Min(block, numel - ahead) * sizeof(T));
      std::uint8_t* block_codes = codes + begin / kCodesPerByte;
      if (absmax[i] >= kInfinityBits) {
        std::memset(block_codes, 0, (block_numel + kCodesPerByte - 1) / kCodesPerByte);
      } else if constexpr (kCodec == Codec::kInt8) {
        QuantizeInt8(x + begin, block_numel, inverses[i], block_codes);
      } else {
        QuantizeInt4(x + begin, block_numel, inverses[i], block_codes);
      }
    }
  }
}

template <class Out>
inline void DecodeInt8(const std::int8_t* __restrict codes, std::size_t numel, float scale, float limit,
                       Out* __restrict out) {
  for (std::size_t i = DecodeInt8Lanes(codes, numel, scale, limit, out); i < numel; ++i) {
    Narrow(DecodeOne(codes[i], scale, limit), out + i);
  }
}

// Two's complement nibbles to int8: (n ^ 8) - 8 in each byte of the pair. Writes numel rounded up to even.
inline void UnpackNibbles(const std::uint8_t* __restrict packed, std::size_t numel, std::int8_t* __restrict codes) {
  for (std::size_t i = 0; i < (numel + 1) / 2; ++i) {
    const unsigned byte = packed[i];
    const unsigned nibbles = (byte & 0x0F) | ((byte & 0xF0) << 4);
    // The top bit of each byte, set before and cleared after, keeps a borrow from crossing over.
    const auto pair = static_cast<std::uint16_t>((((nibbles ^ 0x0808) | 0x8080) - 0x0808) ^ 0x8080);
    std::memcpy(codes + 2 * i, &pair, sizeof(pair));
  }
}

template <class Out>
inline void DecodeInt4(const std::uint8_t* codes, std::size_t numel, float scale, float limit, Out* out) {
  std::int8_t tile[kNibbleTile];
  for (std::size_t i = DecodeInt4Lanes(codes, numel, scale, limit, out); i < numel; i += kNibbleTile) {
    const std::size_t count = Min(kNibbleTile, numel - i);
    UnpackNibbles(codes + i / 2, count, tile);
    DecodeInt8(tile, count, scale, limit, out + i);
  }
}

template <Codec kCodec, class Out>
void DecodeBlocks(const CodeRange& range, float limit, void* data) {
  Out* out = static_cast<Out*>(data);
  const std::size_t end = range.begin + range.numel;
  std::size_t block_index = range.begin / range.block;
  for (std::size_t begin = range.begin; begin < end; ++block_index) {
    const std::size_t count = Min((block_index + 1) * range.block, end) - begin;
    const float scale = LoadScale(range.scales, block_index);
    if constexpr (kCodec == Codec::kInt8) {
      DecodeInt8(reinterpret_cast<const std::int8_t*>(range.codes) + begin, count, scale, limit, out);
    } else {
      DecodeInt4(range.codes + begin / 2, count, scale, limit, out);
    }
    begin += count;
    out += count;
  }
}

template <class In, class Out>
void Convert(const void* __restrict data, std::size_t numel, void* __restrict out_data) {
  if constexpr (std::is_same_v<In, Out>) {
    std::memcpy(out_data, data, numel * sizeof(Out));
  } else {
    const In* in = static_cast<const In*>(data);
    Out* out = static_cast<Out*>(out_data);
    for (std::size_t i = ConvertLanes(in, numel, out); i < numel; ++i) Narrow(Widen(in[i]), out + i);
  }
}

// A cast codec's element is its value, infinite ones included: the limit is not for it.
template <class In, class Out>
void DecodeCast(const CodeRange& range, float /*limit*/, void* out) {
  Convert<In, Out>(range.codes + range.begin * sizeof(In), range.numel, out);
}

void Divide(float* values, std::size_t numel, float divisor) {
  for (std::size_t i = 0; i < numel; ++i) values[i] /= divisor;
}

// Whole cache lines by non-temporal stores, the ragged ends by ordinary ones.
void Stream(void* out, const void* in, std::size_t nbytes) {
  constexpr std::size_t kLine = 64;
  auto* to = static_cast<std::uint8_t*>(out);
  const auto* from = static_cast<const std::uint8_t*>(in);
  const std::size_t head = Min(nbytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  const std::size_t lines = (nbytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  StreamLines(to + head, from + head, lines);
  std::memcpy(to + head + lines, from + head + lines, nbytes - head - lines);
}

}  // namespace

constexpr BlockKernels kTable = {
    {
        {nullptr, nullptr, nullptr},
        {nullptr, nullptr, nullptr},
        {nullptr, nullptr, nullptr},
        {QuantizeBlocks<Codec::kInt8, float>, QuantizeBlocks<Codec::kInt8, Bfloat16>,
         QuantizeBlocks<Codec::kInt8, Float16>},
        {QuantizeBlocks<Codec::kInt4, float>, QuantizeBlocks<Codec::kInt4, Bfloat16>,
         QuantizeBlocks<Codec::kInt4, Float16>},
    },
    {
        {DecodeCast<float, float>, DecodeCast<float, Bfloat16>, DecodeCast<float, Float16>},
        {DecodeCast<Bfloat16, float>, DecodeCast<Bfloat16, Bfloat16>, DecodeCast<Bfloat16, Float16>},
        {DecodeCast<Float16, float>, DecodeCast<Float16, Bfloat16>, DecodeCast<Float16, Float16>},
        {DecodeBlocks<Codec::kInt8, float>, DecodeBlocks<Codec::kInt8, Bfloat16>, DecodeBlocks<Codec::kInt8, Float16>},
        {DecodeBlocks<Codec::kInt4, float>, DecodeBlocks<Codec::kInt4, Bfloat16>, DecodeBlocks<Codec::kInt4, Float16>},
    },
    {DecodeCast<float, Accumulator>, DecodeCast<Bfloat16, Accumulator>, DecodeCast<Float16, Accumulator>,
     DecodeBlocks<Codec::kInt8, Accumulator>, DecodeBlocks<Codec::kInt4, Accumulator>},
    {
        {Convert<float, float>, Convert<float, Bfloat16>, Convert<float, Float16>},
        {Convert<Bfloat16, float>, Convert<Bfloat16, Bfloat16>, Convert<Bfloat16, Float16>},
        {Convert<Float16, float>, Convert<Float16, Bfloat16>, Convert<Float16, Float16>},
    },
    Divide,
    Stream,
};

}  // namespace ZCOMM_ISA_NAMESPACE

const BlockKernels& ZCOMM_ISA_TABLE() { return ZCOMM_ISA_NAMESPACE::kTable; }

}  // namespace zcomm
