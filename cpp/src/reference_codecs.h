#pragma once

#include <cstdint>
#include <vector>

#include "zcomm/message_layout.h"

namespace zcomm {

// The codecs in scalar arithmetic, one block at a time, in the order of the numerics contract
// (zcomm/_formats/reference.py). All oracles use them. They share no code with the vector kernels, so that a mistake in
// one cannot hide in the other.

// The code of a scaled value, and the level of a code, of which only the low bits count. Each codec has its own, in
// reference_codec_<name>.cc. `uniform` is null, or a random number for the codecs that can round stochastically.
template <Codec kCodec>
int CodeRef(float y, const float* uniform);
template <Codec kCodec>
float LevelRef(int code);

#define ZCOMM_CODEC(id, ...)                             \
  template <>                                            \
  int CodeRef<Codec::id>(float y, const float* uniform); \
  template <>                                            \
  float LevelRef<Codec::id>(int code);
#include "zcomm/codecs.def"

// The header's bits, and one code for each element (in the low bits).
struct EncodedBlock {
  std::uint32_t header;
  std::vector<int> codes;
};

// `uniform` has one random number for each element, or is empty: rounding to nearest.
EncodedBlock EncodeBlockRef(Codec codec, const std::vector<float>& values, const std::vector<float>& uniform);

// Values in the finite range of float32, or NaN.
std::vector<float> DecodeBlockRef(Codec codec, const EncodedBlock& block);

// The Hadamard butterflies of a block of 2^k values, without scaling.
void RotateRef(std::vector<float>* values);

// Clamps to +-limit; a NaN stays a NaN.
float ClampRef(float value, float limit);

}  // namespace zcomm
