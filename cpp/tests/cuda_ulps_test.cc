// Compares the bodies of the CUDA kernels for changes in ulps, on emulated warps, with the CPU's, bit for bit.

#include <algorithm>
#include <cstdlib>

#include "emulated_warp.h"
#include "ulps_chunks.h"
#include "ulps_decode.h"
#include "ulps_encode.h"
#include "zcomm/ulps.h"

namespace zcomm::cuda {
namespace {

using Bits = std::vector<std::uint16_t>;
using Message = std::vector<std::uint32_t>;  // so that it is aligned

constexpr std::uint32_t kWarpsOfTiles = 3;
constexpr std::uint32_t kGuard = 0xABABABAB;

Message Padded(const std::uint8_t* data, std::size_t nbytes) {
  Message words(nbytes / 4 + 1, kGuard);
  std::memcpy(words.data(), data, nbytes);
  return words;
}

// In any order: warps do not wait for each other.
template <class Body>
void RunWarps(std::uint32_t count, Random* random, const Body& body) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0U);
  for (std::uint32_t i = count; i > 1; --i) std::swap(order[i - 1], order[random->Below(i)]);
  for (const std::uint32_t warp : order) {
    EmulatedWarp::Run([&] { body(warp); }, random);
  }
}

std::uint32_t WarpsOfChunks(std::size_t numel) {
  return static_cast<std::uint32_t>(std::max<std::uint64_t>(1, UlpsChunks(numel, ulps::kDenseChunkBits)));
}

template <class T>
EmulatedWarp::Span SpanOf(const std::vector<T>& values) {
  return {values.data(), sizeof(T) * values.size()};
}

Message EncodedByWarps(const Bits& new_bits, const Bits& old_bits, Random* random) {
  const std::size_t numel = new_bits.size();
  Message message(UlpsMaxMessageNbytes(numel) / 4 + 1, kGuard);
  std::vector<UlpsCounts> counts(WarpsOfChunks(numel));
  std::vector<std::uint32_t> entries(WarpsOfChunks(numel), kGuard);
  std::vector<UlpsParts> parts(WarpsOfChunks(numel), UlpsParts{kGuard, kGuard, kGuard, kGuard});
  std::vector<UlpsTile> tiles(UlpsTiles(numel), UlpsTile{kGuard, kGuard, kGuard, {}});
  Message places(UlpsPlacesNbytes(numel) / 4, kGuard);
  UlpsSums sums{0, 0};
  EmulatedWarp::allowed = {SpanOf(new_bits), SpanOf(old_bits),      SpanOf(counts),
                           SpanOf(entries),  SpanOf(parts),         SpanOf(tiles),
                           SpanOf(places),   {&sums, sizeof(sums)}, {message.data(), UlpsMaxMessageNbytes(numel)}};
  const UlpsEncodeArguments a{new_bits.data(), old_bits.data(),
                              numel,           reinterpret_cast<std::uint8_t*>(message.data()),
                              &sums,           counts.data(),
                              entries.data(),  parts.data(),
                              tiles.data(),    reinterpret_cast<std::uint8_t*>(places.data())};
  static UlpsEncodeShared shared;
  std::uint32_t of_warp[ulps::kMaxSymbols] = {};
  const auto run = [&](std::uint32_t count, const auto& body) { RunWarps(count, random, body); };
  run(kWarpsOfTiles, [&](std::uint32_t warp) { SampleUlps<EmulatedWarp>(a, warp, kWarpsOfTiles); });
  run(kWarpsOfTiles, [&](std::uint32_t warp) { CountUlps<EmulatedWarp>(a, warp, kWarpsOfTiles, of_warp); });
  run(kWarpsOfTiles, [&](std::uint32_t warp) { ListUlps<EmulatedWarp>(a, warp, kWarpsOfTiles, of_warp); });
  run(WarpsOfChunks(numel), [&](std::uint32_t warp) { EncodeUlps<EmulatedWarp>(a, warp, &shared); });
  run(kWarpsOfTiles, [&](std::uint32_t warp) { ExtraUlps<EmulatedWarp>(a, warp, kWarpsOfTiles); });
  run(kWarpsOfTiles, [&](std::uint32_t warp) { PlaceUlps<EmulatedWarp>(a, warp, kWarpsOfTiles); });
  run(1, [&](std::uint32_t) { FinishUlps<EmulatedWarp>(a); });
  EmulatedWarp::allowed.clear();
  EXPECT(message.back() == kGuard, "a word after the message is written");
  return message;
}

// False: refused.
bool DecodedByWarps(const Message& message, std::size_t nbytes, Bits* values, Random* random) {
  const std::size_t numel = values->size();
  UlpsSums sums{0, 0};
  std::int32_t is_valid = 1;
  std::vector<UlpsDecoded> decoded(WarpsOfChunks(numel), UlpsDecoded{kGuard, kGuard, kGuard, kGuard, kGuard});
  std::vector<std::uint32_t> extra_at(UlpsTiles(numel), kGuard);
  Message symbols(UlpsSymbolsNbytes(numel) / 4, kGuard);
  EmulatedWarp::allowed = {{message.data(), nbytes},
                           SpanOf(*values),
                           SpanOf(decoded),
                           SpanOf(extra_at),
                           SpanOf(symbols),
                           {&sums, sizeof(sums)},
                           {&is_valid, sizeof(is_valid)}};
  const UlpsDecodeArguments a{reinterpret_cast<const std::uint8_t*>(message.data()),
                              nbytes,
                              values->data(),
                              numel,
                              &sums,
                              decoded.data(),
                              extra_at.data(),
                              reinterpret_cast<std::uint8_t*>(symbols.data()),
                              &is_valid};
  static UlpsDecodeShared shared;
  RunWarps(kWarpsOfTiles, random, [&](std::uint32_t warp) { SumUlps<EmulatedWarp>(a, warp, kWarpsOfTiles); });
  RunWarps(WarpsOfChunks(numel), random, [&](std::uint32_t warp) { DecodeUlps<EmulatedWarp>(a, warp, &shared); });
  RunWarps(kWarpsOfTiles, random, [&](std::uint32_t warp) { ApplyUlps<EmulatedWarp>(a, warp, kWarpsOfTiles); });
  EmulatedWarp::allowed.clear();
  return is_valid == 1;
}

bool DecodedByCpu(const Message& message, std::size_t nbytes, Bits* values) {
  try {
    zcomm::DecodeUlps(reinterpret_cast<const std::uint8_t*>(message.data()), nbytes, values->data(), values->size());
  } catch (const std::invalid_argument&) {
    return false;
  }
  return true;
}

Message EncodedByCpu(const Bits& new_bits, const Bits& old_bits, std::size_t* nbytes) {
  std::vector<std::uint8_t> room(UlpsMaxMessageNbytes(new_bits.size()));
  *nbytes = zcomm::EncodeUlps(new_bits.data(), old_bits.data(), new_bits.size(), room.data(), room.size());
  return Padded(room.data(), *nbytes);
}

// A change of each element with the probability 1 / `one_in`, of a size that `octaves` bound.
Bits Moved(const Bits& old_bits, std::uint32_t one_in, std::uint32_t octaves, Random* random) {
  Bits bits = old_bits;
  for (std::uint16_t& b : bits) {
    if (random->Below(one_in) != 0) continue;
    const std::uint32_t z = random->Next() & ((1U << random->Below(octaves + 1)) - 1U);
    b = static_cast<std::uint16_t>(ulps::Changed(b, z & 0xFFFFU));
  }
  return bits;
}

Bits AnyBits(std::size_t numel, Random* random) {
  Bits bits(numel);
  for (std::uint16_t& b : bits) b = static_cast<std::uint16_t>(random->Next());
  return bits;
}

void CheckSame(const Bits& new_bits, const Bits& old_bits, Random* random) {
  const std::size_t numel = new_bits.size();
  std::size_t nbytes = 0;
  const Message expected = EncodedByCpu(new_bits, old_bits, &nbytes);
  const Message got = EncodedByWarps(new_bits, old_bits, random);
  for (std::size_t i = 0; i < nbytes / 4; ++i) {
    EXPECT(got[i] == expected[i], "word %zu of %zu is %x, expected %x; %zu elements", i, nbytes / 4, got[i],
           expected[i], numel);
  }
  Bits values = old_bits;
  EXPECT(DecodedByWarps(expected, nbytes, &values, random) && values == new_bits, "%zu elements", numel);
  if (nbytes > kUlpsHeadBytes) {
    Message damaged = expected;
    damaged[random->Below(static_cast<std::uint32_t>(nbytes / 4))] ^= 1U << random->Below(32);
    values = old_bits;
    EXPECT(!DecodedByWarps(damaged, nbytes, &values, random) && values == old_bits, "damage is not seen");
    EXPECT(!DecodedByWarps(expected, nbytes - 4, &values, random) && values == old_bits, "a short message");
  }
}

void CheckSizes(Random* random) {
  for (const std::size_t numel : {0, 1, 2, 31, 32, 33, 127, 128, 129, 160, 500, 1000, 4097}) {
    const Bits old_bits = AnyBits(numel, random);
    for (const std::uint32_t one_in : {1U, 14U, 20U, 200U}) {
      for (const std::uint32_t octaves : {0U, 1U, 3U, 7U, 9U, 16U}) {
        CheckSame(Moved(old_bits, one_in, octaves, random), old_bits, random);
      }
    }
    CheckSame(AnyBits(numel, random), old_bits, random);
  }
}

void CheckChunks(Random* random) {
  const std::size_t numel = (std::size_t{1} << ulps::kDenseChunkBits) + 501;
  const Bits old_bits = AnyBits(numel, random);
  CheckSame(Moved(old_bits, 2, 4, random), old_bits, random);
  CheckSame(Moved(old_bits, 500, 4, random), old_bits, random);
  const Bits longer = AnyBits((std::size_t{1} << ulps::kSparseChunkBits) + 77, random);
  CheckSame(Moved(longer, 3000, 2, random), longer, random);
  CheckSame(Moved(longer, 40, 2, random), longer, random);
  // Dense where no sample is: between those at multiples of numel / 64, each of 1,024 elements.
  Bits between = longer;
  for (std::size_t i = 0; i < longer.size(); ++i) {
    if (i % (longer.size() / ulps::kSamples) > 2 * ulps::kSampleNumel) between[i] ^= 1U;
  }
  CheckSame(between, longer, random);
}

// A gap and a change whose extra bits together do not fit into a word.
void CheckWidest(Random* random) {
  const std::size_t numel = (std::size_t{1} << ulps::kRareChunkBits) + 3;
  Bits old_bits(numel, 0x3F80);
  old_bits[numel - 4] = 0;
  Bits new_bits = old_bits;
  new_bits[numel - 4] = 0x7F00;
  CheckSame(new_bits, old_bits, random);
}

Bits AnyMoved(const Bits& old_bits, Random* random) {
  const std::uint32_t one_in[] = {1, 16, 40};
  return Moved(old_bits, one_in[random->Below(3)], 1 + random->Below(9), random);
}

void CheckAny(std::size_t num_cases, Random* random) {
  for (std::size_t i = 0; i < num_cases; ++i) {
    const Bits old_bits = AnyBits(1 + random->Below(1500), random);
    CheckSame(AnyMoved(old_bits, random), old_bits, random);
  }
}

// Checksums that fit what stands in the message.
void Sign(std::size_t nbytes, Message* message) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(message->data());
  const ulps::UlpsKernels& kernels = ulps::BaselineUlpsKernels();
  (*message)[5] = kernels.checksum(bytes + kUlpsHeadBytes, nbytes / 4 - kUlpsHeadWords, kUlpsHeadWords);
  (*message)[6] = kernels.checksum(bytes, kUlpsHeadWords - 1, 0);
}

// A table that begins with runs of no absent symbols: nothing would bound how many of them one lane reads.
void CheckEmptyRuns(Random* random) {
  const Bits old_bits = AnyBits(1000, random);
  std::size_t nbytes = 0;
  Message message = EncodedByCpu(Moved(old_bits, 1, 3, random), old_bits, &nbytes);
  std::vector<std::uint8_t> bytes(nbytes);
  std::memcpy(bytes.data(), message.data(), nbytes);
  bytes.insert(bytes.begin() + kUlpsHeadBytes + 4 + 4 + 1, 4, std::uint8_t{0});  // behind entry, words and direct bits
  message = Padded(bytes.data(), bytes.size());
  message[3] += 4;
  message[kUlpsHeadWords] += 4;
  Sign(bytes.size(), &message);
  Bits values = old_bits;
  EXPECT(!DecodedByCpu(message, bytes.size(), &values), "the CPU takes empty runs");
  EXPECT(!DecodedByWarps(message, bytes.size(), &values, random), "empty runs");
}

// Content that does not fit, under checksums that do: refused or decoded as by the CPU, and nothing else is touched.
void CheckHostile(std::size_t num_cases, Random* random) {
  std::size_t accepted = 0;
  for (std::size_t i = 0; i < num_cases; ++i) {
    // Sometimes several tiles, rarely two chunks.
    const std::size_t more = i % 500 == 7 ? std::size_t{1} << ulps::kDenseChunkBits : i % 50 == 7 ? 2 * kUlpsTile : 0;
    const Bits old_bits = AnyBits(more + 1 + random->Below(1500), random);
    const Bits new_bits = AnyMoved(old_bits, random);
    std::size_t nbytes = 0;
    Message message = EncodedByCpu(new_bits, old_bits, &nbytes);
    auto* bytes = reinterpret_cast<std::uint8_t*>(message.data());
    const auto most = static_cast<std::uint32_t>(nbytes - kUlpsHeadBytes);
    for (std::uint32_t k = 0; k <= random->Below(3); ++k) {
      const std::uint32_t spread = std::min(most, 8U << random->Below(9));
      bytes[kUlpsHeadBytes + random->Below(spread)] = static_cast<std::uint8_t>(random->Next());
    }
    Sign(nbytes, &message);
    Bits got = old_bits;
    Bits expected = old_bits;
    const bool is_valid = DecodedByCpu(message, nbytes, &expected);
    EXPECT(DecodedByWarps(message, nbytes, &got, random) == is_valid, "case %zu: the CPU says %d", i, is_valid);
    EXPECT(!is_valid || got == expected, "case %zu", i);
    accepted += is_valid ? 1 : 0;
  }
  EXPECT(accepted > num_cases / 75 && accepted < num_cases - num_cases / 15, "%zu", accepted);
}

}  // namespace
}  // namespace zcomm::cuda

// Arguments: how many random and how many hostile cases.
int main(int argc, char** argv) {
  const auto count = [&](int argument, std::size_t few) {
    return argc > argument ? std::strtoull(argv[argument], nullptr, 10) : few;
  };
  zcomm::Random random(20260102);
  zcomm::cuda::CheckSizes(&random);
  zcomm::cuda::CheckAny(count(1, 100), &random);
  zcomm::cuda::CheckHostile(count(2, 1500), &random);
  zcomm::cuda::CheckChunks(&random);
  zcomm::cuda::CheckWidest(&random);
  zcomm::cuda::CheckEmptyRuns(&random);
  std::puts("ok");
  return 0;
}
