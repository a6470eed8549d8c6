// Matrix instructions for bfloat16 and float16, and the operands that they need.
#pragma once

#include "common.cuh"

namespace hstree {

template <typename T>
constexpr bool is_half = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

// Two elements in one register, the first in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(T first, T second) {
  static_assert(is_half<T>);
  uint16_t low, high;
  memcpy(&low, &first, sizeof low);
  memcpy(&high, &second, sizeof high);
  return uint32_t(high) << 16 | low;
}

// The sum of both.
template <typename T>
__device__ __forceinline__ float unpack_sum(uint32_t packed) {
  T first, second;
  memcpy(&first, &packed, sizeof first);
  packed >>= 16;
  memcpy(&second, &packed, sizeof second);
  return to_sum(first) + to_sum(second);
}

// c += a b for a warp: a [16, 16], b [16, 8] of type T, c [16, 8] float32. mma.m16n8k16 of the PTX manual;
// with g = lane / 4 and t = lane % 4 a lane holds
//   a: rows g, g + 8, g, g + 8 in columns 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9 (a[2], a[3])
//   b: column g in rows 2t, 2t + 1 (b[0]) and 2t + 8, 2t + 9 (b[1])
//   c: row g in columns 2t, 2t + 1 (c[0], c[1]), row g + 8 in the same (c[2], c[3])
// Called by whole warps. Products are exact and sums float32.
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(is_half<T>);
#ifdef HSTREE_CUDA_EMULATION
  emu::mma(c, a, b, [](uint16_t bits) {
    T element;
    memcpy(&element, &bits, sizeof element);
    return to_sum(element);
  });
#else
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
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
    uint32_t bits;
    memcpy(&bits, &largest, sizeof bits);
    uint32_t exponent = bits >> 23;
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    float inverse, back;
    bits = (254 - exponent) << 23;
    memcpy(&inverse, &bits, sizeof inverse);
    bits = exponent << 23;
    memcpy(&back, &bits, sizeof back);
    const T own_high = round_to<T>(value * inverse);
    const uint32_t own = pack(own_high, round_to<T>(value * inverse - to_sum(own_high)));
    const uint32_t next = __shfl_xor_sync(all_lanes, own, 1);
    if (r % 2 == 0) {
      high[k][r / 2] = (own & 0xffffu) | next << 16;
      low[k][r / 2] = own >> 16 | (next & 0xffff0000u);
    }
    if (r == 0) scale[k] = back;
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
