// The update rules of zcomm/optimizer_step.h over float32 arrays: plain loops, which the compiler vectorizes at each
// level.

template <bool kAddsDecay, bool kHasLargest>
void StepAdam(const StepOptions& options, const StepArrays& arrays, std::size_t numel) {
  float* __restrict p = arrays.param;
  const float* __restrict grad = arrays.grad;
  float* __restrict m = arrays.moment1;
  float* __restrict v = arrays.moment2;
  float* __restrict w = arrays.largest;
  const StepOptions o = options;
  for (std::size_t i = 0; i < numel; ++i) {
    float g = grad[i] * o.grad_factor;
    if (kAddsDecay) g += o.weight_decay * p[i];
    const float start = kAddsDecay ? p[i] : p[i] * o.keep;
    const float first = m[i] + (g - m[i]) * o.mix1;
    float second = v[i] * o.beta2 + (o.mix2 * g) * g;
    m[i] = first;
    v[i] = second;
    if (kHasLargest) {
      second = second <= w[i] || w[i] != w[i] ? w[i] : second;  // a NaN stays
      w[i] = second;
    }
    p[i] = start - (o.rate * first) / (__builtin_sqrtf(second) * o.inverse_root + o.eps);
  }
}

template <bool kAddsDecay>
void StepAdam(const StepOptions& options, const StepArrays& arrays, std::size_t numel) {
  if (arrays.largest != nullptr) return StepAdam<kAddsDecay, true>(options, arrays, numel);
  return StepAdam<kAddsDecay, false>(options, arrays, numel);
}

void StepAdagrad(const StepOptions& options, const StepArrays& arrays, std::size_t numel) {
  float* __restrict p = arrays.param;
  const float* __restrict grad = arrays.grad;
  float* __restrict m = arrays.moment1;
  const StepOptions o = options;
  for (std::size_t i = 0; i < numel; ++i) {
    const float g = grad[i] * o.grad_factor + o.weight_decay * p[i];
    m[i] += g * g;
    p[i] -= (o.rate * g) / (__builtin_sqrtf(m[i]) + o.eps);
  }
}

void StepLion(const StepOptions& options, const StepArrays& arrays, std::size_t numel) {
  float* __restrict p = arrays.param;
  const float* __restrict grad = arrays.grad;
  float* __restrict m = arrays.moment1;
  const StepOptions o = options;
  for (std::size_t i = 0; i < numel; ++i) {
    const float g = grad[i] * o.grad_factor;
    const float c = m[i] * o.beta1 + g * o.mix1;
    const float down = c > 0.0F ? o.rate : 0.0F;
    const float step = c < 0.0F ? -o.rate : down;  // rate * sign(c), which is -0 if the rate is 0
    p[i] = p[i] * o.keep - (c != c ? c : step);
    m[i] = m[i] * o.beta2 + g * o.mix2;
  }
}

void StepTraffic(const StepOptions& options, const StepArrays& arrays, std::size_t numel) {
  float* __restrict p = arrays.param;
  const float* __restrict grad = arrays.grad;
  float* __restrict m = arrays.moment1;
  float* __restrict v = arrays.moment2;
  for (std::size_t i = 0; i < numel; ++i) {
    const float g = grad[i] * options.grad_factor;
    p[i] += g;
    m[i] += g;
    v[i] += g;
  }
}

// Rounds stochastically to bfloat16: up iff `uniform`, an integer below 2^24, is below the part that is cut off (scaled
// to 24 bits). Infinities stay, and a NaN stays a NaN.
void RoundAtRandom(const float* __restrict values, const float* __restrict uniform, std::size_t numel,
                   void* __restrict out_data) {
  auto* __restrict out = static_cast<std::uint16_t*>(out_data);
  for (std::size_t i = 0; i < numel; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    const std::uint32_t noise = static_cast<std::uint32_t>(static_cast<std::int32_t>(uniform[i])) >> 8;
    const std::uint32_t rounded =
        magnitude < 0x7F800000 ? bits + noise : bits | (magnitude > 0x7F800000 ? 0x400000 : 0);
    out[i] = static_cast<std::uint16_t>(rounded >> 16);
  }
}
