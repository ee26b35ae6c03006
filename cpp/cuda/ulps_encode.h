#pragma once

#include "ulps.h"

// The encoding half of ulps.h.
namespace zcomm::cuda {

// A chunk's elements, and where its payload is made: room for raw values and kUlpsSlack.
struct UlpsChunk {
  const std::uint16_t* new_bits;
  const std::uint16_t* old_bits;
  std::uint32_t numel;
  std::uint8_t* place;

  ZCOMM_DEVICE std::uint32_t RawNbytes() const { return static_cast<std::uint32_t>(UlpsUpTo4(2ULL * numel)); }
  ZCOMM_DEVICE std::uint32_t Room() const { return RawNbytes() + kUlpsSlack; }
};

ZCOMM_HOST_DEVICE std::uint64_t UlpsPlacesNbytes(std::uint64_t numel) {
  return UlpsUpTo4(2 * numel) + kUlpsSlack * UlpsChunks(numel, ulps::kDenseChunkBits);
}

template <class P>
ZCOMM_DEVICE std::uint32_t UlpsChunkBits(const UlpsEncodeArguments& a) {
  if (a.numel <= 1ULL << ulps::kDenseChunkBits) return ulps::kDenseChunkBits;
  return ulps::ChunkBitsOf(P::template Load<std::uint32_t>(&a.sums->changed));
}

template <class P>
ZCOMM_DEVICE UlpsChunk LocateUlpsChunk(const UlpsEncodeArguments& a, std::uint32_t chunk, std::uint32_t chunk_bits) {
  const std::uint64_t first = static_cast<std::uint64_t>(chunk) << chunk_bits;
  const std::uint64_t rest = a.numel - first;
  const auto numel = static_cast<std::uint32_t>(rest >> chunk_bits != 0 ? 1ULL << chunk_bits : rest);
  std::uint8_t* place = a.places + 2 * first + static_cast<std::uint64_t>(kUlpsSlack) * chunk;
  return {a.new_bits + first, a.old_bits + first, numel, place};
}

// Calls visit(i, z) for each change in rounds of 32, in order or from the last on. All lanes call; z is 0 past the end.
template <class P, class Visit>
ZCOMM_DEVICE void VisitChanges(const UlpsChunk& chunk, bool is_reversed, const Visit& visit) {
  const std::uint32_t num_rounds = (chunk.numel + 31) / 32;
  for (std::uint32_t done = 0; done < num_rounds; done += kUlpsAhead) {
    std::uint32_t changes[kUlpsAhead];
    std::uint32_t places[kUlpsAhead];
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kUlpsAhead; ++k) {
      const std::uint32_t round = is_reversed ? num_rounds - 1 - done - k : done + k;
      places[k] = 32 * round + static_cast<std::uint32_t>(P::Lane());
      const bool is_within = done + k < num_rounds && places[k] < chunk.numel;
      changes[k] =
          is_within ? ulps::Change(LoadWord16<P>(chunk.new_bits, places[k]), LoadWord16<P>(chunk.old_bits, places[k]))
                    : 0U;
    }
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kUlpsAhead; ++k) {
      if (done + k < num_rounds && !visit(places[k], changes[k])) return;
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
    const std::uint64_t sum = SumOfWarp<P>(changed);
    if (P::Lane() == 0) P::Add(&a.sums->changed, static_cast<std::uint32_t>(sum));
  }
}

// ---------------------------------------------------------------------------------------------------------------------

// Counts symbols for kMaxDirectBits in shared->counts; returns how many are not 0.
template <class P>
ZCOMM_DEVICE std::uint32_t CountChanges(const UlpsChunk& chunk, UlpsShared* shared) {
  for (auto s = static_cast<std::uint32_t>(P::Lane()); s < 256; s += 32) shared->counts[s] = 0;
  P::Sync();
  std::uint32_t changed = 0;
  VisitChanges<P>(chunk, false, [&](std::uint32_t, std::uint32_t z) {
    if (z != 0) P::AddShared(&shared->counts[ulps::Symbol(z, ulps::kMaxDirectBits)], 1U);
    changed += z != 0 ? 1U : 0U;
    return true;
  });
  const auto sum = static_cast<std::uint32_t>(SumOfWarp<P>(changed));
  if (P::Lane() == 0) shared->counts[0] = chunk.numel - sum;
  P::Sync();
  return sum;
}

// Moves 16-bit words to a lower address.
template <class P>
ZCOMM_DEVICE void MoveDown(std::uint8_t* to, const std::uint8_t* from, std::uint32_t count) {
  constexpr std::uint32_t kAtOnce = 8;
  for (std::uint32_t begin = 0; begin < count; begin += 32 * kAtOnce) {
    std::uint32_t words[kAtOnce];
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      const std::uint32_t i = begin + 32 * k + static_cast<std::uint32_t>(P::Lane());
      words[k] = i < count ? LoadWord16<P>(from, i) : 0U;
    }
    P::Sync();  // What is read here may lie where another lane writes.
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      const std::uint32_t i = begin + 32 * k + static_cast<std::uint32_t>(P::Lane());
      if (i < count) P::template Store<std::uint16_t>(to + 2ULL * i, static_cast<std::uint16_t>(words[k]));
    }
    P::Sync();
  }
}

// The words of a chunk, from the last on: below `top`, in 16-bit words from the place.
template <class P>
struct UlpsCoder {
  std::uint8_t* place;
  std::uint32_t top;
  std::uint32_t used = 0;
  std::uint32_t state = ulps::kLowestState;

  ZCOMM_DEVICE UlpsCoder(std::uint8_t* to, std::uint32_t room) : place(to), top(room / 2) {}

  ZCOMM_DEVICE void Encode(bool is_active, const ulps::EncodeEntry& entry) {
    const bool is_full = is_active && ulps::IsFull(state, entry.packed);
    const std::uint32_t mask = P::Ballot(is_full);
    used += CountBits(mask);
    if (is_full) {
      P::template Store<std::uint16_t>(place + 2ULL * (top - used + RankIn<P>(mask)),
                                       static_cast<std::uint16_t>(state));
      state >>= 16;
    }
    if (is_active) state = ulps::EncodeSymbol(state, entry);
  }
};

// Puts the parts of a payload in order: what stands in shared->table, states, words. The room for extra bits becomes 0.
// Returns the payload's bytes, or 0 if they are not fewer than raw.
template <class P>
ZCOMM_DEVICE std::uint32_t FinishPayload(const UlpsChunk& chunk, const UlpsCoder<P>& coder, std::uint32_t num_lanes,
                                         std::uint32_t extra_nbytes, const UlpsShared& shared) {
  const auto lane = static_cast<std::uint32_t>(P::Lane());
  const auto states_at = static_cast<std::uint32_t>(UlpsUpTo4(shared.table_nbytes));
  const std::uint32_t words_at = states_at + 4 * num_lanes;
  const auto extra_at = static_cast<std::uint32_t>(UlpsUpTo4(words_at + 2ULL * coder.used));
  if (static_cast<std::uint64_t>(extra_at) + extra_nbytes >= chunk.RawNbytes()) return 0;
  P::Sync();  // The words of all lanes are written.
  MoveDown<P>(chunk.place + words_at, chunk.place + 2ULL * (coder.top - coder.used), coder.used);
  for (std::uint32_t i = lane; i < states_at; i += 32) {
    P::template Store<std::uint8_t>(chunk.place + i, i < shared.table_nbytes ? shared.table[i] : std::uint8_t{0});
  }
  if (lane < num_lanes) P::template Store<std::uint32_t>(chunk.place + states_at + 4 * lane, coder.state);
  if (lane == 0 && coder.used % 2 != 0) P::template Store<std::uint16_t>(chunk.place + extra_at - 2, std::uint16_t{0});
  for (std::uint32_t i = lane; i < extra_nbytes / 4; i += 32) {
    P::template Store<std::uint32_t>(chunk.place + extra_at + 4ULL * i, 0U);
  }
  P::Sync();
  return extra_at + extra_nbytes;
}

// Adds bits to words that were 0, in the order of lanes.
template <class P>
ZCOMM_DEVICE void WriteExtra(std::uint8_t* data, std::uint32_t bits, std::uint32_t width, std::uint64_t* at) {
  if (P::Ballot(width > 0) == 0) return;
  std::uint32_t total = 0;
  const std::uint64_t mine = *at + SumBefore<P>(width, &total);
  *at += total;
  if (width == 0) return;
  const std::uint64_t shifted = static_cast<std::uint64_t>(bits) << (mine % 32);
  auto* word = reinterpret_cast<std::uint32_t*>(data) + mine / 32;
  P::Add(word, static_cast<std::uint32_t>(shifted));
  if (shifted >> 32 != 0) P::Add(word + 1, static_cast<std::uint32_t>(shifted >> 32));
}

ZCOMM_DEVICE void StoreInTable(std::uint32_t word, std::uint32_t at, UlpsShared* shared) {
  for (std::uint32_t i = 0; i < 4; ++i) shared->table[at + i] = static_cast<std::uint8_t>(word >> (8 * i));
}

// One lane makes the table of changes, at shared->table + at, and their entries. Returns the extra bits, in all lanes.
template <class P>
ZCOMM_DEVICE std::uint64_t MakeChangesTable(std::uint32_t num_changes, std::uint32_t at, UlpsShared* shared) {
  std::uint64_t num_extra_bits = 0;
  if (P::Lane() == 0) {
    shared->direct = ulps::DirectBits(shared->counts, num_changes);
    num_extra_bits = ulps::CoarserCounts(shared->counts, shared->direct, shared->coded);
    const std::uint32_t num_symbols = ulps::NumSymbols(shared->direct);
    ulps::ScaleCounts(shared->coded, num_symbols, shared->frequency);
    ulps::FillEntries(shared->frequency, num_symbols, shared->entries[0]);
    shared->table[at] = static_cast<std::uint8_t>(shared->direct);
    const std::uint8_t* end = ulps::WriteTable(shared->frequency, num_symbols, shared->table + at + 1);
    shared->table_nbytes = static_cast<std::uint32_t>(end - shared->table);
  }
  P::Sync();
  return SumOfWarp<P>(num_extra_bits);
}

// 0: not fewer bytes than raw.
template <class P>
ZCOMM_DEVICE std::uint32_t EncodeDenseChunk(const UlpsChunk& chunk, UlpsShared* shared) {
  const std::uint64_t num_extra_bits = MakeChangesTable<P>(chunk.numel, 4, shared);
  const std::uint32_t direct = shared->direct;
  const auto extra_nbytes = static_cast<std::uint32_t>((num_extra_bits + 31) / 32 * 4);
  UlpsCoder<P> coder(chunk.place, chunk.Room());
  VisitChanges<P>(chunk, true, [&](std::uint32_t i, std::uint32_t z) {
    coder.Encode(i < chunk.numel, shared->entries[0][ulps::Symbol(z, direct)]);
    return 2 * coder.used + extra_nbytes < chunk.RawNbytes();
  });
  if (P::Lane() == 0) StoreInTable(coder.used, 0, shared);
  P::Sync();
  const std::uint32_t nbytes = FinishPayload<P>(chunk, coder, 32, extra_nbytes, *shared);
  if (nbytes == 0) return 0;
  std::uint64_t at = 0;
  VisitChanges<P>(chunk, false, [&](std::uint32_t, std::uint32_t z) {
    const std::uint32_t width = ulps::Width(ulps::Symbol(z, direct), direct);
    WriteExtra<P>(chunk.place + (nbytes - extra_nbytes), ulps::Extra(z, width), width, &at);
    return true;
  });
  return nbytes;
}

// The changes of a sparse chunk: their places stand at the end of the chunk's place.
template <class P>
struct UlpsPlaces {
  const UlpsChunk& chunk;
  std::uint32_t count;

  ZCOMM_DEVICE std::uint8_t* Data() const { return chunk.place + (chunk.Room() - 4 * count); }

  ZCOMM_DEVICE void Find() const {
    std::uint32_t found = 0;
    VisitChanges<P>(chunk, false, [&](std::uint32_t i, std::uint32_t z) {
      const std::uint32_t mask = P::Ballot(z != 0);
      if (z != 0) P::template Store<std::uint32_t>(Data() + 4ULL * (found + RankIn<P>(mask)), i);
      found += CountBits(mask);
      return true;
    });
    P::Sync();
  }

  // Change `i`: its gap and its z; 0 for one past the end.
  ZCOMM_DEVICE void Read(std::uint32_t i, std::uint32_t* gap, std::uint32_t* z) const {
    *gap = 0;
    *z = 0;
    if (i >= count) return;
    const std::uint32_t place = LoadWord32<P>(Data(), i);
    *gap = i == 0 ? place : place - LoadWord32<P>(Data(), i - 1) - 1U;
    *z = ulps::Change(LoadWord16<P>(chunk.new_bits, place), LoadWord16<P>(chunk.old_bits, place));
  }
};

template <class P>
ZCOMM_DEVICE std::uint32_t EncodeSparseChunk(const UlpsChunk& chunk, std::uint32_t num_changes, UlpsShared* shared) {
  const auto lane = static_cast<std::uint32_t>(P::Lane());
  const UlpsPlaces<P> places{chunk, num_changes};
  places.Find();
  for (std::uint32_t s = lane; s < ulps::kGapSymbols; s += 32) shared->gap_counts[s] = 0;
  if (lane == 0) shared->counts[0] = 0;
  P::Sync();
  std::uint32_t gap = 0;
  std::uint32_t z = 0;
  std::uint32_t num_gap_bits = 0;
  for (std::uint32_t i = lane; i < num_changes; i += 32) {
    places.Read(i, &gap, &z);
    const std::uint32_t symbol = ulps::Symbol(gap, ulps::kGapDirectBits);
    P::AddShared(&shared->gap_counts[symbol], 1U);
    num_gap_bits += ulps::Width(symbol, ulps::kGapDirectBits);
  }
  P::Sync();
  if (lane == 0) {
    ulps::ScaleCounts(shared->gap_counts, ulps::kGapSymbols, shared->frequency);
    ulps::FillEntries(shared->frequency, ulps::kGapSymbols, shared->entries[1]);
    const std::uint8_t* end = ulps::WriteTable(shared->frequency, ulps::kGapSymbols, shared->table + 8);
    shared->table_nbytes = static_cast<std::uint32_t>(end - shared->table);
    StoreInTable(num_changes, 0, shared);
  }
  P::Sync();
  const std::uint32_t changes_at = shared->table_nbytes;
  P::Sync();  // All have read it before it changes.
  const std::uint64_t num_extra_bits =
      MakeChangesTable<P>(num_changes, changes_at, shared) + SumOfWarp<P>(num_gap_bits);
  const std::uint32_t direct = shared->direct;
  const auto extra_nbytes = static_cast<std::uint32_t>((num_extra_bits + 31) / 32 * 4);
  UlpsCoder<P> coder(chunk.place, chunk.Room() - 4 * num_changes);
  const std::uint32_t num_rounds = (num_changes + ulps::kSparseLanes - 1) / ulps::kSparseLanes;
  for (std::uint32_t round = num_rounds; round-- > 0;) {
    const std::uint32_t i = round * ulps::kSparseLanes + lane;
    const bool is_active = lane < ulps::kSparseLanes && i < num_changes;
    places.Read(is_active ? i : num_changes, &gap, &z);
    coder.Encode(is_active, shared->entries[0][ulps::Symbol(z, direct)]);
    coder.Encode(is_active, shared->entries[1][ulps::Symbol(gap, ulps::kGapDirectBits)]);
  }
  if (lane == 0) StoreInTable(coder.used, 4, shared);
  P::Sync();
  const std::uint32_t nbytes = FinishPayload<P>(chunk, coder, ulps::kSparseLanes, extra_nbytes, *shared);
  if (nbytes == 0) return 0;
  std::uint64_t at = 0;
  for (std::uint32_t begin = 0; begin < num_changes; begin += 32) {
    places.Read(begin + lane, &gap, &z);
    const std::uint32_t gap_width = ulps::Width(ulps::Symbol(gap, ulps::kGapDirectBits), ulps::kGapDirectBits);
    const std::uint32_t width = ulps::Width(ulps::Symbol(z, direct), direct);
    const std::uint32_t bits = ulps::Extra(gap, gap_width) | ulps::Extra(z, width) << gap_width;
    WriteExtra<P>(chunk.place + (nbytes - extra_nbytes), bits, gap_width + width, &at);
  }
  return nbytes;
}

template <class P>
ZCOMM_DEVICE void EncodeRawChunk(const UlpsChunk& chunk) {
  for (auto i = static_cast<std::uint32_t>(P::Lane()); i < chunk.RawNbytes() / 2; i += 32) {
    const std::uint32_t bits = i < chunk.numel ? LoadWord16<P>(chunk.new_bits, i) : 0U;
    P::template Store<std::uint16_t>(chunk.place + 2ULL * i, static_cast<std::uint16_t>(bits));
  }
}

// Chunk `warp`, if there is one.
template <class P>
ZCOMM_DEVICE void EncodeUlps(const UlpsEncodeArguments& a, std::uint32_t warp, UlpsShared* shared) {
  const std::uint32_t chunk_bits = UlpsChunkBits<P>(a);
  if (warp >= UlpsChunks(a.numel, chunk_bits)) return;
  const UlpsChunk chunk = LocateUlpsChunk<P>(a, warp, chunk_bits);
  const std::uint32_t changed = CountChanges<P>(chunk, shared);
  const bool is_sparse = ulps::IsSparse(changed, chunk.numel);
  std::uint32_t nbytes = 0;
  std::uint32_t kind = ulps::kZero;
  if (changed > 0) {
    nbytes = is_sparse ? EncodeSparseChunk<P>(chunk, changed, shared) : EncodeDenseChunk<P>(chunk, shared);
    kind = is_sparse ? ulps::kSparse : ulps::kDense;
    if (nbytes == 0) {
      P::Sync();
      EncodeRawChunk<P>(chunk);
      nbytes = chunk.RawNbytes();
      kind = ulps::kRaw;
    }
  }
  if (P::Lane() == 0) P::template Store<std::uint32_t>(a.entries + warp, nbytes | kind);
}

// Pieces of payloads to the message.
template <class P>
ZCOMM_DEVICE void PlaceUlps(const UlpsEncodeArguments& a, std::uint32_t warp, std::uint32_t num_warps) {
  const std::uint32_t chunk_bits = UlpsChunkBits<P>(a);
  const std::uint64_t num_chunks = UlpsChunks(a.numel, chunk_bits);
  const std::uint64_t pieces = ((1ULL << chunk_bits) / 2 + kUlpsPieceWords - 1) / kUlpsPieceWords;
  std::uint32_t mixed = 0;
  for (std::uint64_t task = warp; task < num_chunks * pieces; task += num_warps) {
    const auto index = static_cast<std::uint32_t>(task / pieces);
    const std::uint64_t begin = task % pieces * kUlpsPieceWords;
    const std::uint32_t entry = LoadWord32<P>(a.entries, index);
    const std::uint64_t num_words = entry / 4;
    if (begin == 0 && P::Lane() == 0) {
      P::template Store<std::uint32_t>(a.message + kUlpsHeadBytes + 4ULL * index, entry);
      mixed += ulps::Mixed(entry, kUlpsHeadWords + index);
    }
    if (begin >= num_words) continue;
    const UlpsOffsets offsets = FindOffsets<P>(a.entries, index, num_chunks);
    const std::uint64_t first = kUlpsHeadWords + num_chunks + offsets.before / 4;
    const UlpsChunk chunk = LocateUlpsChunk<P>(a, index, chunk_bits);
    const std::uint64_t end = begin + kUlpsPieceWords < num_words ? begin + kUlpsPieceWords : num_words;
    for (std::uint64_t i = begin + static_cast<std::uint32_t>(P::Lane()); i < end; i += 32) {
      const std::uint32_t word = LoadWord32<P>(chunk.place, i);
      P::template Store<std::uint32_t>(a.message + 4 * (first + i), word);
      mixed += ulps::Mixed(word, static_cast<std::uint32_t>(first + i));
    }
  }
  AddToChecksum<P>(mixed, a.sums);
}

template <class P>
ZCOMM_DEVICE void FinishUlps(const UlpsEncodeArguments& a) {
  const std::uint32_t chunk_bits = UlpsChunkBits<P>(a);
  const std::uint64_t num_chunks = UlpsChunks(a.numel, chunk_bits);
  const std::uint64_t nbytes = kUlpsHeadBytes + 4 * num_chunks + FindOffsets<P>(a.entries, 0, num_chunks).total;
  if (P::Lane() != 0) return;
  const std::uint32_t words[kUlpsHeadWords - 1] = {ulps::kMagic | ulps::kVersion << 16 | chunk_bits << 24,
                                                   static_cast<std::uint32_t>(a.numel),
                                                   static_cast<std::uint32_t>(a.numel >> 32),
                                                   static_cast<std::uint32_t>(nbytes),
                                                   static_cast<std::uint32_t>(nbytes >> 32),
                                                   P::template Load<std::uint32_t>(&a.sums->checksum)};
  std::uint32_t sum = 0;
  ZCOMM_UNROLL
  for (std::uint32_t i = 0; i < kUlpsHeadWords - 1; ++i) {
    P::template Store<std::uint32_t>(a.message + 4 * i, words[i]);
    sum += ulps::Mixed(words[i], i);
  }
  P::template Store<std::uint32_t>(a.message + 4 * (kUlpsHeadWords - 1), sum);
}

}  // namespace zcomm::cuda
