// Messages of any bytes, in every format, through every decoder: nothing outside of a buffer is read or written, the
// vector kernels give the bits of the reference, and what is refused is refused by an exception.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <vector>

#include "zcomm/arrays.h"
#include "zcomm/decode.h"
#include "zcomm/message_layout.h"
#include "zcomm/quantize.h"
#include "zcomm/reduce.h"

namespace {

using zcomm::Codec;
using zcomm::DType;
using zcomm::MessageLayout;

constexpr std::uint32_t kHash = 77;
constexpr std::size_t kHeaderNbytes = 9;

// A buffer of its own, so that the address sanitizer sees its ends; 16 bytes aligned, as messages are.
struct Free {
  void operator()(void* data) const { std::free(data); }
};
using Buffer = std::unique_ptr<std::uint8_t, Free>;
Buffer MakeBuffer(std::size_t nbytes) {
  Buffer buffer(static_cast<std::uint8_t*>(std::malloc(nbytes)));
  if (nbytes > 0) std::memset(buffer.get(), 0x3C, nbytes);
  return buffer;
}

bool IsNan(DType dtype, const std::uint8_t* data) {
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, data, sizeof(value));
    return value != value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, data, sizeof(bits));
  const int exponent = dtype == DType::kBfloat16 ? 0x7F80 : 0x7C00;
  return (bits & 0x7FFF) > exponent;
}

void ExpectSame(DType dtype, const Buffer& a, const Buffer& b, std::size_t numel, const char* what) {
  const std::size_t size = zcomm::ItemSize(dtype);
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint8_t *x = a.get() + i * size, *y = b.get() + i * size;
    if (std::memcmp(x, y, size) != 0 && !(IsNan(dtype, x) && IsNan(dtype, y))) {
      std::fprintf(stderr, "%s: element %zu differs from the reference\n", what, i);
      std::abort();
    }
  }
}

struct Case {
  MessageLayout layout;
  DType dtype;
  std::size_t count;
  bool has_trailer;
  int operation;
};

Case CaseOf(const std::uint8_t* header) {
  constexpr Codec kCodecs[] = {
      Codec::kFloat32,
      Codec::kBfloat16,
      Codec::kFloat16,
#define ZCOMM_CODEC(id, ...) Codec::id,
#include "zcomm/codecs.def"
  };
  const Codec codec = kCodecs[header[0] % std::size(kCodecs)];
  const std::size_t block = (header[1] & 1) != 0 ? std::size_t{2} << (header[1] / 2 % 10) : header[1];
  const std::size_t segment_numel = header[2] + 256 * (header[3] % 8);
  const MessageLayout layout =
      zcomm::MakeMessageLayout(codec, block, header[4] % 5, segment_numel, (header[5] & 1) != 0);
  return {layout, static_cast<DType>(header[6] % 3), header[7] % 4u, (header[5] & 2) == 0, header[8] % 3};
}

void Run(const Case& given, const std::uint8_t* data, std::size_t size) {
  const MessageLayout& layout = given.layout;
  const std::size_t nbytes = layout.nbytes * given.count;
  const Buffer messages = MakeBuffer(nbytes);
  for (std::size_t i = 0; i < nbytes && size > 0; ++i) messages.get()[i] = data[i % size];
  for (std::size_t i = 0; i < given.count && given.has_trailer; ++i)
    zcomm::WriteTrailer(layout, kHash, messages.get() + i * layout.nbytes);
  const zcomm::ConstMessages input{messages.get(), layout.nbytes, given.count, kHash};
  if (given.operation == 0) {
    const std::size_t numel = layout.numel() * given.count, bytes = numel * zcomm::ItemSize(given.dtype);
    const Buffer got = MakeBuffer(bytes), expected = MakeBuffer(bytes);
    zcomm::DecodeRef(layout, input, {given.dtype, expected.get(), layout.numel(), layout.segment_numel});
    zcomm::Decode(layout, input, {given.dtype, got.get(), layout.numel(), layout.segment_numel}, 1);
    ExpectSame(given.dtype, got, expected, numel, "Decode");
  } else if (given.operation == 1) {
    const std::size_t bytes = layout.numel() * zcomm::ItemSize(given.dtype);
    const Buffer got = MakeBuffer(bytes), expected = MakeBuffer(bytes);
    zcomm::DecodeSumRef(layout, input, {given.dtype, expected.get(), 0, layout.segment_numel}, 3.0f);
    zcomm::DecodeSum(layout, input, {given.dtype, got.get(), 0, layout.segment_numel}, 3.0f, 1);
    ExpectSame(given.dtype, got, expected, layout.numel(), "DecodeSum");
  } else {
    const MessageLayout out = zcomm::MakeMessageLayout(Codec::kInt8, 64, 1, layout.segment_numel);
    const std::size_t bytes = out.nbytes * layout.num_segments;
    const Buffer got = MakeBuffer(bytes), expected = MakeBuffer(bytes);
    const zcomm::MutableMessages to{got.get(), out.nbytes, layout.num_segments, kHash};
    const zcomm::MutableMessages reference{expected.get(), out.nbytes, layout.num_segments, kHash};
    zcomm::DecodeSumRequantizeRef(layout, input, out, reference, nullptr);
    zcomm::DecodeSumRequantize(layout, input, out, to, nullptr, 1);
    if (bytes > 0 && std::memcmp(got.get(), expected.get(), bytes) != 0) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < kHeaderNbytes) return 0;
  try {
    Run(CaseOf(data), data + kHeaderNbytes, size - kHeaderNbytes);
  } catch (const std::invalid_argument&) {
  }
  return 0;
}
