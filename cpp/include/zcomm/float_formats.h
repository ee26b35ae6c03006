#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/arrays.h"

namespace zcomm {

// Scalar conversions between float32 and the 16-bit formats: to nearest, ties to even, overflow to infinity. A NaN
// stays a NaN, but its payload is lost. The processor's denormal modes do not matter. The vector kernels must give
// these bits.
float FloatFromBfloat16(std::uint16_t bits);
std::uint16_t Bfloat16FromFloat(float value);
float FloatFromFloat16(std::uint16_t bits);
std::uint16_t Float16FromFloat(float value);

// The largest finite value of a type.
float MaxFinite(DType dtype);

// Element `index` of an array, converted to or from float32.
float LoadElement(DType dtype, const void* data, std::size_t index);
void StoreElement(DType dtype, void* data, std::size_t index, float value);

}  // namespace zcomm
