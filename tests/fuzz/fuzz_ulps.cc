// Messages of changes in ulps of any bytes: nothing outside of a buffer is read or written, what is refused is refused
// by an exception, and what is encoded comes back bit for bit.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "ulps_chunks.h"
#include "zcomm/ulps.h"

namespace {

constexpr std::size_t kSwitches = 4;

void Expect(bool holds) {
  if (!holds) std::abort();
}

// A buffer of its own, so that the address sanitizer sees its ends.
template <class T>
std::unique_ptr<T[]> Filled(const std::uint8_t* data, std::size_t size, std::size_t count) {
  std::unique_ptr<T[]> buffer(new T[count]());
  std::memcpy(buffer.get(), data, size < count * sizeof(T) ? size : count * sizeof(T));
  return buffer;
}

// `data` is new bits, then old ones.
void CheckRoundTrip(const std::uint8_t* data, std::size_t size, std::size_t numel) {
  const auto new_bits = Filled<std::uint16_t>(data, size, numel);
  const std::size_t half = size < 2 * numel ? size : 2 * numel;
  const auto old_bits = Filled<std::uint16_t>(data + half, size - half, numel);
  const std::size_t most = zcomm::UlpsMaxMessageNbytes(numel);
  const std::unique_ptr<std::uint8_t[]> room(new std::uint8_t[most]);
  const std::size_t nbytes = zcomm::EncodeUlps(new_bits.get(), old_bits.get(), numel, room.get(), most);
  const auto message = Filled<std::uint8_t>(room.get(), nbytes, nbytes);
  zcomm::DecodeUlps(message.get(), nbytes, old_bits.get(), numel);
  Expect(numel == 0 || std::memcmp(new_bits.get(), old_bits.get(), 2 * numel) == 0);
}

// `data` is a message's body, of which the head is made to fit.
void CheckBody(const std::uint8_t* data, std::size_t size, std::size_t numel, std::uint32_t chunk_bits) {
  const std::size_t nbytes = zcomm::kUlpsHeadNbytes + size / 4 * 4;
  const std::unique_ptr<std::uint8_t[]> message(new std::uint8_t[nbytes]);
  std::memcpy(message.get() + zcomm::kUlpsHeadNbytes, data, size / 4 * 4);
  const zcomm::ulps::UlpsKernels& kernels = zcomm::ulps::BaselineUlpsKernels();
  const std::uint64_t fields[2] = {numel, nbytes};
  zcomm::ulps::StoreU32(message.get(), zcomm::ulps::kMagic | zcomm::ulps::kVersion << 16 | chunk_bits << 24);
  std::memcpy(message.get() + 4, fields, sizeof(fields));
  const std::uint32_t checksum = kernels.checksum(message.get() + zcomm::kUlpsHeadNbytes, size / 4, 7);
  zcomm::ulps::StoreU32(message.get() + 20, checksum);
  zcomm::ulps::StoreU32(message.get() + 24, kernels.checksum(message.get(), 6, 0));
  const std::unique_ptr<std::uint16_t[]> values(new std::uint16_t[numel]());
  zcomm::DecodeUlps(message.get(), nbytes, values.get(), numel);
}

void CheckAnything(const std::uint8_t* data, std::size_t size, std::size_t numel) {
  const auto message = Filled<std::uint8_t>(data, size, size);
  const std::unique_ptr<std::uint16_t[]> values(new std::uint16_t[numel]());
  zcomm::DecodeUlps(message.get(), size, values.get(), numel);
}

}  // namespace

// Two bytes of elements, one of what to do, one that is 7 for two whole chunks more; then the data.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < kSwitches) return 0;
  // Chunks are decoded in pairs. They take long, so few inputs have them.
  const std::size_t more = data[3] == 7 ? std::size_t{2} << zcomm::ulps::kDenseChunkBits : 0;
  const std::size_t numel = more + (data[0] + 256U * data[1]) % 20000U;
  const std::uint8_t* rest = data + kSwitches;
  try {
    if (data[2] % 4 == 0) CheckRoundTrip(rest, size - kSwitches, numel);
    if (data[2] % 4 == 1) CheckAnything(rest, size - kSwitches, numel);
    if (data[2] % 4 == 2) CheckBody(rest, size - kSwitches, numel, zcomm::ulps::kDenseChunkBits);
    if (data[2] % 4 == 3) CheckBody(rest, size - kSwitches, numel, zcomm::ulps::kRareChunkBits);
  } catch (const std::invalid_argument&) {
    Expect(data[2] % 4 != 0);
  }
  return 0;
}
