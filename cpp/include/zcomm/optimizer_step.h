#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "zcomm/arrays.h"
#include "zcomm/random.h"

namespace zcomm {

// The update rules: float32, in the order written, without fused multiply-adds. ^ marks state that is kept from step to
// step. g below is grad_factor * gradient, in one multiplication.
//
//   kAdam     g += weight_decay * p, then as kAdamW with keep = 1
//   kAdamW    p *= keep;  m^ += (g - m) * mix1;  v^ = v * beta2 + (mix2 * g) * g;  [w^ = max(w, v), in place of v]
//             p -= (rate * m) / (sqrt(v) * inverse_root + eps)
//   kAdagrad  g += weight_decay * p;  m^ += g * g;  p -= (rate * g) / (sqrt(m) + eps)
//   kLion     c = m * beta1 + g * mix1;  p = p * keep - rate * sign(c);  m^ = m * beta2 + g * mix2
//   kTraffic  p += g;  m^ += g;  v^ += g: the memory traffic of Adam with almost no arithmetic, for benchmarks
enum class Rule : int { kAdam = 0, kAdamW = 1, kAdagrad = 2, kLion = 3, kTraffic = 4 };

inline constexpr std::size_t kNumRules = 5;

constexpr bool HasSecondMoment(Rule rule) { return rule <= Rule::kAdamW || rule == Rule::kTraffic; }

struct StepOptions {
  Rule rule;
  float grad_factor;
  float weight_decay;
  float keep;
  float rate;
  float beta1;
  float mix1;
  float beta2;
  float mix2;
  float eps;
  float inverse_root;
};

// Arrays of `numel` elements each, aligned to their element type. They must not overlap. Not owned.
struct Shard {
  std::size_t numel;
  float* param;      // float32 master weights
  const void* grad;  // of grad_dtype
  DType grad_dtype;
  void* moment1;       // m, of moment_dtype
  void* moment2;       // v, of moment_dtype; null unless HasSecondMoment
  DType moment_dtype;  // kFloat32, or kBfloat16, rounded stochastically by `draw`
  float* largest;      // w of amsgrad; null without amsgrad
  void* out;           // receives the new parameter in out_dtype, rounded to nearest even; null: not written
  DType out_dtype;
};

// One step of the whole shard. bfloat16 moments are rounded stochastically: a change of v is often smaller than half a
// bfloat16 step, and rounding to nearest would lose it every time. Element e of moment1 takes word e of `draw`; moment2
// takes the same words under draw's next tensor number. Throws std::invalid_argument before anything is written.
// Thread-safe. The bits do not depend on num_threads, the ISA level or denormal modes; NaNs count as equal.
void OptimizerStep(const StepOptions& options, const Shard& shard, const std::optional<Draw>& draw,
                   std::size_t num_threads);

// The oracle of tests: the same bits, scalar and single-threaded.
void OptimizerStepRef(const StepOptions& options, const Shard& shard, const std::optional<Draw>& draw);

}  // namespace zcomm
