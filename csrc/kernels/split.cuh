// Factors in float32 as sums of two elements of bfloat16 or float16, for matrix instructions.
#pragma once

#include "mma.cuh"

namespace hstree {

// The power of 2 that brings a magnitude to [1, 2), and its reciprocal.
struct Scale {
  float inverse, back;
};
__device__ __forceinline__ Scale scale_of(float largest) {
  uint32_t bits;
  memcpy(&bits, &largest, sizeof bits);
  uint32_t exponent = bits >> 23;
  exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
  Scale scale;
  bits = (254 - exponent) << 23;
  memcpy(&scale.inverse, &bits, sizeof bits);
  bits = exponent << 23;
  memcpy(&scale.back, &bits, sizeof bits);
  return scale;
}

// high + low is within 2^-16 of a factor below 2 in bfloat16, in float16 within 2^-22 of it or 2^-24.
template <typename T>
__device__ __forceinline__ void split(float first, float second, uint32_t& high, uint32_t& low) {
  const T a = round_to<T>(first), b = round_to<T>(second);
  high = pack(a, b);
  low = pack(round_to<T>(first - to_sum(a)), round_to<T>(second - to_sum(b)));
}

// The lower or the upper halves of two words.
__device__ __forceinline__ uint32_t halves(uint32_t first, uint32_t second, bool upper) {
  return upper ? first >> 16 | (second & 0xffff0000u) : (first & 0xffffu) | second << 16;
}

}  // namespace hstree
