#include <algorithm>

#include "ulps_chunks.h"
#include "zcomm/check.h"

namespace zcomm::ulps {
namespace {

constexpr std::size_t kDecodedAtOnce = 4096;  // symbols that stay in a cache until they are applied

// The parts of a payload, one after another.
class Reader {
 public:
  Reader(const std::uint8_t* data, std::size_t nbytes) : begin_(data), at_(data), end_(data + nbytes) {}

  const std::uint8_t* Take(std::size_t nbytes) {
    ZCOMM_CHECK(nbytes <= static_cast<std::size_t>(end_ - at_), "parts of a chunk must be within it");
    at_ += nbytes;
    return at_ - nbytes;
  }
  std::uint32_t TakeU32() { return LoadU32(Take(4)); }
  void Align() { Take(static_cast<std::size_t>(begin_ - at_) & 3U); }
  BitReader Rest() const { return MakeBitReader(at_, static_cast<std::size_t>(end_ - at_)); }

 private:
  const std::uint8_t* begin_;
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

struct Slots {
  std::uint32_t slots[kScale];

  Slots(Reader* reader, std::uint32_t num_symbols) {
    std::uint32_t symbol = 0;
    std::uint32_t sum = 0;
    while (symbol < num_symbols) {
      const std::uint32_t low = *reader->Take(1);
      if (low == 0) {
        const std::uint32_t length = *reader->Take(1);
        ZCOMM_CHECK(length > 0, "absent symbols of a table must be at least one");
        symbol += length;
        continue;
      }
      const std::uint32_t frequency = low < 128 ? low : low - 128 + 128U * *reader->Take(1);
      ZCOMM_CHECK(frequency <= kScale - sum, "a table must have frequencies of sum ", kScale);
      for (std::uint32_t i = 0; i < frequency; ++i) slots[sum + i] = MakeSlot(symbol, frequency, i);
      sum += frequency;
      ++symbol;
    }
    ZCOMM_CHECK(symbol == num_symbols && sum == kScale, "a table must have ", num_symbols, " frequencies of sum ",
                kScale);
  }
};

std::uint32_t TakeDirect(Reader* reader) {
  const std::uint32_t direct = *reader->Take(1);
  ZCOMM_CHECK(direct >= 1 && direct <= kMaxDirectBits, "a table must have 1 to ", kMaxDirectBits,
              " direct bits: ", direct);
  return direct;
}

void TakeLanes(Reader* reader, std::uint32_t num_lanes, std::uint32_t num_words, Lanes* lanes) {
  std::memcpy(lanes->states, reader->Take(4 * num_lanes), 4 * num_lanes);
  ZCOMM_CHECK(std::all_of(lanes->states, lanes->states + num_lanes,
                          [](std::uint32_t state) { return state >= kLowestState && state < kStateLimit; }),
              "states must be in range");
  lanes->words = reader->Take(std::size_t{2} * num_words);
  lanes->words_end = lanes->words + std::size_t{2} * num_words;
  reader->Align();
}

void CheckEnd(const Lanes& lanes, std::uint32_t num_lanes, const BitReader& extra) {
  ZCOMM_CHECK(lanes.words == lanes.words_end && std::all_of(lanes.states, lanes.states + num_lanes,
                                                            [](std::uint32_t state) { return state == kLowestState; }),
              "words and states of a chunk must be used up");
  ZCOMM_CHECK(IsUsedUp(extra), "extra bits of a chunk must be as many as its symbols need");
}

constexpr char kTooShort[] = "words and extra bits of a chunk must suffice";

// The next symbols of a dense chunk, and the values that they change.
class DenseChunk {
 public:
  DenseChunk(Reader reader, std::uint16_t* values)
      : num_words_(reader.TakeU32()),
        direct_(TakeDirect(&reader)),
        table_(&reader, NumSymbols(direct_)),
        values_(values) {
    reader.Align();
    TakeLanes(&reader, kDenseLanes, num_words_, &lanes_);
    extra_ = reader.Rest();
  }

  DenseStream Stream() { return {&lanes_, table_.slots, symbols_}; }
  bool Apply(std::size_t numel) {
    values_ += numel;
    return ActiveUlpsKernels().apply(symbols_, direct_, numel, &extra_, values_ - numel);
  }
  void CheckEnd() const { ulps::CheckEnd(lanes_, kDenseLanes, extra_); }

 private:
  std::uint32_t num_words_;
  std::uint32_t direct_;
  Slots table_;
  Lanes lanes_;
  BitReader extra_;
  std::uint8_t symbols_[kDecodedAtOnce];
  std::uint16_t* values_;
};

void DecodeDense(Reader reader, std::uint16_t* values, std::size_t numel) {
  DenseChunk chunk(reader, values);
  for (std::size_t at = 0; at < numel; at += kDecodedAtOnce) {
    const std::size_t count = std::min(kDecodedAtOnce, numel - at);
    ZCOMM_CHECK(ActiveUlpsKernels().decode(chunk.Stream(), count) && chunk.Apply(count), kTooShort);
  }
  chunk.CheckEnd();
}

void DecodeDenseBoth(Reader a_reader, Reader b_reader, std::uint16_t* values, std::size_t numel) {
  DenseChunk a(a_reader, values);
  DenseChunk b(b_reader, values + numel);
  for (std::size_t at = 0; at < numel; at += kDecodedAtOnce) {
    const std::size_t count = std::min(kDecodedAtOnce, numel - at);
    ZCOMM_CHECK(ActiveUlpsKernels().decode_both(a.Stream(), b.Stream(), count) && a.Apply(count) && b.Apply(count),
                kTooShort);
  }
  a.CheckEnd();
  b.CheckEnd();
}

// Any value where the bits do not suffice, which the caller asks later.
std::uint32_t TakeValue(BitReader* bits, std::uint32_t symbol, std::uint32_t direct) {
  return symbol < 1U << direct ? symbol : TakeJoined(bits, symbol, Width(symbol, direct));
}

std::uint32_t TakeSymbol(Lanes* lanes, std::uint32_t lane, const Slots& table) {
  const std::uint32_t slot = table.slots[lanes->states[lane] & (kScale - 1)];
  std::uint32_t state = DecodeSymbol(lanes->states[lane], slot);
  if (state < kLowestState) {
    ZCOMM_CHECK(lanes->words != lanes->words_end, kTooShort);
    std::uint16_t word = 0;
    std::memcpy(&word, lanes->words, sizeof(word));
    lanes->words += sizeof(word);
    state = state << 16 | word;
  }
  lanes->states[lane] = state;
  return slot >> 24;
}

void DecodeSparse(Reader reader, std::uint16_t* values, std::size_t numel) {
  const std::uint32_t num_changes = reader.TakeU32();
  const std::uint32_t num_words = reader.TakeU32();
  const Slots gaps(&reader, kGapSymbols);
  const std::uint32_t direct = TakeDirect(&reader);
  const Slots changes(&reader, NumSymbols(direct));
  reader.Align();
  Lanes lanes;
  TakeLanes(&reader, kSparseLanes, num_words, &lanes);
  BitReader extra = reader.Rest();
  std::size_t place = 0;  // of the next change if its gap is 0
  for (std::uint32_t at = 0; at < num_changes; at += kSparseLanes) {
    const std::uint32_t count = std::min(kSparseLanes, num_changes - at);
    std::uint32_t gap[kSparseLanes];
    std::uint32_t change[kSparseLanes];
    for (std::uint32_t lane = 0; lane < count; ++lane) gap[lane] = TakeSymbol(&lanes, lane, gaps);
    for (std::uint32_t lane = 0; lane < count; ++lane) change[lane] = TakeSymbol(&lanes, lane, changes);
    for (std::uint32_t lane = 0; lane < count; ++lane) {
      place += TakeValue(&extra, gap[lane], kGapDirectBits);
      ZCOMM_CHECK(place < numel, "a change must be within its chunk of ", numel, " elements: ", place);
      const std::uint32_t z = TakeValue(&extra, change[lane], direct);
      values[place] = static_cast<std::uint16_t>(Changed(values[place], z));
      ++place;
    }
    ZCOMM_CHECK(IsWithin(extra), kTooShort);
  }
  CheckEnd(lanes, kSparseLanes, extra);
}

void DecodeChunk(const Payload& payload, const std::uint8_t* data, std::uint16_t* values, std::size_t numel) {
  if (payload.kind == kSparse) return DecodeSparse(Reader(data, payload.nbytes), values, numel);
  if (payload.kind == kDense) return DecodeDense(Reader(data, payload.nbytes), values, numel);
  ZCOMM_CHECK(payload.nbytes == (payload.kind == kRaw ? RawNbytes(numel) : 0),
              "a chunk without changes must be empty and a raw one hold every element: nbytes=", payload.nbytes);
  if (payload.kind == kRaw) std::memcpy(values, data, 2 * numel);
}

}  // namespace

void DecodeChunks(const std::uint8_t* entries, std::size_t num_chunks, std::size_t chunk_numel, std::uint16_t* values,
                  std::size_t numel) {
  const auto payload_of = [&](std::size_t chunk) {
    const std::uint32_t entry = LoadU32(entries + 4 * chunk);
    return Payload{entry & ~3U, static_cast<Kind>(entry & 3U)};
  };
  const std::uint8_t* data = entries + 4 * num_chunks;
  for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
    const std::size_t first = chunk * chunk_numel;
    const Payload payload = payload_of(chunk);
    const bool may_pair = ActiveUlpsKernels().decode_both != nullptr && first + 2 * chunk_numel <= numel;
    if (may_pair && payload.kind == kDense && payload_of(chunk + 1).kind == kDense) {
      const Payload next = payload_of(++chunk);
      DecodeDenseBoth(Reader(data, payload.nbytes), Reader(data + payload.nbytes, next.nbytes), values + first,
                      chunk_numel);
      data += payload.nbytes + next.nbytes;
      continue;
    }
    DecodeChunk(payload, data, values + first, std::min(chunk_numel, numel - first));
    data += payload.nbytes;
  }
}

}  // namespace zcomm::ulps
