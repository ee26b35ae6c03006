// The Hadamard rotation of blocks of 2^k elements: butterflies of stride 1, 2, 4, ... (N7 of
// zcomm/_formats/reference.py). Butterflies of one stride are independent, so that several strides can be done between
// one load and one store.

// (a + b, a - b) of lanes j and j + kStride. The lanes with bit kStride set are b, and negate their own value.
template <std::size_t kStride>
inline F ButterflyLanes(F value) {
  std::int32_t signs[kLanes];
  for (std::size_t j = 0; j < kLanes; ++j) signs[j] = (j & kStride) != 0 ? INT32_MIN : 0;
  I sign;
  std::memcpy(&sign, signs, sizeof(sign));
  return SwapLanes<kStride>(value) + FloatOf(BitsOf(value) ^ sign);
}

// Strides 1 .. block / 2 within a vector; block <= kLanes.
template <std::size_t kStride = 1>
inline F RotateLanes(F value, std::size_t block) {
  if constexpr (kStride == kLanes) {
    return value;
  } else {
    return kStride < block ? RotateLanes<2 * kStride>(ButterflyLanes<kStride>(value), block) : value;
  }
}

inline void Butterfly(F* a, F* b) {
  const F sum = *a + *b;
  *b = *a - *b;
  *a = sum;
}

// Strides 1 .. kVectors * kLanes / 2 over kVectors vectors in registers.
template <std::size_t kVectors>
inline void RotateVectors(float* values) {
  F v[kVectors];
  for (std::size_t j = 0; j < kVectors; ++j) v[j] = RotateLanes(Load(values + j * kLanes), kLanes);
  for (std::size_t stride = 1; stride < kVectors; stride *= 2) {
    for (std::size_t j = 0; j < kVectors; ++j) {
      if ((j & stride) == 0) Butterfly(&v[j], &v[j + stride]);
    }
  }
  for (std::size_t j = 0; j < kVectors; ++j) Store(values + j * kLanes, v[j]);
}

// Rotates blocks shorter than a vector.
inline void RotateShort(float* values, std::size_t numel, std::size_t block) {
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) Store(values + i, RotateLanes(Load(values + i), block));
  float padded[kLanes] = {};
  std::memcpy(padded, values + i, (numel - i) * sizeof(float));
  Store(padded, RotateLanes(Load(padded), block));
  std::memcpy(values + i, padded, (numel - i) * sizeof(float));
}

// Rotates one block of at least a vector.
template <std::size_t kVectors>
inline void RotateLong(float* values, std::size_t block) {
  for (std::size_t i = 0; i < block; i += kVectors * kLanes) RotateVectors<kVectors>(values + i);
  for (std::size_t stride = kVectors * kLanes; stride < block; stride *= 2) {
    for (std::size_t i = 0; i < block; i += 2 * stride) {
      for (std::size_t j = i; j < i + stride; j += kLanes) {
        F a = Load(values + j);
        F b = Load(values + j + stride);
        Butterfly(&a, &b);
        Store(values + j, a);
        Store(values + j + stride, b);
      }
    }
  }
}

// `numel` is a multiple of `block`, a power of two.
void Rotate(float* values, std::size_t numel, std::size_t block) {
  if (block < kLanes) return RotateShort(values, numel, block);
  for (std::size_t i = 0; i < numel; i += block) {
    if (block % (8 * kLanes) == 0) {
      RotateLong<8>(values + i, block);
    } else if (block % (4 * kLanes) == 0) {
      RotateLong<4>(values + i, block);
    } else {
      RotateLong<1>(values + i, block);
    }
  }
}
