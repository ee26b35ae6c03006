#pragma once

#include <cstddef>
#include <cstdint>

#include "portable.h"
#include "ulps_arithmetic.h"

// The changes of zcomm/_formats/ulps_reference.py on a GPU: a warp codes a chunk, and its lanes are those of the
// format. Warps do not wait for each other. Kernels of one call, in this order:
//
//   encode   SampleUlps    counts changed elements of samples, which decide the length of chunks
//            EncodeUlps    each chunk's payload to its place in the workspace, and its size
//            PlaceUlps     payloads and sizes to the message, and the sum of its checksum
//            FinishUlps    the head
//   decode   SumUlps       the sum of the checksum
//            DecodeUlps    each chunk, if head and checksum are right
namespace zcomm::cuda {

namespace ulps = zcomm::ulps;

constexpr std::uint32_t kUlpsHeadWords = 7;
constexpr std::uint32_t kUlpsHeadBytes = 4 * kUlpsHeadWords;
// What a chunk's place in the workspace has beside the room of its raw values: a payload's head, and what is aligned.
constexpr std::uint32_t kUlpsSlack = 2048;
constexpr std::uint32_t kUlpsPieceWords = 4096;  // of a payload, that a warp moves to the message

// The sums that atomic additions make; the caller zeroes them before the first kernel.
struct UlpsSums {
  std::uint32_t changed;
  std::uint32_t checksum;
};

// A warp's memory, shared by its lanes.
struct UlpsShared {
  std::uint32_t slots[2][ulps::kScale];
  std::uint32_t counts[256];
  std::uint32_t gap_counts[ulps::kGapSymbols];
  std::uint32_t coded[ulps::kMaxSymbols];
  std::uint32_t frequency[ulps::kMaxSymbols];
  ulps::EncodeEntry entries[2][ulps::kMaxSymbols];
  std::uint8_t table[8 + 2 * (1 + 2 * ulps::kMaxSymbols) + 3];
  std::uint32_t table_nbytes;
  std::uint32_t direct;
  std::uint32_t is_valid;
};

struct UlpsEncodeArguments {
  const std::uint16_t* new_bits;
  const std::uint16_t* old_bits;
  std::uint64_t numel;
  std::uint8_t* message;  // aligned to 4 bytes
  UlpsSums* sums;
  std::uint32_t* entries;  // one for each chunk of kDenseChunkBits
  std::uint8_t* places;    // of payloads: ChunkPlace
};

struct UlpsDecodeArguments {
  const std::uint8_t* message;  // aligned to 4 bytes
  std::uint64_t capacity;
  std::uint16_t* values;
  std::uint64_t numel;
  UlpsSums* sums;
  std::int32_t* is_valid;  // becomes 0 if the message is refused
};

ZCOMM_HOST_DEVICE std::uint64_t UlpsChunks(std::uint64_t numel, std::uint32_t chunk_bits) {
  return (numel + (1ULL << chunk_bits) - 1) >> chunk_bits;
}
ZCOMM_HOST_DEVICE std::uint64_t UlpsUpTo4(std::uint64_t nbytes) { return (nbytes + 3) / 4 * 4; }

template <class P>
ZCOMM_DEVICE std::uint64_t SumOfWarp(std::uint64_t value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const std::uint32_t low = P::ShuffleXor(static_cast<std::uint32_t>(value), mask);
    const std::uint32_t high = P::ShuffleXor(static_cast<std::uint32_t>(value >> 32), mask);
    value += low | static_cast<std::uint64_t>(high) << 32;
  }
  return value;
}

// The sum of the lanes before this one, and of all.
template <class P>
ZCOMM_DEVICE std::uint32_t SumBefore(std::uint32_t value, std::uint32_t* total) {
  const auto lane = static_cast<std::uint32_t>(P::Lane());
  std::uint32_t sum = value;
  for (std::uint32_t distance = 1; distance < 32; distance *= 2) {
    const std::uint32_t other = P::Shuffle(sum, (lane - distance) % 32);
    if (lane >= distance) sum += other;
  }
  *total = P::Shuffle(sum, 31);
  return sum - value;
}

ZCOMM_DEVICE std::uint32_t CountBits(std::uint32_t word) {
#ifdef __CUDA_ARCH__
  return static_cast<std::uint32_t>(__popc(word));
#else
  return static_cast<std::uint32_t>(__builtin_popcount(word));
#endif
}

// How many of the lanes before this one are in `mask`.
template <class P>
ZCOMM_DEVICE std::uint32_t RankIn(std::uint32_t mask) {
  return CountBits(mask & ((1U << P::Lane()) - 1U));
}

template <class P>
ZCOMM_DEVICE std::uint32_t LoadWord16(const void* base, std::uint64_t index) {
  return P::template Load<std::uint16_t>(static_cast<const std::uint16_t*>(base) + index);
}

template <class P>
ZCOMM_DEVICE std::uint32_t LoadWord32(const void* base, std::uint64_t index) {
  return P::template Load<std::uint32_t>(static_cast<const std::uint32_t*>(base) + index);
}

// Adds what all lanes have summed up.
template <class P>
ZCOMM_DEVICE void AddToChecksum(std::uint32_t mixed, UlpsSums* sums) {
  const std::uint64_t sum = SumOfWarp<P>(mixed);
  if (P::Lane() == 0) P::Add(&sums->checksum, static_cast<std::uint32_t>(sum));
}

// ---------------------------------------------------------------------------------------------------------------------

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

// The bytes of the payloads before a chunk, and of all.
struct UlpsOffsets {
  std::uint64_t before;
  std::uint64_t total;
};

template <class P>
ZCOMM_DEVICE UlpsOffsets FindOffsets(const void* entries, std::uint64_t chunk, std::uint64_t num_chunks) {
  std::uint64_t before = 0;
  std::uint64_t total = 0;
  for (std::uint64_t i = static_cast<std::uint32_t>(P::Lane()); i < num_chunks; i += 32) {
    const std::uint32_t nbytes = LoadWord32<P>(entries, i) & ~3U;
    total += nbytes;
    before += i < chunk ? nbytes : 0U;
  }
  return {SumOfWarp<P>(before), SumOfWarp<P>(total)};
}

// A chunk's payload, and how far it has been read. The same in all lanes.
struct UlpsPayload {
  const std::uint8_t* data;
  std::uint32_t nbytes;
  std::uint32_t at;

  ZCOMM_DEVICE bool Has(std::uint64_t more) const { return at + more <= nbytes; }
  ZCOMM_DEVICE std::uint32_t U32() const { return at / 4; }
};

// One lane reads a table's frequencies; all fill the slots.
template <class P>
ZCOMM_DEVICE bool ReadTable(UlpsPayload* payload, bool has_direct, std::uint32_t* slots, UlpsShared* shared) {
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
        symbol += take();
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

// The words of a chunk, of which each lane holds those that follow: two windows of 32, and a third on its way.
template <class P>
struct UlpsWords {
  const std::uint8_t* data;
  std::uint32_t count;
  std::uint32_t used = 0;
  std::uint32_t current;
  std::uint32_t next;
  std::uint32_t later;

  ZCOMM_DEVICE UlpsWords(const std::uint8_t* from, std::uint32_t num_words) : data(from), count(num_words) {
    current = Fetch(0);
    next = Fetch(32);
    later = Fetch(64);
  }

  ZCOMM_DEVICE std::uint32_t Fetch(std::uint32_t first) const {
    const std::uint32_t i = first + static_cast<std::uint32_t>(P::Lane());
    return i < count ? LoadWord16<P>(data, i) : 0U;
  }

  // For lanes that `takes` is true for, the next words, in order. False if there are not enough.
  ZCOMM_DEVICE bool Take(bool takes, std::uint32_t* word) {
    const std::uint32_t mask = P::Ballot(takes);
    if (mask == 0) return true;
    const std::uint32_t taken = CountBits(mask);
    if (used + taken > count) return false;
    const std::uint32_t place = used % 32 + RankIn<P>(mask);
    const std::uint32_t here = P::Shuffle(current, place % 32);
    const std::uint32_t there = P::Shuffle(next, place % 32);
    *word = place < 32 ? here : there;
    if (used % 32 + taken >= 32) {
      current = next;
      next = later;
      later = Fetch(used / 32 * 32 + 96);
    }
    used += taken;
    return true;
  }
};

// The next symbols of the active lanes. False if the words do not suffice.
template <class P>
ZCOMM_DEVICE bool DecodeRound(const std::uint32_t* slots, bool is_active, UlpsWords<P>* words, std::uint32_t* state,
                              std::uint32_t* symbol) {
  const std::uint32_t slot = slots[*state & (ulps::kScale - 1U)];
  const std::uint32_t moved = is_active ? ulps::DecodeSymbol(*state, slot) : *state;
  const bool is_low = is_active && moved < ulps::kLowestState;
  std::uint32_t word = 0;
  if (!words->Take(is_low, &word)) return false;
  *state = is_low ? moved << 16 | word : moved;
  *symbol = slot >> 24;
  return true;
}

// Extra bits from the word `first` of a payload on. Offsets are in bits.
template <class P>
struct UlpsExtra {
  const std::uint8_t* data;
  std::uint32_t num_words;
  std::uint64_t at = 0;

  // The next `width` bits, at most 32, of each lane, in order of the lanes. False if there are not enough.
  ZCOMM_DEVICE bool Take(std::uint32_t width, std::uint32_t* bits) {
    *bits = 0;
    if (P::Ballot(width > 0) == 0) return true;
    std::uint32_t total = 0;
    const std::uint64_t mine = at + SumBefore<P>(width, &total);
    if (at + total > 32ULL * num_words) return false;
    at += total;
    if (width == 0) return true;
    const auto word = static_cast<std::uint32_t>(mine / 32);
    const std::uint32_t low = LoadWord32<P>(data, word);
    const std::uint32_t high = word + 1 < num_words ? LoadWord32<P>(data, word + 1) : 0U;
    const std::uint64_t both = low | static_cast<std::uint64_t>(high) << 32;
    const auto from = static_cast<std::uint32_t>(both >> (mine % 32));
    *bits = width < 32 ? ulps::Extra(from, width) : from;
    return true;
  }

  ZCOMM_DEVICE bool IsUsedUp() const { return (at + 31) / 32 == num_words; }
};

// States and words of a payload after its tables; what remains is extra bits.
template <class P>
struct UlpsLanes {
  std::uint32_t state;
  UlpsWords<P> words;
  UlpsExtra<P> extra;

  // Whether they are used up.
  ZCOMM_DEVICE bool HasEnded(std::uint32_t num_lanes) const {
    const bool is_done = static_cast<std::uint32_t>(P::Lane()) >= num_lanes || state == ulps::kLowestState;
    return P::Ballot(!is_done) == 0 && words.used == words.count && extra.IsUsedUp();
  }
};

// How a payload's parts lie after its tables; false if they are not within it.
template <class P>
ZCOMM_DEVICE bool LocateLanes(UlpsPayload payload, std::uint32_t num_lanes, std::uint32_t num_words,
                              std::uint32_t* states_at, std::uint32_t* words_at, std::uint32_t* extra_at) {
  const std::uint64_t states = UlpsUpTo4(payload.at);
  const std::uint64_t words = states + 4 * num_lanes;
  const std::uint64_t extra = UlpsUpTo4(words + 2ULL * num_words);
  if (extra > payload.nbytes) return false;
  *states_at = static_cast<std::uint32_t>(states);
  *words_at = static_cast<std::uint32_t>(words);
  *extra_at = static_cast<std::uint32_t>(extra);
  const auto lane = static_cast<std::uint32_t>(P::Lane());
  const std::uint32_t state = lane < num_lanes ? LoadWord32<P>(payload.data, states / 4 + lane) : ulps::kLowestState;
  return P::Ballot(state < ulps::kLowestState || state >= ulps::kStateLimit) == 0;
}

template <class P>
ZCOMM_DEVICE UlpsLanes<P> ReadLanes(const UlpsPayload& payload, std::uint32_t num_lanes, std::uint32_t num_words,
                                    std::uint32_t states_at, std::uint32_t words_at, std::uint32_t extra_at) {
  const auto lane = static_cast<std::uint32_t>(P::Lane());
  const std::uint32_t state = lane < num_lanes ? LoadWord32<P>(payload.data, states_at / 4 + lane) : ulps::kLowestState;
  return {state, UlpsWords<P>(payload.data + words_at, num_words),
          UlpsExtra<P>{payload.data + extra_at, (payload.nbytes - extra_at) / 4}};
}

constexpr std::uint32_t kUlpsAhead = 4;  // rounds whose values are loaded at once

template <class P>
ZCOMM_DEVICE bool DecodeDenseChunk(UlpsPayload payload, std::uint16_t* values, std::uint32_t numel,
                                   UlpsShared* shared) {
  if (!payload.Has(4)) return false;
  const std::uint32_t num_words = LoadWord32<P>(payload.data, 0);
  payload.at = 4;
  if (!ReadTable<P>(&payload, true, shared->slots[0], shared)) return false;
  const std::uint32_t direct = shared->direct;
  std::uint32_t states_at = 0;
  std::uint32_t words_at = 0;
  std::uint32_t extra_at = 0;
  if (!LocateLanes<P>(payload, 32, num_words, &states_at, &words_at, &extra_at)) return false;
  UlpsLanes<P> lanes = ReadLanes<P>(payload, 32, num_words, states_at, words_at, extra_at);
  for (std::uint32_t begin = 0; begin < numel; begin += 32 * kUlpsAhead) {
    std::uint32_t old_bits[kUlpsAhead];
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kUlpsAhead; ++k) {
      const std::uint32_t i = begin + 32 * k + static_cast<std::uint32_t>(P::Lane());
      old_bits[k] = i < numel ? LoadWord16<P>(values, i) : 0U;
    }
    ZCOMM_UNROLL
    for (std::uint32_t k = 0; k < kUlpsAhead; ++k) {
      if (begin + 32 * k >= numel) break;
      const std::uint32_t i = begin + 32 * k + static_cast<std::uint32_t>(P::Lane());
      const bool is_active = i < numel;
      std::uint32_t symbol = 0;
      if (!DecodeRound<P>(shared->slots[0], is_active, &lanes.words, &lanes.state, &symbol)) return false;
      std::uint32_t extra = 0;
      if (!lanes.extra.Take(is_active ? ulps::Width(symbol, direct) : 0U, &extra)) return false;
      if (is_active) {
        const std::uint32_t z = ulps::Joined(symbol, direct, extra);
        P::template Store<std::uint16_t>(values + i, static_cast<std::uint16_t>(ulps::Changed(old_bits[k], z)));
      }
    }
  }
  return lanes.HasEnded(32);
}

template <class P>
ZCOMM_DEVICE bool DecodeSparseChunk(UlpsPayload payload, std::uint16_t* values, std::uint32_t numel,
                                    UlpsShared* shared) {
  if (!payload.Has(8)) return false;
  const std::uint32_t num_changes = LoadWord32<P>(payload.data, 0);
  const std::uint32_t num_words = LoadWord32<P>(payload.data, 1);
  payload.at = 8;
  if (!ReadTable<P>(&payload, false, shared->slots[0], shared)) return false;
  if (!ReadTable<P>(&payload, true, shared->slots[1], shared)) return false;
  const std::uint32_t direct = shared->direct;
  std::uint32_t states_at = 0;
  std::uint32_t words_at = 0;
  std::uint32_t extra_at = 0;
  if (!LocateLanes<P>(payload, ulps::kSparseLanes, num_words, &states_at, &words_at, &extra_at)) return false;
  UlpsLanes<P> lanes = ReadLanes<P>(payload, ulps::kSparseLanes, num_words, states_at, words_at, extra_at);
  const auto lane = static_cast<std::uint32_t>(P::Lane());
  std::uint32_t place = 0;  // of the next change if its gap is 0
  for (std::uint32_t at = 0; at < num_changes; at += ulps::kSparseLanes) {
    const bool is_active = lane < ulps::kSparseLanes && at + lane < num_changes;
    std::uint32_t gap = 0;
    std::uint32_t change = 0;
    if (!DecodeRound<P>(shared->slots[0], is_active, &lanes.words, &lanes.state, &gap)) return false;
    if (!DecodeRound<P>(shared->slots[1], is_active, &lanes.words, &lanes.state, &change)) return false;
    const std::uint32_t gap_width = is_active ? ulps::Width(gap, ulps::kGapDirectBits) : 0U;
    const std::uint32_t width = is_active ? ulps::Width(change, direct) : 0U;
    std::uint32_t extra = 0;  // of both
    if (!lanes.extra.Take(gap_width + width, &extra)) return false;
    const std::uint32_t length =
        is_active ? ulps::Joined(gap, ulps::kGapDirectBits, ulps::Extra(extra, gap_width)) + 1U : 0U;
    std::uint32_t total = 0;
    const std::uint32_t mine = place + SumBefore<P>(length, &total) + length - 1U;
    if (P::Ballot(is_active && mine >= numel) != 0) return false;
    place += total;
    if (is_active) {
      const std::uint32_t z = ulps::Joined(change, direct, extra >> gap_width);
      const std::uint32_t old_bits = LoadWord16<P>(values, mine);
      P::template Store<std::uint16_t>(values + mine, static_cast<std::uint16_t>(ulps::Changed(old_bits, z)));
    }
  }
  return lanes.HasEnded(ulps::kSparseLanes);
}

template <class P>
ZCOMM_DEVICE bool DecodeChunk(ulps::Kind kind, const UlpsPayload& payload, std::uint16_t* values, std::uint32_t numel,
                              UlpsShared* shared) {
  if (kind == ulps::kSparse) return DecodeSparseChunk<P>(payload, values, numel, shared);
  if (kind == ulps::kDense) return DecodeDenseChunk<P>(payload, values, numel, shared);
  if (payload.nbytes != (kind == ulps::kRaw ? UlpsUpTo4(2ULL * numel) : 0)) return false;
  for (auto i = static_cast<std::uint32_t>(P::Lane()); kind == ulps::kRaw && i < numel; i += 32) {
    P::template Store<std::uint16_t>(values + i, static_cast<std::uint16_t>(LoadWord16<P>(payload.data, i)));
  }
  return true;
}

// Chunk `warp`, if there is one.
template <class P>
ZCOMM_DEVICE void DecodeUlps(const UlpsDecodeArguments& a, std::uint32_t warp, UlpsShared* shared) {
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
      const std::uint64_t rest = a.numel - first;
      const auto numel = static_cast<std::uint32_t>(rest >> head.chunk_bits != 0 ? 1ULL << head.chunk_bits : rest);
      const std::uint32_t entry = LoadWord32<P>(entries, warp);
      const UlpsPayload payload{entries + 4 * num_chunks + offsets.before, entry & ~3U, 0};
      is_valid = DecodeChunk<P>(static_cast<ulps::Kind>(entry & 3U), payload, a.values + first, numel, shared);
    }
  }
  if (!is_valid && P::Lane() == 0) P::template Store<std::int32_t>(a.is_valid, 0);
}

}  // namespace zcomm::cuda
