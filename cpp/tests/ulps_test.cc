#include "zcomm/ulps.h"

#include <algorithm>
#include <memory>
#include <set>

#include "test_util.h"
#include "ulps_chunks.h"

namespace zcomm {
namespace {

using ulps::Change;
using ulps::Changed;
using ulps::Order;
using ulps::UlpsKernels;
using Bits = std::vector<std::uint16_t>;
using Bytes = std::vector<std::uint8_t>;

// Buffers of their own, so that the address sanitizer sees their ends.
template <class T>
std::unique_ptr<T[]> Exact(const std::vector<T>& from) {
  std::unique_ptr<T[]> copy(new T[from.size()]);
  std::copy(from.begin(), from.end(), copy.get());
  return copy;
}

Bits AnyBits(std::size_t numel, Random* random) {
  Bits bits(numel);
  for (std::uint16_t& b : bits) b = static_cast<std::uint16_t>(random->Next());
  return bits;
}

Bytes AnyBytes(std::size_t count, Random* random) {
  Bytes bytes(count);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random->Next());
  return bytes;
}

enum class Steps { kNone, kOne, kAll, kRare, kSparse, kFew, kNarrow, kWide, kHeavy, kAny, kNumSteps };

int Geometric(std::uint32_t percent, Random* random) {
  int value = 0;
  while (value < 3000 && random->Below(100) < percent) ++value;
  return value;
}

int SomeStep(Steps steps, Random* random) {
  const int sign = random->Below(2) == 0 ? 1 : -1;
  switch (steps) {
    case Steps::kNone:
      return 0;
    case Steps::kOne:
      return random->Below(500) == 0 ? sign : 0;
    case Steps::kAll:
      return -3;
    case Steps::kRare:
      return random->Below(200) == 0 ? sign * (1 + Geometric(10, random)) : 0;
    case Steps::kSparse:
      return random->Below(17) == 0 ? sign * (1 + Geometric(90, random)) : 0;
    case Steps::kFew:
      return random->Below(15) == 0 ? sign : 0;
    case Steps::kNarrow:
      return sign * Geometric(40, random);
    case Steps::kWide:
      return sign * Geometric(97, random);
    case Steps::kHeavy:
      return sign * static_cast<int>(65535U >> random->Below(17));
    default:
      return static_cast<int>(random->Next());
  }
}

// Old values moved by steps of some kinds, each in a stretch.
Bits SomeNew(const Bits& old_bits, Random* random) {
  Bits bits = old_bits;
  auto steps = Steps::kNone;
  for (std::uint16_t& b : bits) {
    if (&b == bits.data() || random->Below(4000) == 0) {
      steps = static_cast<Steps>(random->Below(static_cast<std::uint32_t>(Steps::kNumSteps)));
    }
    b = static_cast<std::uint16_t>(Order((Order(b) + static_cast<std::uint32_t>(SomeStep(steps, random))) & 0xFFFFU));
  }
  return bits;
}

Bytes Encoded(const Bits& new_bits, const Bits& old_bits) {
  const std::size_t numel = new_bits.size();
  const std::size_t most = UlpsMaxMessageNbytes(numel);
  EXPECT(most <= 2 * numel + numel / 50 + 64, "%zu elements may need %zu bytes", numel, most);
  const std::unique_ptr<std::uint8_t[]> message(new std::uint8_t[most]);
  const std::size_t nbytes = EncodeUlps(Exact(new_bits).get(), Exact(old_bits).get(), numel, message.get(), most);
  EXPECT(nbytes % 4 == 0 && nbytes <= most, "%zu of %zu bytes", nbytes, most);
  EXPECT(UlpsMessageNbytes(message.get(), kUlpsHeadNbytes) == nbytes, "the head tells another length");
  return Bytes(message.get(), message.get() + nbytes);
}

// False: refused, for a reason that stands in the text.
bool Decodes(const Bytes& message, Bits* values) {
  const auto exact = Exact(*values);
  try {
    DecodeUlps(Exact(message).get(), message.size(), exact.get(), values->size());
  } catch (const std::invalid_argument& error) {
    EXPECT(Contains(error.what(), "must"), "%s", error.what());
    return false;
  }
  std::copy(exact.get(), exact.get() + values->size(), values->begin());
  return true;
}

void CheckPairs() {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    EXPECT(Order(Order(bits)) == bits, "%x", bits);
    for (const std::uint32_t old_bits : {0U, 1U, 0x8000U, 0x8001U, 0x7FFFU, 0xFFFFU, 0x7F80U, 0x3F80U}) {
      const std::uint32_t z = Change(bits, old_bits);
      EXPECT(z <= 0xFFFF && Changed(old_bits, z) == bits, "%x from %x", bits, old_bits);
    }
  }
  EXPECT(Change(0x3F81, 0x3F80) == 2 && Change(0x3F7F, 0x3F80) == 1 && Change(0x8000, 0) == 1, "an ulp");
  for (std::uint32_t direct = 1; direct <= ulps::kMaxDirectBits; ++direct) {
    for (std::uint32_t z = 0; z < 65536; ++z) {
      const std::uint32_t symbol = ulps::Symbol(z, direct);
      const std::uint32_t extra = ulps::Extra(z, ulps::Width(symbol, direct));
      EXPECT(symbol < ulps::NumSymbols(direct) && ulps::Joined(symbol, direct, extra) == z, "%u, %u", z, direct);
      EXPECT(ulps::Coarser(ulps::Symbol(z, ulps::kMaxDirectBits), direct) == symbol, "%u, %u", z, direct);
    }
  }
}

// Values from symbols and extra bits, beside bits that are read one by one.
void CheckExtraBits(Random* random) {
  for (int i = 0; i < 3000; ++i) {
    const Bytes bytes = AnyBytes(4 * random->Below(4), random);
    const auto exact = Exact(bytes);
    ulps::BitReader reader = ulps::MakeBitReader(exact.get(), bytes.size());
    std::size_t at = 0;
    while (at <= 8 * bytes.size() + 20) {
      const std::uint32_t width = random->Below(26);
      const std::uint32_t symbol = random->Next();
      std::uint32_t expected = (2 + symbol % 2) << width;
      for (std::uint32_t bit = 0; bit < width && at + bit < 8 * bytes.size(); ++bit) {
        expected |= (bytes[(at + bit) / 8] >> (at + bit) % 8 & 1U) << bit;
      }
      at += width;
      const std::uint32_t got = TakeJoined(&reader, symbol, width);
      EXPECT(IsWithin(reader) == (at <= 8 * bytes.size()), "%zu of %zu bytes", at, bytes.size());
      EXPECT(!IsWithin(reader) || got == expected, "%x, expected %x: width %u", got, expected, width);
      EXPECT(IsUsedUp(reader) == ((at + 31) / 32 * 4 == bytes.size()), "%zu of %zu bytes", at, bytes.size());
    }
  }
}

// Division by a reciprocal is exact, and decoding undoes encoding.
void CheckSymbols(Random* random) {
  for (std::uint32_t frequency = 1; frequency <= ulps::kScale; ++frequency) {
    const std::uint32_t first = random->Below(ulps::kScale - frequency + 1);
    const ulps::EncodeEntry entry = ulps::MakeEncodeEntry(frequency, first);
    const std::uint32_t limit = frequency << 19;
    for (std::uint32_t state : {ulps::kLowestState, limit - 1, random->Next() % limit, limit - frequency,
                                limit - frequency - 1, random->Next() % limit}) {
      const std::uint32_t expected = state / frequency * ulps::kScale + state % frequency + first;
      EXPECT(!ulps::IsFull(state, entry.packed), "%u, %u", state, frequency);
      EXPECT(ulps::EncodeSymbol(state, entry) == expected, "%u by %u", state, frequency);
      const std::uint32_t number = (expected & (ulps::kScale - 1)) - first;
      EXPECT(ulps::DecodeSymbol(expected, ulps::MakeSlot(9, frequency, number)) == state, "%u", state);
    }
    EXPECT(frequency == ulps::kScale || ulps::IsFull(limit, entry.packed), "%u", frequency);
  }
}

// Loops of this level against the baseline's; those of coding are compared by messages.
void CheckKernels(Random* random) {
  const UlpsKernels& plain = ulps::BaselineUlpsKernels();
  const UlpsKernels& here = ulps::ActiveUlpsKernels();
  for (const std::size_t numel : SizesAround(100)) {
    const Bits old_bits = AnyBits(numel, random);
    const Bits new_bits = SomeNew(old_bits, random);
    Bytes expected(numel + 1, 0xEE);
    Bytes got = expected;
    const std::size_t nonzero = plain.symbols(new_bits.data(), old_bits.data(), numel, expected.data());
    EXPECT(here.symbols(new_bits.data(), old_bits.data(), numel, got.data()) == nonzero, "%zu", numel);
    EXPECT(got == expected, "symbols of %zu", numel);
    EXPECT(here.checksum(got.data(), numel / 4, 7) == plain.checksum(got.data(), numel / 4, 7), "%zu", numel);
  }
}

void CheckRoundTrips(Random* random) {
  std::vector<std::size_t> sizes = SizesAround(4096);
  sizes.insert(sizes.end(), {(std::size_t{1} << 18) - 1, (std::size_t{1} << 18) + 33, std::size_t{1100000}});
  for (const std::size_t numel : sizes) {
    for (int repeat = 0; repeat < (numel < 10000 ? 8 : 2); ++repeat) {
      const Bits old_bits = AnyBits(numel, random);
      const Bits new_bits = SomeNew(old_bits, random);
      Bytes message = Encoded(new_bits, old_bits);
      Bits values = old_bits;
      EXPECT(Decodes(message, &values) && values == new_bits, "%zu elements", numel);
      message.resize(message.size() + 5, 0xCC);
      values = old_bits;
      EXPECT(Decodes(message, &values) && values == new_bits, "%zu elements, bytes after the message", numel);
    }
  }
}

void Store(std::uint32_t word, std::size_t at, Bytes* message) { std::memcpy(message->data() + at, &word, 4); }

// Lengths and checksums fit what stands in the message.
void Sign(Bytes* message) {
  const UlpsKernels& kernels = ulps::BaselineUlpsKernels();
  const std::uint64_t nbytes = message->size();
  std::memcpy(message->data() + 12, &nbytes, sizeof(nbytes));
  Store(kernels.checksum(message->data() + kUlpsHeadNbytes, nbytes / 4 - 7, 7), 20, message);
  Store(kernels.checksum(message->data(), 6, 0), 24, message);
}

void CheckDamage(Random* random) {
  const Bits old_bits = AnyBits(3000, random);
  Bits new_bits = SomeNew(old_bits, random);
  const Bits others = AnyBits(300, random);  // else the message may be a head alone
  std::copy(others.begin(), others.end(), new_bits.begin());
  const Bytes message = Encoded(new_bits, old_bits);
  for (std::size_t nbytes = 0; nbytes < message.size(); nbytes += 1 + random->Below(9)) {
    Bits values = old_bits;
    EXPECT(!Decodes(Bytes(message.begin(), message.begin() + static_cast<std::ptrdiff_t>(nbytes)), &values), "short");
  }
  for (int i = 0; i < 500; ++i) {
    Bytes damaged = message;
    damaged[random->Below(static_cast<std::uint32_t>(message.size()))] ^=
        static_cast<std::uint8_t>(1U << random->Below(8));
    Bits values = old_bits;
    EXPECT(!Decodes(damaged, &values) && values == old_bits, "a flipped bit is not seen");
  }
  Bits values(old_bits.begin(), old_bits.end() - 1);
  EXPECT(!Decodes(message, &values), "another size");
  for (const std::size_t nbytes : {kUlpsHeadNbytes, kUlpsHeadNbytes + 5, message.size() - 3}) {
    Bytes part(message.begin(), message.begin() + static_cast<std::ptrdiff_t>(nbytes));
    Sign(&part);
    Bits as_before = old_bits;
    EXPECT(!Decodes(part, &as_before), "%zu bytes without room for sizes of chunks, or not in words", nbytes);
  }
  Bytes huge = message;
  huge[11] = 0x7F;  // the highest byte of the number of elements
  Sign(&huge);
  EXPECT(!Decodes(huge, &values), "a huge size");
}

// A chunk of random bits needs more words than it has room, which ends with the payload before.
void CheckRawAfterOthers(Random* random) {
  const std::size_t chunk = std::size_t{1} << ulps::kDenseChunkBits;
  const Bits old_bits = AnyBits(2 * chunk, random);
  Bits new_bits = AnyBits(2 * chunk, random);
  for (std::size_t i = 0; i < chunk; ++i) {
    const int step = SomeStep(Steps::kWide, random);
    new_bits[i] = static_cast<std::uint16_t>(Order((Order(old_bits[i]) + static_cast<std::uint32_t>(step)) & 0xFFFFU));
  }
  Bits values = old_bits;
  EXPECT(Decodes(Encoded(new_bits, old_bits), &values) && values == new_bits, "a raw chunk after a dense one");
}

// A message of two chunks means what messages of each of them mean, which are decoded another way.
void CheckTwoDenseChunks(Random* random) {
  constexpr std::size_t kChunk = std::size_t{1} << ulps::kDenseChunkBits;
  const Bits old_bits = AnyBits(2 * kChunk, random);
  Bits new_bits = old_bits;
  for (std::size_t i = 0; i < new_bits.size(); ++i) {
    const int step = SomeStep(i < kChunk ? Steps::kWide : Steps::kNarrow, random);
    new_bits[i] = static_cast<std::uint16_t>(Order((Order(old_bits[i]) + static_cast<std::uint32_t>(step)) & 0xFFFFU));
  }
  const Bytes whole = Encoded(new_bits, old_bits);
  constexpr std::size_t kPayloads = kUlpsHeadNbytes + 8;
  std::size_t accepted = 0;
  for (std::uint32_t i = 0; i < 120; ++i) {
    Bytes message = whole;
    const std::size_t first_nbytes = ulps::LoadU32(message.data() + kUlpsHeadNbytes) & ~3U;
    const std::size_t from = kPayloads + (i % 2 == 0 ? 0 : first_nbytes);
    const std::size_t nbytes = i % 2 == 0 ? first_nbytes : message.size() - kPayloads - first_nbytes;
    if (i < 2) {  // a word more than the chunk needs
      const std::size_t entry_at = kUlpsHeadNbytes + 4 * static_cast<std::size_t>(i);
      Store(ulps::LoadU32(message.data() + entry_at) + 4, entry_at, &message);
      message.insert(message.begin() + static_cast<std::ptrdiff_t>(from + nbytes), 4, 0);
    } else {
      // A byte of the table, the states, the words, or the extra bits; any extra bits are valid.
      const std::size_t at = i < 40 ? random->Below(300) : nbytes - 1 - random->Below(16U << random->Below(11));
      message[from + at] = static_cast<std::uint8_t>(random->Next());
    }
    Sign(&message);
    Bits expected = old_bits;
    bool is_valid = true;
    for (const std::size_t chunk : {0, 1}) {
      Bytes one(message.begin(), message.begin() + kUlpsHeadNbytes);
      Store(kChunk, 4, &one);
      one.insert(one.end(), message.begin() + static_cast<std::ptrdiff_t>(kUlpsHeadNbytes + 4 * chunk),
                 message.begin() + static_cast<std::ptrdiff_t>(kUlpsHeadNbytes + 4 * chunk + 4));
      const std::size_t middle_at = kPayloads + (ulps::LoadU32(message.data() + kUlpsHeadNbytes) & ~3U);
      const auto middle = message.begin() + static_cast<std::ptrdiff_t>(middle_at);
      one.insert(one.end(), chunk == 0 ? message.begin() + kPayloads : middle, chunk == 0 ? middle : message.end());
      Sign(&one);
      const auto begin = old_bits.begin() + static_cast<std::ptrdiff_t>(chunk * kChunk);
      Bits values(begin, begin + kChunk);
      is_valid = Decodes(one, &values) && is_valid;
      std::copy(values.begin(), values.end(), expected.begin() + static_cast<std::ptrdiff_t>(chunk * kChunk));
    }
    Bits values = old_bits;
    EXPECT(Decodes(message, &values) == is_valid, "case %u: each alone says %d", i, is_valid);
    EXPECT(!is_valid || values == expected, "case %u", i);
    accepted += is_valid ? 1 : 0;
  }
  EXPECT(accepted > 10 && accepted < 110, "%zu", accepted);
}

// States outside of their range are refused: kernels would not agree about them.
void CheckStates() {
  const Bits old_bits(3000, 0x3F80);
  Bits new_bits = old_bits;
  for (std::size_t i = 0; i < new_bits.size(); i += 2) new_bits[i] = 0x3F81;
  const Bytes message = Encoded(new_bits, old_bits);
  // Head, one chunk's size, words, d; then 3 of 32 frequencies: 2048, 0, 2048; 13 in 16 absent; 0.
  const std::size_t states_at = kUlpsHeadNbytes + 4 + 16;
  Bits values = old_bits;
  EXPECT(Decodes(message, &values) && values == new_bits, "as it was");
  for (const std::uint32_t state : {0U, ulps::kLowestState - 1, ulps::kStateLimit, 0xFFFFFFFFU}) {
    Bytes hostile = message;
    Store(state, states_at, &hostile);
    Sign(&hostile);
    try {
      DecodeUlps(hostile.data(), hostile.size(), values.data(), values.size());
      EXPECT(false, "state %x is accepted", state);
    } catch (const std::invalid_argument& error) {
      EXPECT(Contains(error.what(), "states must be in range"), "%s", error.what());
    }
  }
}

// Messages whose checksums fit but whose content does not: nothing outside the buffers is touched.
void CheckHostile(Random* random) {
  std::size_t accepted = 0;
  for (int i = 0; i < 6000; ++i) {
    const Bits old_bits = AnyBits(1 + random->Below(3000), random);
    Bytes message = Encoded(SomeNew(old_bits, random), old_bits);
    const std::size_t spread = std::min<std::size_t>(message.size() - kUlpsHeadNbytes, 8U << random->Below(10));
    for (std::uint32_t k = 0; k <= random->Below(3) && spread > 0; ++k) {
      message[kUlpsHeadNbytes + random->Below(static_cast<std::uint32_t>(spread))] =
          static_cast<std::uint8_t>(random->Next());
    }
    if (random->Below(3) == 0) message.resize(std::max(kUlpsHeadNbytes + 4, message.size() - 4 * random->Below(9)));
    Sign(&message);
    Bits values = old_bits;
    accepted += Decodes(message, &values) ? 1 : 0;
  }
  EXPECT(accepted > 100, "%zu", accepted);
}

void CheckArguments() {
  std::uint8_t message[kUlpsHeadNbytes] = {};
  EXPECT(EncodeUlps(nullptr, nullptr, 0, message, sizeof(message)) == kUlpsHeadNbytes, "nothing is a head");
  DecodeUlps(message, sizeof(message), nullptr, 0);
  const std::uint16_t one = 1;
  EXPECT(Contains(MessageOfThrow([&] { EncodeUlps(&one, &one, 1, message, sizeof(message)); }), "room"), "capacity");
  message[2] = 2;
  EXPECT(Contains(MessageOfThrow([&] { UlpsMessageNbytes(message, sizeof(message)); }), "version"), "version");
}

}  // namespace
}  // namespace zcomm

int main() {
  zcomm::Random random(20260101);
  zcomm::CheckPairs();
  zcomm::CheckExtraBits(&random);
  zcomm::CheckSymbols(&random);
  zcomm::CheckKernels(&random);
  zcomm::CheckRoundTrips(&random);
  zcomm::CheckDamage(&random);
  zcomm::CheckRawAfterOthers(&random);
  zcomm::CheckTwoDenseChunks(&random);
  zcomm::CheckStates();
  zcomm::CheckHostile(&random);
  zcomm::CheckArguments();
  std::puts("ok");
  return 0;
}
