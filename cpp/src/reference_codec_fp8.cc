#include <cmath>
#include <limits>

#include "reference_codecs.h"

namespace zcomm {
namespace {

double Magnitude(int code) {
  const int exponent = code >> 3;
  const int eighths = code & 7;
  return exponent == 0 ? std::ldexp(eighths, -9) : std::ldexp(8 + eighths, exponent - 10);
}

}  // namespace

template <>
int CodeRef<Codec::kFp8E4m3>(float y, const float*) {
  const double magnitude = std::fabs(static_cast<double>(y));
  int below = 0;
  for (int bit = 0x40; bit > 0; bit >>= 1) {
    if (below + bit <= 0x7E && Magnitude(below + bit) <= magnitude) below += bit;
  }
  const double down = magnitude - Magnitude(below);
  const double up = below < 0x7E ? Magnitude(below + 1) - magnitude : std::numeric_limits<double>::infinity();
  const int best = below + (up < down || (up == down && below % 2 == 1) ? 1 : 0);
  return y < 0 && best > 0 ? best | 0x80 : best;
}

template <>
float LevelRef<Codec::kFp8E4m3>(int code) {
  return static_cast<float>((code & 0x80) != 0 ? -Magnitude(code & 0x7F) : Magnitude(code & 0x7F));
}

}  // namespace zcomm
