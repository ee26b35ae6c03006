// The kernels of one ISA level. Each ulps_kernels_<level>.cc defines ZCOMM_ISA_NAMESPACE, ZCOMM_ISA_TABLE and
// ZCOMM_ISA_LANES, includes this file once, and is compiled with that level's flags (see block_kernels_impl.h).

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ulps_kernels.h"

#ifdef ZCOMM_X86
#include <immintrin.h>
#endif

namespace zcomm::ulps {
namespace ZCOMM_ISA_NAMESPACE {
namespace {

inline std::uint32_t LoadWord(const std::uint8_t* from) {
  std::uint16_t word = 0;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

// A symbol of each of the first `count` lanes, the last lane first; words go below `words`.
inline std::uint8_t* EncodeLanes(const EncodeEntry* entries, std::size_t count, std::uint8_t* words,
                                 std::uint32_t* states) {
  for (std::size_t lane = count; lane-- > 0;) {
    std::uint32_t state = states[lane];
    if (IsFull(state, entries[lane].packed)) {
      const auto word = static_cast<std::uint16_t>(state);
      words -= sizeof(word);
      std::memcpy(words, &word, sizeof(word));
      state >>= 16;
    }
    states[lane] = EncodeSymbol(state, entries[lane]);
  }
  return words;
}

// Elements of a group. With fewer, loops over bits of AtLeast() end more often, and nobody can predict when.
constexpr std::size_t kGroup = 64;

// Each lanes file has:
//   kInterleaves                        whether rounds of two streams in turn take less time
//   SymbolsOfGroup(new, old, symbols)   how many of the symbols are not 0
//   AtLeast(symbols, least)             bit i: symbol i is at least `least`
//   ApplyGroup(z, values)               changes values by z
//   Round(states), Save(states)         the states of all lanes in registers
//   Round.Encode(entries, words), Round.Decode(slots, words, symbols)   one symbol of each lane
#include ZCOMM_ISA_LANES

constexpr std::ptrdiff_t kRoundNbytes = 2 * kDenseLanes;  // the most that the words of a round can need
constexpr std::size_t kTile = 512;

std::size_t Symbols(const std::uint16_t* new_bits, const std::uint16_t* old_bits, std::size_t numel,
                    std::uint8_t* symbols) {
  std::size_t nonzero = 0;
  std::size_t i = 0;
  for (; i + kGroup <= numel; i += kGroup) nonzero += SymbolsOfGroup(new_bits + i, old_bits + i, symbols + i);
  for (; i < numel; ++i) {
    const std::uint32_t z = Change(new_bits[i], old_bits[i]);
    symbols[i] = static_cast<std::uint8_t>(Symbol(z, kMaxDirectBits));
    nonzero += z != 0 ? 1 : 0;
  }
  return nonzero;
}

inline void LookUp(const std::uint8_t* symbols, std::size_t numel, const EncodeTable& table, EncodeEntry* entries) {
  std::size_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, symbols + i, sizeof(eight));
    for (std::size_t k = 0; k < 8; ++k) entries[i + k] = table.entries[eight >> (8 * k) & 0xFF];
  }
  for (; i < numel; ++i) entries[i] = table.entries[symbols[i]];
}

std::uint8_t* Encode(const std::uint8_t* symbols, std::size_t numel, const EncodeTable& table, std::uint8_t* begin,
                     std::uint8_t* end, std::uint32_t* states) {
  // A tile's entries are looked up one by one, which takes less time than gathers.
  alignas(64) EncodeEntry entries[kTile];
  std::size_t at = numel / kDenseLanes * kDenseLanes;
  LookUp(symbols + at, numel - at, table, entries);
  std::uint8_t* words = EncodeLanes(entries, numel - at, end, states);  // no word: the states are the lowest
  Round round(states);
  while (at > 0) {
    const std::size_t tile = (at - 1) / kTile * kTile;
    LookUp(symbols + tile, at - tile, table, entries);
    while (at > tile) {
      if (words - begin < 2 * kRoundNbytes) return nullptr;
      at -= kDenseLanes;
      words = round.Encode(entries + (at - tile), words);
    }
  }
  round.Save(states);
  return words;
}

// Calls visit(i) for symbols from `least` on.
template <class Visit>
inline void VisitAtLeast(const std::uint8_t* symbols, std::uint32_t least, std::size_t numel, const Visit& visit) {
  std::size_t i = 0;
  for (; i + kGroup <= numel; i += kGroup) {
    for (std::uint64_t mask = AtLeast(symbols + i, least); mask != 0; mask &= mask - 1) {
      visit(i + static_cast<std::size_t>(__builtin_ctzll(mask)));
    }
  }
  for (; i < numel; ++i) {
    if (symbols[i] >= least) visit(i);
  }
}

// Of a symbol for kMaxDirectBits, if it is coded with fewer direct bits than it has.
struct ExtraWidths {
  std::uint8_t widths[256];
};

constexpr ExtraWidths MakeExtraWidths() {
  ExtraWidths made{};
  std::uint8_t width = 0;
  for (std::uint32_t symbol = 4; symbol < kMaxSymbols; ++symbol) {
    const bool is_direct = symbol < 1U << kMaxDirectBits;
    if (is_direct ? (symbol & (symbol - 1)) == 0 : symbol % 2 == 0) ++width;  // the next octave
    made.widths[symbol] = width;
  }
  return made;
}

constexpr ExtraWidths kExtraWidths = MakeExtraWidths();

void WriteExtra(const std::uint8_t* symbols, std::uint32_t least, const std::uint16_t* new_bits,
                const std::uint16_t* old_bits, std::size_t numel, std::uint8_t* out) {
  std::uint64_t buffer = 0;
  std::uint32_t num_bits = 0;
  // Symbols below 4 have no extra bits. All others have some, so every store is of a u32 that is needed, and whether it
  // was the last store there, which no branch predictor could guess, needs no branch.
  VisitAtLeast(symbols, least < 4 ? 4 : least, numel, [&](std::size_t i) {
    const std::uint32_t z = Change(new_bits[i], old_bits[i]);
    // Of the symbol: `out` has room for what symbols say, also if somebody writes to the values meanwhile.
    const std::uint32_t width = kExtraWidths.widths[symbols[i]];
    buffer |= static_cast<std::uint64_t>(Extra(z, width)) << num_bits;
    num_bits += width;
    const auto low = static_cast<std::uint32_t>(buffer);
    std::memcpy(out, &low, sizeof(low));
    const std::uint32_t full = num_bits & 32U;
    out += full / 8;
    buffer >>= full;
    num_bits &= 31U;
  });
  const auto rest = static_cast<std::uint32_t>(buffer);
  if (num_bits > 0) std::memcpy(out, &rest, sizeof(rest));
}

bool DecodeLanes(const DenseStream& stream, std::size_t at, std::size_t count) {
  Lanes* lanes = stream.lanes;
  for (std::size_t lane = 0; lane < count; ++lane) {
    const std::uint32_t slot = stream.slots[lanes->states[lane] & (kScale - 1)];
    std::uint32_t state = DecodeSymbol(lanes->states[lane], slot);
    stream.symbols[at + lane] = static_cast<std::uint8_t>(slot >> 24);
    if (state < kLowestState) {
      if (lanes->words == lanes->words_end) return false;
      state = state << 16 | LoadWord(lanes->words);
      lanes->words += 2;
    }
    lanes->states[lane] = state;
  }
  return true;
}

// A stream with its states in registers.
class Rounds {
 public:
  explicit Rounds(const DenseStream& stream)
      : round_(stream.lanes->states), words_(stream.lanes->words), stream_(stream) {}

  bool HasWords() const { return stream_.lanes->words_end - words_ >= kRoundNbytes; }
  void Decode(std::size_t at) { words_ = round_.Decode(stream_.slots, words_, stream_.symbols + at); }
  void Save() const {
    round_.Save(stream_.lanes->states);
    stream_.lanes->words = words_;
  }

 private:
  Round round_;
  const std::uint8_t* words_;
  DenseStream stream_;
};

bool DecodeFrom(std::size_t at, const DenseStream& stream, std::size_t numel) {
  Rounds rounds(stream);
  for (; at + kDenseLanes <= numel && rounds.HasWords(); at += kDenseLanes) rounds.Decode(at);
  rounds.Save();
  for (; at < numel; at += kDenseLanes) {
    const std::size_t count = numel - at < kDenseLanes ? numel - at : kDenseLanes;
    if (!DecodeLanes(stream, at, count)) return false;
  }
  return true;
}

bool Decode(const DenseStream& stream, std::size_t numel) { return DecodeFrom(0, stream, numel); }

// A round waits for the one before it of the same stream; meanwhile the other one goes on.
bool DecodeBoth(const DenseStream& a, const DenseStream& b, std::size_t numel) {
  Rounds of_a(a);
  Rounds of_b(b);
  std::size_t at = 0;
  for (; at + kDenseLanes <= numel && of_a.HasWords() && of_b.HasWords(); at += kDenseLanes) {
    of_a.Decode(at);
    of_b.Decode(at);
  }
  of_a.Save();
  of_b.Save();
  return DecodeFrom(at, a, numel) && DecodeFrom(at, b, numel);
}

// Width() of a symbol that is not direct.
inline std::uint32_t WidthOfCoarse(std::uint32_t symbol, std::uint32_t direct) {
  return symbol / 2U - (1U << direct) / 2U + direct - 1U;
}

// Join() for a tile in which the extra bits may end: no load goes beyond them. Not inlined, as it would take registers
// from the loop in Join().
[[gnu::noinline]] bool JoinLast(const std::uint8_t* symbols, std::uint32_t direct, std::size_t numel, BitReader* extra,
                                std::uint16_t* z) {
  BitReader bits = *extra;
  VisitAtLeast(symbols, 1U << direct, numel, [&](std::size_t i) {
    z[i] = static_cast<std::uint16_t>(TakeJoined(&bits, symbols[i], WidthOfCoarse(symbols[i], direct)));
  });
  *extra = bits;
  return IsWithin(bits);
}

// The changes in zigzag form of the symbols of a tile; false if the extra bits do not suffice.
bool Join(const std::uint8_t* symbols, std::uint32_t direct, std::size_t numel, BitReader* extra, std::uint16_t* z) {
  for (std::size_t i = 0; i < numel; ++i) z[i] = symbols[i];
  std::size_t at = extra->at;
  // A symbol has 14 extra bits at most, so those of a tile end within 2 * kTile bytes, and a load reads 4.
  if (at / 8 + 2 * kTile + sizeof(std::uint32_t) > extra->nbytes) return JoinLast(symbols, direct, numel, extra, z);
  const std::uint8_t* begin = extra->begin;
  VisitAtLeast(symbols, 1U << direct, numel, [&](std::size_t i) {
    const std::uint32_t width = WidthOfCoarse(symbols[i], direct);
    std::uint32_t word = 0;
    std::memcpy(&word, begin + at / 8, sizeof(word));
    z[i] = static_cast<std::uint16_t>((2U + (symbols[i] & 1U)) << width | Extra(word >> (at & 7U), width));
    at += width;
  });
  extra->at = at;
  return true;
}

bool Apply(const std::uint8_t* symbols, std::uint32_t direct, std::size_t numel, BitReader* extra,
           std::uint16_t* values) {
  alignas(64) std::uint16_t z[kTile];
  for (std::size_t tile = 0; tile < numel; tile += kTile) {
    const std::size_t count = numel - tile < kTile ? numel - tile : kTile;
    // Of the next tile of this call, as values that nothing has touched for long are in no cache.
    for (std::size_t i = tile + kTile; i < numel && i < tile + 2 * kTile; i += 32) __builtin_prefetch(values + i, 1);
    if (!Join(symbols + tile, direct, count, extra, z)) return false;
    std::uint16_t* changed = values + tile;
    std::size_t i = 0;
    for (; i + kGroup <= count; i += kGroup) ApplyGroup(z + i, changed + i);
    for (; i < count; ++i) changed[i] = static_cast<std::uint16_t>(Changed(changed[i], z[i]));
  }
  return true;
}

std::uint32_t Checksum(const std::uint8_t* words, std::size_t count, std::uint32_t first) {
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t word = 0;
    std::memcpy(&word, words + 4 * i, sizeof(word));
    sum += Mixed(word, first + static_cast<std::uint32_t>(i));
  }
  return sum;
}

}  // namespace
}  // namespace ZCOMM_ISA_NAMESPACE

const UlpsKernels& ZCOMM_ISA_TABLE() {
  constexpr auto kDecodeBoth = ZCOMM_ISA_NAMESPACE::kInterleaves ? ZCOMM_ISA_NAMESPACE::DecodeBoth : nullptr;
  static constexpr UlpsKernels kKernels{ZCOMM_ISA_NAMESPACE::Symbols,
                                        ZCOMM_ISA_NAMESPACE::Encode,
                                        ZCOMM_ISA_NAMESPACE::WriteExtra,
                                        ZCOMM_ISA_NAMESPACE::Decode,
                                        kDecodeBoth,
                                        ZCOMM_ISA_NAMESPACE::Apply,
                                        ZCOMM_ISA_NAMESPACE::Checksum};
  return kKernels;
}

}  // namespace zcomm::ulps
