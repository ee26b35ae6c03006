#pragma once

#include <cstdint>
#include <vector>

#include "zcomm/message_layout.h"

namespace zcomm {

// The codecs in scalar arithmetic, a block at a time, in the order of the numerics contract (zcomm/_formats/reference.py): shared by
// the oracles, and sharing nothing with the vector kernels.

// The header's bits, and one code an element (its low bits count).
struct EncodedBlock {
  std::uint32_t header;
  std::vector<int> codes;
};

// `uniform`: one random number an element, or empty for rounding to nearest.
EncodedBlock EncodeBlockRef(Codec codec, const std::vector<float>& values, const std::vector<float>& uniform);

// Values in the finite range of float32, or NaN.
std::vector<float> DecodeBlockRef(Codec codec, const EncodedBlock& block);

// The butterflies of a block of 2^k values.
void RotateRef(std::vector<float>* values);

// To +-limit; a NaN stays one.
float ClampRef(float value, float limit);

}  // namespace zcomm
