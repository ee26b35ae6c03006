#pragma once

#include <cstdint>

#include "arguments.h"
#include "codecs.h"

// Moves a tile between memory and the registers of a warp. Each lane holds 4 vectors of 8 consecutive elements: element
// k of vector j in lane l is element 256 j + 8 l + k of the tile. A whole tile moves in aligned words of 16 bytes
// (codes: 8 or 4 bytes, the size of a lane's vector). If the tile does not start at a word boundary, its words are
// treated as a ring: its head and its tail share one word, which one lane moves element by element, and the warp
// rotates the ring to the tile's start. A partial tile, the last of a row, moves element by element.
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
  const std::uint64_t first = std::uint64_t{index - unit * tiles.per_segment.value} * kTile;
  const std::uint64_t left = tiles.segment_numel - first;
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

// kCount consecutive words for each vector of a lane: word i of vector j in lane l is word (32 j + l) kCount + i of the
// tile's 128 kCount.
template <class Words, int kCount>
using TileWords = Words[kVectors][kCount];

template <class Words, int kCount>
constexpr int kTileNbytes = kVectors * 32 * kCount * static_cast<int>(sizeof(Words));

// The bounds are constants: in a loop that is not unrolled, the compiler would put the array in local memory, which is
// slow.
template <int kDropped, int kNumWords>
ZCOMM_DEVICE void DropWords(bool is_dropped, std::uint32_t (&w)[kNumWords]) {
  ZCOMM_UNROLL
  for (int i = 0; i + kDropped < kNumWords; ++i) w[i] = is_dropped ? w[i + kDropped] : w[i];
}

// Rotates the ring of a tile's words: byte `nbytes`, which is in the first word and at a multiple of sizeof(Unit),
// becomes the first byte. All lanes call, with the same `nbytes`.
template <class P, class Unit, class Words, int kCount>
ZCOMM_DEVICE void ShiftWords(TileWords<Words, kCount>& words, int nbytes) {
  constexpr int kPerWord = static_cast<int>(sizeof(Words)) / 4;
  constexpr int kOwn = kPerWord * kCount;
  const Words first = words[0][0];
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const Words& wrapped = j + 1 < kVectors ? words[(j + 1) % kVectors][0] : first;
    std::uint32_t w[kOwn + kPerWord];  // and the next lane's first word
    ZCOMM_UNROLL
    for (int i = 0; i < kOwn; ++i) w[i] = words[j][i / kPerWord].w[i % kPerWord];
    ZCOMM_UNROLL
    for (int i = 0; i < kPerWord; ++i) w[kOwn + i] = P::ShuffleNext(P::Lane() == 0 ? wrapped.w[i] : w[i]);
    if constexpr (kPerWord == 4) DropWords<2>((nbytes & 8) != 0, w);
    if constexpr (kPerWord >= 2) DropWords<1>((nbytes & 4) != 0, w);
    const std::uint32_t selector = 0x3210U + 0x1111U * static_cast<std::uint32_t>(nbytes % 4);
    ZCOMM_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      words[j][i / kPerWord].w[i % kPerWord] = sizeof(Unit) == 4 ? w[i] : P::Permute(w[i], w[i + 1], selector);
    }
  }
}

// The word that a tile's ends share, when the tile starts `offset` bytes after the word boundary `base`. Its first
// `offset` bytes are the tail, which lies one tile after `base`; the others are the head.
template <class P, class Unit, class Words>
ZCOMM_DEVICE Words LoadEnds(const std::uint8_t* base, int offset, int tile_nbytes) {
  Words ends{};
  ZCOMM_UNROLL
  for (int i = 0; i < static_cast<int>(sizeof(Words)); i += static_cast<int>(sizeof(Unit))) {
    const auto unit = P::template Load<Unit>(base + i + (i < offset ? tile_nbytes : 0));
    ends.w[i / 4] |= static_cast<std::uint32_t>(unit) << (8 * (i % 4));
  }
  return ends;
}

template <class P, class Unit, class Words>
ZCOMM_DEVICE void StoreEnds(const Words& ends, std::uint8_t* base, int offset, int tile_nbytes) {
  ZCOMM_UNROLL
  for (int i = 0; i < static_cast<int>(sizeof(Words)); i += static_cast<int>(sizeof(Unit))) {
    P::template Store<Unit>(base + i + (i < offset ? tile_nbytes : 0),
                            static_cast<Unit>(ends.w[i / 4] >> (8 * (i % 4))));
  }
}

template <class Words>
ZCOMM_DEVICE int Misalignment(const std::uint8_t* start) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(start) % sizeof(Words));
}

// Loads the words of a whole tile, and no byte outside it.
template <class P, class Unit, class Words, int kCount>
ZCOMM_DEVICE void LoadWords(const std::uint8_t* start, TileWords<Words, kCount>& words) {
  const int offset = Misalignment<Words>(start);
  const std::uint8_t* base = start - offset;
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    ZCOMM_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int index = (j * 32 + P::Lane()) * kCount + i;
      words[j][i] = offset != 0 && index == 0 ? LoadEnds<P, Unit, Words>(base, offset, kTileNbytes<Words, kCount>)
                                              : P::template Load<Words>(base + index * static_cast<int>(sizeof(Words)));
    }
  }
  if (offset != 0) ShiftWords<P, Unit>(words, offset);
}

// Pairs of lanes exchange words, so that each store of the warp covers whole 32-byte sectors. Counted from its own
// first word, an even lane then has words 0 and 2, an odd one words -1 and 1.
template <class P>
ZCOMM_DEVICE void ExchangeHalves(Words4 (&words)[2]) {
  const bool is_odd = P::Lane() % 2 == 1;
  ZCOMM_UNROLL
  for (int k = 0; k < 4; ++k) {
    const std::uint32_t low = words[0].w[k];
    const std::uint32_t high = words[1].w[k];
    const std::uint32_t other = P::ShuffleXor(is_odd ? low : high, 1);
    words[0].w[k] = is_odd ? other : low;
    words[1].w[k] = is_odd ? high : other;
  }
}

// Writes a whole tile, and no byte outside it.
template <class P, class Unit, class Words, int kCount>
ZCOMM_DEVICE void StoreWords(TileWords<Words, kCount>& words, std::uint8_t* start) {
  constexpr int kNbytes = static_cast<int>(sizeof(Words));
  const int offset = Misalignment<Words>(start);
  if (offset != 0) ShiftWords<P, Unit>(words, kNbytes - offset);
  std::uint8_t* first = start + (offset != 0 ? kNbytes - offset : 0);
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    int index = (j * 32 + P::Lane()) * kCount;
    if constexpr (kCount == 2) {
      ExchangeHalves<P>(words[j]);
      index -= P::Lane() % 2;
    }
    ZCOMM_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int at = index + kCount * i;
      if (offset != 0 && at == kVectors * 32 * kCount - 1) {
        StoreEnds<P, Unit>(words[j][i], start - offset, offset, kTileNbytes<Words, kCount>);
      } else {
        P::template Store<Words>(first + at * kNbytes, words[j][i]);
      }
    }
  }
}

// The two 16-bit elements of a word as float32.
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
  LoadWords<P, std::uint32_t>(start, raw);
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; ++k) v[j][k] = FloatOf(raw[j][k / 4].w[k % 4]);
  }
}

template <class P>
ZCOMM_DEVICE void LoadNarrow(const std::uint8_t* start, DType dtype, Values& v) {
  Words4 raw[kVectors][1];
  LoadWords<P, std::uint16_t>(start, raw);
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; k += 2) Widen<P>(dtype, raw[j][0].w[k / 2], &v[j][k], &v[j][k + 1]);
  }
}

// Loads a tile as float32; elements past its end are 0.
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
  if (numel < kTile) {
    LoadElements<P>(start, dtype, numel, v);
  } else if (dtype == DType::kFloat32) {
    LoadWide<P>(start, v);
  } else {
    LoadNarrow<P>(start, dtype, v);
  }
}

template <class P>
ZCOMM_DEVICE void StoreWide(const Values& v, std::uint8_t* start) {
  Words4 raw[kVectors][2];
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; ++k) raw[j][k / 4].w[k % 4] = BitsOf(v[j][k]);
  }
  StoreWords<P, std::uint32_t>(raw, start);
}

template <class P>
ZCOMM_DEVICE void StoreNarrow(const Values& v, DType dtype, std::uint8_t* start) {
  Words4 raw[kVectors][1];
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    ZCOMM_UNROLL
    for (int k = 0; k < kVector; k += 2) raw[j][0].w[k / 2] = Narrow<P>(dtype, v[j][k], v[j][k + 1]);
  }
  StoreWords<P, std::uint16_t>(raw, start);
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
  if (numel < kTile) {
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
  if (numel == kTile) {
    Words raw[kVectors][1];
    LoadWords<P, std::uint8_t>(codes, raw);
    ZCOMM_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      ZCOMM_UNROLL
      for (int i = 0; i < C::kBits / 4; ++i) coded->words[j][i] = raw[j][0].w[i];
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
ZCOMM_DEVICE void StoreCodes(const Coded<C>& coded, int numel, std::uint8_t* codes) {
  if (numel == kTile) {
    typename VectorOfCodes<C::kBits>::Words raw[kVectors][1];
    ZCOMM_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      ZCOMM_UNROLL
      for (int i = 0; i < C::kBits / 4; ++i) raw[j][0].w[i] = coded.words[j][i];
    }
    StoreWords<P, std::uint8_t>(raw, codes);
    return;
  }
  const int nbytes = (numel * C::kBits + 7) / 8;
  ZCOMM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    ZCOMM_UNROLL
    for (int b = 0; b < C::kBits; ++b) {
      const int byte = At<P>(j) * C::kBits / 8 + b;
      if (byte >= nbytes) continue;
      P::template Store<std::uint8_t>(codes + byte,
                                      static_cast<std::uint8_t>(coded.words[j][b / 4] >> (8 * (b % 4)) & 0xFFU));
    }
  }
}

template <class P, class C>
ZCOMM_DEVICE void StoreCoded(const Wire& wire, const Place& place, const Coded<C>& coded) {
  StoreCodes<P, C>(coded, place.numel, Codes(wire, place, C::kBits));
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
