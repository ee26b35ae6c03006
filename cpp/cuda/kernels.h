#pragma once

#include <cstdint>

#include "tiles.h"

// The bodies of the kernels: what warp `warp` of `num_warps` does. Warps share nothing but their inputs, and never wait
// for each other.
namespace zcomm::cuda {

constexpr float kFloat32Max = 3.4028234663852886e38F;
constexpr int kResidualBlockLog2 = 8;  // a vector of all lanes

// The codec of messages that are plain arrays.
struct CastCodec {};

// For each vector, the bits of the largest magnitude in the lane's block.
template <class P>
ZCOMM_DEVICE void AbsmaxOfBlocks(const Values& v, int block_log2, std::uint32_t (&absmax)[kVectors]) {
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    absmax[j] = 0;
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; ++k) {
      const std::uint32_t magnitude = BitsOf(v[j][k]) & 0x7FFFFFFFU;
      absmax[j] = magnitude > absmax[j] ? magnitude : absmax[j];
    }
  }
  if (block_log2 >= 8) {
    ZCOMM_UNROLL
    for (int j = 0; j < kVectors; ++j) absmax[j] = P::MaxOfWarp(absmax[j]);
  } else {
    for (int mask = 1; mask < 1 << (block_log2 - 3); mask *= 2) {
      ZCOMM_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        const std::uint32_t other = P::ShuffleXor(absmax[j], mask);
        absmax[j] = other > absmax[j] ? other : absmax[j];
      }
    }
  }
  for (int distance = 1; distance < 1 << (block_log2 > 8 ? block_log2 - 8 : 0); distance *= 2) {
    std::uint32_t other[kVectors];
    ZCOMM_UNROLL
    for (int j = 0; j < kVectors; ++j) other[j] = distance == 1 ? absmax[j ^ 1] : absmax[j ^ 2];
    ZCOMM_UNROLL
    for (int j = 0; j < kVectors; ++j) absmax[j] = other[j] > absmax[j] ? other[j] : absmax[j];
  }
}

// Encodes values to headers and codes. Values past the last element are 0, and so are their codes' bits.
template <class P, class C>
ZCOMM_DEVICE void EncodeTile(const Values& v, int block_log2, int numel, const Tables& tables, Coded<C>* coded) {
  std::uint32_t absmax[kVectors];
  AbsmaxOfBlocks<P>(v, block_log2, absmax);
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const Scale scale = ScaleOf<P, C>(absmax[j]);
    float scaled[kVector];
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; ++k) scaled[k] = v[j][k] * scale.inverse;
    C::template Encode<P>(scaled, tables, coded->words[j]);
    coded->headers[j] = scale.header;
    if (scale.header == kNanHeader) {
      ZCOMM_UNROLL
      for (int i = 0; i < C::kBits / 4; ++i) coded->words[j][i] = 0;
    }
    if (numel < kTile) {
      ZCOMM_UNROLL
      for (int i = 0; i < C::kBits / 4; ++i) {
        const int elements = numel - At<P>(j) - i * (32 / C::kBits);
        const std::uint32_t kept = elements <= 0 ? 0U : (1U << (elements * C::kBits % 32)) - 1U;
        if (elements < 32 / C::kBits) coded->words[j][i] &= kept;
      }
    }
  }
}

ZCOMM_DEVICE void ZeroOutside(int at, int numel, float (&vector)[kVector]) {
  ZCOMM_UNROLL
  for (int k = 0; k < kVector; ++k) vector[k] = at + k < numel ? vector[k] : 0.0F;
}

// Where the residual of a tile starts: its codes, and one scale for each vector.
struct ResidualPlace {
  std::uint8_t* codes;
  std::uint8_t* scales;
};

ZCOMM_DEVICE ResidualPlace Locate(const Residual& residual, std::int64_t row, std::int64_t first) {
  return {
      reinterpret_cast<std::uint8_t*>(residual.codes) + row * static_cast<std::int64_t>(residual.codes_stride) + first,
      reinterpret_cast<std::uint8_t*>(residual.scales) +
          2 * (row * static_cast<std::int64_t>(residual.scales_stride) + (first >> kResidualBlockLog2))};
}

// v = RN(v + RN(beta * residual)).
template <class P>
ZCOMM_DEVICE void AddResidual(const ResidualPlace& place, float beta, int numel, const Tables& tables, Values& v) {
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    if (j * kVectorStride >= numel) continue;
    const Words2 raw = P::template Load<Words2>(place.codes + At<P>(j));
    const std::uint32_t words[2] = {raw.w[0], raw.w[1]};
    float residual[kVector];
    DecodeVector<P, Int8Codec>(words, P::template Load<std::uint16_t>(place.scales + 2 * j), kFloat32Max, tables,
                               residual);
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; ++k) v[j][k] += residual[k] * beta;
    ZeroOutside(At<P>(j), numel, v[j]);
  }
}

// Encodes v - Decode(coded) as the tile's residual. Blocks that are not finite keep their old residual.
template <class P, class C>
ZCOMM_DEVICE void StoreResidual(const ResidualPlace& place, const Coded<C>& coded, int numel, const Tables& tables,
                                Values& v) {
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    float decoded[kVector];
    DecodeVector<P, C>(coded.words[j], coded.headers[j], kFloat32Max, tables, decoded);
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; ++k) v[j][k] -= decoded[k];
    ZeroOutside(At<P>(j), numel, v[j]);
  }
  Coded<Int8Codec> kept;
  EncodeTile<P, Int8Codec>(v, kResidualBlockLog2, numel, tables, &kept);
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    if (j * kVectorStride >= numel || kept.headers[j] == kNanHeader) continue;
    P::template Store<Words2>(place.codes + At<P>(j), Words2{{kept.words[j][0], kept.words[j][1]}});
    if (P::Lane() == 0) {
      P::template Store<std::uint16_t>(place.scales + 2 * j, static_cast<std::uint16_t>(kept.headers[j]));
    }
  }
}

// Encodes values into a message, with the residual of row `row` if the call has one.
template <class P, class C>
ZCOMM_DEVICE void EncodeAndStore(const Wire& wire, const Place& place, const Residual& residual, std::int64_t row,
                                 const Tables& tables, Values& v) {
  Coded<C> coded;
  if (residual.codes == nullptr) {
    EncodeTile<P, C>(v, wire.block_log2, place.numel, tables, &coded);
  } else {
    const ResidualPlace at = Locate(residual, row, place.first);
    AddResidual<P>(at, residual.beta, place.numel, tables, v);
    EncodeTile<P, C>(v, wire.block_log2, place.numel, tables, &coded);
    StoreResidual<P, C>(at, coded, place.numel, tables, v);
  }
  StoreCoded<P, C>(wire, place, coded);
}

// Writes the zero padding after headers and codes, and the trailers with `hash`, of a block codec's messages.
template <class P>
ZCOMM_DEVICE void WriteEnds(const Wire& wire, std::uint32_t hash, std::uint32_t warp, std::uint32_t num_warps) {
  for (std::uint32_t i = warp; i < wire.count; i += num_warps) {
    std::uint8_t* message = wire.data + i * wire.pitch;
    const std::int64_t header = 2 * wire.num_segments * wire.headers_per_segment + P::Lane();
    const std::int64_t code = wire.codes_offset + wire.num_segments * wire.segment_nbytes + P::Lane();
    if (header < wire.codes_offset) P::template Store<std::uint8_t>(message + header, 0);
    if (code < wire.nbytes - 8) P::template Store<std::uint8_t>(message + code, 0);
    if (P::Lane() < 2) {
      P::template Store<std::uint32_t>(message + wire.nbytes - 8 + 4 * P::Lane(), P::Lane() == 0 ? hash : 0U);
    }
  }
}

// Zeroes the trailers of the expected messages (see Expected in zcomm/cuda_kernels.h), except of those that this call
// writes.
template <class P>
ZCOMM_DEVICE void ClearEnds(const Wire& wire, const Expected& expected, std::uint32_t warp, std::uint32_t num_warps) {
  const std::uint8_t* end = wire.data + wire.count * wire.pitch;
  for (std::size_t i = warp * 32 + static_cast<std::uint32_t>(P::Lane()); i < expected.count; i += num_warps * 32) {
    std::uint8_t* message = expected.data + i * static_cast<std::size_t>(wire.nbytes);
    if (message >= wire.data && message < end) continue;
    P::template Store<std::uint32_t>(message + wire.nbytes - 8, 0U);
    P::template Store<std::uint32_t>(message + wire.nbytes - 4, 0U);
  }
}

// Whether all messages carry their hash; true if they have none. All lanes must call.
template <class P>
ZCOMM_DEVICE bool HasValidEnds(const Wire& wire) {
  if (!wire.has_ends) return true;
  std::uint32_t difference = 0;
  for (std::uint32_t i = static_cast<std::uint32_t>(P::Lane()); i < wire.count; i += 32) {
    difference |= P::template Load<std::uint32_t>(wire.data + i * wire.pitch + wire.nbytes - 8) ^ wire.hash;
  }
  return P::MaxOfWarp(difference) == 0;
}

template <class P>
ZCOMM_DEVICE void CheckEnds(const Wire& wire, std::uint32_t warp, std::int32_t* is_valid) {
  if (is_valid == nullptr || warp != 0) return;
  if (!HasValidEnds<P>(wire) && P::Lane() == 0) P::template Store<std::int32_t>(is_valid, 0);
}

// v = term 0 + term 1 + ..., of messages place.message, place.message + 1, ... Loads the next message's codes while it
// decodes one.
template <class P, class C>
ZCOMM_DEVICE void SumTile(const Wire& wire, Place place, std::uint32_t num_terms, float limit, const Tables& tables,
                          Values& v) {
  Coded<C> next;
  LoadCoded<P, C>(wire, place, &next);
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; ++k) v[j][k] = -0.0F;  // -0 + x is x, for all x
  }
  for (std::uint32_t i = 0; i < num_terms; ++i) {
    const Coded<C> coded = next;
    ++place.message;
    if (i + 1 < num_terms) LoadCoded<P, C>(wire, place, &next);
    ZCOMM_UNROLL
    for (int j = 0; j < kVectors; ++j) AddVector<P, C>(coded.words[j], coded.headers[j], limit, tables, v[j]);
  }
}

template <class P>
ZCOMM_DEVICE void SumCastTile(const Wire& wire, Place place, std::uint32_t num_terms, Values& v) {
  const auto dtype = static_cast<DType>(wire.codec);
  const int bits = dtype == DType::kFloat32 ? 32 : 16;
  LoadTile<P>(Codes(wire, place, bits), dtype, place.numel, v);
  for (std::uint32_t i = 1; i < num_terms; ++i) {
    ++place.message;
    Values term;
    LoadTile<P>(Codes(wire, place, bits), dtype, place.numel, term);
    ZCOMM_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      ZCOMM_UNROLL
      for (int k = 0; k < kVector; ++k) v[j][k] += term[j][k];
    }
  }
}

template <class P, class C>
struct Summed {
  ZCOMM_DEVICE static void Tile(const Wire& wire, const Place& place, std::uint32_t num_terms, float limit,
                                const Tables& tables, Values& v) {
    SumTile<P, C>(wire, place, num_terms, limit, tables, v);
  }
};

template <class P>
struct Summed<P, CastCodec> {
  ZCOMM_DEVICE static void Tile(const Wire& wire, const Place& place, std::uint32_t num_terms, float /*limit*/,
                                const Tables& /*tables*/, Values& v) {
    SumCastTile<P>(wire, place, num_terms, v);
  }
};

template <class P, class C>
ZCOMM_DEVICE void QuantizeTiles(const QuantizeArguments& a, std::uint32_t warp, std::uint32_t num_warps,
                                const Tables& tables) {
  for (std::uint32_t i = warp; i < a.tiles.count; i += num_warps) {
    const Place place = Locate(a.tiles, i);
    Values v;
    LoadTile<P>(Start(a.input, place), a.input.dtype, place.numel, v);
    if (a.held.data != nullptr) {
      Values held;
      LoadTile<P>(Start(a.held, place), a.held.dtype, place.numel, held);
      ZCOMM_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        ZCOMM_UNROLL
        for (int k = 0; k < kVector; ++k) v[j][k] -= held[j][k];
      }
    }
    const std::int64_t row = place.message * a.output.num_segments + place.segment;
    EncodeAndStore<P, C>(a.output, place, a.residual, row, tables, v);
  }
  WriteEnds<P>(a.output, a.output.hash, warp, num_warps);
  ClearEnds<P>(a.output, a.expected, warp, num_warps);
}

template <class P, class C>
ZCOMM_DEVICE void DecodeTiles(const DecodeArguments& a, std::uint32_t warp, std::uint32_t num_warps,
                              const Tables& tables) {
  for (std::uint32_t i = warp; i < a.tiles.count; i += num_warps) {
    const Place place = Locate(a.tiles, i);
    Values v;
    Summed<P, C>::Tile(a.input, place, a.num_terms, a.limit, tables, v);
    std::uint8_t* start = Start(a.output, place);
    if (a.divisor != 1.0F) {
      ZCOMM_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        ZCOMM_UNROLL
        for (int k = 0; k < kVector; ++k) {
          v[j][k] = a.inverse != 0 ? v[j][k] * a.inverse : P::Divide(v[j][k], a.divisor);
        }
      }
    }
    if (a.is_added) {
      Values held;
      LoadTile<P>(start, a.output.dtype, place.numel, held);
      ZCOMM_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        ZCOMM_UNROLL
        for (int k = 0; k < kVector; ++k) v[j][k] = held[j][k] + v[j][k];
      }
    }
    StoreTile<P>(v, a.output.dtype, place.numel, start);
  }
  CheckEnds<P>(a.input, warp, a.is_valid);
}

template <class P, class C>
ZCOMM_DEVICE void RequantizeTiles(const RequantizeArguments& a, std::uint32_t warp, std::uint32_t num_warps,
                                  const Tables& tables) {
  for (std::uint32_t i = warp; i < a.tiles.count; i += num_warps) {
    Place place = Locate(a.tiles, i);
    Values v;
    switch (a.input.codec) {
      case Codec::kInt8:
        SumTile<P, Int8Codec>(a.input, place, a.input.count, kFloat32Max, tables, v);
        break;
      case Codec::kInt4:
        SumTile<P, Int4Codec>(a.input, place, a.input.count, kFloat32Max, tables, v);
        break;
      case Codec::kNf4:
        SumTile<P, Nf4Codec>(a.input, place, a.input.count, kFloat32Max, tables, v);
        break;
      case Codec::kFp8E4m3:
        SumTile<P, Fp8Codec>(a.input, place, a.input.count, kFloat32Max, tables, v);
        break;
      default:
        SumCastTile<P>(a.input, place, a.input.count, v);
    }
    if (place.numel < kTile) {  // a code 0 need not mean the value 0
      ZCOMM_UNROLL
      for (int j = 0; j < kVectors; ++j) ZeroOutside(At<P>(j), place.numel, v[j]);
    }
    const std::int64_t segment = place.segment;
    place.message = segment;
    place.segment = 0;
    EncodeAndStore<P, C>(a.output, place, a.residual, segment, tables, v);
  }
  // If an input message is refused, the ranks that receive this output must refuse it, too: they cannot see this rank's
  // flag. Every warp that writes a trailer checks all inputs itself, as warps do not wait for each other.
  const bool is_refused = warp < a.output.count && !HasValidEnds<P>(a.input);
  WriteEnds<P>(a.output, is_refused ? 0U : a.output.hash, warp, num_warps);
  ClearEnds<P>(a.output, a.expected, warp, num_warps);
  CheckEnds<P>(a.input, warp, a.is_valid);
}

}  // namespace zcomm::cuda
