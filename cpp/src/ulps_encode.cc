#include <algorithm>
#include <memory>
#include <vector>

#include "ulps_chunks.h"

namespace zcomm::ulps {
namespace {

// Frequencies of a chunk's symbols.
struct Table {
  std::uint32_t num_symbols;
  std::uint32_t frequency[kMaxSymbols];

  Table(const std::uint32_t* counts, std::uint32_t num) : num_symbols(num) {
    ScaleCounts(counts, num_symbols, frequency);
  }
};
constexpr std::size_t kMaxTableNbytes = 1 + 2 * kMaxSymbols;
static_assert(kGapSymbols <= kMaxSymbols, "tables of gaps must fit");

std::size_t WordsNbytes(std::uint64_t num_bits) { return static_cast<std::size_t>((num_bits + 31) / 32 * 4); }
std::size_t UpTo4(std::size_t nbytes) { return (nbytes + 3) / 4 * 4; }

// Eight tables, because an increment waits for the last one of the same counter.
void CountSymbols(const std::uint8_t* symbols, std::size_t numel, std::uint32_t* counts) {
  constexpr std::size_t kTables = 8;
  std::uint32_t parts[kTables][256] = {};
  std::size_t i = 0;
  for (; i + kTables <= numel; i += kTables) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, symbols + i, sizeof(eight));
    for (std::size_t k = 0; k < kTables; ++k) ++parts[k][eight >> (8 * k) & 0xFF];
  }
  for (; i < numel; ++i) ++parts[0][symbols[i]];
  for (const auto& part : parts) {
    for (std::size_t s = 0; s < 256; ++s) counts[s] += part[s];
  }
}

// 0: not smaller than raw.
std::size_t EncodeDense(const Values& values, std::size_t numel, const std::uint8_t* symbols, std::uint8_t* out) {
  std::uint32_t counts[256] = {};
  CountSymbols(symbols, numel, counts);
  const std::uint32_t direct = DirectBits(counts, static_cast<std::uint32_t>(numel));
  std::uint32_t coded[kMaxSymbols];
  const std::size_t extra_nbytes = WordsNbytes(CoarserCounts(counts, direct, coded));
  if (extra_nbytes >= RawNbytes(numel)) return 0;
  const Table table(coded, NumSymbols(direct));
  EncodeEntry entries[kMaxSymbols] = {};
  FillEntries(table.frequency, table.num_symbols, entries);
  EncodeTable by_symbol;
  for (std::uint32_t s = 0; s < kMaxSymbols; ++s) by_symbol.entries[s] = entries[Coarser(s, direct)];
  std::uint8_t* end = out + (RawNbytes(numel) - extra_nbytes);
  std::uint32_t states[kDenseLanes];
  std::fill_n(states, kDenseLanes, kLowestState);
  const UlpsKernels& kernels = ActiveUlpsKernels();
  const std::uint8_t* words = kernels.encode(symbols, numel, by_symbol, out, end, states);
  if (words == nullptr) return 0;
  std::uint8_t head[4 + kMaxTableNbytes + 3] = {};
  const auto words_nbytes = static_cast<std::size_t>(end - words);
  StoreU32(head, static_cast<std::uint32_t>(words_nbytes / 2));
  head[4] = static_cast<std::uint8_t>(direct);
  const std::size_t head_nbytes =
      UpTo4(static_cast<std::size_t>(WriteTable(table.frequency, table.num_symbols, head + 5) - head));
  const std::size_t words_at = head_nbytes + sizeof(states);
  const std::size_t extra_at = words_at + UpTo4(words_nbytes);
  if (extra_at + extra_nbytes >= RawNbytes(numel)) return 0;
  // Downwards: the room of raw values ends with the extra bits, and just before them come the words.
  kernels.write_extra(symbols, 1U << direct, values.new_bits, values.old_bits, numel, end);
  std::memmove(out + words_at, words, words_nbytes);
  std::memset(out + words_at + words_nbytes, 0, UpTo4(words_nbytes) - words_nbytes);
  std::memmove(out + extra_at, end, extra_nbytes);
  std::memcpy(out, head, head_nbytes);
  std::memcpy(out + head_nbytes, states, sizeof(states));
  return extra_at + extra_nbytes;
}

std::vector<std::uint32_t> PlacesOfChanges(const std::uint8_t* symbols, std::size_t numel, std::size_t nonzero) {
  std::vector<std::uint32_t> places(nonzero);
  std::size_t found = 0;
  std::size_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, symbols + i, sizeof(eight));
    if (eight == 0) continue;
    for (std::size_t k = 0; k < 8; ++k) {
      if ((eight >> (8 * k) & 0xFF) != 0) places[found++] = static_cast<std::uint32_t>(i + k);
    }
  }
  for (; i < numel; ++i) {
    if (symbols[i] != 0) places[found++] = static_cast<std::uint32_t>(i);
  }
  return places;
}

class BitWriter {
 public:
  explicit BitWriter(std::uint8_t* out) : out_(out) {}

  void Write(std::uint32_t bits, std::uint32_t width) {
    buffer_ |= static_cast<std::uint64_t>(bits) << num_bits_;
    num_bits_ += width;
    if (num_bits_ >= 32) Flush();
  }

  void Flush() {
    if (num_bits_ == 0) return;
    StoreU32(out_, static_cast<std::uint32_t>(buffer_));
    out_ += 4;
    buffer_ >>= 32;
    num_bits_ = num_bits_ < 32 ? 0 : num_bits_ - 32;
  }

 private:
  std::uint8_t* out_;
  std::uint64_t buffer_ = 0;
  std::uint32_t num_bits_ = 0;
};

// One chunk whose changes are few: their places and values.
class SparseChunk {
 public:
  SparseChunk(const Values& values, std::size_t numel, const std::uint8_t* symbols, std::size_t nonzero)
      : values_(values), symbols_(symbols), places_(PlacesOfChanges(symbols, numel, nonzero)) {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      const std::uint32_t gap = Symbol(Gap(i), kGapDirectBits);
      ++gap_counts_[gap];
      num_gap_bits_ += Width(gap, kGapDirectBits);
      ++counts_[symbols_[places_[i]]];
    }
    direct_ = DirectBits(counts_, static_cast<std::uint32_t>(places_.size()));
  }

  std::size_t Write(std::size_t most_nbytes, std::uint8_t* out) const {
    std::uint32_t coded[kMaxSymbols];
    const std::uint64_t num_extra_bits = num_gap_bits_ + CoarserCounts(counts_, direct_, coded);
    const Table gaps(gap_counts_, kGapSymbols);
    const Table changes(coded, NumSymbols(direct_));
    std::uint32_t states[kSparseLanes];
    std::fill_n(states, kSparseLanes, kLowestState);
    std::vector<std::uint16_t> words(2 * places_.size());
    const auto first_word =
        static_cast<std::size_t>(Encode(gaps, changes, states, words.data() + words.size()) - words.data());
    const std::size_t num_words = words.size() - first_word;
    std::uint8_t head[8 + 2 * kMaxTableNbytes + 3] = {};
    StoreU32(head, static_cast<std::uint32_t>(places_.size()));
    StoreU32(head + 4, static_cast<std::uint32_t>(num_words));
    std::uint8_t* at = WriteTable(gaps.frequency, gaps.num_symbols, head + 8);
    *at++ = static_cast<std::uint8_t>(direct_);
    const std::size_t head_nbytes =
        UpTo4(static_cast<std::size_t>(WriteTable(changes.frequency, changes.num_symbols, at) - head));
    const std::size_t words_at = head_nbytes + sizeof(states);
    const std::size_t extra_at = words_at + UpTo4(2 * num_words);
    const std::size_t nbytes = extra_at + WordsNbytes(num_extra_bits);
    if (nbytes >= most_nbytes) return 0;
    std::memset(out + extra_at - 4, 0, 4);
    std::memcpy(out, head, head_nbytes);
    std::memcpy(out + head_nbytes, states, sizeof(states));
    std::memcpy(out + words_at, words.data() + first_word, 2 * num_words);
    WriteExtra(out + extra_at);
    return nbytes;
  }

 private:
  std::uint32_t Gap(std::size_t i) const { return i == 0 ? places_[0] : places_[i] - places_[i - 1] - 1; }

  // Words go below `words`; where they begin.
  std::uint16_t* Encode(const Table& gaps, const Table& changes, std::uint32_t* states, std::uint16_t* words) const {
    EncodeEntry of_gaps[kMaxSymbols] = {};
    EncodeEntry of_changes[kMaxSymbols] = {};
    FillEntries(gaps.frequency, gaps.num_symbols, of_gaps);
    FillEntries(changes.frequency, changes.num_symbols, of_changes);
    const auto encode = [&](std::uint32_t lane, EncodeEntry entry) {
      std::uint32_t state = states[lane];
      if (IsFull(state, entry.packed)) {
        *--words = static_cast<std::uint16_t>(state);
        state >>= 16;
      }
      states[lane] = EncodeSymbol(state, entry);
    };
    for (std::size_t end = places_.size(); end > 0;) {
      const std::size_t begin = (end - 1) / kSparseLanes * kSparseLanes;
      for (std::size_t i = end; i-- > begin;) {
        encode(static_cast<std::uint32_t>(i - begin), of_changes[Coarser(symbols_[places_[i]], direct_)]);
      }
      for (std::size_t i = end; i-- > begin;) {
        encode(static_cast<std::uint32_t>(i - begin), of_gaps[Symbol(Gap(i), kGapDirectBits)]);
      }
      end = begin;
    }
    return words;
  }

  void WriteExtra(std::uint8_t* out) const {
    BitWriter bits(out);
    for (std::size_t i = 0; i < places_.size(); ++i) {
      const std::uint32_t gap_width = Width(Symbol(Gap(i), kGapDirectBits), kGapDirectBits);
      bits.Write(Extra(Gap(i), gap_width), gap_width);
      const std::uint32_t z = Change(values_.new_bits[places_[i]], values_.old_bits[places_[i]]);
      // Of the symbol: `out` has room for what symbols say, also if somebody writes to the values meanwhile.
      const std::uint32_t width = Width(Coarser(symbols_[places_[i]], direct_), direct_);
      bits.Write(Extra(z, width), width);
    }
    bits.Flush();
  }

  Values values_;
  const std::uint8_t* symbols_;
  std::vector<std::uint32_t> places_;
  std::uint32_t gap_counts_[kGapSymbols] = {};
  std::uint32_t counts_[256] = {};
  std::uint64_t num_gap_bits_ = 0;
  std::uint32_t direct_ = 0;
};

}  // namespace

Payload EncodeChunk(const Values& values, std::size_t numel, std::uint8_t* symbols, std::uint8_t* out) {
  const std::size_t nonzero = ActiveUlpsKernels().symbols(values.new_bits, values.old_bits, numel, symbols);
  if (nonzero == 0) return {0, kZero};
  const std::size_t raw_nbytes = RawNbytes(numel);
  const bool is_sparse = IsSparse(static_cast<std::uint32_t>(nonzero), static_cast<std::uint32_t>(numel));
  const std::size_t nbytes = is_sparse ? SparseChunk(values, numel, symbols, nonzero).Write(raw_nbytes, out)
                                       : EncodeDense(values, numel, symbols, out);
  if (nbytes != 0) return {nbytes, is_sparse ? kSparse : kDense};
  std::memset(out + raw_nbytes - 4, 0, 4);
  std::memcpy(out, values.new_bits, 2 * numel);
  return {raw_nbytes, kRaw};
}

}  // namespace zcomm::ulps
