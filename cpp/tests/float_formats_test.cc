#include "zcomm/float_formats.h"

#include <cmath>

#include "test_util.h"

namespace zcomm {
namespace {

// Every pair of neighboring values a < b of a 16-bit format: their midpoint, and the floats next to it.
void CheckRounding(float (*widen)(std::uint16_t), std::uint16_t (*narrow)(float), unsigned infinity) {
  for (unsigned bits = 0; bits < infinity; ++bits) {
    const auto low = static_cast<std::uint16_t>(bits);
    const auto high = static_cast<std::uint16_t>(bits + 1);
    const float below = widen(low);
    // The step continues past the largest finite value, where infinity is the upper neighbour.
    const double above = high < infinity ? widen(high) : 2.0 * below - widen(static_cast<std::uint16_t>(bits - 1));
    const auto middle = static_cast<float>((static_cast<double>(below) + above) / 2);
    EXPECT(narrow(below) == low && narrow(-below) == (low | 0x8000U), "%x", bits);
    EXPECT(narrow(middle) == (bits % 2 == 0 ? low : high), "tie above %x", bits);
    EXPECT(narrow(std::nextafter(middle, 0.0F)) == low, "below the tie above %x", bits);
    EXPECT(narrow(std::nextafter(middle, INFINITY)) == high, "above the tie above %x", bits);
  }
}

void CheckSpecialValues() {
  EXPECT(std::isinf(FloatFromFloat16(0x7C00)) && std::isinf(FloatFromBfloat16(0x7F80)), "infinity");
  EXPECT(Float16FromFloat(-INFINITY) == 0xFC00 && Bfloat16FromFloat(-INFINITY) == 0xFF80, "infinity");
  EXPECT(Float16FromFloat(1e30F) == 0x7C00, "overflow");
  for (const std::uint32_t bits : {0x7F800001U, 0x7FC00000U, 0x7FFFFFFFU, 0xFF800001U}) {
    EXPECT(std::isnan(FloatFromFloat16(Float16FromFloat(FromBits(bits)))), "%x", bits);
    EXPECT(std::isnan(FloatFromBfloat16(Bfloat16FromFloat(FromBits(bits)))), "%x", bits);
  }
  EXPECT(FloatFromFloat16(0x0001) == std::ldexp(1.0F, -24) && FloatFromFloat16(0x3C00) == 1.0F, "known values");
  EXPECT(MaxFinite(DType::kFloat16) == 65504.0F && MaxFinite(DType::kBfloat16) == FloatFromBfloat16(0x7F7F), "max");
}

}  // namespace
}  // namespace zcomm

int main() {
  zcomm::CheckRounding(zcomm::FloatFromFloat16, zcomm::Float16FromFloat, 0x7C00);
  zcomm::CheckRounding(zcomm::FloatFromBfloat16, zcomm::Bfloat16FromFloat, 0x7F80);
  zcomm::CheckSpecialValues();
  std::puts("ok");
  return 0;
}
