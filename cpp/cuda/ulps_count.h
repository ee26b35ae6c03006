#pragma once

#include "ulps.h"

// What encoding knows of a chunk before its symbols are coded: the first kernels of ulps.h.
namespace zcomm::cuda {

// How often each symbol occurs in a chunk, except that of no change. The caller zeroes them.
struct UlpsCounts {
  std::uint32_t changes[ulps::kMaxSymbols];
  std::uint32_t gaps[ulps::kGapSymbols];
};

// The changes of a tile.
struct UlpsTile {
  std::uint32_t changed;
  std::uint32_t last;                                  // the place of the last in its chunk + 1; 0: there is none
  std::uint32_t gap_bits;                              // extra bits of gaps, in sparse chunks
  std::uint32_t extra_bits[ulps::kMaxDirectBits + 1];  // of changes, by direct bits
};

// Where the parts of a chunk's payload are in its place. Extra bits follow its front.
struct UlpsParts {
  std::uint32_t front;      // 32-bit words of tables and states, the first of the place
  std::uint32_t num_words;  // 16-bit
  std::uint32_t words_at;   // in 16-bit words
  std::uint32_t direct;     // of the table of changes
};

struct UlpsEncodeArguments {
  const std::uint16_t* new_bits;
  const std::uint16_t* old_bits;
  std::uint64_t numel;
  std::uint8_t* message;  // aligned to 4 bytes
  UlpsSums* sums;
  UlpsCounts* counts;  // one for each chunk of kDenseChunkBits, as are `entries` and `parts`
  std::uint32_t* entries;
  UlpsParts* parts;
  UlpsTile* tiles;
  std::uint8_t* places;  // of payloads, aligned to 8: LocateUlpsChunk
};

// A chunk's elements, and where its payload is made: room for raw values and kUlpsSlack. Symbols are at the bottom of
// the place, a byte an element, until they are coded; words come from the top down. A symbol gives at most one word of
// two bytes, so words stay above the symbols that are still to be read. In a sparse chunk the list of changes is at the
// top, and with its words takes at most 12 bytes a change, of which there are fewer than numel / 16. The slack is for
// the front of a payload of few elements.
struct UlpsChunk {
  const std::uint16_t* new_bits;
  const std::uint16_t* old_bits;
  std::uint32_t numel;
  std::uint8_t* place;

  ZCOMM_DEVICE std::uint32_t RawNbytes() const { return static_cast<std::uint32_t>(UlpsUpTo4(2ULL * numel)); }
  ZCOMM_DEVICE std::uint32_t Room() const { return (RawNbytes() + kUlpsSlack) / 8 * 8; }
};

ZCOMM_HOST_DEVICE std::uint64_t UlpsPlacesNbytes(std::uint64_t numel) {
  return UlpsUpTo4(2 * numel) + kUlpsSlack * UlpsChunks(numel, ulps::kDenseChunkBits);
}

template <class P>
ZCOMM_DEVICE std::uint32_t UlpsChunkBits(const UlpsEncodeArguments& a) {
  if (a.numel <= 1ULL << ulps::kDenseChunkBits) return ulps::kDenseChunkBits;
  return ulps::ChunkBitsOf(P::template Load<std::uint32_t>(&a.sums->changed));
}

ZCOMM_DEVICE UlpsChunk LocateUlpsChunk(const UlpsEncodeArguments& a, std::uint64_t chunk, std::uint32_t chunk_bits) {
  const std::uint64_t first = chunk << chunk_bits;
  const std::uint32_t numel = UlpsChunkNumel(chunk, a.numel, chunk_bits);
  return {a.new_bits + first, a.old_bits + first, numel, a.places + 2 * first + kUlpsSlack * chunk};
}

constexpr std::uint32_t kUlpsAhead = 8;  // rounds whose values are loaded at once

// Calls visit(i, z) for each change of a tile in rounds of 32, in order. All lanes call; z is 0 past the end.
template <class P, class Visit>
ZCOMM_DEVICE void VisitChanges(const UlpsChunk& chunk, const UlpsTileSpan& span, const Visit& visit) {
  for (std::uint32_t begin = span.begin; begin < span.end; begin += 32 * kUlpsAhead) {
    std::uint32_t changes[kUlpsAhead];
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kUlpsAhead; ++k) {
      const std::uint32_t i = begin + 32 * k + static_cast<std::uint32_t>(P::Lane());
      changes[k] = i < span.end ? ulps::Change(LoadWord16<P>(chunk.new_bits, i), LoadWord16<P>(chunk.old_bits, i)) : 0U;
    }
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kUlpsAhead; ++k) {
      if (begin + 32 * k < span.end) visit(begin + 32 * k + static_cast<std::uint32_t>(P::Lane()), changes[k]);
    }
  }
}

template <class P>
ZCOMM_DEVICE void SampleUlps(const UlpsEncodeArguments& a, std::uint32_t warp, std::uint32_t num_warps) {
  if (a.numel <= 1ULL << ulps::kDenseChunkBits) return;
  for (std::uint32_t i = warp; i < ulps::kSamples; i += num_warps) {
    const std::uint64_t first = i * (a.numel / ulps::kSamples);
    std::uint32_t changed = 0;
    for (std::uint32_t k = static_cast<std::uint32_t>(P::Lane()); k < ulps::kSampleNumel; k += 32) {
      changed += LoadWord16<P>(a.new_bits, first + k) != LoadWord16<P>(a.old_bits, first + k) ? 1U : 0U;
    }
    const std::uint32_t sum = Sum32OfWarp<P>(changed);
    if (P::Lane() == 0) P::Add(&a.sums->changed, sum);
  }
}

// Adds a warp's counts to those of a chunk, and makes them 0. What lanes have counted before, they see.
template <class P>
ZCOMM_DEVICE void AddCounts(std::uint32_t* counts, std::uint32_t num_symbols, std::uint32_t* of_chunk) {
  for (auto s = static_cast<std::uint32_t>(P::Lane()); s < num_symbols; s += 32) {
    if (counts[s] != 0) P::Add(of_chunk + s, counts[s]);
    counts[s] = 0;
  }
}

// Extra bits of the changes that a warp has counted, for each number of direct bits, to the tile's record.
template <class P>
ZCOMM_DEVICE void SumExtraBits(const std::uint32_t* counts, UlpsTile* tile) {
  std::uint32_t sums[ulps::kMaxDirectBits + 1] = {};
  for (auto s = static_cast<std::uint32_t>(P::Lane()); s < ulps::kMaxSymbols; s += 32) {
    ZCOMM_UNROLL
    for (std::uint32_t direct = 1; direct <= ulps::kMaxDirectBits; ++direct) {
      sums[direct] += counts[s] * ulps::Width(ulps::Coarser(s, direct), direct);
    }
  }
  ZCOMM_UNROLL
  for (std::uint32_t direct = 1; direct <= ulps::kMaxDirectBits; ++direct) {
    const std::uint32_t sum = Sum32OfWarp<P>(sums[direct]);
    if (P::Lane() == 0) P::template Store<std::uint32_t>(&tile->extra_bits[direct], sum);
  }
}

// `counts`: kMaxSymbols zeros in the warp's shared memory.
template <class P>
ZCOMM_DEVICE void CountUlps(const UlpsEncodeArguments& a, std::uint32_t warp, std::uint32_t num_warps,
                            std::uint32_t* counts) {
  // Smaller changes, which most are, are counted in registers: atomics on the same counter wait for each other.
  constexpr std::uint32_t kFew = 4;
  const std::uint32_t chunk_bits = UlpsChunkBits<P>(a);
  for (std::uint64_t tile = warp; tile < UlpsTiles(a.numel); tile += num_warps) {
    const UlpsTileSpan span = LocateUlpsTile(tile, a.numel, chunk_bits);
    const UlpsChunk chunk = LocateUlpsChunk(a, span.chunk, chunk_bits);
    std::uint32_t few[kFew] = {};
    std::uint32_t last = 0;
    std::uint32_t changed = 0;
    VisitChanges<P>(chunk, span, [&](std::uint32_t i, std::uint32_t z) {
      const std::uint32_t symbol = ulps::Symbol(z, ulps::kMaxDirectBits);
      if (i < span.end) P::template Store<std::uint8_t>(chunk.place + i, static_cast<std::uint8_t>(symbol));
      if (z >= kFew) P::AddShared(&counts[symbol], 1U);
      ZCOMM_UNROLL
      for (std::uint32_t small = 1; small < kFew; ++small) few[small] += z == small ? 1U : 0U;
      last = z != 0 ? i + 1U : last;
      changed += z != 0 ? 1U : 0U;
    });
    ZCOMM_UNROLL
    for (std::uint32_t small = 1; small < kFew; ++small) {
      const std::uint32_t sum = Sum32OfWarp<P>(few[small]);
      if (P::Lane() == 0) counts[small] = sum;
    }
    P::Sync();
    SumExtraBits<P>(counts, a.tiles + tile);
    AddCounts<P>(counts, ulps::kMaxSymbols, a.counts[span.chunk].changes);
    const std::uint32_t sum = Sum32OfWarp<P>(changed);
    const std::uint32_t most = P::MaxOfWarp(last);
    if (P::Lane() == 0) {
      P::template Store<std::uint32_t>(&a.tiles[tile].changed, sum);
      P::template Store<std::uint32_t>(&a.tiles[tile].last, most);
      P::template Store<std::uint32_t>(&a.tiles[tile].gap_bits, 0U);
    }
    P::Sync();  // The counts are 0.
  }
}

// How many elements of a chunk have changed. If `counts` is not null, it gets the counts of their symbols.
template <class P>
ZCOMM_DEVICE std::uint32_t ReadCounts(const UlpsCounts& of_chunk, std::uint32_t* counts) {
  std::uint32_t changed = 0;
  for (auto s = static_cast<std::uint32_t>(P::Lane()); s < ulps::kMaxSymbols; s += 32) {
    const std::uint32_t count = LoadWord32<P>(of_chunk.changes, s);
    if (counts != nullptr) counts[s] = count;
    changed += count;
  }
  return Sum32OfWarp<P>(changed);
}

// The sum of value(tile) of the tiles of a chunk before one.
template <class P, class Value>
ZCOMM_DEVICE std::uint32_t SumOfTiles(std::uint64_t first, std::uint64_t end, const Value& value) {
  std::uint32_t sum = 0;
  for (std::uint64_t i = first + static_cast<std::uint32_t>(P::Lane()); i < end; i += 32) sum += value(i);
  return Sum32OfWarp<P>(sum);
}

// The changes of a sparse chunk, at the end of its place: where each is, and the symbols of its gap and of itself.
struct UlpsList {
  std::uint8_t* data;

  ZCOMM_DEVICE UlpsList(const UlpsChunk& chunk, std::uint32_t count) : data(chunk.place + (chunk.Room() - 8 * count)) {}

  template <class P>
  ZCOMM_DEVICE void Store(std::uint32_t index, std::uint32_t place, std::uint32_t symbols) const {
    P::template Store<Words2>(data + 8ULL * index, Words2{{place, symbols}});
  }
  template <class P>
  ZCOMM_DEVICE Words2 Load(std::uint32_t index) const {
    return P::template Load<Words2>(data + 8ULL * index);
  }
};

// `counts`: kGapSymbols zeros in the warp's shared memory.
template <class P>
ZCOMM_DEVICE void ListUlps(const UlpsEncodeArguments& a, std::uint32_t warp, std::uint32_t num_warps,
                           std::uint32_t* counts) {
  const std::uint32_t chunk_bits = UlpsChunkBits<P>(a);
  for (std::uint64_t tile = warp; tile < UlpsTiles(a.numel); tile += num_warps) {
    const UlpsTileSpan span = LocateUlpsTile(tile, a.numel, chunk_bits);
    const UlpsChunk chunk = LocateUlpsChunk(a, span.chunk, chunk_bits);
    const std::uint32_t count = ReadCounts<P>(a.counts[span.chunk], nullptr);
    if (!ulps::IsSparse(count, chunk.numel) || LoadWord32<P>(&a.tiles[tile].changed, 0) == 0) continue;
    std::uint32_t found = 0;  // before this tile
    std::uint32_t end = 0;    // where the last of these is, + 1
    for (std::uint64_t i = span.first_tile + static_cast<std::uint32_t>(P::Lane()); i < tile; i += 32) {
      found += LoadWord32<P>(&a.tiles[i].changed, 0);
      const std::uint32_t last = LoadWord32<P>(&a.tiles[i].last, 0);
      end = last > end ? last : end;
    }
    found = Sum32OfWarp<P>(found);
    end = P::MaxOfWarp(end);
    const UlpsList list(chunk, count);
    std::uint32_t gap_bits = 0;
    for (std::uint32_t begin = span.begin; begin < span.end; begin += 32 * kUlpsAhead) {
      std::uint32_t symbols[kUlpsAhead];
      ZCOMM_UNROLL
      for (std::uint32_t k = 0; k < kUlpsAhead; ++k) {
        const std::uint32_t i = begin + 32 * k + static_cast<std::uint32_t>(P::Lane());
        symbols[k] = i < span.end ? P::template Load<std::uint8_t>(chunk.place + i) : std::uint32_t{0};
      }
      ZCOMM_UNROLL
      for (std::uint32_t k = 0; k < kUlpsAhead; ++k) {
        const std::uint32_t mask = P::Ballot(symbols[k] != 0);
        if (mask == 0) continue;
        const std::uint32_t first = begin + 32 * k;
        if (symbols[k] != 0) {
          const std::uint32_t before = mask & ((1U << P::Lane()) - 1U);
          const std::uint32_t from = before != 0 ? first + ulps::Octave(before) + 1U : end;
          const std::uint32_t place = first + static_cast<std::uint32_t>(P::Lane());
          const std::uint32_t gap = ulps::Symbol(place - from, ulps::kGapDirectBits);
          list.Store<P>(found + CountBits(before), place, gap | symbols[k] << 8);
          P::AddShared(&counts[gap], 1U);
          gap_bits += ulps::Width(gap, ulps::kGapDirectBits);
        }
        found += CountBits(mask);
        end = first + ulps::Octave(mask) + 1U;
      }
    }
    const std::uint32_t sum = Sum32OfWarp<P>(gap_bits);
    if (P::Lane() == 0) P::template Store<std::uint32_t>(&a.tiles[tile].gap_bits, sum);
    P::Sync();
    AddCounts<P>(counts, ulps::kGapSymbols, a.counts[span.chunk].gaps);
    P::Sync();  // The counts are 0.
  }
}

}  // namespace zcomm::cuda
