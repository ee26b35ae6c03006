#include "reference_codecs.h"

namespace zcomm {
namespace {

constexpr float kLevels[16] = {-8.0F,       -5.5625F,   -4.1875F, -3.15625F, -2.28125F, -1.4765625F, -0.7265625F, 0.0F,
                               0.63671875F, 1.2890625F, 1.96875F, 2.703125F, 3.53125F,  4.5F,        5.78125F,    8.0F};

}  // namespace

template <>
int CodeRef<Codec::kNf4>(float y, const float*) {
  int code = 0;
  while (code < 15 && (kLevels[code] + kLevels[code + 1]) / 2 < y) ++code;
  return code;
}

template <>
float LevelRef<Codec::kNf4>(int code) {
  return kLevels[code & 0x0F];
}

}  // namespace zcomm
