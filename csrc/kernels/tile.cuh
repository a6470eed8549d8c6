// A tile: consecutive places in the leaf order of one tree, and the nodes on their paths, each listed once
// with the run of rows below it. Forward and grad_input kernels read every weight row once for each tile.
#pragma once

#include "common.cuh"

namespace hstree {

constexpr int tile_rows = 16;
constexpr int tile_items = tile_rows * max_depth;

struct Item {
  int32_t node;           // entry of the path: its node number or, if wide, its first row
  int level, begin, end;  // rows [begin, end) of the tile have the node at this level
};

// In shared memory.
struct Tile {
  int64_t row[tile_rows];         // row of the input, or -1 past the last one
  int64_t path_begin[tile_rows];  // first entry of its path
  int length[tile_rows];          // nodes on its path; -1: corrupt tables
  int shared[tile_rows];          // leading nodes shared with the row before in this tile
  int first_item[tile_rows + 1];  // items of a row are its nodes that are not shared
  int32_t node[tile_items];
  uint16_t run[tile_items];  // level | begin << 6 | (end - 1) << 10

  __device__ __forceinline__ int items() const { return first_item[tile_rows]; }

  __device__ __forceinline__ Item item(int index) const {
    const unsigned bits = run[index];
    return {node[index], static_cast<int>(bits & 63u), static_cast<int>(bits >> 6 & 15u),
            static_cast<int>(bits >> 10) + 1};
  }

  // Called by all threads of a block; ends with a barrier.
  __device__ void fill(const Tables& tables, const LeafOrder& leaf_order, int tree, int64_t place) {
    const int i = threadIdx.x;
    if (i < tile_rows) {
      const bool inside = place + i < tables.rows;
      const int64_t at = tree * tables.rows + place + i;
      row[i] = inside ? leaf_order.order[at] : -1;
      length[i] = inside ? leaf_order.length[at] : 0;
      shared[i] = inside && i > 0 ? leaf_order.shared[at] : 0;
      path_begin[i] = length[i] > 0 ? hstree::path_begin(tables, tree, row[i]) : 0;
    }
    __syncthreads();
    if (i == 0) {
      int sum = 0;
      for (int r = 0; r < tile_rows; ++r) {
        first_item[r] = sum;
        if (length[r] > 0) sum += length[r] - shared[r];
      }
      first_item[tile_rows] = sum;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < tile_items; k += blockDim.x) {
      const int r = k / max_depth, level = k % max_depth;
      if (level < shared[r] || level >= length[r]) continue;
      int end = r + 1;
      while (end < tile_rows && shared[end] > level) ++end;
      const int64_t entry = path_begin[r] + level;
      const int index = first_item[r] + level - shared[r];
      node[index] = tables.wide ? tables.path[3 * entry] : tables.path[entry] >> 1;
      run[index] = static_cast<uint16_t>(level | r << 6 | (end - 1) << 10);
    }
    __syncthreads();
  }
};
static_assert(max_depth <= 64 && tile_rows <= 16, "Tile::run packs an item into 16 bits");

constexpr int dot_threads = 128;

// Products of weight rows with the input rows of a tile. T: element type; Vector: elements of one access.
template <typename T, int Vector>
struct Dot {
  using S = Sum<T>;
  static constexpr int chunk = sizeof(S) == 8 ? 128 : 512;  // features in shared memory at a time
  static constexpr int per_lane = chunk / 32;
  static constexpr int steps = per_lane / Vector;
  static constexpr int span = 32 * Vector;
  static constexpr int read = 16 / sizeof(S) < Vector ? 16 / sizeof(S) : Vector;  // sums of one shared access

  // Columns of the staged rows for a subset of `features`: a multiple of span, at most chunk.
  static __host__ int columns(int64_t features) {
    return features >= chunk ? chunk : static_cast<int>(divide_up(features, span) * span);
  }

  // Where a feature of the chunk stands: such that the lanes' accesses of 16 bytes are consecutive.
  static __device__ __forceinline__ int position(int feature) {
    const int lane = feature % span / Vector, k = feature % Vector;
    return feature / span * span + k / read * (32 * read) + lane * read + k % read;
  }

  // rows [tile_rows, columns] = features [begin, begin + width) of the tile's rows, then zeros.
  static __device__ void stage(const Tables& tables, const Tile& tile, int tree, const T* input,
                               int64_t begin, int width, int columns, S* rows) {
    for (int feature = threadIdx.x; feature < columns; feature += dot_threads) {
      const int64_t source = feature < width ? input_feature(tables, tree, begin + feature) : -1;
      S* column = rows + position(feature);
#pragma unroll 4
      for (int r = 0; r < tile_rows; ++r) {
        if (tile.length[r] <= 0) continue;
        column[r * columns] =
            source < 0 ? S(0) : to_sum(__ldg(input + tile.row[r] * tables.in_features + source));
      }
    }
  }

  // The lane's part of a weight row, zero from width on.
  static __device__ __forceinline__ void load_weight(const T* weight, int width, S (&value)[steps][Vector]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int feature = step * span + lane * Vector;
      if (feature < width) {
        load<Vector>(weight + feature, value[step]);
      } else {
#pragma unroll
        for (int k = 0; k < Vector; ++k) value[step][k] = S(0);
      }
    }
  }

  // Dot products of a weight row with Count rows of the tile, first ... first + Count - 1, none beyond last.
  template <int Count>
  static __device__ __forceinline__ void dot(const S (&weight)[steps][Vector], const S* rows, int columns,
                                             int first, int last, S (&sum)[Count]) {
    const S* lane_row[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      lane_row[i] = rows + (first + i < last ? first + i : last) * columns + threadIdx.x % 32 * read;
      sum[i] = S(0);
    }
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      if (step * span >= columns) break;
#pragma unroll
      for (int k = 0; k < Vector; k += read) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
          const S* address = lane_row[i] + step * span + k * 32;
          S value[read];
          if constexpr (read * sizeof(S) == 16) {
            const uint4 raw = *reinterpret_cast<const uint4*>(address);
            memcpy(value, &raw, sizeof raw);
          } else {
#pragma unroll
            for (int e = 0; e < read; ++e) value[e] = address[e];
          }
#pragma unroll
          for (int e = 0; e < read; ++e) sum[i] += weight[step][k + e] * value[e];
        }
      }
    }
  }

  // Calls add(row, dot product) once for each row [begin, end) of the tile, each time on one lane of the
  // warp.
  template <typename Add>
  static __device__ __forceinline__ void run(const S (&weight)[steps][Vector], const S* rows, int columns,
                                             int begin, int end, Add add) {
    const int lane = threadIdx.x % 32;
    for (int first = begin; first < end; first += 4) {
      if (end - first == 1) {
        S sum[1];
        dot(weight, rows, columns, first, end - 1, sum);
        const S total = warp_sum(sum[0]);
        if (lane == 0) add(first, total);
        continue;
      }
      S sum[4];
      dot(weight, rows, columns, first, end - 1, sum);
      // Four sums over 32 lanes: each exchange halves the sums that a lane still holds.
      const bool upper = lane & 16, upper_half = lane & 8;
      const S keep0 = upper ? sum[2] : sum[0], keep1 = upper ? sum[3] : sum[1];
      const S send0 = upper ? sum[0] : sum[2], send1 = upper ? sum[1] : sum[3];
      const S pair0 = keep0 + __shfl_xor_sync(all_lanes, send0, 16);
      const S pair1 = keep1 + __shfl_xor_sync(all_lanes, send1, 16);
      S total = (upper_half ? pair1 : pair0) + __shfl_xor_sync(all_lanes, upper_half ? pair0 : pair1, 8);
      total += __shfl_xor_sync(all_lanes, total, 4);
      total += __shfl_xor_sync(all_lanes, total, 2);
      total += __shfl_xor_sync(all_lanes, total, 1);
      const int r = first + lane / 8;
      if (lane % 8 == 0 && r < end) add(r, total);
    }
  }
};

constexpr int row_threads = 64;

// grad_input rows of a tile: every thread holds Vector columns of all rows in registers.
template <typename T, int Vector>
struct RowSums {
  using S = Sum<T>;
  S sum[tile_rows][Vector] = {};

  // sum[r] += factor[r] * weight for rows [begin, end).
  __device__ __forceinline__ void add(const S (&weight)[Vector], const S* factor, int begin, int end) {
#pragma unroll
    for (int group = 0; group < tile_rows; group += 4) {
      if (begin >= group + 4 || end <= group) continue;
#pragma unroll
      for (int r = group; r < group + 4; ++r) {
        if (r < begin || r >= end) continue;
#pragma unroll
        for (int k = 0; k < Vector; ++k) sum[r][k] += factor[r] * weight[k];
      }
    }
  }

  // total[row, subset feature] += sum, for the columns of this thread.
  __device__ __forceinline__ void add_to(const Tables& tables, const Tile& tile, int tree, int64_t column,
                                         S* total) {
    if (column >= tables.features) return;
#pragma unroll
    for (int k = 0; k < Vector; ++k) {
      const int64_t feature = input_feature(tables, tree, column + k);
#pragma unroll
      for (int r = 0; r < tile_rows; ++r) {
        if (tile.length[r] > 0) total[tile.row[r] * tables.in_features + feature] += sum[r][k];
      }
    }
  }
};

// output[i] = value[i], rounded to T.  value [count] Sum<T>, output [count] T. One thread for each element.
template <typename T>
__global__ void round_kernel(const Sum<T>* value, T* output, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i < count) store(output + i, value[i]);
}

// grad_input = sum, rounded, unless they are one buffer.
template <typename T>
void round_sums(const Tables& tables, const void* sum, void* grad_input, cudaStream_t stream) {
  const int64_t count = tables.rows * tables.in_features;
  if (sum == grad_input || count == 0) return;
  launch(round_kernel<T>, grid_size(divide_up(count, 256)), 256, 0, stream, static_cast<const Sum<T>*>(sum),
         static_cast<T*>(grad_input), count);
}

// Tiles of one tree.
inline int64_t tile_count(const Tables& tables) {
  return divide_up(tables.rows, tile_rows);
}

}  // namespace hstree
