// The oracle of the optimizer steps: element by element, as zcomm/optimizer_step.h defines them.

#include <cmath>
#include <cstring>
#include <vector>

#include "float_mode.h"
#include "zcomm/float_formats.h"
#include "zcomm/optimizer_step.h"

namespace zcomm {
namespace {

struct Element {
  float p;
  float m;
  float v;
  float w;
};

void StepAdam(const StepOptions& o, float g, bool adds_decay, bool has_largest, Element* e) {
  if (adds_decay) g = g + o.weight_decay * e->p;
  if (!adds_decay) e->p = e->p * o.keep;
  e->m = e->m + (g - e->m) * o.mix1;
  e->v = e->v * o.beta2 + (o.mix2 * g) * g;
  if (has_largest && !std::isnan(e->w)) e->w = e->w >= e->v ? e->w : e->v;
  e->p = e->p - (o.rate * e->m) / (std::sqrt(has_largest ? e->w : e->v) * o.inverse_root + o.eps);
}

void StepLion(const StepOptions& o, float g, Element* e) {
  const float c = e->m * o.beta1 + g * o.mix1;
  const float sign = std::isnan(c) ? c : static_cast<float>((c > 0) - (c < 0));
  e->p = e->p * o.keep - o.rate * sign;
  e->m = e->m * o.beta2 + g * o.mix2;
}

void StepAdagrad(const StepOptions& o, float g, Element* e) {
  g = g + o.weight_decay * e->p;
  e->m = e->m + g * g;
  e->p = e->p - (o.rate * g) / (std::sqrt(e->m) + o.eps);
}

float Get(DType dtype, const void* data, std::size_t i) { return data == nullptr ? 0.0F : LoadElement(dtype, data, i); }

std::uint16_t RoundAtRandom(float value, float uniform) {
  if (std::isnan(value) || std::isinf(value)) return Bfloat16FromFloat(value);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  const std::uint32_t cut = bits & 0xFFFF;
  const bool up = std::floor(uniform / 256.0F) + static_cast<float>(cut) >= 65536.0F;
  return static_cast<std::uint16_t>((bits >> 16) + (up ? 1 : 0));
}

// One moment of the whole shard, as float32 during the step.
class Moment {
 public:
  Moment(void* data, const Shard& shard, std::uint32_t which) : data_(data), shard_(shard), which_(which) {
    if (data == nullptr) return;
    values_.resize(shard.numel);
    for (std::size_t i = 0; i < shard.numel; ++i) values_[i] = LoadElement(shard.moment_dtype, data, i);
  }

  float Get(std::size_t i) const { return data_ == nullptr ? 0.0F : values_[i]; }
  void Set(std::size_t i, float value) {
    if (data_ != nullptr) values_[i] = value;
  }

  void Store(const std::optional<Draw>& draw) {
    if (data_ == nullptr) return;
    if (shard_.moment_dtype == DType::kFloat32) {
      for (std::size_t i = 0; i < shard_.numel; ++i) StoreElement(DType::kFloat32, data_, i, values_[i]);
      return;
    }
    Draw own = *draw;
    own.tensor += which_;
    for (std::size_t i = 0; i < shard_.numel; ++i) {
      static_cast<std::uint16_t*>(data_)[i] = RoundAtRandom(values_[i], Uniform24(own, i));
    }
  }

 private:
  void* data_;
  const Shard& shard_;
  std::uint32_t which_;
  std::vector<float> values_;
};

}  // namespace

void OptimizerStepRef(const StepOptions& options, const Shard& shard, const std::optional<Draw>& draw) {
  const IeeeFloatMode ieee;
  Moment moment1(shard.moment1, shard, 0);
  Moment moment2(shard.moment2, shard, 1);
  for (std::size_t i = 0; i < shard.numel; ++i) {
    const float g = LoadElement(shard.grad_dtype, shard.grad, i) * options.grad_factor;
    Element e{shard.param[i], moment1.Get(i), moment2.Get(i), Get(DType::kFloat32, shard.largest, i)};
    const bool is_adam = options.rule == Rule::kAdam || options.rule == Rule::kAdamW;
    if (is_adam) StepAdam(options, g, options.rule == Rule::kAdam, shard.largest != nullptr, &e);
    if (options.rule == Rule::kAdagrad) StepAdagrad(options, g, &e);
    if (options.rule == Rule::kLion) StepLion(options, g, &e);
    if (options.rule == Rule::kTraffic) e = {e.p + g, e.m + g, e.v + g, e.w};
    shard.param[i] = e.p;
    moment1.Set(i, e.m);
    moment2.Set(i, e.v);
    if (shard.largest != nullptr) shard.largest[i] = e.w;
    if (shard.out != nullptr) StoreElement(shard.out_dtype, shard.out, i, e.p);
  }
  moment1.Store(draw);
  moment2.Store(draw);
}

}  // namespace zcomm
