#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "zcomm/arrays.h"
#include "zcomm/float_formats.h"
#include "zcomm/message_layout.h"
#include "zcomm/random.h"

// Ends the test with the condition's text, place and a printf-style context unless the condition holds.
#define EXPECT(cond, ...)                                             \
  do {                                                                \
    if (!(cond)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond); \
      std::fprintf(stderr, __VA_ARGS__);                              \
      std::fprintf(stderr, "\n");                                     \
      std::exit(1);                                                   \
    }                                                                 \
  } while (false)

namespace zcomm {

// The message of the `Error` that `call` throws; empty when it throws none.
template <class Error, class Call>
std::string MessageOf(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// The message of the std::invalid_argument that `call` throws; the test fails when it throws none.
template <class Call>
std::string MessageOfThrow(const Call& call) {
  const std::string message = MessageOf<std::invalid_argument>(call);
  EXPECT(!message.empty(), "expected std::invalid_argument");
  return message;
}

inline bool Contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2654435761U + 88172645463325252U) {}

  std::uint32_t Next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<std::uint32_t>(state_ >> 32);
  }
  std::uint32_t Below(std::uint32_t bound) { return Next() % bound; }
  float Uniform() { return static_cast<float>(Next()) / 2147483648.0F - 1.0F; }

 private:
  std::uint64_t state_;
};

inline float FromBits(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Kinds of data that take different paths through the numerics contract.
enum class Kind { kPlain, kTies, kZeros, kDenormals, kTiny, kHuge, kInfinities, kNans, kAnyBits, kNumKinds };

inline float Sample(Kind kind, std::size_t i, Random* random) {
  const float uniform = random->Uniform();
  switch (kind) {
    case Kind::kTies:
      return static_cast<float>(static_cast<int>(uniform * 254.0F)) * 0.5F;
    case Kind::kZeros:
      return uniform < 0 ? -0.0F : 0.0F;
    case Kind::kDenormals:
      return FromBits(random->Next() & 0x807FFFFFU);
    case Kind::kTiny:  // around 2^-100, where the scale becomes 0
      return uniform * FromBits(0x0E000000U);
    case Kind::kHuge:
      return i % 5 == 0 ? std::numeric_limits<float>::max() : uniform * std::numeric_limits<float>::max();
    case Kind::kInfinities:
      return i % 401 == 7 ? -std::numeric_limits<float>::infinity() : uniform;
    case Kind::kNans:
      return i % 401 == 7 ? std::numeric_limits<float>::quiet_NaN() : uniform;
    case Kind::kAnyBits:
      return FromBits(random->Next());
    default:
      return uniform * FromBits(0x3F800000U + (random->Below(16) << 23));
  }
}

// `numel` elements of `dtype` as bytes.
inline std::vector<std::uint8_t> MakeArray(DType dtype, std::size_t numel, Kind kind, Random* random) {
  std::vector<std::uint8_t> array(numel * ItemSize(dtype) + 4);
  for (std::size_t i = 0; i < numel; ++i) StoreElement(dtype, array.data(), i, Sample(kind, i, random));
  return array;
}

// Equal bit for bit, NaNs by position.
inline bool SameElement(DType dtype, const void* a, const void* b, std::size_t index) {
  const float left = LoadElement(dtype, a, index);
  const float right = LoadElement(dtype, b, index);
  if (left != left || right != right) return left != left && right != right;
  return std::memcmp(&left, &right, sizeof(left)) == 0;
}

inline void ExpectSameElements(DType dtype, const void* a, const void* b, std::size_t numel, const char* what) {
  for (std::size_t i = 0; i < numel; ++i) {
    EXPECT(SameElement(dtype, a, b, i), "%s: element %zu of %zu: %a, expected %a", what, i, numel,
           static_cast<double>(LoadElement(dtype, a, i)), static_cast<double>(LoadElement(dtype, b, i)));
  }
}

// Messages of a cast codec compare as elements, of a block codec as bytes.
inline void ExpectSameMessages(const MessageLayout& layout, const std::uint8_t* a, const std::uint8_t* b,
                               const char* what) {
  if (!IsBlockCodec(layout.codec)) {
    ExpectSameElements(static_cast<DType>(layout.codec), a, b, layout.numel(), what);
    return;
  }
  for (std::size_t i = 0; i < layout.nbytes; ++i) {
    EXPECT(a[i] == b[i], "%s: byte %zu of %zu is %d, expected %d; codec %d block %zu rotated %d segments %zu x %zu",
           what, i, layout.nbytes, a[i], b[i], static_cast<int>(layout.codec), layout.block,
           static_cast<int>(layout.is_rotated), layout.num_segments, layout.segment_numel);
  }
}

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kBfloat16, DType::kFloat16};
inline constexpr Codec kCodecs[] = {
    Codec::kFloat32,
    Codec::kBfloat16,
    Codec::kFloat16,
#define ZCOMM_CODEC(id, ...) Codec::id,
#include "zcomm/codecs.def"
};

// Whether a codec with this block can be rotated.
inline bool MayRotate(Codec codec, std::size_t block) { return IsBlockCodec(codec) && (block & (block - 1)) == 0; }

// A draw, or nothing, by chance.
inline std::optional<Draw> MaybeDraw(Random* random) {
  if (random->Below(2) == 0) return std::nullopt;
  const auto first = static_cast<std::uint64_t>(random->Next()) << random->Below(5);
  return Draw{random->Next(), random->Next(), random->Next(), random->Next(), random->Next(), first};
}

// Sizes around the vector widths (8, 16, 32, 64), the block and the tile, odd ones included.
inline std::vector<std::size_t> SizesAround(std::size_t block) {
  std::vector<std::size_t> sizes = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 2047, 2048, 2049};
  for (const std::size_t size : {block - 1, block, block + 1, 2 * block, 3 * block + 5}) {
    if (size <= 20000) sizes.push_back(size);
  }
  return sizes;
}

}  // namespace zcomm
