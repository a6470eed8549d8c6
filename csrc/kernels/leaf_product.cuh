// Gradients of the rows of the weight that all trees share, summed over the rows of a run, for the leaf op.
#pragma once

#include "split.cuh"
#include "tile.cuh"

namespace hstree {

// Sums over 16 rows of factors [classes, 16 rows] times features [16 rows, columns of the block].
//
// float32 and float64: fused multiply-adds, one thread for each column, features of the rows in registers.
template <typename T, bool Half = is_half<T>>
struct LeafProduct {
  static constexpr int threads = sizeof(T) == 8 ? 64 : 128;
  static constexpr int columns = threads, classes = 16;

  struct Factors {
    T factor[classes][tile_rows];

    __device__ __forceinline__ void set(int k, int r, T value) { factor[k][r] = value; }
    __device__ __forceinline__ T sum(int k) const {
      T sum = 0;
      for (int r = 0; r < tile_rows; ++r) sum += factor[k][r];
      return sum;
    }
  };

  T sum[classes] = {};
  T feature[tile_rows];

  // row: of hidden, or -1. first: column of the block.
  __device__ __forceinline__ void load(const T* hidden, const int64_t* row, int64_t features, int64_t first) {
    const int64_t column = first + threadIdx.x;
#pragma unroll
    for (int r = 0; r < tile_rows; ++r) {
      feature[r] = row[r] >= 0 && column < features ? __ldg(hidden + row[r] * features + column) : T(0);
    }
  }

  __device__ __forceinline__ void add(const Factors& factors, int count) {
#pragma unroll
    for (int k = 0; k < classes; ++k) {
      if (k >= count) continue;
#pragma unroll
      for (int r = 0; r < tile_rows; ++r) sum[k] += factors.factor[k][r] * feature[r];
    }
  }

  // Calls take(k, column of the block, sums of consecutive columns) for all sums of a thread.
  template <typename Take>
  __device__ __forceinline__ void each(int count, Take take) {
#pragma unroll
    for (int k = 0; k < classes; ++k) {
      T one[1] = {sum[k]};
      if (k < count) take(k, static_cast<int>(threadIdx.x), one);
      sum[k] = one[0];
    }
  }
};

// bfloat16 and float16: [16 classes] x [16 rows] x [8 columns] by matrix instructions, factors as in SplitFactors.
// A warp has 32 columns of all classes, a lane four consecutive ones twice, so that four lanes write 64 bytes
// of a row of sums. Column 16 (j / 2) + 4 (n / 2) + 2 (j % 2) + n % 2 of the warp is column n of instruction j:
// a lane reads four consecutive features of four rows in 8 bytes each, and takes two of them.
template <typename T>
struct LeafProduct<T, true> {
  static constexpr int threads = 256, columns = 256, classes = 64;
  using Factors = SplitFactors<T, classes>;

  float sum[classes / 16][2][2][4] = {};  // classes g and g + 8 of 16, halves of the columns
  uint32_t feature[4][2];

  __device__ __forceinline__ void load(const T* hidden, const int64_t* row, int64_t features, int64_t first) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool aligned = features % 4 == 0 && reinterpret_cast<uintptr_t>(hidden) % 8 == 0;
    uint2 four[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t column = first + threadIdx.x / 32 * 32 + 16 * half + g / 2 * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t own = row[i / 2 * 8 + 2 * t + i % 2];
        four[half][i] = load_four(hidden + own * features + column, own < 0 ? 0 : features - column, aligned);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint2 above = four[j / 2][2 * k], below = four[j / 2][2 * k + 1];
        feature[j][k] =
            j % 2 == 0 ? halves(above.x, below.x, g % 2 != 0) : halves(above.y, below.y, g % 2 != 0);
      }
    }
  }

  __device__ __forceinline__ void add(const Factors& factors, int count) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < classes / 16; ++m) {
      if (16 * m >= count) continue;
      uint32_t high[4], low[4];
      factors.operands(16 * m, high, low);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float product[4] = {};
        mma<T>(product, low, feature[j]);
        mma<T>(product, high, feature[j]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[m][i / 2][j / 2][j % 2 * 2 + i % 2] += product[i] * factors.scale[16 * m + g + i / 2 * 8];
        }
      }
    }
  }

  template <typename Take>
  __device__ __forceinline__ void each(int count, Take take) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < classes / 16; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = 16 * m + g + i / 2 * 8;
        if (k >= count) continue;
        take(k, static_cast<int>(threadIdx.x / 32 * 32 + i % 2 * 16 + threadIdx.x % 4 * 4),
             sum[m][i / 2][i % 2]);
      }
    }
  }

 private:
  // Four elements, zero from `left` on.
  static __device__ __forceinline__ uint2 load_four(const T* address, int64_t left, bool aligned) {
    if (aligned) return left > 0 ? __ldg(reinterpret_cast<const uint2*>(address)) : uint2{0, 0};
    const T zero = round_to<T>(0.0f);
    T element[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) element[e] = e < left ? __ldg(address + e) : zero;
    return {pack(element[0], element[1]), pack(element[2], element[3])};
  }
};

}  // namespace hstree
