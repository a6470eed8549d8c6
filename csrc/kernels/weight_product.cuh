// Gradients of weight rows, summed over rows, for the wide op.
#pragma once

#include "segment.cuh"
#include "split.cuh"
#include "tile.cuh"

namespace hstree {

template <typename T>
constexpr int weight_columns = sizeof(T) == 8 ? 64 : 128;  // of a block
constexpr int weight_threads = 128;
constexpr int item_group = 16;  // number of weight rows whose sums a thread holds at a time

// Sums over 16 rows of factors [weight rows, 16 rows] times features [16 rows, columns of the block].
//
// float32 and float64: fused multiply-adds, one thread for each column, features of the rows in registers.
template <typename T, bool Half = is_half<T>>
struct WeightProduct {
  static constexpr int threads = weight_columns<T>;

  template <int Items>
  struct Factors {
    T factor[Items][tile_rows];

    // Called by whole warps: lane i of 16 has the factor of row i, zero outside the run of weight row k.
    __device__ __forceinline__ void set(int k, int r, T value) { factor[k][r] = value; }
    __device__ __forceinline__ T sum(int k) const {
      T sum = 0;
      for (int r = 0; r < tile_rows; ++r) sum += factor[k][r];
      return sum;
    }
  };

  struct Sums {
    T sum[item_group] = {};
  };

  int64_t source;  // feature of hidden, or -1
  T feature[tile_rows];

  __device__ WeightProduct(const Tables& tables, int tree, int64_t first_column) {
    const int64_t column = first_column + threadIdx.x;
    source = column < tables.features ? hidden_feature(tables, tree, column) : -1;
  }

  // row_of(r): row of hidden, or -1.
  template <typename RowOf>
  __device__ __forceinline__ void load(const Tables& tables, const T* hidden, RowOf row_of) {
#pragma unroll
    for (int r = 0; r < tile_rows; ++r) {
      const int64_t row = row_of(r);
      feature[r] = row >= 0 && source >= 0 ? __ldg(hidden + row * tables.in_features + source) : T(0);
    }
  }

  // Adds to the sums of weight rows first ... first + 15. run_of(k): an Item whose run is that of row k.
  template <int Items, typename RunOf>
  __device__ __forceinline__ void add(const Factors<Items>& factors, int first, RunOf run_of,
                                      Sums& sums) const {
#pragma unroll
    for (int k = 0; k < item_group; ++k) {
      const Item item = run_of(first + k);
#pragma unroll
      for (int group = 0; group < tile_rows; group += 4) {
        if (item.begin >= group + 4 || item.end <= group) continue;
#pragma unroll
        for (int r = group; r < group + 4; ++r) {
          if (r >= item.begin && r < item.end) sums.sum[k] += factors.factor[first + k][r] * feature[r];
        }
      }
    }
  }

  // Calls take(k, column, sums of consecutive columns) for all sums of a thread, k < 16.
  template <typename Take>
  static __device__ __forceinline__ void each(Sums& sums, Take take) {
#pragma unroll
    for (int k = 0; k < item_group; ++k) {
      T sum[1] = {sums.sum[k]};
      take(k, static_cast<int>(threadIdx.x), sum);
      sums.sum[k] = sum[0];
    }
  }
};

// bfloat16 and float16: [16 weight rows] x [16 rows] x [8 columns] by matrix instructions. Features go from
// global memory to the registers of the instruction. A factor is two elements of type T, the second for the
// rounding error of the first, after the largest of a weight row is scaled to [1, 2). The error is at most
// 2^-16 of the factor in bfloat16 and 2^-22 of the largest factor in float16. A warp has 32 columns, a lane
// four of them that are consecutive, twice, so that four lanes write 32 bytes of a gradient row.
template <typename T>
struct WeightProduct<T, true> {
  static constexpr int threads = weight_threads;

  template <int Items>
  using Factors = SplitFactors<T, Items>;

  struct Sums {
    float sum[2][2][4] = {};  // weight rows g and g + 8, halves of 16 columns
  };

  int32_t source[4];
  uint32_t feature[4][2];

  __device__ WeightProduct(const Tables& tables, int tree, int64_t first_column) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t column =
          first_column + threadIdx.x / 32 * 32 + 16 * (j / 2) + g / 2 * 4 + j % 2 * 2 + g % 2;
      source[j] = column < tables.features ? static_cast<int32_t>(hidden_feature(tables, tree, column)) : -1;
    }
  }

  template <typename RowOf>
  __device__ __forceinline__ void load(const Tables& tables, const T* hidden, RowOf row_of) {
    T element[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t number = row_of(i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2);
      const T* row = hidden + (number < 0 ? 0 : number) * tables.in_features;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        element[j][i] = number >= 0 && source[j] >= 0 ? __ldg(row + source[j]) : round_to<T>(0.0f);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      feature[j][0] = pack(element[j][0], element[j][1]);
      feature[j][1] = pack(element[j][2], element[j][3]);
    }
  }

  template <int Items, typename RunOf>
  __device__ __forceinline__ void add(const Factors<Items>& factors, int first, RunOf, Sums& sums) const {
    uint32_t high[4], low[4];
    factors.operands(first, high, low);
    const int g = first + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float product[4] = {};
      mma<T>(product, low, feature[j]);
      mma<T>(product, high, feature[j]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums.sum[i / 2][j / 2][j % 2 * 2 + i % 2] += product[i] * factors.scale[g + i / 2 * 8];
      }
    }
  }

  template <typename Take>
  static __device__ __forceinline__ void each(Sums& sums, Take take) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      take(static_cast<int>(threadIdx.x % 32 / 4 + i / 2 * 8),
           static_cast<int>(threadIdx.x / 32 * 32 + i % 2 * 16 + threadIdx.x % 4 * 4),
           sums.sum[i / 2][i % 2]);
    }
  }
};

}  // namespace hstree
