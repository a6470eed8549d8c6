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

// The sum of the two elements.
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

}  // namespace hstree
