// Products of the rows of a tile with weight rows. Each weight row is multiplied with a run of the tile's
// rows.
#pragma once

#include "async_copy.cuh"
#include "mma.cuh"
#include "tile.cuh"

namespace hstree {

constexpr int product_threads = 128;

constexpr int forward_blocks = 4;  // per multiprocessor: 128 registers a thread for loads and sums

// The rows [begin, end) of the tile that are multiplied with row `row` of the tree's weight.
struct Run {
  int32_t row;
  int begin, end;
};

// How a launch reads the rows of hidden.
struct Staging {
  int columns;   // features in shared memory at a time; 0: none
  bool vectors;  // rows are aligned to 16 bytes

  // Chunks of at most `most` features, as equal in size as multiples of span allow.
  static __host__ int chunk(int64_t features, int most, int span) {
    const int64_t chunks = features > most ? divide_up(features, most) : 1;
    return static_cast<int>(divide_up(divide_up(features, chunks), span) * span);
  }

  // Whether eight consecutive features of a tree are consecutive in hidden.
  __device__ __forceinline__ bool in_vectors(const Tables& tables) const {
    return vectors && tables.feature_index == nullptr;
  }
};

// The interface of both products below. A block calls, for each `chunk` features,
//   stage(...), multiply(...) once or several times,
// with all of its threads, if the tile has an item.
// T: element type; Aligned: whether each weight row can be read in 16 bytes.
//
// float32 and float64: fused multiply-adds. One warp for each weight row, lanes over features. The weight row
// and the next one, still in flight, are in registers. The rows of its run come from shared memory, four at a
// time, filled by asynchronous copies.
template <typename T, bool Aligned, bool Half = is_half<T>>
struct Product {
  static constexpr int vector = Aligned ? 16 / sizeof(T) : 1;  // elements of one access
  static constexpr int most = sizeof(T) == 8 ? 128 : 512;      // columns
  static constexpr int steps = most / 32 / vector;
  static constexpr int span = 32 * vector;

  static __host__ Staging staging(const Tables& tables, const T* hidden) {
    return {Staging::chunk(tables.features, most, span), aligned<T>(hidden, tables.in_features, 16)};
  }
  static constexpr __host__ __device__ size_t bytes(const Staging& staging) {
    return sizeof(T) * tile_rows * staging.columns;
  }

  const T* weight;  // of the tree
  int64_t features;
  const T* hidden;
  const int32_t* index;  // the tree's features, or null
  int64_t in_features;
  int64_t chunk;
  int columns;
  bool in_vectors;
  T* rows;  // [tile_rows, columns]

  // weight, hidden: arguments of the op.
  __device__ __forceinline__ Product(const Tables& tables, int tree, const void* weight, const void* hidden,
                                     const Staging& staging, void* shared)
      : weight(static_cast<const T*>(weight) + tree * tables.weight_rows * tables.features),
        features(tables.features),
        hidden(static_cast<const T*>(hidden)),
        index(tables.feature_index == nullptr ? nullptr : tables.feature_index + tree * tables.features),
        in_features(tables.in_features),
        chunk(staging.columns),
        columns(staging.columns),
        in_vectors(staging.in_vectors(tables)),
        rows(static_cast<T*>(shared)) {}

  // rows = features [begin, begin + width) of the tile's rows, then zeros.
  __device__ __forceinline__ void stage(const Tile& tile, int64_t begin, int width) const {
    __syncthreads();
    if (in_vectors) {
      copy<16 / sizeof(T)>(tile, begin, width);
    } else {
      copy<1>(tile, begin, width);
    }
    async_copy_commit();
    async_copy_wait<0>();
    __syncthreads();
  }

  // Calls add(k, r, product) once for each row r in the run of each weight row k < count, always on the same
  // thread for a given k and r, with products of features [begin, begin + width). run_of(k): the Run of k.
  // Rows from first_row to last_row - 1 contain all runs.
  template <typename RunOf, typename Add>
  __device__ __forceinline__ void multiply(const Tile&, int64_t begin, int width, int count,
                                           int /*first_row*/, int /*last_row*/, RunOf run_of, Add add) const {
    const int warp = threadIdx.x / 32;
    Run next = {};
    T next_weight[steps][vector];
    const auto load_next = [&](int k) {
      if (k >= count) return;
      next = run_of(k);
      load_weight(weight + next.row * features + begin, width, next_weight);
    };
    load_next(warp);
    for (int k = warp; k < count; k += product_threads / 32) {
      const Run run = next;
      T own_weight[steps][vector];
      memcpy(own_weight, next_weight, sizeof own_weight);
      load_next(k + product_threads / 32);
      for (int first = run.begin; first < run.end; first += 4) {
        if (run.end - first == 1) {
          T sum[1];
          dot(own_weight, first, run.end - 1, sum);
          const T total = warp_sum(sum[0]);
          if (threadIdx.x % 32 == 0) add(k, first, total);
          continue;
        }
        T sum[4];
        dot(own_weight, first, run.end - 1, sum);
        const T total = four_sums(sum);
        const int r = first + threadIdx.x % 32 / 8;
        if (threadIdx.x % 8 == 0 && r < run.end) add(k, r, total);
      }
    }
  }

 private:
  template <int Count>
  __device__ __forceinline__ void copy(const Tile& tile, int64_t begin, int width) const {
    for (int feature = Count * threadIdx.x; feature < columns; feature += Count * product_threads) {
      const bool inside = feature < width;
      const int64_t at = inside ? begin + feature : 0;
      const T* source = hidden + (index == nullptr || !inside ? at : __ldg(index + at));
#pragma unroll 4
      for (int r = 0; r < tile_rows; ++r) {
        if (tile.length[r] <= 0) continue;
        async_copy_or_zero<Count * sizeof(T)>(rows + r * columns + feature,
                                              source + tile.row[r] * in_features, inside);
      }
    }
  }

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

  // The lane's parts of the dot products with the Count rows of the tile from `first` on, without those
  // beyond last.
  template <int Count>
  __device__ __forceinline__ void dot(const T (&weight)[steps][vector], int first, int last,
                                      T (&sum)[Count]) const {
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

  // Leaves sum i over the warp in lane 8 i. Each exchange halves the number of sums that a lane holds.
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

// bfloat16 and float16: [16 rows] x [8 weight rows] by matrix instructions. Warps divide the features, 32 at
// a time, and each processes all weight rows, `batch` at a time. So the accesses of a step, 16 bytes a lane,
// are independent of each other, and all warps have the same work. Their sums are added in shared memory.
// Weights are loaded from global memory to the registers of the instruction, because no other warp needs
// them. So are rows of hidden of trees that read all features; otherwise they are gathered in shared memory,
// two bytes at a time. Lane t of four holds features 8 t ... 8 t + 7 of 32
// consecutive ones, which are columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of two instructions: the assignment of
// features to columns is free as long as both factors agree.
template <typename T, bool Aligned>
struct Product<T, Aligned, true> {
  static constexpr int warps = product_threads / 32;
  static constexpr int groups = Aligned ? 7 : 4;  // of 8 weight rows, whose sums a warp has at a time
  static constexpr int batch = 8 * groups;        // weight rows
  static constexpr int span = 32 * warps;         // features of a step of the block
  static constexpr int most = 640;                // columns
  static constexpr int padding = 32;  // shifts the banks of successive rows of the tile by 64 bytes
  static constexpr int partial_sums = warps * tile_rows * batch;

  static __host__ Staging staging(const Tables& tables, const T* hidden) {
    const bool vectors = Aligned && aligned<T>(hidden, tables.in_features, 16);
    if (vectors && tables.feature_index == nullptr) return {0, true};
    return {Staging::chunk(tables.features, most, span), vectors};
  }
  static constexpr __host__ __device__ size_t bytes(const Staging& staging) {
    return sizeof(float) * partial_sums +
           (staging.columns > 0 ? sizeof(T) * tile_rows * (staging.columns + padding) : 0);
  }

  const T* weight;
  int64_t features;
  const T* hidden;
  const int32_t* index;
  int64_t in_features;
  int64_t chunk;
  int columns;
  bool in_vectors;
  float* partial;  // [warps, tile_rows, batch]
  T* rows;         // [tile_rows, columns + padding]; unused if in_vectors

  // weight, hidden: arguments of the op.
  __device__ __forceinline__ Product(const Tables& tables, int tree, const void* weight, const void* hidden,
                                     const Staging& staging, void* shared)
      : weight(static_cast<const T*>(weight) + tree * tables.weight_rows * tables.features),
        features(tables.features),
        hidden(static_cast<const T*>(hidden)),
        index(tables.feature_index == nullptr ? nullptr : tables.feature_index + tree * tables.features),
        in_features(tables.in_features),
        columns(staging.columns),
        in_vectors(Aligned && staging.in_vectors(tables)),
        partial(static_cast<float*>(shared)),
        rows(reinterpret_cast<T*>(partial + partial_sums)) {
    chunk = in_vectors ? tables.features : columns;
  }

  __device__ __forceinline__ void stage(const Tile& tile, int64_t begin, int width) const {
    if (in_vectors) return;
    const T* row[tile_rows];
#pragma unroll
    for (int r = 0; r < tile_rows; ++r) row[r] = row_of(tile, r);
#pragma unroll 1
    for (int feature = 2 * threadIdx.x; feature < columns; feature += 2 * product_threads) {
      const int first = source(begin, feature, width), second = source(begin, feature + 1, width);
      const uint32_t inside = (feature < width ? 0xffffu : 0) | (feature + 1 < width ? 0xffff0000u : 0);
      T low[tile_rows], high[tile_rows];
#pragma unroll
      for (int r = 0; r < tile_rows; ++r) {
        low[r] = __ldg(row[r] + first);
        high[r] = __ldg(row[r] + second);
      }
      T* to = rows + feature;
#pragma unroll
      for (int r = 0; r < tile_rows; ++r, to += columns + padding) {
        *reinterpret_cast<uint32_t*>(to) = pack(low[r], high[r]) & inside;
      }
    }
    __syncthreads();
  }

  template <typename RunOf, typename Add>
  __device__ __forceinline__ void multiply(const Tile& tile, int64_t begin, int width, int count,
                                           int first_row, int last_row, RunOf run_of, Add add) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int first = 0; first < count; first += batch) {
      int32_t weight_row[groups];
#pragma unroll
      for (int i = 0; i < groups; ++i) {
        const int k = first + 8 * i + g;
        weight_row[i] = run_of(k < count ? k : count - 1).row;
      }
      float sum[groups][4] = {};
      if (in_vectors) {
        const auto row = [&](int r) { return r >= first_row && r < last_row ? row_of(tile, r) : nullptr; };
        accumulate(GlobalRows{row(g), row(g + 8), index, width - 8 * t}, begin, width, count - first,
                   weight_row, sum);
      } else {
        const T* low = rows + g * (columns + padding) + 8 * t;
        accumulate(StagedRows{low, low + 8 * (columns + padding)}, begin, width, count - first, weight_row,
                   sum);
      }
      __syncthreads();  // the sums of the previous batch have been read
      float* own = partial + (threadIdx.x / 32 * tile_rows + g) * batch + 2 * t;
#pragma unroll
      for (int i = 0; i < groups; ++i) {
        store_pair(own + 8 * i, sum[i][0], sum[i][1]);
        store_pair(own + 8 * i + 8 * batch, sum[i][2], sum[i][3]);
      }
      __syncthreads();
      for (int i = threadIdx.x; i < tile_rows * batch; i += product_threads) {
        const int k = first + i % batch, r = i / batch;
        if (k >= count) continue;
        const Run run = run_of(k);
        if (r < run.begin || r >= run.end) continue;
        float total = partial[i];
#pragma unroll
        for (int warp = 1; warp < warps; ++warp) total += partial[warp * tile_rows * batch + i];
        add(k, r, total);
      }
    }
  }

 private:
  struct StagedRows {
    const T *low, *high;

    __device__ __forceinline__ void start(int) {}
    __device__ __forceinline__ void load(int feature, uint4& first, uint4& second) {
      first = *reinterpret_cast<const uint4*>(low + feature);
      second = *reinterpret_cast<const uint4*>(high + feature);
    }
  };

  // The index of the next step's first feature is loaded one step ahead.
  struct GlobalRows {
    const T *low, *high;  // or null
    const int32_t* index;
    int width;
    int next;

    __device__ __forceinline__ GlobalRows(const T* low, const T* high, const int32_t* index, int width)
        : low(low), high(high), index(index), width(width) {}
    __device__ __forceinline__ void start(int feature) {
      const int at = feature + 8 * (threadIdx.x % 4);
      next = index == nullptr || feature >= width ? at : __ldg(index + at);
    }
    __device__ __forceinline__ void load(int feature, uint4& first, uint4& second) {
      const int source = next;
      const bool inside = feature < width;
      start(feature + span);
      first =
          inside && low != nullptr ? __ldg(reinterpret_cast<const uint4*>(low + source)) : uint4{0, 0, 0, 0};
      second = inside && high != nullptr ? __ldg(reinterpret_cast<const uint4*>(high + source))
                                         : uint4{0, 0, 0, 0};
    }
  };

  // The row of hidden that is row r of the tile; arbitrary past the last one.
  __device__ __forceinline__ const T* row_of(const Tile& tile, int r) const {
    return hidden + (tile.row[r] < 0 ? 0 : tile.row[r]) * in_features;
  }

  // The feature of hidden at index begin + feature of the subset; arbitrary from width on.
  __device__ __forceinline__ int source(int64_t begin, int feature, int width) const {
    if (feature >= width) return 0;
    return index == nullptr ? static_cast<int>(begin) + feature : __ldg(index + begin + feature);
  }

  // Adds the products of the warp's features and of `left` weight rows.
  template <typename Rows>
  __device__ __forceinline__ void accumulate(Rows rows, int64_t begin, int width, int left,
                                             const int32_t (&weight_row)[groups],
                                             float (&sum)[groups][4]) const {
    const int first = static_cast<int>(threadIdx.x / 32 * 32), own = 8 * (threadIdx.x % 4);
    const T* lane_weight = weight + begin + own;
    __syncwarp();  // lanes may have diverged while adding
    rows.start(first);
    for (int feature = first; feature < width; feature += span) {
      uint4 part[groups], low, high;
#pragma unroll
      for (int i = 0; i < groups; ++i) {
        part[i] = 8 * i < left ? load_weight(weight_at(lane_weight, weight_row[i]), feature, width - own)
                               : uint4{0, 0, 0, 0};
      }
      rows.load(feature, low, high);
#pragma unroll
      for (int i = 0; i < groups; ++i) {
        mma<T>(sum[i], {low.x, high.x, low.y, high.y}, {part[i].x, part[i].y});
        mma<T>(sum[i], {low.z, high.z, low.w, high.w}, {part[i].z, part[i].w});
      }
    }
  }

  __device__ __forceinline__ const T* weight_at(const T* first, int32_t row) const {
    const auto row_bytes = static_cast<uint32_t>(features * sizeof(T));
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(first) +
                                      static_cast<uint64_t>(static_cast<uint32_t>(row)) * row_bytes);
  }

  static __device__ __forceinline__ void store_pair(float* address, float first, float second) {
    const float value[2] = {first, second};
    uint2 raw;
    memcpy(&raw, value, sizeof raw);
    *reinterpret_cast<uint2*>(address) = raw;
  }

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

// Launches a forward kernel: a block for each (tree, tile), with Product's dynamic shared memory and
// `more_bytes` in addition.
template <typename T, bool Aligned, typename Tensors>
void launch_forward(void (*kernel)(Tables, LeafOrder, Tensors, int64_t, Staging), const Tables& tables,
                    const LeafOrder& leaf_order, const Tensors& tensors, size_t more_bytes,
                    cudaStream_t stream) {
  using P = Product<T, Aligned>;
  const int64_t tiles = tile_count(tables);
  const Staging staging = P::staging(tables, static_cast<const T*>(tensors.hidden));
  launch(kernel, grid_size(tables.trees * tiles), product_threads, P::bytes(staging) + more_bytes, stream,
         tables, leaf_order, tensors, tiles, staging);
}

}  // namespace hstree
