// Products of the rows of a tile with weight rows, of which each is for a run of the tile's rows.
#pragma once

#include "mma.cuh"
#include "tile.cuh"

namespace hstree {

constexpr int product_threads = 128;

// The rows [begin, end) of the tile that meet a weight row, which begins at `weight`.
template <typename T>
struct Run {
  const T* weight;
  int begin, end;
};

// What both products below have. The features go through shared memory in chunks; a block calls, for each,
//   stage(...), a barrier, multiply(...), a barrier.
// T: element type; Aligned: whether each weight row can be read in 16 bytes.
//
// float32 and float64: fused multiply-adds. One warp for each weight row, lanes over features; the weight row
// in registers and the rows of its run one after another, four at a time.
template <typename T, bool Aligned, bool Half = is_half<T>>
struct Product {
  using Staged = T;
  static constexpr int vector = Aligned ? 16 / sizeof(T) : 1;  // elements of one access
  static constexpr int chunk = sizeof(T) == 8 ? 128 : 512;     // features in shared memory at a time
  static constexpr int steps = chunk / 32 / vector;
  static constexpr int span = 32 * vector;

  // Columns of the staged rows for a subset of `features`: a multiple of span, at most chunk.
  static __host__ int columns(int64_t features) {
    return features >= chunk ? chunk : static_cast<int>(divide_up(features, span) * span);
  }
  static __host__ size_t bytes(int64_t features) { return sizeof(T) * tile_rows * columns(features); }

  // rows [tile_rows, columns] = features [begin, begin + width) of the tile's rows, then zeros.
  static __device__ void stage(const Tables& tables, const Tile& tile, int tree, const T* input,
                               int64_t begin, int width, int columns, T* rows) {
    for (int feature = threadIdx.x; feature < columns; feature += product_threads) {
      const int64_t source = feature < width ? input_feature(tables, tree, begin + feature) : -1;
#pragma unroll 4
      for (int r = 0; r < tile_rows; ++r) {
        if (tile.length[r] <= 0) continue;
        rows[r * columns + feature] =
            source < 0 ? T(0) : __ldg(input + tile.row[r] * tables.in_features + source);
      }
    }
  }

  // Calls add(k, r, product) once for each row r in the run of each weight row k < count, always on the same
  // thread for a given k and r. run_of(k): the Run of k, from the chunk's first feature.
  template <typename RunOf, typename Add>
  static __device__ __forceinline__ void multiply(int count, const T* rows, int columns, int width,
                                                  RunOf run_of, Add add) {
    for (int k = threadIdx.x / 32; k < count; k += product_threads / 32) {
      const Run<T> run = run_of(k);
      T weight[steps][vector];
      load_weight(run.weight, width, weight);
      for (int first = run.begin; first < run.end; first += 4) {
        if (run.end - first == 1) {
          T sum[1];
          dot(weight, rows, columns, first, run.end - 1, sum);
          const T total = warp_sum(sum[0]);
          if (threadIdx.x % 32 == 0) add(k, first, total);
          continue;
        }
        T sum[4];
        dot(weight, rows, columns, first, run.end - 1, sum);
        const T total = four_sums(sum);
        const int r = first + threadIdx.x % 32 / 8;
        if (threadIdx.x % 8 == 0 && r < run.end) add(k, r, total);
      }
    }
  }

 private:
  // The lane's part of a weight row, zero from width on.
  static __device__ __forceinline__ void load_weight(const T* weight, int width, T (&value)[steps][vector]) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int feature = step * span + threadIdx.x % 32 * vector;
      if (feature < width) {
        load<vector>(weight + feature, value[step]);
      } else {
#pragma unroll
        for (int k = 0; k < vector; ++k) value[step][k] = T(0);
      }
    }
  }

  // Lane's parts of the dot products with Count rows of the tile, first ... first + Count - 1, none beyond
  // last.
  template <int Count>
  static __device__ __forceinline__ void dot(const T (&weight)[steps][vector], const T* rows, int columns,
                                             int first, int last, T (&sum)[Count]) {
    const T* lane_row[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      lane_row[i] = rows + (first + i < last ? first + i : last) * columns + threadIdx.x % 32 * vector;
      sum[i] = T(0);
    }
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      if (step * span >= columns) break;
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        T value[vector];
        if constexpr (vector * sizeof(T) == 16) {
          const uint4 raw = *reinterpret_cast<const uint4*>(lane_row[i] + step * span);
          memcpy(value, &raw, sizeof raw);
        } else {
#pragma unroll
          for (int e = 0; e < vector; ++e) value[e] = lane_row[i][step * span + e];
        }
#pragma unroll
        for (int e = 0; e < vector; ++e) sum[i] += weight[step][e] * value[e];
      }
    }
  }

  // Sum i over the warp in lanes 8 i: each exchange halves the sums that a lane still holds.
  static __device__ __forceinline__ T four_sums(const T (&sum)[4]) {
    const bool upper = threadIdx.x & 16, upper_half = threadIdx.x & 8;
    const T keep0 = upper ? sum[2] : sum[0], keep1 = upper ? sum[3] : sum[1];
    const T send0 = upper ? sum[0] : sum[2], send1 = upper ? sum[1] : sum[3];
    const T pair0 = keep0 + __shfl_xor_sync(all_lanes, send0, 16);
    const T pair1 = keep1 + __shfl_xor_sync(all_lanes, send1, 16);
    T total = (upper_half ? pair1 : pair0) + __shfl_xor_sync(all_lanes, upper_half ? pair0 : pair1, 8);
    total += __shfl_xor_sync(all_lanes, total, 4);
    total += __shfl_xor_sync(all_lanes, total, 2);
    return total + __shfl_xor_sync(all_lanes, total, 1);
  }
};

// bfloat16 and float16: [16 rows] x [8 weight rows] by matrix instructions, a warp for each 8 weight rows.
// Weights go from global memory to the registers of the instruction in 16 bytes a lane, four accesses in
// flight: a block reads each weight row once, so that a stop in shared memory would only add a write and a
// read. Lane t of four holds features 8 t ... 8 t + 7 of 32 consecutive ones, which are columns 2 t, 2 t + 1,
// 2 t + 8, 2 t + 9 of two instructions: which feature is which column does not matter as long as both factors
// agree.
template <typename T, bool Aligned>
struct Product<T, Aligned, true> {
  using Staged = T;
  static constexpr int chunk = 1024;
  static constexpr int span = 128;    // features of four accesses of a lane
  static constexpr int padding = 32;  // elements; two rows of the tile then lie 64 bytes apart in the banks

  static __host__ int columns(int64_t features) {
    return (features >= chunk ? chunk : static_cast<int>(divide_up(features, span) * span)) + padding;
  }
  static __host__ size_t bytes(int64_t features) { return sizeof(T) * tile_rows * columns(features); }

  static __device__ void stage(const Tables& tables, const Tile& tile, int tree, const T* input,
                               int64_t begin, int width, int columns, T* rows) {
    T zero;
    store(&zero, 0.0f);
    for (int feature = 2 * threadIdx.x; feature < columns - padding; feature += 2 * product_threads) {
      const int64_t first = feature < width ? input_feature(tables, tree, begin + feature) : -1;
      const int64_t second = feature + 1 < width ? input_feature(tables, tree, begin + feature + 1) : -1;
#pragma unroll 8
      for (int r = 0; r < tile_rows; ++r) {
        const T* row = input + (tile.row[r] < 0 ? 0 : tile.row[r]) * tables.in_features;
        const T low = first < 0 ? zero : __ldg(row + first);
        const T high = second < 0 ? zero : __ldg(row + second);
        *reinterpret_cast<uint32_t*>(rows + r * columns + feature) = pack(low, high);
      }
    }
  }

  template <typename RunOf, typename Add>
  static __device__ __forceinline__ void multiply(int count, const T* rows, int columns, int width,
                                                  RunOf run_of, Add add) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const T* lane_rows = rows + g * columns + 8 * t;
    for (int group = threadIdx.x / 32 * 8; group < count; group += product_threads / 32 * 8) {
      const T* weight = run_of(group + g < count ? group + g : count - 1).weight + 8 * t;
      float sum[4] = {};
      __syncwarp();  // lanes may have added on their own
      for (int feature = 0; feature < columns - padding; feature += span) {
        uint4 part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = load_weight(weight, feature + 32 * i, width - 8 * t);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4 low = *reinterpret_cast<const uint4*>(lane_rows + feature + 32 * i);
          const uint4 high = *reinterpret_cast<const uint4*>(lane_rows + 8 * columns + feature + 32 * i);
          mma<T>(sum, {low.x, high.x, low.y, high.y}, {part[i].x, part[i].y});
          mma<T>(sum, {low.z, high.z, low.w, high.w}, {part[i].z, part[i].w});
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = group + 2 * t + i % 2, r = g + i / 2 * 8;
        if (k >= count) continue;
        const Run<T> run = run_of(k);
        if (r >= run.begin && r < run.end) add(k, r, sum[i]);
      }
    }
  }

 private:
  // Eight elements, zero from width on.
  static __device__ __forceinline__ uint4 load_weight(const T* weight, int feature, int width) {
    if constexpr (Aligned) {
      return feature < width ? __ldg(reinterpret_cast<const uint4*>(weight + feature)) : uint4{0, 0, 0, 0};
    } else {
      T element[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (feature + k < width) {
          element[k] = __ldg(weight + feature + k);
        } else {
          store(element + k, 0.0f);
        }
      }
      uint4 raw;
      memcpy(&raw, element, sizeof raw);
      return raw;
    }
  }
};

// Launches a forward kernel: a block for each (tree, tile), with the staged rows and `more_bytes` of dynamic
// shared memory.
template <typename T, bool Aligned, typename Tensors>
void launch_forward(void (*kernel)(Tables, LeafOrder, Tensors, int64_t, int), const Tables& tables,
                    const LeafOrder& leaf_order, const Tensors& tensors, size_t more_bytes,
                    cudaStream_t stream) {
  using P = Product<T, Aligned>;
  const int64_t tiles = tile_count(tables);
  launch(kernel, grid_size(tables.trees * tiles), product_threads, P::bytes(tables.features) + more_bytes,
         stream, tables, leaf_order, tensors, tiles, P::columns(tables.features));
}

}  // namespace hstree
