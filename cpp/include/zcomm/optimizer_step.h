#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "zcomm/arrays.h"
#include "zcomm/moment_blocks.h"
#include "zcomm/random.h"

namespace zcomm {

// How a step moves a parameter. In float32, in the order written, without fused multiply-adds; ^ marks what is held
// from step to step. g below is grad_factor * gradient, in one multiplication.
//
//   kAdam     g += weight_decay * p, then as kAdamW with keep = 1
//   kAdamW    p *= keep;  m^ += (g - m) * mix1;  v^ = v * beta2 + (mix2 * g) * g;  [w^ = max(w, v), in place of v]
//             p -= (rate * m) / (sqrt(v) * inverse_root + eps)
//   kAdagrad  g += weight_decay * p;  m^ += g * g;  p -= (rate * g) / (sqrt(m) + eps)
//   kLion     c = m * beta1 + g * mix1;  p = p * keep - rate * sign(c);  m^ = m * beta2 + g * mix2
//   kTraffic  p += g;  m^ += g;  v^ += g: the memory traffic of Adam and next to no arithmetic, a bound for benchmarks
enum class Rule : int { kAdam = 0, kAdamW = 1, kAdagrad = 2, kLion = 3, kTraffic = 4 };

inline constexpr std::size_t kNumRules = 5;

constexpr bool HasSecondMoment(Rule rule) { return rule <= Rule::kAdamW || rule == Rule::kTraffic; }

// Which moments are sums of squares.
constexpr MomentKind KindOfFirstMoment(Rule rule) {
  return rule == Rule::kAdagrad ? MomentKind::kNonNegative : MomentKind::kSigned;
}
inline constexpr MomentKind kKindOfSecondMoment = MomentKind::kNonNegative;

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

// `numel` elements each, aligned to their element type, not overlapping, not owned.
struct Shard {
  std::size_t numel;
  float* param;      // float32 master weights
  const void* grad;  // of grad_dtype
  DType grad_dtype;
  void* moment1;               // m, of moment_format
  void* moment2;               // v, of moment_format; null unless HasSecondMoment
  MomentFormat moment_format;  // but for kFloat32 rounded stochastically by `draw`
  float* largest;              // w of amsgrad; null: no amsgrad
  void* out;                   // null, or where the new parameter goes in out_dtype, rounded to nearest even
  DType out_dtype;
};

// One step of the whole shard. Moments that are not float32 take word e of `draw` for element e of moment1, and of
// moment2 under draw's next tensor number: v may change by less than their step, which rounding to nearest would lose.
// Throws std::invalid_argument before it writes anything.
void OptimizerStep(const StepOptions& options, const Shard& shard, const std::optional<Draw>& draw,
                   std::size_t num_threads);

// The same bits: scalar, single-threaded.
void OptimizerStepRef(const StepOptions& options, const Shard& shard, const std::optional<Draw>& draw);

}  // namespace zcomm
