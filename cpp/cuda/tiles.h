#pragma once

#include <cstdint>

#include "arguments.h"
#include "codecs.h"

// Moving a tile between memory and the registers of a warp. Lane l holds of each of its 4 vectors 8 consecutive
// elements: vector j, element k is element 256 j + 8 l + k of the tile. A whole tile whose memory is aligned moves in
// 16-byte accesses (codes: 8 or 4 bytes a lane, 256 or 128 in a row); any other element by element.
namespace zcomm::cuda {

using Values = float[kVectors][kVector];

struct Place {
  std::int64_t message;
  std::int64_t segment;
  std::int64_t first;  // element of the segment
  int numel;           // of the tile, at most kTile
};

ZCOMM_DEVICE Place Locate(const Tiles& tiles, std::uint32_t index) {
  const std::uint32_t unit = Quotient(index, tiles.per_segment);
  const std::uint32_t message = Quotient(unit, tiles.segments_per_message);
  const std::uint64_t first = tiles.begin + std::uint64_t{index - unit * tiles.per_segment.value} * kTile;
  const std::uint64_t left = tiles.end - first;
  return {message, unit - message * tiles.segments_per_message.value, static_cast<std::int64_t>(first),
          left < kTile ? static_cast<int>(left) : kTile};
}

// The first element of this lane's vector j.
template <class P>
ZCOMM_DEVICE int At(int j) {
  return j * kVectorStride + P::Lane() * kVector;
}

ZCOMM_DEVICE std::uint8_t* Start(const Array& array, const Place& place) {
  const std::int64_t element =
      place.message * array.message_stride + place.segment * array.segment_stride + place.first;
  return array.data + element * (array.dtype == DType::kFloat32 ? 4 : 2);
}

// Two 16-bit elements of a word in float32.
template <class P>
ZCOMM_DEVICE void Widen(DType dtype, std::uint32_t word, float* low, float* high) {
  if (dtype == DType::kBfloat16) {
    *low = FloatOf(word << 16);
    *high = FloatOf(word & 0xFFFF0000U);
  } else {
    *low = P::FromFloat16(static_cast<std::uint16_t>(word & 0xFFFFU));
    *high = P::FromFloat16(static_cast<std::uint16_t>(word >> 16));
  }
}

template <class P>
ZCOMM_DEVICE std::uint32_t Narrow(DType dtype, float low, float high) {
  return dtype == DType::kBfloat16 ? P::PackBfloat16(low, high) : P::PackFloat16(low, high);
}

template <class P>
ZCOMM_DEVICE void LoadWide(const std::uint8_t* start, Values& v) {
  Words4 raw[kVectors][2];
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    raw[j][0] = P::template Load<Words4>(start + 4 * At<P>(j));
    raw[j][1] = P::template Load<Words4>(start + 4 * At<P>(j) + 16);
  }
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; ++k) v[j][k] = FloatOf(raw[j][k / 4].w[k % 4]);
  }
}

template <class P>
ZCOMM_DEVICE void LoadNarrow(const std::uint8_t* start, DType dtype, Values& v) {
  Words4 raw[kVectors];
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) raw[j] = P::template Load<Words4>(start + 2 * At<P>(j));
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; k += 2) Widen<P>(dtype, raw[j].w[k / 2], &v[j][k], &v[j][k + 1]);
  }
}

// Elements that are not there are 0.
template <class P>
ZCOMM_DEVICE void LoadElements(const std::uint8_t* start, DType dtype, int numel, Values& v) {
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; ++k) {
      const int element = At<P>(j) + k;
      std::uint32_t word = 0;
      if (element < numel) {
        word = dtype == DType::kFloat32 ? P::template Load<std::uint32_t>(start + 4 * element)
                                        : P::template Load<std::uint16_t>(start + 2 * element);
      }
      float unused = 0;
      v[j][k] = FloatOf(word);
      if (dtype != DType::kFloat32) Widen<P>(dtype, word, &v[j][k], &unused);
    }
  }
}

template <class P>
ZCOMM_DEVICE void LoadTile(const std::uint8_t* start, DType dtype, int numel, Values& v) {
  if (numel < kTile || !IsAligned(start, 16)) {
    LoadElements<P>(start, dtype, numel, v);
  } else if (dtype == DType::kFloat32) {
    LoadWide<P>(start, v);
  } else {
    LoadNarrow<P>(start, dtype, v);
  }
}

// Pairs of lanes exchange halves of their vectors, so that each store of the warp covers 32-byte sectors whole.
template <class P>
ZCOMM_DEVICE void StoreWide(const Values& v, std::uint8_t* start) {
  const bool is_odd = P::Lane() % 2 == 1;
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    Words4 even_lanes;
    Words4 odd_lanes;
    ZCOMM_UNROLL
    for (int k = 0; k < 4; ++k) {
      const std::uint32_t low = BitsOf(v[j][k]);
      const std::uint32_t high = BitsOf(v[j][4 + k]);
      const std::uint32_t other = P::ShuffleXor(is_odd ? low : high, 1);
      even_lanes.w[k] = is_odd ? other : low;
      odd_lanes.w[k] = is_odd ? high : other;
    }
    const int pair = At<P>(j) - (is_odd ? 4 : 0);
    P::template Store<Words4>(start + 4 * pair, even_lanes);
    P::template Store<Words4>(start + 4 * pair + 32, odd_lanes);
  }
}

template <class P>
ZCOMM_DEVICE void StoreNarrow(const Values& v, DType dtype, std::uint8_t* start) {
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    Words4 words;
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; k += 2) words.w[k / 2] = Narrow<P>(dtype, v[j][k], v[j][k + 1]);
    P::template Store<Words4>(start + 2 * At<P>(j), words);
  }
}

template <class P>
ZCOMM_DEVICE void StoreElements(const Values& v, DType dtype, int numel, std::uint8_t* start) {
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; ++k) {
      const int element = At<P>(j) + k;
      if (element >= numel) continue;
      if (dtype == DType::kFloat32) {
        P::template Store<std::uint32_t>(start + 4 * element, BitsOf(v[j][k]));
      } else {
        P::template Store<std::uint16_t>(start + 2 * element,
                                         static_cast<std::uint16_t>(Narrow<P>(dtype, v[j][k], 0.0F) & 0xFFFFU));
      }
    }
  }
}

template <class P>
ZCOMM_DEVICE void StoreTile(const Values& v, DType dtype, int numel, std::uint8_t* start) {
  if (numel < kTile || !IsAligned(start, 16)) {
    StoreElements<P>(v, dtype, numel, start);
  } else if (dtype == DType::kFloat32) {
    StoreWide<P>(v, start);
  } else {
    StoreNarrow<P>(v, dtype, start);
  }
}

// The codes of a lane's vector.
template <int kBits>
struct VectorOfCodes;

template <>
struct VectorOfCodes<8> {
  using Words = Words2;
};

template <>
struct VectorOfCodes<4> {
  using Words = Words1;
};

// The header and the codes of a lane's vectors.
template <class C>
struct Coded {
  std::uint32_t words[kVectors][C::kBits / 4];
  std::uint32_t headers[kVectors];
};

ZCOMM_DEVICE std::uint8_t* Headers(const Wire& wire, const Place& place) {
  return wire.data + place.message * wire.pitch +
         2 * (place.segment * wire.headers_per_segment + (place.first >> wire.block_log2));
}

ZCOMM_DEVICE std::uint8_t* Codes(const Wire& wire, const Place& place, int bits) {
  return wire.data + place.message * wire.pitch + wire.codes_offset + place.segment * wire.segment_nbytes +
         place.first * bits / 8;
}

template <class P, class C>
ZCOMM_DEVICE void LoadCodes(const std::uint8_t* codes, int numel, Coded<C>* coded) {
  using Words = typename VectorOfCodes<C::kBits>::Words;
  if (numel == kTile && IsAligned(codes, C::kBits)) {
    ZCOMM_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const Words raw = P::template Load<Words>(codes + At<P>(j) * C::kBits / 8);
      ZCOMM_UNROLL
      for (int i = 0; i < C::kBits / 4; ++i) coded->words[j][i] = raw.w[i];
    }
    return;
  }
  const int nbytes = (numel * C::kBits + 7) / 8;
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    ZCOMM_UNROLL
    for (int i = 0; i < C::kBits / 4; ++i) coded->words[j][i] = 0;
    ZCOMM_UNROLL
    for (int b = 0; b < C::kBits; ++b) {
      const int byte = At<P>(j) * C::kBits / 8 + b;
      if (byte < nbytes) {
        coded->words[j][b / 4] |= std::uint32_t{P::template Load<std::uint8_t>(codes + byte)} << (8 * (b % 4));
      }
    }
  }
}

template <class P, class C>
ZCOMM_DEVICE void LoadCoded(const Wire& wire, const Place& place, Coded<C>* coded) {
  LoadCodes<P, C>(Codes(wire, place, C::kBits), place.numel, coded);
  const std::uint8_t* headers = Headers(wire, place);
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const int element = At<P>(j);
    coded->headers[j] =
        element < place.numel ? P::template Load<std::uint16_t>(headers + 2 * (element >> wire.block_log2)) : 0;
  }
}

template <class P, class C>
ZCOMM_DEVICE void StoreCoded(const Wire& wire, const Place& place, const Coded<C>& coded) {
  using Words = typename VectorOfCodes<C::kBits>::Words;
  std::uint8_t* codes = Codes(wire, place, C::kBits);
  const bool is_whole = place.numel == kTile && IsAligned(codes, C::kBits);
  const int nbytes = (place.numel * C::kBits + 7) / 8;
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const int at = At<P>(j) * C::kBits / 8;
    if (is_whole) {
      Words raw;
      ZCOMM_UNROLL
      for (int i = 0; i < C::kBits / 4; ++i) raw.w[i] = coded.words[j][i];
      P::template Store<Words>(codes + at, raw);
    } else {
      ZCOMM_UNROLL
      for (int b = 0; b < C::kBits; ++b) {
        if (at + b >= nbytes) continue;
        P::template Store<std::uint8_t>(codes + at + b,
                                        static_cast<std::uint8_t>(coded.words[j][b / 4] >> (8 * (b % 4)) & 0xFFU));
      }
    }
  }
  std::uint8_t* headers = Headers(wire, place);
  const int block = 1 << wire.block_log2;
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const int element = At<P>(j);
    if ((element & (block - 1)) == 0 && element < place.numel) {
      P::template Store<std::uint16_t>(headers + 2 * (element >> wire.block_log2),
                                       static_cast<std::uint16_t>(coded.headers[j]));
    }
  }
}

}  // namespace zcomm::cuda
