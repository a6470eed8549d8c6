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

// A factor as two elements in one word, the larger one in the lower half. Their sum is within 2^-16 of it in
// bfloat16; in float16 within 2^-22 of a factor below 2, or 2^-25.
template <typename T>
__device__ __forceinline__ uint32_t split(float value) {
  const T high = round_to<T>(value);
  return pack(high, round_to<T>(value - to_sum(high)));
}

// The lower or upper halves of two words, in one instruction.
__device__ __forceinline__ uint32_t halves(uint32_t first, uint32_t second, bool upper) {
#ifdef HSTREE_CUDA_EMULATION
  return upper ? first >> 16 | (second & 0xffff0000u) : (first & 0xffffu) | second << 16;
#else
  return __byte_perm(first, second, upper ? 0x7632 : 0x5410);
#endif
}

}  // namespace hstree
