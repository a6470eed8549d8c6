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

// Factors [Items, 16] in float32 as the first operand of mma, each as two elements of type T, high + low, times
// the scale of its item: a power of 2 that brings the item's largest factor to [1, 2). high + low is within
// 2^-16 of a factor in bfloat16, in float16 within 2^-22 of it or 2^-24 of the largest. In shared memory.
template <typename T, int Items>
struct SplitFactors {
  static constexpr int words = 8 + 4;  // of 16 factors, padded so that the banks of 8 items differ
  uint32_t high[Items][words], low[Items][words];
  float scale[Items];

  // Called by whole warps: lane r of 16 has factor r of item k.
  __device__ __forceinline__ void set(int k, int r, float value) {
    float largest = fabsf(value);
#pragma unroll
    for (int bits = 8; bits > 0; bits /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, bits));
    }
    const Scale by = scale_of(largest);
    const uint32_t own = split<T>(value * by.inverse);
    const uint32_t next = __shfl_xor_sync(all_lanes, own, 1);
    if (r % 2 == 0) {
      high[k][r / 2] = (own & 0xffffu) | next << 16;
      low[k][r / 2] = own >> 16 | (next & 0xffff0000u);
    }
    if (r == 0) scale[k] = by.back;
  }

  __device__ __forceinline__ float sum(int k) const {
    float sum = 0;
    for (int word = 0; word < 8; ++word) sum += unpack_sum<T>(high[k][word]) + unpack_sum<T>(low[k][word]);
    return sum * scale[k];
  }

  // The operands of items first ... first + 15.
  __device__ __forceinline__ void operands(int first, uint32_t (&high_part)[4],
                                           uint32_t (&low_part)[4]) const {
    const int above = first + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high_part[i] = high[above + i % 2 * 8][t + i / 2 * 4];
      low_part[i] = low[above + i % 2 * 8][t + i / 2 * 4];
    }
  }
};

}  // namespace hstree
