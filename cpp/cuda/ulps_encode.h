#pragma once

#include "ulps_count.h"

// Coding what ulps_count.h has counted: the last kernels of ulps.h that encode.
namespace zcomm::cuda {

// A warp's memory, shared by its lanes, when it encodes a chunk.
struct UlpsEncodeShared {
  std::uint32_t counts[ulps::kMaxSymbols];
  std::uint32_t coded[ulps::kMaxSymbols];
  std::uint32_t frequency[ulps::kMaxSymbols];
  std::uint32_t first[ulps::kMaxSymbols];
  ulps::EncodeEntry changes[ulps::kMaxSymbols];  // by the symbol for kMaxDirectBits
  ulps::EncodeEntry gaps[ulps::kGapSymbols];
  std::uint8_t table[8 + 2 * (1 + 2 * ulps::kMaxSymbols) + 3];
  std::uint32_t table_nbytes;
  std::uint32_t direct;
};

// The lanes that gave a word in a round, the low half of their states before.
struct UlpsRound {
  std::uint32_t mask;
  std::uint32_t state;
};

// The words of a chunk, from the last on: below `top`, in 16-bit words from the place. Some rounds are encoded before
// their words are written, and both without branches: then a round waits for the one before only for its states.
template <class P>
struct UlpsCoder {
  std::uint8_t* place;
  std::uint32_t top;
  std::uint32_t used = 0;
  std::uint32_t state = ulps::kLowestState;

  ZCOMM_DEVICE UlpsCoder(std::uint8_t* to, std::uint32_t nbytes) : place(to), top(nbytes / 2) {}

  ZCOMM_DEVICE UlpsRound Encode(bool is_active, const ulps::EncodeEntry& entry) {
    const bool is_full = is_active && ulps::IsFull(state, entry.packed);
    const UlpsRound round{P::Ballot(is_full), state};
    const std::uint32_t left = is_full ? state >> 16 : state;
    const std::uint32_t coded = ulps::EncodeSymbol(left, entry);
    state = is_active ? coded : left;
    return round;
  }

  ZCOMM_DEVICE void Write(const UlpsRound& round) {
    used += CountBits(round.mask);
    const bool is_mine = (round.mask >> P::Lane() & 1U) != 0;
    P::StoreIf(is_mine, place + 2ULL * (top - used + RankIn<P>(round.mask)), static_cast<std::uint16_t>(round.state));
  }
};

ZCOMM_DEVICE void StoreInTable(std::uint32_t word, std::uint32_t at, UlpsEncodeShared* shared) {
  for (std::uint32_t i = 0; i < 4; ++i) shared->table[at + i] = static_cast<std::uint8_t>(word >> (8 * i));
}

// One lane writes a table at shared->table + at, and frequencies with their sums to `shared`.
ZCOMM_DEVICE void MakeTable(const std::uint32_t* counts, std::uint32_t num_symbols, std::uint32_t at,
                            UlpsEncodeShared* shared) {
  ulps::ScaleCounts(counts, num_symbols, shared->frequency);
  std::uint32_t sum = 0;
  for (std::uint32_t s = 0; s < num_symbols; ++s) {
    shared->first[s] = sum;
    sum += shared->frequency[s];
  }
  const std::uint8_t* end = ulps::WriteTable(shared->frequency, num_symbols, shared->table + at);
  shared->table_nbytes = static_cast<std::uint32_t>(end - shared->table);
}

ZCOMM_DEVICE ulps::EncodeEntry EntryOf(std::uint32_t symbol, const UlpsEncodeShared& shared) {
  const std::uint32_t frequency = shared.frequency[symbol];
  return frequency > 0 ? ulps::MakeEncodeEntry(frequency, shared.first[symbol]) : ulps::EncodeEntry{0, 0};
}

// The table of changes, whose symbols are counted in `shared`, and their entries. Returns their extra bits.
template <class P>
ZCOMM_DEVICE std::uint64_t MakeChangesTable(std::uint32_t num_changes, std::uint32_t at, UlpsEncodeShared* shared) {
  std::uint64_t num_extra_bits = 0;
  if (P::Lane() == 0) {
    shared->direct = ulps::DirectBits(shared->counts, num_changes);
    num_extra_bits = ulps::CoarserCounts(shared->counts, shared->direct, shared->coded);
    shared->table[at] = static_cast<std::uint8_t>(shared->direct);
    MakeTable(shared->coded, ulps::NumSymbols(shared->direct), at + 1, shared);
  }
  P::Sync();
  for (auto s = static_cast<std::uint32_t>(P::Lane()); s < ulps::kMaxSymbols; s += 32) {
    shared->changes[s] = EntryOf(ulps::Coarser(s, shared->direct), *shared);
  }
  P::Sync();
  return SumOfWarp<P>(num_extra_bits);
}

// Writes shared->table and the states to the start of the place, zeros where extra bits follow, and where the parts
// are. Returns the payload's bytes, or 0 if they are not fewer than raw.
template <class P>
ZCOMM_DEVICE std::uint32_t FinishPayload(const UlpsChunk& chunk, const UlpsCoder<P>& coder, std::uint32_t num_lanes,
                                         std::uint64_t num_extra_bits, const UlpsEncodeShared& shared,
                                         UlpsParts* parts) {
  const auto lane = static_cast<std::uint32_t>(P::Lane());
  const auto states_at = static_cast<std::uint32_t>(UlpsUpTo4(shared.table_nbytes));
  const std::uint32_t front = states_at / 4 + num_lanes;
  const auto num_extra = static_cast<std::uint32_t>((num_extra_bits + 31) / 32);
  const std::uint64_t nbytes = UlpsUpTo4(4ULL * front + 2ULL * coder.used) + 4ULL * num_extra;
  if (nbytes >= chunk.RawNbytes()) return 0;
  P::Sync();  // All lanes have read their symbols, which are where this is written.
  for (std::uint32_t i = lane; i < states_at; i += 32) {
    P::template Store<std::uint8_t>(chunk.place + i, i < shared.table_nbytes ? shared.table[i] : std::uint8_t{0});
  }
  if (lane < num_lanes) P::template Store<std::uint32_t>(chunk.place + states_at + 4 * lane, coder.state);
  for (std::uint32_t i = lane; i < num_extra; i += 32) {
    P::template Store<std::uint32_t>(chunk.place + 4ULL * (front + i), 0U);
  }
  if (lane == 0) {
    P::template Store<std::uint32_t>(&parts->front, front);
    P::template Store<std::uint32_t>(&parts->num_words, coder.used);
    P::template Store<std::uint32_t>(&parts->words_at, coder.top - coder.used);
    P::template Store<std::uint32_t>(&parts->direct, shared.direct);
  }
  return static_cast<std::uint32_t>(nbytes);
}

// 0: not fewer bytes than raw.
template <class P>
ZCOMM_DEVICE std::uint32_t EncodeDenseChunk(const UlpsChunk& chunk, UlpsEncodeShared* shared, UlpsParts* parts) {
  constexpr std::uint32_t kAtOnce = 16;  // rounds
  const std::uint64_t num_extra_bits = MakeChangesTable<P>(chunk.numel, 4, shared);
  const std::uint64_t most = chunk.RawNbytes();
  if (num_extra_bits / 8 >= most) return 0;
  const std::uint32_t num_rounds = (chunk.numel + 31) / 32;
  const auto lane = static_cast<std::uint32_t>(P::Lane());
  // This lane's symbol in the k-th round before `end`; kMaxSymbols: there is none.
  const auto load = [&](std::uint32_t end, std::uint32_t k) -> std::uint32_t {
    const std::uint32_t i = 32 * (end - 1 - k) + lane;
    return k < end && i < chunk.numel ? P::template Load<std::uint8_t>(chunk.place + i) : ulps::kMaxSymbols;
  };
  std::uint32_t symbols[kAtOnce];
  ZCOMM_UNROLL
  for (std::uint32_t k = 0; k < kAtOnce; ++k) symbols[k] = load(num_rounds, k);
  UlpsCoder<P> coder(chunk.place, chunk.Room());
  for (std::uint32_t end = num_rounds;;) {
    ulps::EncodeEntry entries[kAtOnce];
    bool is_active[kAtOnce];
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      is_active[k] = symbols[k] < ulps::kMaxSymbols;
      entries[k] = shared->changes[is_active[k] ? symbols[k] : 0U];
    }
    const std::uint32_t before = end > kAtOnce ? end - kAtOnce : 0U;
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kAtOnce; ++k) symbols[k] = load(before, k);
    UlpsRound rounds[kAtOnce];
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kAtOnce; ++k) rounds[k] = coder.Encode(is_active[k], entries[k]);
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kAtOnce; ++k) coder.Write(rounds[k]);
    end = before;
    if (end == 0 || 2ULL * coder.used + num_extra_bits / 8 >= most) break;
  }
  if (lane == 0) StoreInTable(coder.used, 0, shared);
  return FinishPayload<P>(chunk, coder, 32, num_extra_bits, *shared, parts);
}

// 0: not fewer bytes than raw.
template <class P>
ZCOMM_DEVICE std::uint32_t EncodeSparseChunk(const UlpsChunk& chunk, std::uint32_t num_changes,
                                             const UlpsCounts& of_chunk, UlpsEncodeShared* shared, UlpsParts* parts) {
  constexpr std::uint32_t kAtOnce = 8;  // rounds
  const auto lane = static_cast<std::uint32_t>(P::Lane());
  std::uint32_t num_gap_bits = 0;
  for (std::uint32_t s = lane; s < ulps::kGapSymbols; s += 32) {
    const std::uint32_t count = LoadWord32<P>(of_chunk.gaps, s);
    shared->coded[s] = count;
    num_gap_bits += count * ulps::Width(s, ulps::kGapDirectBits);
  }
  P::Sync();
  if (lane == 0) {
    MakeTable(shared->coded, ulps::kGapSymbols, 8, shared);
    StoreInTable(num_changes, 0, shared);
  }
  P::Sync();
  for (std::uint32_t s = lane; s < ulps::kGapSymbols; s += 32) shared->gaps[s] = EntryOf(s, *shared);
  const std::uint32_t changes_at = shared->table_nbytes;
  P::Sync();  // All have read frequencies and lengths before they change.
  const std::uint64_t num_extra_bits =
      MakeChangesTable<P>(num_changes, changes_at, shared) + Sum32OfWarp<P>(num_gap_bits);
  const UlpsList list(chunk, num_changes);
  UlpsCoder<P> coder(chunk.place, chunk.Room() - 8 * num_changes);
  const std::uint32_t num_rounds = (num_changes + ulps::kSparseLanes - 1) / ulps::kSparseLanes;
  for (std::uint32_t done = 0; done < num_rounds; done += kAtOnce) {
    std::uint32_t symbols[kAtOnce];
    bool is_active[kAtOnce];
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      const std::uint32_t i = (num_rounds - 1 - done - k) * ulps::kSparseLanes + lane;
      is_active[k] = lane < ulps::kSparseLanes && done + k < num_rounds && i < num_changes;
      symbols[k] = is_active[k] ? list.Load<P>(i).w[1] : 0U;
    }
    UlpsRound rounds[2 * kAtOnce];
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      rounds[2 * k] = coder.Encode(is_active[k], shared->changes[symbols[k] >> 8]);
      rounds[2 * k + 1] = coder.Encode(is_active[k], shared->gaps[symbols[k] & 0xFFU]);
    }
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < 2 * kAtOnce; ++k) coder.Write(rounds[k]);
  }
  if (lane == 0) StoreInTable(coder.used, 4, shared);
  return FinishPayload<P>(chunk, coder, ulps::kSparseLanes, num_extra_bits, *shared, parts);
}

// Chunk `warp`, if there is one.
template <class P>
ZCOMM_DEVICE void EncodeUlps(const UlpsEncodeArguments& a, std::uint32_t warp, UlpsEncodeShared* shared) {
  const std::uint32_t chunk_bits = UlpsChunkBits<P>(a);
  if (warp >= UlpsChunks(a.numel, chunk_bits)) return;
  const UlpsChunk chunk = LocateUlpsChunk(a, warp, chunk_bits);
  const UlpsCounts& of_chunk = a.counts[warp];
  const std::uint32_t changed = ReadCounts<P>(of_chunk, shared->counts);
  const bool is_sparse = ulps::IsSparse(changed, chunk.numel);
  P::Sync();
  if (P::Lane() == 0) shared->counts[0] = is_sparse ? 0U : chunk.numel - changed;
  P::Sync();
  std::uint32_t nbytes = 0;
  std::uint32_t kind = ulps::kZero;
  if (changed > 0) {
    nbytes = is_sparse ? EncodeSparseChunk<P>(chunk, changed, of_chunk, shared, a.parts + warp)
                       : EncodeDenseChunk<P>(chunk, shared, a.parts + warp);
    kind = is_sparse ? ulps::kSparse : ulps::kDense;
    if (nbytes == 0) {
      nbytes = chunk.RawNbytes();
      kind = ulps::kRaw;
    }
  }
  if (P::Lane() == 0) P::template Store<std::uint32_t>(a.entries + warp, nbytes | kind);
}

// Adds bits to words that were 0.
template <class P>
ZCOMM_DEVICE void WriteExtra(std::uint8_t* data, std::uint32_t bits, std::uint32_t width, std::uint32_t at) {
  if (width == 0) return;
  const std::uint64_t shifted = static_cast<std::uint64_t>(bits) << (at % 32);
  auto* word = reinterpret_cast<std::uint32_t*>(data) + at / 32;
  P::Add(word, static_cast<std::uint32_t>(shifted));
  if (shifted >> 32 != 0) P::Add(word + 1, static_cast<std::uint32_t>(shifted >> 32));
}

// Those of the changes of a sparse chunk from index `begin` to `end`, from bit `at` on.
template <class P>
ZCOMM_DEVICE void WriteSparseExtra(const UlpsChunk& chunk, const UlpsList& list, std::uint32_t begin, std::uint32_t end,
                                   std::uint32_t direct, std::uint8_t* data, std::uint32_t at) {
  for (; begin < end; begin += 32) {
    const std::uint32_t i = begin + static_cast<std::uint32_t>(P::Lane());
    std::uint32_t gap = 0;
    std::uint32_t z = 0;
    std::uint32_t symbols = 0;
    if (i < end) {
      const Words2 change = list.Load<P>(i);
      const std::uint32_t place = change.w[0];
      symbols = change.w[1];
      gap = i == 0 ? place : place - list.Load<P>(i - 1).w[0] - 1U;
      z = ulps::Change(LoadWord16<P>(chunk.new_bits, place), LoadWord16<P>(chunk.old_bits, place));
    }
    const std::uint32_t gap_width = ulps::Width(symbols & 0xFFU, ulps::kGapDirectBits);
    const std::uint32_t width = ulps::Width(ulps::Coarser(symbols >> 8, direct), direct);
    std::uint32_t total = 0;
    const std::uint32_t mine = at + SumBefore<P>(gap_width + width, &total);
    at += total;
    WriteExtra<P>(data, ulps::Extra(gap, gap_width), gap_width, mine);
    WriteExtra<P>(data, ulps::Extra(z, width), width, mine + gap_width);
  }
}

template <class P>
ZCOMM_DEVICE void ExtraUlps(const UlpsEncodeArguments& a, std::uint32_t warp, std::uint32_t num_warps) {
  const std::uint32_t chunk_bits = UlpsChunkBits<P>(a);
  for (std::uint64_t tile = warp; tile < UlpsTiles(a.numel); tile += num_warps) {
    const UlpsTileSpan span = LocateUlpsTile(tile, a.numel, chunk_bits);
    const std::uint32_t kind = LoadWord32<P>(a.entries, span.chunk) & 3U;
    if (kind != ulps::kSparse && kind != ulps::kDense) continue;
    const UlpsChunk chunk = LocateUlpsChunk(a, span.chunk, chunk_bits);
    const std::uint32_t direct = LoadWord32<P>(&a.parts[span.chunk].direct, 0);
    const auto bits_of = [&](std::uint64_t i) {
      return LoadWord32<P>(a.tiles[i].extra_bits, direct) + LoadWord32<P>(&a.tiles[i].gap_bits, 0);
    };
    if (bits_of(tile) == 0) continue;
    std::uint32_t at = SumOfTiles<P>(span.first_tile, tile, bits_of);
    std::uint8_t* data = chunk.place + 4ULL * LoadWord32<P>(&a.parts[span.chunk].front, 0);
    if (kind == ulps::kSparse) {
      const auto changed_in = [&](std::uint64_t i) { return LoadWord32<P>(&a.tiles[i].changed, 0); };
      const std::uint32_t begin = SumOfTiles<P>(span.first_tile, tile, changed_in);
      const UlpsList list(chunk, ReadCounts<P>(a.counts[span.chunk], nullptr));
      WriteSparseExtra<P>(chunk, list, begin, begin + changed_in(tile), direct, data, at);
      continue;
    }
    VisitChanges<P>(chunk, span, [&](std::uint32_t, std::uint32_t z) {
      const std::uint32_t width = ulps::Width(ulps::Symbol(z, direct), direct);
      if (P::Ballot(width > 0) == 0) return;
      std::uint32_t total = 0;
      const std::uint32_t mine = at + SumBefore<P>(width, &total);
      at += total;
      WriteExtra<P>(data, ulps::Extra(z, width), width, mine);
    });
  }
}

// What a chunk's payload is put together from.
template <class P>
struct UlpsSource {
  const std::uint8_t* words;  // 16-bit
  std::uint32_t num_words;
  std::uint32_t front = 0;  // 32-bit words before these, at `place`; extra bits are behind `front`, there
  const std::uint8_t* place = nullptr;

  ZCOMM_DEVICE UlpsSource(const UlpsEncodeArguments& a, const UlpsChunk& chunk, std::uint32_t index, std::uint32_t kind)
      : words(reinterpret_cast<const std::uint8_t*>(chunk.new_bits)), num_words(chunk.numel) {
    if (kind == ulps::kRaw) return;
    place = chunk.place;
    front = LoadWord32<P>(&a.parts[index].front, 0);
    num_words = LoadWord32<P>(&a.parts[index].num_words, 0);
    words = place + 2ULL * LoadWord32<P>(&a.parts[index].words_at, 0);
  }

  // 32-bit word `i` of the payload.
  ZCOMM_DEVICE std::uint32_t Word(std::uint64_t i) const {
    if (i < front) return LoadWord32<P>(place, i);
    const std::uint64_t pair = i - front;
    const std::uint64_t num_pairs = (num_words + 1ULL) / 2;
    if (pair >= num_pairs) return LoadWord32<P>(place, front + (pair - num_pairs));
    const std::uint32_t low = LoadWord16<P>(words, 2 * pair);
    return 2 * pair + 1 < num_words ? low | LoadWord16<P>(words, 2 * pair + 1) << 16 : low;
  }
};

// Pieces of payloads to the message.
template <class P>
ZCOMM_DEVICE void PlaceUlps(const UlpsEncodeArguments& a, std::uint32_t warp, std::uint32_t num_warps) {
  const std::uint32_t chunk_bits = UlpsChunkBits<P>(a);
  const std::uint64_t num_chunks = UlpsChunks(a.numel, chunk_bits);
  const std::uint64_t pieces = ((1ULL << chunk_bits) / 2 + kUlpsPieceWords - 1) / kUlpsPieceWords;
  // Consecutive pieces, because the offset of a chunk takes as long to find as there are chunks.
  const std::uint64_t tasks = (num_chunks * pieces + num_warps - 1) / num_warps;
  const std::uint64_t last = (warp + 1ULL) * tasks < num_chunks * pieces ? (warp + 1ULL) * tasks : num_chunks * pieces;
  std::uint32_t mixed = 0;
  UlpsOffsets offsets{0, 0};
  std::uint64_t found = num_chunks;  // the chunk of these offsets
  for (std::uint64_t task = warp * tasks; task < last; ++task) {
    const auto index = static_cast<std::uint32_t>(task / pieces);
    const std::uint64_t begin = task % pieces * kUlpsPieceWords;
    const std::uint32_t entry = LoadWord32<P>(a.entries, index);
    const std::uint64_t num_words = entry / 4;
    if (begin == 0 && P::Lane() == 0) {
      P::template Store<std::uint32_t>(a.message + kUlpsHeadBytes + 4ULL * index, entry);
      mixed += ulps::Mixed(entry, kUlpsHeadWords + index);
    }
    if (begin >= num_words) continue;
    if (found != index) offsets = FindOffsets<P>(a.entries, index, num_chunks);
    found = index;
    const std::uint64_t first = kUlpsHeadWords + num_chunks + offsets.before / 4;
    const UlpsSource<P> source(a, LocateUlpsChunk(a, index, chunk_bits), index, entry & 3U);
    const std::uint64_t end = begin + kUlpsPieceWords < num_words ? begin + kUlpsPieceWords : num_words;
    for (std::uint64_t i = begin + static_cast<std::uint32_t>(P::Lane()); i < end; i += 32) {
      const std::uint32_t word = source.Word(i);
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
