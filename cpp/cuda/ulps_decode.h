#pragma once

#include "ulps.h"

// The decoding half of ulps.h.
namespace zcomm::cuda {

// What ApplyUlps needs of a chunk.
struct UlpsDecoded {
  std::uint64_t from;  // the first byte of its payload in the message
  std::uint32_t kind;
  std::uint32_t direct;
  std::uint32_t extra_from;  // the first byte of extra bits in the payload
  std::uint32_t num_extra;   // 32-bit words of these
};

struct UlpsDecodeArguments {
  const std::uint8_t* message;  // aligned to 4 bytes
  std::uint64_t capacity;
  std::uint16_t* values;
  std::uint64_t numel;
  UlpsSums* sums;
  UlpsDecoded* decoded;     // one for each chunk of kDenseChunkBits
  std::uint32_t* extra_at;  // of each tile: the first of its extra bits in its chunk
  std::uint8_t* symbols;    // aligned to 4 bytes, UlpsSymbolsNbytes(numel)
  std::int32_t* is_valid;   // 1; becomes 0 if the message is refused
};

// A warp's memory, shared by its lanes, when it decodes.
struct UlpsDecodeShared {
  std::uint32_t slots[2][ulps::kScale];
  std::uint32_t frequency[ulps::kMaxSymbols];
  std::uint8_t gaps[32 * ulps::kSparseLanes];
  std::uint8_t changes[32 * ulps::kSparseLanes];
  std::uint32_t table_nbytes;
  std::uint32_t direct;
  std::uint32_t is_valid;
};

struct UlpsHead {
  std::uint32_t chunk_bits;
  std::uint64_t numel;
  std::uint64_t nbytes;
  std::uint32_t checksum;
};

// False if it is the head of no message for these values. All lanes read the same.
template <class P>
ZCOMM_DEVICE bool ReadUlpsHead(const UlpsDecodeArguments& a, UlpsHead* head) {
  if (a.capacity < kUlpsHeadBytes) return false;
  std::uint32_t words[kUlpsHeadWords];
  std::uint32_t sum = 0;
  ZCOMM_UNROLL
  for (std::uint32_t i = 0; i < kUlpsHeadWords; ++i) {
    words[i] = LoadWord32<P>(a.message, i);
    sum += i + 1 < kUlpsHeadWords ? ulps::Mixed(words[i], i) : 0U;
  }
  head->chunk_bits = words[0] >> 24;
  head->numel = words[1] | static_cast<std::uint64_t>(words[2]) << 32;
  head->nbytes = words[3] | static_cast<std::uint64_t>(words[4]) << 32;
  head->checksum = words[5];
  const bool is_head = (words[0] & 0xFFFFFFU) == (ulps::kMagic | ulps::kVersion << 16) && sum == words[6];
  const bool has_chunks = ulps::IsChunkBits(head->chunk_bits);
  if (!is_head || !has_chunks || head->numel != a.numel || head->nbytes > a.capacity || head->nbytes % 4 != 0) {
    return false;
  }
  return head->nbytes >= kUlpsHeadBytes + 4 * UlpsChunks(head->numel, head->chunk_bits) &&
         head->nbytes <= kUlpsHeadBytes + 4 * UlpsChunks(a.numel, ulps::kDenseChunkBits) + UlpsUpTo4(2 * a.numel);
}

template <class P>
ZCOMM_DEVICE void SumUlps(const UlpsDecodeArguments& a, std::uint32_t warp, std::uint32_t num_warps) {
  UlpsHead head;
  if (!ReadUlpsHead<P>(a, &head)) return;
  std::uint32_t mixed = 0;
  const std::uint64_t stride = 32ULL * num_warps;
  for (std::uint64_t i = kUlpsHeadWords + 32ULL * warp + static_cast<std::uint32_t>(P::Lane()); i < head.nbytes / 4;
       i += stride) {
    mixed += ulps::Mixed(LoadWord32<P>(a.message, i), static_cast<std::uint32_t>(i));
  }
  AddToChecksum<P>(mixed, a.sums);
}

// A chunk's payload, and how far it has been read. The same in all lanes.
struct UlpsPayload {
  const std::uint8_t* data;
  std::uint32_t nbytes;
  std::uint32_t at;

  ZCOMM_DEVICE bool Has(std::uint64_t more) const { return at + more <= nbytes; }
};

// One lane reads a table's frequencies; all fill the slots.
template <class P>
ZCOMM_DEVICE bool ReadTable(UlpsPayload* payload, bool has_direct, std::uint32_t* slots, UlpsDecodeShared* shared) {
  if (P::Lane() == 0) {
    std::uint32_t at = payload->at;
    bool is_valid = true;
    const auto take = [&]() -> std::uint32_t {
      is_valid = is_valid && at < payload->nbytes;
      return is_valid ? P::template Load<std::uint8_t>(payload->data + at++) : 0U;
    };
    const std::uint32_t direct = has_direct ? take() : ulps::kGapDirectBits;
    is_valid = is_valid && direct >= 1 && direct <= ulps::kMaxDirectBits;
    const std::uint32_t num_symbols = !has_direct ? ulps::kGapSymbols : is_valid ? ulps::NumSymbols(direct) : 0U;
    for (std::uint32_t s = 0; s < ulps::kMaxSymbols; ++s) shared->frequency[s] = 0;
    std::uint32_t symbol = 0;
    std::uint32_t sum = 0;
    while (is_valid && symbol < num_symbols) {
      const std::uint32_t low = take();
      if (low == 0) {
        const std::uint32_t length = take();
        is_valid = is_valid && length > 0;
        symbol += length;
        continue;
      }
      const std::uint32_t frequency = low < 128 ? low : low - 128 + 128 * take();
      is_valid = is_valid && frequency <= ulps::kScale - sum;
      sum += frequency;
      shared->frequency[symbol++] = frequency;
    }
    shared->is_valid = is_valid && symbol == num_symbols && sum == ulps::kScale ? 1U : 0U;
    shared->table_nbytes = at - payload->at;
    shared->direct = direct;
  }
  P::Sync();
  if (shared->is_valid == 0) return false;
  std::uint32_t first = 0;
  for (std::uint32_t s = 0; s < ulps::kMaxSymbols; ++s) {
    const std::uint32_t frequency = shared->frequency[s];
    for (auto i = static_cast<std::uint32_t>(P::Lane()); i < frequency; i += 32) {
      slots[first + i] = ulps::MakeSlot(s, frequency, i);
    }
    first += frequency;
  }
  payload->at += shared->table_nbytes;
  P::Sync();
  return true;
}

// The words of a chunk, of which each lane holds two of those that follow: two windows of 64, and a third on its way.
template <class P>
struct UlpsWords {
  const std::uint8_t* data;
  std::uint32_t count;
  std::uint32_t used = 0;   // more than `count` if they did not suffice: there are zeros behind them
  std::uint32_t first = 0;  // of `current`
  std::uint32_t current;
  std::uint32_t next;
  std::uint32_t later;

  ZCOMM_DEVICE UlpsWords(const std::uint8_t* from, std::uint32_t num_words) : data(from), count(num_words) {
    current = Fetch(0);
    next = Fetch(64);
    later = Fetch(128);
  }

  // Two words at once: if `count` is odd, two bytes of padding follow the last one.
  ZCOMM_DEVICE std::uint32_t Fetch(std::uint32_t from) const {
    const std::uint32_t i = from + 2 * static_cast<std::uint32_t>(P::Lane());
    return i < count ? LoadWord32<P>(data, i / 2) : 0U;
  }

  // For lanes that `takes` is true for, the next words, in order. At most twice before Advance().
  ZCOMM_DEVICE std::uint32_t Take(bool takes) {
    const std::uint32_t mask = P::Ballot(takes);
    const std::uint32_t place = used - first + RankIn<P>(mask);
    const std::uint32_t here = P::Shuffle(current, place / 2 % 32);
    const std::uint32_t there = P::Shuffle(next, place / 2 % 32);
    const std::uint32_t pair = place < 64 ? here : there;
    used += CountBits(mask);
    return place % 2 == 0 ? pair & 0xFFFFU : pair >> 16;
  }

  ZCOMM_DEVICE void Advance() {
    if (used - first < 64) return;
    first += 64;
    current = next;
    next = later;
    later = Fetch(first + 128);
  }
};

// The next symbols of the active lanes. At most twice before words->Advance().
template <class P>
ZCOMM_DEVICE std::uint32_t DecodeRound(const std::uint32_t* slots, bool is_active, UlpsWords<P>* words,
                                       std::uint32_t* state) {
  const std::uint32_t slot = slots[*state & (ulps::kScale - 1U)];
  const std::uint32_t moved = is_active ? ulps::DecodeSymbol(*state, slot) : *state;
  const bool is_low = moved < ulps::kLowestState;
  const std::uint32_t word = words->Take(is_low);
  *state = is_low ? moved << 16 | word : moved;
  return slot >> 24;
}

// `width` bits, fewer than 32, from bit `at` of `num_words` words on, which hold them.
template <class P>
ZCOMM_DEVICE std::uint32_t ReadExtra(const std::uint8_t* data, std::uint32_t num_words, std::uint32_t at,
                                     std::uint32_t width) {
  if (width == 0) return 0;
  const std::uint32_t word = at / 32;
  const std::uint32_t low = LoadWord32<P>(data, word);
  const std::uint32_t high = at % 32 + width > 32 && word + 1 < num_words ? LoadWord32<P>(data, word + 1) : 0U;
  const auto from = static_cast<std::uint32_t>((low | static_cast<std::uint64_t>(high) << 32) >> (at % 32));
  return ulps::Extra(from, width);
}

// How a payload's parts lie after its tables: states, words, and extra bits to its end. Offsets are in bytes.
struct UlpsLayout {
  std::uint32_t states_at;
  std::uint32_t words_at;
  std::uint32_t extra_at;
  std::uint32_t num_extra;  // 32-bit words
};

// False if they are not within it.
ZCOMM_DEVICE bool LocateLanes(const UlpsPayload& payload, std::uint32_t num_lanes, std::uint32_t num_words,
                              UlpsLayout* layout) {
  const std::uint64_t states = UlpsUpTo4(payload.at);
  const std::uint64_t words = states + 4 * num_lanes;
  const std::uint64_t extra = UlpsUpTo4(words + 2ULL * num_words);
  if (extra > payload.nbytes) return false;
  layout->states_at = static_cast<std::uint32_t>(states);
  layout->words_at = static_cast<std::uint32_t>(words);
  layout->extra_at = static_cast<std::uint32_t>(extra);
  layout->num_extra = (payload.nbytes - layout->extra_at) / 4;
  return true;
}

// States and words of a payload.
template <class P>
struct UlpsLanes {
  std::uint32_t num_lanes;
  std::uint32_t state;
  UlpsWords<P> words;

  ZCOMM_DEVICE UlpsLanes(const UlpsPayload& payload, std::uint32_t count, std::uint32_t num_words,
                         const UlpsLayout& layout)
      : num_lanes(count), state(ulps::kLowestState), words(payload.data + layout.words_at, num_words) {
    const auto lane = static_cast<std::uint32_t>(P::Lane());
    if (lane < count) state = LoadWord32<P>(payload.data, layout.states_at / 4 + lane);
  }

  ZCOMM_DEVICE bool HasStates() const {
    return P::Ballot(state < ulps::kLowestState || state >= ulps::kStateLimit) == 0;
  }

  // Whether they are used up, and the extra bits, of which `num_extra_bits` have been read.
  ZCOMM_DEVICE bool HasEnded(std::uint64_t num_extra_bits, const UlpsLayout& layout) const {
    const bool is_done = static_cast<std::uint32_t>(P::Lane()) >= num_lanes || state == ulps::kLowestState;
    return P::Ballot(!is_done) == 0 && words.used == words.count && (num_extra_bits + 31) / 32 == layout.num_extra;
  }
};

// Of 128 symbols from `begin` on, a lane keeps those of elements l, l + 32, l + 64 and l + 96 in one word.
ZCOMM_DEVICE std::uint32_t SymbolsAt(std::uint32_t begin, int lane) {
  return begin + 4 * static_cast<std::uint32_t>(lane);
}

// The symbols of a dense chunk, and where the extra bits of its tiles begin.
template <class P>
ZCOMM_DEVICE bool DecodeDenseChunk(UlpsPayload payload, std::uint8_t* symbols, std::uint32_t* extra_at,
                                   std::uint32_t numel, UlpsDecoded* decoded, UlpsDecodeShared* shared) {
  if (!payload.Has(4)) return false;
  const std::uint32_t num_words = LoadWord32<P>(payload.data, 0);
  payload.at = 4;
  if (!ReadTable<P>(&payload, true, shared->slots[0], shared)) return false;
  const std::uint32_t direct = shared->direct;
  UlpsLayout layout{};
  if (!LocateLanes(payload, 32, num_words, &layout)) return false;
  UlpsLanes<P> lanes(payload, 32, num_words, layout);
  if (!lanes.HasStates()) return false;
  decoded->direct = direct;
  decoded->extra_from = layout.extra_at;
  decoded->num_extra = layout.num_extra;
  const int lane = P::Lane();
  std::uint32_t num_bits = 0;  // of this lane
  for (std::uint32_t begin = 0; begin < numel; begin += 128) {
    if (begin % kUlpsTile == 0) {
      const std::uint32_t before = Sum32OfWarp<P>(num_bits);
      if (lane == 0) P::template Store<std::uint32_t>(extra_at + begin / kUlpsTile, before);
    }
    std::uint32_t packed = 0;
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < 4; ++k) {
      const bool is_active = begin + 32 * k + static_cast<std::uint32_t>(lane) < numel;
      const std::uint32_t symbol = DecodeRound<P>(shared->slots[0], is_active, &lanes.words, &lanes.state);
      num_bits += is_active ? ulps::Width(symbol, direct) : 0U;
      packed |= symbol << (8 * k);
      if (k % 2 == 1) lanes.words.Advance();
    }
    P::template Store<std::uint32_t>(symbols + SymbolsAt(begin, lane), packed);
  }
  return lanes.HasEnded(SumOfWarp<P>(num_bits), layout);
}

// The changes of 32 rounds of a sparse chunk: symbols in shared->gaps and shared->changes.
template <class P>
struct UlpsSparse {
  std::uint16_t* values;
  std::uint32_t numel;
  const std::uint8_t* extra;
  std::uint32_t num_extra;  // 32-bit words
  std::uint32_t direct;
  std::uint64_t at = 0;     // of extra bits
  std::uint32_t place = 0;  // of the next change if its gap is 0

  static constexpr std::uint32_t kGroups = ulps::kSparseLanes;

  // False if extra bits do not suffice, or a place is none.
  ZCOMM_DEVICE bool Apply(std::uint32_t count, const UlpsDecodeShared& shared) {
    std::uint32_t lengths[kGroups];
    std::uint32_t changes[kGroups];
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kGroups; ++k) {
      const std::uint32_t i = 32 * k + static_cast<std::uint32_t>(P::Lane());
      const bool is_active = i < count;
      const std::uint32_t gap = is_active ? shared.gaps[i] : 0U;
      const std::uint32_t change = is_active ? shared.changes[i] : 0U;
      const std::uint32_t gap_width = ulps::Width(gap, ulps::kGapDirectBits);
      const std::uint32_t width = ulps::Width(change, direct);
      std::uint32_t total = 0;
      const std::uint64_t mine = at + SumBefore<P>(gap_width + width, &total);
      at += total;
      if (at > 32ULL * num_extra) return false;
      const auto bit = static_cast<std::uint32_t>(mine);
      lengths[k] =
          is_active ? ulps::Joined(gap, ulps::kGapDirectBits, ReadExtra<P>(extra, num_extra, bit, gap_width)) + 1U : 0U;
      changes[k] = ulps::Joined(change, direct, ReadExtra<P>(extra, num_extra, bit + gap_width, width));
    }
    std::uint32_t places[kGroups];
    std::uint32_t old_bits[kGroups];
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kGroups; ++k) {
      std::uint32_t total = 0;
      places[k] = place + SumBefore<P>(lengths[k], &total) + lengths[k] - 1U;
      if (P::Ballot(lengths[k] != 0 && places[k] >= numel) != 0) return false;
      place += total;
      old_bits[k] = lengths[k] != 0 ? LoadWord16<P>(values, places[k]) : 0U;
    }
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kGroups; ++k) {
      const auto bits = static_cast<std::uint16_t>(ulps::Changed(old_bits[k], changes[k]));
      if (lengths[k] != 0) P::template Store<std::uint16_t>(values + places[k], bits);
    }
    return true;
  }
};

template <class P>
ZCOMM_DEVICE bool DecodeSparseChunk(UlpsPayload payload, std::uint16_t* values, std::uint32_t numel,
                                    UlpsDecodeShared* shared) {
  if (!payload.Has(8)) return false;
  const std::uint32_t num_changes = LoadWord32<P>(payload.data, 0);
  const std::uint32_t num_words = LoadWord32<P>(payload.data, 1);
  payload.at = 8;
  if (!ReadTable<P>(&payload, false, shared->slots[0], shared)) return false;
  if (!ReadTable<P>(&payload, true, shared->slots[1], shared)) return false;
  UlpsLayout layout{};
  if (!LocateLanes(payload, ulps::kSparseLanes, num_words, &layout)) return false;
  UlpsLanes<P> lanes(payload, ulps::kSparseLanes, num_words, layout);
  if (!lanes.HasStates()) return false;
  UlpsSparse<P> sparse{values, numel, payload.data + layout.extra_at, layout.num_extra, shared->direct};
  const auto lane = static_cast<std::uint32_t>(P::Lane());
  constexpr std::uint32_t kAtOnce = 32 * ulps::kSparseLanes;
  for (std::uint32_t begin = 0; begin < num_changes; begin += kAtOnce) {
    const std::uint32_t count = num_changes - begin < kAtOnce ? num_changes - begin : kAtOnce;
    for (std::uint32_t at = 0; at < count; at += ulps::kSparseLanes) {
      const bool is_active = lane < ulps::kSparseLanes && at + lane < count;
      const std::uint32_t gap = DecodeRound<P>(shared->slots[0], is_active, &lanes.words, &lanes.state);
      const std::uint32_t change = DecodeRound<P>(shared->slots[1], is_active, &lanes.words, &lanes.state);
      lanes.words.Advance();
      if (!is_active) continue;
      shared->gaps[at + lane] = static_cast<std::uint8_t>(gap);
      shared->changes[at + lane] = static_cast<std::uint8_t>(change);
    }
    P::Sync();
    if (!sparse.Apply(count, *shared)) return false;
    P::Sync();  // All have read the symbols before they change.
  }
  return lanes.HasEnded(sparse.at, layout);
}

template <class P>
ZCOMM_DEVICE void StoreDecoded(UlpsDecoded* to, const UlpsDecoded& decoded) {
  if (P::Lane() != 0) return;
  const auto low = static_cast<std::uint32_t>(decoded.from);
  P::template Store<Words2>(&to->from, Words2{{low, static_cast<std::uint32_t>(decoded.from >> 32)}});
  P::template Store<std::uint32_t>(&to->kind, decoded.kind);
  P::template Store<std::uint32_t>(&to->direct, decoded.direct);
  P::template Store<std::uint32_t>(&to->extra_from, decoded.extra_from);
  P::template Store<std::uint32_t>(&to->num_extra, decoded.num_extra);
}

template <class P>
ZCOMM_DEVICE UlpsDecoded LoadDecoded(const UlpsDecoded* from) {
  const Words2 payload = P::template Load<Words2>(&from->from);
  return {payload.w[0] | static_cast<std::uint64_t>(payload.w[1]) << 32, LoadWord32<P>(&from->kind, 0),
          LoadWord32<P>(&from->direct, 0), LoadWord32<P>(&from->extra_from, 0), LoadWord32<P>(&from->num_extra, 0)};
}

// Chunk `warp`, if there is one.
template <class P>
ZCOMM_DEVICE void DecodeUlps(const UlpsDecodeArguments& a, std::uint32_t warp, UlpsDecodeShared* shared) {
  UlpsHead head;
  const bool has_head = ReadUlpsHead<P>(a, &head);
  const bool is_whole = has_head && P::template Load<std::uint32_t>(&a.sums->checksum) == head.checksum;
  bool is_valid = is_whole;
  if (is_whole) {
    const std::uint64_t num_chunks = UlpsChunks(a.numel, head.chunk_bits);
    const std::uint8_t* entries = a.message + kUlpsHeadBytes;
    const UlpsOffsets offsets = FindOffsets<P>(entries, warp, num_chunks);
    is_valid = offsets.total == head.nbytes - kUlpsHeadBytes - 4 * num_chunks;
    if (is_valid && warp < num_chunks) {
      const std::uint64_t first = static_cast<std::uint64_t>(warp) << head.chunk_bits;
      const std::uint32_t numel = UlpsChunkNumel(warp, a.numel, head.chunk_bits);
      const std::uint32_t entry = LoadWord32<P>(entries, warp);
      const UlpsPayload payload{entries + 4 * num_chunks + offsets.before, entry & ~3U, 0};
      UlpsDecoded decoded{static_cast<std::uint64_t>(payload.data - a.message), entry & 3U, 0, 0, 0};
      if (decoded.kind == ulps::kSparse) {
        is_valid = DecodeSparseChunk<P>(payload, a.values + first, numel, shared);
      } else if (decoded.kind == ulps::kDense) {
        is_valid = DecodeDenseChunk<P>(payload, a.symbols + first, a.extra_at + (first >> kUlpsTileBits), numel,
                                       &decoded, shared);
      } else {
        is_valid = payload.nbytes == (decoded.kind == ulps::kRaw ? UlpsUpTo4(2ULL * numel) : 0);
      }
      StoreDecoded<P>(a.decoded + warp, decoded);
    }
  }
  if (!is_valid && P::Lane() == 0) P::template Store<std::int32_t>(a.is_valid, 0);
}

// The values of a dense chunk's tile, from element `begin` to `end`, whose extra bits begin at bit `at`.
template <class P>
ZCOMM_DEVICE void ApplyDenseTile(const UlpsDecodeArguments& a, const UlpsDecoded& decoded, std::uint64_t begin,
                                 std::uint64_t end, std::uint32_t at) {
  const std::uint8_t* extra = a.message + decoded.from + decoded.extra_from;
  const int lane = P::Lane();
  for (std::uint64_t first = begin; first < end; first += 128) {
    const std::uint32_t packed = P::template Load<std::uint32_t>(a.symbols + first + SymbolsAt(0, lane));
    std::uint32_t old_bits[4];
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < 4; ++k) {
      const std::uint64_t i = first + 32 * k + static_cast<std::uint32_t>(lane);
      old_bits[k] = i < end ? LoadWord16<P>(a.values, i) : 0U;
    }
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < 4; ++k) {
      const std::uint64_t i = first + 32 * k + static_cast<std::uint32_t>(lane);
      const std::uint32_t symbol = packed >> (8 * k) & 0xFFU;
      const std::uint32_t width = i < end ? ulps::Width(symbol, decoded.direct) : 0U;
      std::uint32_t bits = 0;
      if (P::Ballot(width > 0) != 0) {
        std::uint32_t total = 0;
        const std::uint32_t mine = at + SumBefore<P>(width, &total);
        at += total;
        bits = ReadExtra<P>(extra, decoded.num_extra, mine, width);
      }
      const std::uint32_t z = ulps::Joined(symbol, decoded.direct, bits);
      if (i < end)
        P::template Store<std::uint16_t>(a.values + i, static_cast<std::uint16_t>(ulps::Changed(old_bits[k], z)));
    }
  }
}

template <class P>
ZCOMM_DEVICE void ApplyUlps(const UlpsDecodeArguments& a, std::uint32_t warp, std::uint32_t num_warps) {
  if (P::template Load<std::int32_t>(a.is_valid) == 0) return;
  const std::uint32_t chunk_bits = LoadWord32<P>(a.message, 0) >> 24;
  for (std::uint64_t tile = warp; tile < UlpsTiles(a.numel); tile += num_warps) {
    const UlpsTileSpan span = LocateUlpsTile(tile, a.numel, chunk_bits);
    const UlpsDecoded decoded = LoadDecoded<P>(a.decoded + span.chunk);
    const std::uint64_t begin = tile << kUlpsTileBits;
    const std::uint64_t end = begin + (span.end - span.begin);
    if (decoded.kind == ulps::kDense) {
      ApplyDenseTile<P>(a, decoded, begin, end, LoadWord32<P>(a.extra_at, tile));
    } else if (decoded.kind == ulps::kRaw) {
      for (std::uint64_t i = begin + static_cast<std::uint32_t>(P::Lane()); i < end; i += 32) {
        const std::uint32_t bits = LoadWord16<P>(a.message + decoded.from, i - begin + span.begin);
        P::template Store<std::uint16_t>(a.values + i, static_cast<std::uint16_t>(bits));
      }
    }
  }
}

}  // namespace zcomm::cuda
