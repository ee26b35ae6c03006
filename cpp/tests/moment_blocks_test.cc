#include "zcomm/moment_blocks.h"

#include <cmath>
#include <limits>

#include "block_kernels.h"
#include "test_util.h"

namespace zcomm {
namespace {

constexpr MomentKind kKinds[] = {MomentKind::kSigned, MomentKind::kNonNegative};
constexpr float kHalf = 1 << 23;

// Magnitudes over many orders, zeros, the least and the largest numbers.
std::vector<float> Values(MomentKind kind, std::size_t numel, float spread, Random* random) {
  std::vector<float> values(numel);
  for (float& value : values) {
    value = random->Uniform() * std::exp2(spread * random->Uniform());
    if (random->Below(50) == 0) value = 0.0F;
    if (kind == MomentKind::kNonNegative) value = std::fabs(value);
  }
  return values;
}

std::vector<float> Uniforms(std::size_t numel, Random* random) {
  std::vector<float> uniform(numel);
  for (float& u : uniform) u = static_cast<float>(random->Below(1 << 24));
  return uniform;
}

std::vector<std::uint8_t> Encoded(MomentKind kind, const std::vector<float>& values,
                                  const std::vector<float>& uniform) {
  std::vector<std::uint8_t> records(MomentRecordsNbytes(values.size()), 0xAB);
  ActiveKernels().encode_moments[static_cast<int>(kind)](values.data(), uniform.data(), values.size(), records.data());
  std::vector<std::uint8_t> expected(records.size(), 0xCD);
  EncodeMomentsRef(kind, values.data(), uniform.data(), values.size(), expected.data());
  EXPECT(records == expected, "records of %zu", values.size());
  return records;
}

std::vector<float> Decoded(MomentKind kind, const std::vector<std::uint8_t>& records, std::size_t numel) {
  std::vector<float> values(numel);
  ActiveKernels().decode_moments[static_cast<int>(kind)](records.data(), numel, values.data());
  std::vector<float> expected(numel);
  DecodeMomentsRef(kind, records.data(), numel, expected.data());
  EXPECT(numel == 0 || std::memcmp(values.data(), expected.data(), numel * sizeof(float)) == 0, "values of %zu", numel);
  return values;
}

// The distance of the levels around y, in units of the largest: y lies between (c / n)^2 and ((c + 1) / n)^2.
double Step(MomentKind kind, double y, double largest) {
  const double n = kind == MomentKind::kSigned ? 127 : 255;
  const double c = std::floor(n * std::sqrt(y / largest) * (1 - 1e-6));
  return (2 * c + 1) / (n * n) * largest;
}

void TestErrorIsBelowAStep() {
  Random random(1);
  for (const MomentKind kind : kKinds) {
    const auto root = [&](double x) { return kind == MomentKind::kSigned ? std::fabs(x) : std::sqrt(x); };
    for (const std::size_t numel : {0, 1, 15, 255, 256, 257, 5000}) {
      for (const float spread : {0.0F, 5.0F, 60.0F}) {
        const std::vector<float> x = Values(kind, numel, spread, &random);
        const std::vector<float> got = Decoded(kind, Encoded(kind, x, Uniforms(numel, &random)), numel);
        for (std::size_t i = 0; i < numel; ++i) {
          const std::size_t first = i / kMomentBlock * kMomentBlock;
          double largest = kLeastScale;
          for (std::size_t j = first; j < std::min(first + kMomentBlock, numel); ++j) {
            largest = std::max(largest, root(x[j]));
          }
          const double error = std::fabs(root(got[i]) - root(x[i]));
          EXPECT(error <= Step(kind, root(x[i]), largest) * (1 + 1e-4), "%g became %g", x[i], got[i]);
          EXPECT(root(x[i]) < largest || std::fabs(got[i] - x[i]) <= 2e-7 * std::fabs(x[i]) + 1e-27, "%g, %g", x[i],
                 got[i]);
          EXPECT(kind == MomentKind::kSigned || (got[i] > 0) == (x[i] > 0), "%g became %g", x[i], got[i]);
          EXPECT(got[i] * x[i] >= 0, "%g became %g", x[i], got[i]);
        }
      }
    }
  }
}

void TestDecodedGetsTheSameRecord() {
  Random random(2);
  for (const MomentKind kind : kKinds) {
    for (const float spread : {0.0F, 10.0F, 70.0F}) {
      const std::size_t numel = 20000;
      const std::vector<float> x = Values(kind, numel, spread, &random);
      const std::vector<std::uint8_t> records = Encoded(kind, x, Uniforms(numel, &random));
      const std::vector<float> half(numel, kHalf);
      EXPECT(Encoded(kind, Decoded(kind, records, numel), half) == records, "spread %g", spread);
    }
  }
}

void TestExtremes() {
  constexpr float kLargest = std::numeric_limits<float>::max();
  constexpr float kSmallest = std::numeric_limits<float>::denorm_min();
  const std::vector<float> half(3, kHalf);
  const std::vector<float> zero(3, (1 << 24) - 1.0F);  // never up
  for (const MomentKind kind : kKinds) {
    EXPECT(Decoded(kind, Encoded(kind, {0, 0, 0}, half), 3) == (std::vector<float>{0, 0, 0}), "zeros");
    EXPECT(Decoded(kind, std::vector<std::uint8_t>(MomentRecordsNbytes(3)), 3) == (std::vector<float>{0, 0, 0}),
           "a record of zeros");
    const float largest = Decoded(kind, Encoded(kind, {kLargest, 1, 0}, half), 3)[0];
    EXPECT(std::isfinite(largest) && largest >= kLargest * 0.999999F, "%g", largest);
    for (const float broken : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      for (const float value : Decoded(kind, Encoded(kind, {1, broken, 0}, half), 3)) {
        EXPECT(std::isnan(value), "%g hides %g", value, broken);
      }
    }
  }
  const std::vector<float> second =
      Decoded(MomentKind::kNonNegative, Encoded(MomentKind::kNonNegative, {1, kSmallest, 0}, zero), 3);
  EXPECT(second[1] > 1e-10F && second[2] == 0, "%g %g", second[1], second[2]);
  const float least =
      Decoded(MomentKind::kNonNegative, Encoded(MomentKind::kNonNegative, {kSmallest, 0, 0}, zero), 3)[0];
  EXPECT(least >= std::numeric_limits<float>::min(), "%g", least);
  EXPECT(std::isnan(Decoded(MomentKind::kNonNegative, Encoded(MomentKind::kNonNegative, {-1, 1, 0}, half), 3)[1]),
         "a negative sum of squares");
}

// The mean of many roundings of a block is the block.
void TestRoundingHasNoBias() {
  constexpr int kNumTrials = 4000;
  Random random(3);
  for (const MomentKind kind : kKinds) {
    std::vector<float> x = Values(kind, kMomentBlock, 3.0F, &random);
    x[0] = 8.0F;
    std::vector<double> sum(x.size());
    std::vector<double> squares(x.size());
    for (int trial = 0; trial < kNumTrials; ++trial) {
      const std::vector<float> got = Decoded(kind, Encoded(kind, x, Uniforms(x.size(), &random)), x.size());
      for (std::size_t i = 0; i < x.size(); ++i) {
        sum[i] += got[i];
        squares[i] += (got[i] - static_cast<double>(x[i])) * (got[i] - static_cast<double>(x[i]));
      }
    }
    const double first_level = kind == MomentKind::kSigned ? 0.0 : 8.0 / std::pow(255.0, 4);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double deviation = std::sqrt(squares[i]) / kNumTrials;
      const double allowed = 5 * deviation + 1e-6 * std::fabs(x[i]);
      EXPECT(x[i] <= first_level || std::fabs(sum[i] / kNumTrials - x[i]) <= allowed || kind == MomentKind::kSigned,
             "%g is %g in the mean", x[i], sum[i] / kNumTrials);
      EXPECT(kind != MomentKind::kSigned || std::fabs(sum[i] / kNumTrials - x[i]) <= allowed, "%g is %g in the mean",
             x[i], sum[i] / kNumTrials);
    }
  }
}

}  // namespace
}  // namespace zcomm

int main() {
  zcomm::TestErrorIsBelowAStep();
  zcomm::TestDecodedGetsTheSameRecord();
  zcomm::TestExtremes();
  zcomm::TestRoundingHasNoBias();
  return 0;
}
