#include "zcomm/optimizer_step.h"

#include <cmath>

#include "test_util.h"

namespace zcomm {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBfloat16, DType::kFloat16};
constexpr std::size_t kSizes[] = {0, 1, 15, 16, 17, 1023, 1024, 1025, 100'003};

struct Case {
  Rule rule;
  DType grad_dtype;
  DType moment_dtype;
  DType out_dtype;
  bool has_out;
  bool amsgrad;
  std::size_t numel;
  std::size_t offset;  // elements by which the arrays are off their allocations' alignment
};

struct Arrays {
  std::vector<float> param;
  std::vector<std::uint8_t> grad;
  std::vector<std::uint8_t> moment1;
  std::vector<std::uint8_t> moment2;
  std::vector<float> largest;
  std::vector<std::uint8_t> out;

  Arrays(const Case& c, Kind kind, Random* random) {
    const std::size_t numel = c.numel + c.offset;
    param.resize(numel);
    largest.resize(numel);
    grad.resize(numel * ItemSize(c.grad_dtype));
    moment1.resize(numel * ItemSize(c.moment_dtype));
    moment2.resize(numel * ItemSize(c.moment_dtype));
    out.resize(numel * ItemSize(c.out_dtype));
    for (std::size_t i = 0; i < numel; ++i) {
      param[i] = random->Uniform();
      largest[i] = random->Uniform() * random->Uniform();
      StoreElement(c.grad_dtype, grad.data(), i, Sample(kind, i, random));
    }
    for (std::size_t i = 0; i < numel; ++i) {
      const float first = random->Uniform();
      StoreElement(c.moment_dtype, moment1.data(), i, c.rule == Rule::kAdagrad ? std::fabs(first) : first);
      StoreElement(c.moment_dtype, moment2.data(), i, std::fabs(random->Uniform()));
    }
  }

  Shard MakeShard(const Case& c) {
    const auto at = [&](std::vector<std::uint8_t>& data, DType dtype) {
      return data.data() + c.offset * ItemSize(dtype);
    };
    return {c.numel,
            param.data() + c.offset,
            at(grad, c.grad_dtype),
            c.grad_dtype,
            at(moment1, c.moment_dtype),
            HasSecondMoment(c.rule) ? at(moment2, c.moment_dtype) : nullptr,
            c.moment_dtype,
            c.amsgrad ? largest.data() + c.offset : nullptr,
            c.has_out ? at(out, c.out_dtype) : nullptr,
            c.out_dtype};
  }
};

StepOptions MakeOptions(Rule rule) {
  return {rule, 0.125F, 0.01F, 0.999F, 1e-3F, 0.9F, 0.1F, 0.95F, 0.05F, 1e-8F, 1.7F};
}

template <class T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// NaN payloads depend on the operand order that the compiler chooses: all NaNs count as equal.
bool SameValues(DType dtype, const void* a, const void* b, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const float x = LoadElement(dtype, a, i);
    const float y = LoadElement(dtype, b, i);
    if (!(std::isnan(x) && std::isnan(y)) && std::memcmp(&x, &y, sizeof(x)) != 0) return false;
  }
  return true;
}

void Compare(const Case& c, Kind kind, Random* random) {
  const StepOptions options = MakeOptions(c.rule);
  const std::optional<Draw> draw = Draw{7, 11, 3, 0, 1, 5};
  Arrays expected(c, kind, random);
  Arrays got = expected;
  OptimizerStepRef(options, expected.MakeShard(c), draw);
  OptimizerStep(options, got.MakeShard(c), draw, 1 + random->Below(3));
  const std::size_t numel = c.numel + c.offset;
  const auto context = [&](const char* what) {
    return std::string(what) + ": rule " + std::to_string(static_cast<int>(c.rule)) + ", numel " +
           std::to_string(c.numel) + ", kind " + std::to_string(static_cast<int>(kind));
  };
  EXPECT(SameValues(DType::kFloat32, expected.param.data(), got.param.data(), numel), "%s", context("param").c_str());
  EXPECT(SameBits(expected.grad, got.grad), "%s", context("grad").c_str());
  EXPECT(SameValues(c.moment_dtype, expected.moment1.data(), got.moment1.data(), numel), "%s", context("m").c_str());
  EXPECT(SameValues(c.moment_dtype, expected.moment2.data(), got.moment2.data(), numel), "%s", context("v").c_str());
  EXPECT(SameValues(DType::kFloat32, expected.largest.data(), got.largest.data(), numel), "%s", context("w").c_str());
  EXPECT(SameValues(c.out_dtype, expected.out.data(), got.out.data(), numel), "%s", context("out").c_str());
}

void TestAllRules() {
  Random random(1);
  for (int rule = 0; rule < static_cast<int>(kNumRules); ++rule) {
    for (const DType grad_dtype : kDTypes) {
      for (const DType out_dtype : kDTypes) {
        for (const std::size_t numel : kSizes) {
          const Rule r = static_cast<Rule>(rule);
          const bool is_adam = r == Rule::kAdam || r == Rule::kAdamW;
          const Case c{r,         grad_dtype,           random.Below(2) == 0 ? DType::kFloat32 : DType::kBfloat16,
                       out_dtype, random.Below(3) != 0, is_adam && random.Below(2) == 0,
                       numel,     random.Below(3)};
          Compare(c, static_cast<Kind>(random.Below(static_cast<std::uint32_t>(Kind::kNumKinds))), &random);
        }
      }
    }
  }
}

// Known numbers, worked out by hand.
void TestValues() {
  float p = 1.0F;
  float m = 0.0F;
  float v = 0.0F;
  const float g = 2.0F;
  Shard shard{1, &p, &g, DType::kFloat32, &m, &v, DType::kFloat32, nullptr, nullptr, DType::kFloat32};
  // g = 1, p = 0.75; m = 0.5, v = 0.25: p = 0.75 - 0.25 * 0.5 / (0.5 * 2 + 0)
  OptimizerStep({Rule::kAdamW, 0.5F, 9.0F, 0.75F, 0.25F, 0.5F, 0.5F, 0.75F, 0.25F, 0.0F, 2.0F}, shard, {}, 1);
  EXPECT(p == 0.625F && m == 0.5F && v == 0.25F, "p %g m %g v %g", p, m, v);
  p = 1.0F;
  m = 4.0F;
  shard.moment2 = nullptr;
  // c = 4 * 0.5 + 2 * 0.5 = 3; p = 0.5 - 0.125; m = 4 * 0.25 + 2 * 0.75
  OptimizerStep({Rule::kLion, 1.0F, 0.0F, 0.5F, 0.125F, 0.5F, 0.5F, 0.25F, 0.75F, 0.0F, 0.0F}, shard, {}, 1);
  EXPECT(p == 0.375F && m == 2.5F, "p %g m %g", p, m);
  // c = -0.25; -0 - 0 * -1 = +0. With c = 0.25, -0 - 0 * 1 stays -0.
  for (const float grad : {-0.5F, 0.5F}) {
    p = -0.0F;
    m = 0.0F;
    shard.grad = &grad;
    OptimizerStep({Rule::kLion, 1.0F, 0.0F, 1.0F, 0.0F, 0.5F, 0.5F, 0.25F, 0.75F, 0.0F, 0.0F}, shard, {}, 1);
    EXPECT(p == 0.0F && std::signbit(p) == (grad > 0.0F), "p %g after a step of length 0 down %g", p, grad);
  }
}

void TestBadArguments() {
  float x[3] = {};
  StepOptions options{Rule::kAdamW, 1, 0, 1, 1, 0, 1, 0, 1, 1, 1};
  Shard shard{2, x, x, DType::kFloat32, nullptr, nullptr, DType::kFloat32, nullptr, nullptr, DType::kFloat32};
  const auto message = [&] { return MessageOfThrow([&] { OptimizerStep(options, shard, {}, 1); }); };
  EXPECT(Contains(message(), "first moment"), "%s", message().c_str());
  shard.moment1 = x;
  EXPECT(Contains(message(), "second moment"), "%s", message().c_str());
  shard.moment2 = x;
  shard.moment_dtype = DType::kBfloat16;
  EXPECT(Contains(message(), "random numbers"), "%s", message().c_str());
  shard.moment_dtype = DType::kFloat16;
  EXPECT(Contains(message(), "moment_dtype=2"), "%s", message().c_str());
  shard.moment_dtype = DType::kFloat32;
  shard.param = reinterpret_cast<float*>(reinterpret_cast<char*>(x) + 1);
  EXPECT(Contains(message(), "aligned"), "%s", message().c_str());
  options.rule = static_cast<Rule>(5);
  EXPECT(Contains(message(), "rule=5"), "%s", message().c_str());
}

// The mean of many stochastic roundings is the value.
void TestStochasticRoundingHasNoBias() {
  constexpr std::size_t kNumel = 1 << 16;
  std::vector<float> p(kNumel, 0.0F);
  const std::vector<float> g(kNumel, 1.0F + 1.0F / 1024);  // between the bfloat16 neighbours 1 and 1 + 2^-7
  std::vector<std::uint16_t> m(kNumel);
  const Shard shard{kNumel,  p.data(),         g.data(), DType::kFloat32, m.data(),
                    nullptr, DType::kBfloat16, nullptr,  nullptr,         DType::kFloat32};
  OptimizerStep({Rule::kLion, 1, 0, 1, 1, 0, 1, 0, 1, 0, 0}, shard, Draw{1, 2, 3, 4, 5, 0}, 2);
  double sum = 0;
  for (const std::uint16_t bits : m) sum += FloatFromBfloat16(bits);
  const double mean = sum / kNumel;
  // One rounding has a standard deviation of 2^-7 * sqrt(1/8 * 7/8) = 0.0026; five of the mean's.
  EXPECT(std::fabs(mean - (1.0 + 1.0 / 1024)) < 5 * 0.0026 / 256, "mean %.8f", mean);
}

}  // namespace
}  // namespace zcomm

int main() {
  zcomm::TestAllRules();
  zcomm::TestValues();
  zcomm::TestBadArguments();
  zcomm::TestStochasticRoundingHasNoBias();
  return 0;
}
