// Segments: how the gradients of weight rows are summed over rows without atomics.
//
// The N places of a tree's leaf order are cut into C segments of equal length. The rows below a node are a
// run of places. A run inside one segment is summed and stored there. A longer run has a tail, its part in
// the segment where it starts, and a head in every later segment that it reaches. Both are kept in the
// workspace, by segment and by place in score (`position`: level of the node). The
// second pass adds tail and heads from left to right. So the order of every sum depends only on N, T, S,
// stride and type, and on whether multiprocessors have 160 KiB of shared memory.
#pragma once

#include "common.cuh"
#include "launch.h"

namespace hstree {

struct Segments {
  // Places of a segment. A block stages the features of a whole segment, which limits its length to 512 places, 256
  // in float64, and half of that where multiprocessors have little shared memory.
  static constexpr int64_t shortest = 128;
  static constexpr int64_t most_positions = 4096;  // of C * stride, unless segments are longest or C is 1
  static constexpr int64_t enough_blocks = 1024;   // enough to fill a GPU; more would only add workspace
  static constexpr int64_t none = -1, through = -2;

  int64_t places;  // of a segment, a multiple of 16
  int64_t count;   // C
  int64_t stride, columns;
  int64_t trees;
  int64_t padded_rows;  // N rounded up to a multiple of 16
  int64_t sum_bytes;    // of one sum

  __host__ Segments(ScalarType type, const Tables& tables)
      : stride(tables.stride),
        columns(tables.features + 1),
        trees(tables.trees),
        padded_rows(divide_up(tables.rows, 16) * 16),
        sum_bytes(type == ScalarType::float64 ? sizeof(double) : sizeof(float)) {
    const int64_t most = stride > 0 && stride < most_positions ? most_positions / stride : 1;
    const int64_t enough = divide_up(enough_blocks, trees * divide_up(columns, 64));
    places = divide_up(divide_up(tables.rows, most < enough ? most : enough), 16) * 16;
    const int64_t longest = (has_large_shared_memory() ? 2048 : 1024) / sum_bytes;
    if (places > longest) places = longest;
    if (places < shortest) places = shortest;
    count = divide_up(tables.rows, places);
  }

  __host__ int64_t positions() const { return count > 1 ? trees * count * stride : 0; }

  // Offsets in bytes of the parts of the workspace, and its size. After SegmentOutput's parts come factors [T, stride, N rounded up to a multiple of 16], the number of groups of runs [T, C]
  // and their runs [T, C, runs()] (run_product.cuh).
  __host__ int64_t state_at() const { return round(2 * positions() * columns * sum_bytes); }
  __host__ int64_t factor_at() const { return state_at() + round(positions() * 8); }
  __host__ int64_t groups_at() const { return factor_at() + round(trees * stride * padded_rows * sum_bytes); }
  __host__ int64_t runs_at() const { return groups_at() + round(trees * count * 4); }
  __host__ int64_t bytes() const { return runs_at() + trees * count * runs() * 8; }
  // Largest number of runs of a segment, with the padding of the last groups of two lists.
  __host__ __device__ int64_t runs() const { return places * stride + 32; }

 private:
  static __host__ int64_t round(int64_t bytes) { return divide_up(bytes, 16) * 16; }
};

// Gradients of the rows of weight and bias that are stored, not added to: [rows, S] and [rows].
template <typename T>
struct StoredRows {
  T* grad_weight;
  T* grad_bias;  // or null

  // One column of a row; column S is the bias.
  __device__ __forceinline__ void put(int64_t row, int64_t features, int64_t column, Sum<T> sum) const {
    if (column < features) {
      store(grad_weight + row * features + column, sum);
    } else if (grad_bias != nullptr) {
      store(grad_bias + row, sum);
    }
  }

  // Count columns at once. Returns whether it can, which depends on Count and T alone.
  template <int Count>
  __device__ __forceinline__ bool put_vector(int64_t row, int64_t features, int64_t column,
                                             const Sum<T> (&sum)[Count]) const {
    if constexpr (Count * sizeof(T) == 16 || Count * sizeof(T) == 8) {
      std::conditional_t<Count * sizeof(T) == 16, uint4, uint2> raw;
      T rounded[Count];
#pragma unroll
      for (int e = 0; e < Count; ++e) rounded[e] = round_to<T>(sum[e]);
      memcpy(&raw, rounded, sizeof raw);
      *reinterpret_cast<decltype(raw)*>(grad_weight + row * features + column) = raw;
      return true;
    } else {
      return false;
    }
  }
};

// The destinations of the sums of a segment.
template <typename T>
struct SegmentOutput {
  enum Goal : int { store_sum, head_sum, tail_sum };

  Sum<T>* head;  // [T, C, stride, S + 1] part of a run that continues from the previous segment
  Sum<T>* tail;  // [T, C, stride, S + 1] part, up to the segment's end, of a run that starts in it
  int64_t*
      state;  // [T, C, stride] what crosses the segment's end: row of the gradient of the run that starts
              // in it, `through` for a run from the previous segment, or `none`
  StoredRows<T> rows;

  __host__ SegmentOutput(const Segments& segments, void* workspace, const StoredRows<T>& rows)
      : head(nullptr), tail(nullptr), state(nullptr), rows(rows) {
    if (segments.positions() == 0) return;
    head = static_cast<Sum<T>*>(workspace);
    tail = head + segments.positions() * segments.columns;
    state = reinterpret_cast<int64_t*>(static_cast<char*>(workspace) + segments.state_at());
  }

  // The destination of the sum of a run that is in this segment and possibly in the ones before or after it.
  static __device__ __forceinline__ Goal goal(bool incoming, bool outgoing) {
    return incoming ? head_sum : outgoing ? tail_sum : store_sum;
  }

  // The part of a run that crosses an end of its segment. position: index in [T, C, stride].
  __device__ __forceinline__ Sum<T>* part(Goal goal, int64_t position, int64_t features) const {
    return (goal == head_sum ? head : tail) + position * (features + 1);
  }

  // Sums of columns column ... column + Count - 1 of a run; columns from S on are skipped. row: row of the
  // gradient, ignored unless the goal is store_sum. wide: whether `rows` can put Count columns at once.
  template <int Count>
  __device__ __forceinline__ void write(Goal goal, int64_t row, int64_t position, int64_t features,
                                        int64_t column, const Sum<T> (&sum)[Count], bool wide) const {
    if (goal == store_sum && wide && column < features && rows.put_vector(row, features, column, sum)) return;
#pragma unroll
    for (int e = 0; e < Count; ++e) {
      if (column + e >= features) break;
      if (goal == store_sum) {
        rows.put(row, features, column + e, sum[e]);
      } else {
        part(goal, position, features)[column + e] = sum[e];
      }
    }
  }

  __device__ __forceinline__ void write_bias(Goal goal, int64_t row, int64_t position, int64_t features,
                                             Sum<T> sum) const {
    if (goal == store_sum) {
      rows.put(row, features, features, sum);
    } else {
      part(goal, position, features)[features] = sum;
    }
  }
};

constexpr int reduce_threads = 128;

// grad[row] = tail + head of the next segment + ..., for each run that starts in a segment and crosses its
// end. Layouts: SegmentOutput. Sums in Sum<T>, from left to right: deterministic, no atomics. O(T C stride S)
// bytes, each read at most once. One block for each (tree, segment), chunk of columns and share of the
// positions, one thread for each column. The segments of a run are counted first, 32 at a time, so that the
// loads of its parts are independent.
template <typename T>
__global__ void __launch_bounds__(reduce_threads)
    segment_reduce_kernel(Segments segments, SegmentOutput<T> output) {
  const int64_t first = int64_t(blockIdx.x) * segments.stride;
  const int64_t last_segment = segments.count - 1 - blockIdx.x % segments.count;
  const int64_t column = int64_t(blockIdx.y) * reduce_threads + threadIdx.x;
  const int lane = threadIdx.x % 32;
  const bool inside = column < segments.columns;
  for (int64_t position = first + blockIdx.z; position < first + segments.stride; position += gridDim.z) {
    const int64_t row = output.state[position];
    if (row < 0) continue;
    int64_t parts = 0;  // heads
    for (;; parts += 32) {
      const int64_t next = parts + lane;
      const bool goes_on =
          next < last_segment && output.state[position + (next + 1) * segments.stride] == Segments::through;
      const unsigned stop = __ballot_sync(all_lanes, !goes_on);
      if (stop == 0) continue;
      parts += __ffs(stop);
      break;
    }
    if (parts > last_segment) parts = last_segment;
    if (!inside) continue;
    Sum<T> sum = output.tail[position * segments.columns + column];
    const Sum<T>* head = output.head + (position + segments.stride) * segments.columns + column;
#pragma unroll 8
    for (int64_t part = 0; part < parts; ++part) {
      sum += head[part * segments.stride * segments.columns];
    }
    output.rows.put(row, segments.columns - 1, column, sum);
  }
}

template <typename T>
void segment_reduce(const Segments& segments, const SegmentOutput<T>& output, cudaStream_t stream) {
  if (segments.positions() == 0) return;
  const dim3 grid(grid_size(segments.trees * segments.count),
                  static_cast<unsigned>(divide_up(segments.columns, reduce_threads)),
                  static_cast<unsigned>(segments.stride < 8 ? segments.stride : 8));
  launch(segment_reduce_kernel<T>, grid, reduce_threads, 0, stream, segments, output);
}

}  // namespace hstree
