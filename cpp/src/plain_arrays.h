// Plain arrays: conversion, arithmetic, copies that bypass the caches.

template <class In, class Out>
void Convert(const void* __restrict data, std::size_t numel, void* __restrict out_data) {
  if constexpr (std::is_same_v<In, Out>) {
    std::memcpy(out_data, data, numel * sizeof(Out));
  } else {
    const In* in = static_cast<const In*>(data);
    Out* out = static_cast<Out*>(out_data);
    std::size_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) Store(out + i, Load(in + i));
    In rest[kLanes] = {};
    Out converted[kLanes];
    std::memcpy(rest, in + i, (numel - i) * sizeof(In));
    Store(converted, Load(rest));
    std::memcpy(out + i, converted, (numel - i) * sizeof(Out));
  }
}

template <class In>
constexpr void AddConversions(BlockKernels* table, std::size_t from) {
  table->convert[from][0] = Convert<In, float>;
  table->convert[from][1] = Convert<In, Bfloat16>;
  table->convert[from][2] = Convert<In, Float16>;
}

// `value > limit ? limit : value` keeps a NaN.
void Scale(float* values, std::size_t numel, float factor, float limit) {
  for (std::size_t i = 0; i < numel; ++i) {
    const float value = values[i] * factor;
    const float below = value > limit ? limit : value;
    values[i] = below < -limit ? -limit : below;
  }
}

void Add(float* __restrict sum, const float* __restrict terms, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) sum[i] += terms[i];
}

void Subtract(float* __restrict values, const float* __restrict terms, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) values[i] -= terms[i];
}

void Divide(float* values, std::size_t numel, float divisor) {
  for (std::size_t i = 0; i < numel; ++i) values[i] /= divisor;
}

// Whole cache lines by non-temporal stores, the ragged ends by ordinary ones.
void Stream(void* out, const void* in, std::size_t nbytes) {
  constexpr std::size_t kLine = 64;
  auto* to = static_cast<std::uint8_t*>(out);
  const auto* from = static_cast<const std::uint8_t*>(in);
  const std::size_t head = Min(nbytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  const std::size_t lines = (nbytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  StreamLines(to + head, from + head, lines);
  std::memcpy(to + head + lines, from + head + lines, nbytes - head - lines);
}
