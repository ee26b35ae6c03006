#pragma once

#include <cstddef>
#include <cstdint>

#include "portable.h"
#include "ulps_arithmetic.h"

// The changes of zcomm/_formats/ulps_reference.py on a GPU. The lanes of a warp are those of the format, so a warp
// codes the symbols of a chunk, one round after another; all else is done by tile, of which a chunk has many. Warps do
// not wait for each other. Kernels of one call, in this order:
//
//   encode   SampleUlps    counts changed elements of samples, which decide the length of chunks
//            CountUlps     each tile: symbols of its changes, how often each occurs in the chunk, and their extra bits
//            ListUlps      each tile of sparse chunks: where its changes are, their gaps, and the counts of these
//            EncodeUlps    each chunk: tables, states and words to its place in the workspace, and its size
//            ExtraUlps     each tile: extra bits to the chunk's place
//            PlaceUlps     payloads and sizes to the message, and the sum of its checksum
//            FinishUlps    the head
//   decode   SumUlps       the sum of the checksum
//            DecodeUlps    each chunk, if head and checksum are right: the changes of a sparse one to the values, the
//                          symbols of a dense one to the workspace
//            ApplyUlps     each tile of other chunks: values from symbols and extra bits, or raw
namespace zcomm::cuda {

namespace ulps = zcomm::ulps;

constexpr std::uint32_t kUlpsHeadWords = 7;
constexpr std::uint32_t kUlpsHeadBytes = 4 * kUlpsHeadWords;
constexpr std::uint32_t kUlpsTileBits = 12;
constexpr std::uint32_t kUlpsTile = 1U << kUlpsTileBits;  // elements
// What a chunk's place in the workspace has beside the room of its raw values: a payload's head, and what is aligned.
constexpr std::uint32_t kUlpsSlack = 2048;
constexpr std::uint32_t kUlpsPieceWords = 4096;  // of a payload, that a warp moves to the message

// The sums that atomic additions make; the caller zeroes them before the first kernel.
struct UlpsSums {
  std::uint32_t changed;
  std::uint32_t checksum;
};

ZCOMM_HOST_DEVICE std::uint64_t UlpsChunks(std::uint64_t numel, std::uint32_t chunk_bits) {
  return (numel + (1ULL << chunk_bits) - 1) >> chunk_bits;
}
// The elements of a chunk, which is one of those of `numel`.
ZCOMM_HOST_DEVICE std::uint32_t UlpsChunkNumel(std::uint64_t chunk, std::uint64_t numel, std::uint32_t chunk_bits) {
  const std::uint64_t rest = numel - (chunk << chunk_bits);
  return static_cast<std::uint32_t>(rest >> chunk_bits != 0 ? 1ULL << chunk_bits : rest);
}
ZCOMM_HOST_DEVICE std::uint64_t UlpsTiles(std::uint64_t numel) { return UlpsChunks(numel, kUlpsTileBits); }
ZCOMM_HOST_DEVICE std::uint64_t UlpsUpTo4(std::uint64_t nbytes) { return (nbytes + 3) / 4 * 4; }
ZCOMM_HOST_DEVICE std::uint64_t UlpsSymbolsNbytes(std::uint64_t numel) { return (numel + 127) / 128 * 128; }

// A tile within its chunk.
struct UlpsTileSpan {
  std::uint64_t chunk;
  std::uint64_t first_tile;  // of the chunk
  std::uint32_t begin;       // elements of the chunk
  std::uint32_t end;
};

ZCOMM_DEVICE UlpsTileSpan LocateUlpsTile(std::uint64_t tile, std::uint64_t numel, std::uint32_t chunk_bits) {
  const std::uint32_t bits = chunk_bits - kUlpsTileBits;
  const std::uint64_t first_tile = tile >> bits << bits;
  const auto begin = static_cast<std::uint32_t>((tile - first_tile) << kUlpsTileBits);
  const std::uint64_t rest = numel - (tile << kUlpsTileBits);
  return {tile >> bits, first_tile, begin, begin + static_cast<std::uint32_t>(rest < kUlpsTile ? rest : kUlpsTile)};
}

template <class P>
ZCOMM_DEVICE std::uint64_t SumOfWarp(std::uint64_t value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const std::uint32_t low = P::ShuffleXor(static_cast<std::uint32_t>(value), mask);
    const std::uint32_t high = P::ShuffleXor(static_cast<std::uint32_t>(value >> 32), mask);
    value += low | static_cast<std::uint64_t>(high) << 32;
  }
  return value;
}

template <class P>
ZCOMM_DEVICE std::uint32_t Sum32OfWarp(std::uint32_t value) {
  for (int mask = 16; mask > 0; mask /= 2) value += P::ShuffleXor(value, mask);
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
  const std::uint32_t sum = Sum32OfWarp<P>(mixed);
  if (P::Lane() == 0) P::Add(&sums->checksum, sum);
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

}  // namespace zcomm::cuda
