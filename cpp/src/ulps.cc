#include "zcomm/ulps.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "ulps_chunks.h"
#include "zcomm/check.h"
#include "zcomm/isa.h"

namespace zcomm {
namespace ulps {

const UlpsKernels& ActiveUlpsKernels() {
#ifdef ZCOMM_X86
  static const UlpsKernels& active = ActiveIsa() == Isa::kAvx512 ? Avx512UlpsKernels()
                                     : ActiveIsa() == Isa::kAvx2 ? Avx2UlpsKernels()
                                                                 : BaselineUlpsKernels();
  return active;
#else
  return BaselineUlpsKernels();
#endif
}

namespace {

// "UL", version, chunk bits; numel; nbytes; checksum of what follows the head; checksum of the head so far.
struct Head {
  std::uint32_t chunk_bits;
  std::uint64_t numel;
  std::uint64_t nbytes;
  std::uint32_t checksum;
};
constexpr std::size_t kHeadWords = kUlpsHeadNbytes / 4;

std::size_t NumChunks(std::uint64_t numel, std::uint32_t chunk_bits) {
  return static_cast<std::size_t>(numel >> chunk_bits) + ((numel & ((1ULL << chunk_bits) - 1)) != 0 ? 1 : 0);
}

Head ReadHead(const std::uint8_t* message, std::size_t nbytes) {
  ZCOMM_CHECK(nbytes >= kUlpsHeadNbytes, "a message must have a head of ", kUlpsHeadNbytes, " bytes: nbytes=", nbytes);
  const std::uint32_t start = LoadU32(message);
  ZCOMM_CHECK((start & 0xFFFF) == kMagic, "a message must start with UL: ", start & 0xFFFF);
  ZCOMM_CHECK((start >> 16 & 0xFF) == kVersion, "a message must have version ", kVersion, ": ", start >> 16 & 0xFF);
  const std::uint32_t checksum = BaselineUlpsKernels().checksum(message, kHeadWords - 1, 0);
  ZCOMM_CHECK(checksum == LoadU32(message + 24), "checksum of a head must match");
  Head head{start >> 24, 0, 0, LoadU32(message + 20)};
  std::memcpy(&head.numel, message + 4, sizeof(head.numel));
  std::memcpy(&head.nbytes, message + 12, sizeof(head.nbytes));
  ZCOMM_CHECK(IsChunkBits(head.chunk_bits), "a message must have possible chunks: ", head.chunk_bits);
  ZCOMM_CHECK(head.numel < 1ULL << 60, "a message must have a possible size: numel=", head.numel);
  const std::size_t least = kUlpsHeadNbytes + 4 * NumChunks(head.numel, head.chunk_bits);
  ZCOMM_CHECK(head.nbytes % 4 == 0 && least <= head.nbytes && head.nbytes <= UlpsMaxMessageNbytes(head.numel),
              "a message of ", head.numel, " elements must have a possible length: nbytes=", head.nbytes);
  return head;
}

void WriteHead(const Head& head, std::uint8_t* message) {
  StoreU32(message, kMagic | kVersion << 16 | head.chunk_bits << 24);
  std::memcpy(message + 4, &head.numel, sizeof(head.numel));
  std::memcpy(message + 12, &head.nbytes, sizeof(head.nbytes));
  StoreU32(message + 20, head.checksum);
  StoreU32(message + 24, BaselineUlpsKernels().checksum(message, kHeadWords - 1, 0));
}

std::uint32_t ChunkBits(const Values& values, std::size_t numel) {
  if (numel <= std::size_t{1} << kDenseChunkBits) return kDenseChunkBits;
  std::uint8_t symbols[kSampleNumel];
  std::size_t nonzero = 0;
  for (std::size_t i = 0; i < kSamples; ++i) {
    const std::size_t at = i * (numel / kSamples);
    nonzero += ActiveUlpsKernels().symbols(values.new_bits + at, values.old_bits + at, kSampleNumel, symbols);
  }
  return ChunkBitsOf(static_cast<std::uint32_t>(nonzero));
}

}  // namespace
}  // namespace ulps

using namespace ulps;  // NOLINT(google-build-using-namespace): its own

std::size_t UlpsMaxMessageNbytes(std::size_t numel) {
  return kUlpsHeadNbytes + 4 * NumChunks(numel, kDenseChunkBits) + (2 * numel + 3) / 4 * 4;
}

std::size_t UlpsMessageNbytes(const std::uint8_t* head, std::size_t nbytes) {
  return static_cast<std::size_t>(ReadHead(head, nbytes).nbytes);
}

std::size_t EncodeUlps(const std::uint16_t* new_bits, const std::uint16_t* old_bits, std::size_t numel,
                       std::uint8_t* message, std::size_t capacity) {
  ZCOMM_CHECK(capacity >= UlpsMaxMessageNbytes(numel), "a message of ", numel, " elements must have room for ",
              UlpsMaxMessageNbytes(numel), " bytes: capacity=", capacity);
  const std::uint32_t chunk_bits = ChunkBits({new_bits, old_bits}, numel);
  const std::size_t chunk_numel = std::size_t{1} << chunk_bits;
  const std::size_t num_chunks = NumChunks(numel, chunk_bits);
  // Not a vector, which would write it first.
  const std::unique_ptr<std::uint8_t[]> symbols(new std::uint8_t[std::min(numel, chunk_numel)]);
  std::size_t at = kUlpsHeadNbytes + 4 * num_chunks;
  for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
    const std::size_t first = chunk * chunk_numel;
    const Values values{new_bits + first, old_bits + first};
    const Payload payload = EncodeChunk(values, std::min(chunk_numel, numel - first), symbols.get(), message + at);
    StoreU32(message + kUlpsHeadNbytes + 4 * chunk, static_cast<std::uint32_t>(payload.nbytes) | payload.kind);
    at += payload.nbytes;
  }
  const std::uint32_t checksum =
      ActiveUlpsKernels().checksum(message + kUlpsHeadNbytes, at / 4 - kHeadWords, kHeadWords);
  WriteHead({chunk_bits, numel, at, checksum}, message);
  return at;
}

void DecodeUlps(const std::uint8_t* message, std::size_t nbytes, std::uint16_t* values, std::size_t numel) {
  const Head head = ReadHead(message, nbytes);
  ZCOMM_CHECK(head.numel == numel, "a message must be of as many elements as the tensor: ", head.numel, ", ", numel);
  ZCOMM_CHECK(head.nbytes <= nbytes, "a message must be whole: nbytes=", nbytes, ", of ", head.nbytes);
  const auto end = static_cast<std::size_t>(head.nbytes);
  const std::uint32_t checksum =
      ActiveUlpsKernels().checksum(message + kUlpsHeadNbytes, end / 4 - kHeadWords, kHeadWords);
  ZCOMM_CHECK(checksum == head.checksum, "checksum of a message must match");
  const std::size_t chunk_numel = std::size_t{1} << head.chunk_bits;
  const std::size_t num_chunks = NumChunks(numel, head.chunk_bits);
  const std::uint8_t* entries = message + kUlpsHeadNbytes;
  std::uint64_t sum = 0;
  for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) sum += LoadU32(entries + 4 * chunk) & ~3U;
  ZCOMM_CHECK(sum == end - kUlpsHeadNbytes - 4 * num_chunks, "sizes of chunks must add up");
  DecodeChunks(entries, num_chunks, chunk_numel, values, numel);
}

}  // namespace zcomm
