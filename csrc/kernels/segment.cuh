// Segments: how the gradients of weight rows are summed over rows without atomics.
//
// The N places of a tree's leaf order are cut into C segments of equal length. The rows below a node are a
// run of places. A run inside one segment is summed there and stored at once. A longer one has a tail, its
// part in the segment where it starts, and a head in every later segment that it reaches; both are kept in
// the workspace, by segment and by place in score (`position`: level of a binary node, column of a wide one),
// and the second pass adds tail and heads from left to right. So the order of every sum depends on N, T, S and
// stride alone.
#pragma once

#include "common.cuh"

namespace hstree {

struct Segments {
  static constexpr int64_t shortest = 64;          // places
  static constexpr int64_t most_positions = 4096;  // C * stride, except that C is at least 1
  static constexpr int64_t enough_blocks = 1024;   // of 128 columns, to fill a GPU; more only add workspace
  static constexpr int64_t none = -1, through = -2;

  int64_t places;  // of a segment, a multiple of 16
  int64_t count;   // C
  int64_t stride, columns;
  int64_t trees;

  __host__ explicit Segments(const Tables& tables)
      : stride(tables.stride), columns(tables.features + 1), trees(tables.trees) {
    const int64_t most = stride > 0 && stride < most_positions ? most_positions / stride : 1;
    const int64_t enough = divide_up(enough_blocks, trees * divide_up(columns, 128));
    places = divide_up(divide_up(tables.rows, most < enough ? most : enough), 16) * 16;
    if (places < shortest) places = shortest;
    count = divide_up(tables.rows, places);
  }

  __host__ int64_t positions() const { return count > 1 ? trees * count * stride : 0; }

  __host__ int64_t workspace_bytes(int64_t sum_bytes) const {
    const int64_t sums = 2 * positions() * columns * sum_bytes;
    return divide_up(sums, 16) * 16 + positions() * static_cast<int64_t>(sizeof(int64_t));
  }
};

// Where the sums of a segment go.
template <typename T>
struct SegmentOutput {
  Sum<T>* head;    // [T, C, stride, S + 1] part of a run that came from the segment before
  Sum<T>* tail;    // [T, C, stride, S + 1] part, up to the segment's end, of a run that starts in it
  int64_t* state;  // [T, C, stride] what passes the segment's end: row of the gradient of the run that starts
                   // in it, `through` for a run that came from the segment before, or `none`
  T* grad_weight;  // [rows, S]
  T* grad_bias;    // [rows], or null

  __host__ SegmentOutput(const Segments& segments, void* workspace, void* grad_weight, void* grad_bias)
      : grad_weight(static_cast<T*>(grad_weight)), grad_bias(static_cast<T*>(grad_bias)) {
    const int64_t sums = segments.positions() * segments.columns;
    head = static_cast<Sum<T>*>(workspace);
    tail = head == nullptr ? nullptr : head + sums;
    const int64_t bytes = divide_up(2 * sums * static_cast<int64_t>(sizeof(Sum<T>)), 16) * 16;
    state = head == nullptr ? nullptr : reinterpret_cast<int64_t*>(static_cast<char*>(workspace) + bytes);
  }

  // Column S is the bias.
  __device__ __forceinline__ void store_row(int64_t row, int64_t features, int64_t column, Sum<T> sum) const {
    if (column < features) {
      store(grad_weight + row * features + column, sum);
    } else if (grad_bias != nullptr) {
      store(grad_bias + row, sum);
    }
  }
};

constexpr int reduce_threads = 128;

// state[:] = none.  state [count] int64. One thread for each element.
template <typename T>
__global__ void __launch_bounds__(reduce_threads) clear_state_kernel(int64_t* state, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * reduce_threads + threadIdx.x;
  if (i < count) state[i] = Segments::none;
}

// grad[row] = tail + head of the next segment + ..., for each run that starts in a segment and passes its
// end. Layouts: SegmentOutput. Sums in Sum<T>, from left to right: deterministic, no atomics. O(T C stride S)
// bytes, each read at most once. One block for each (tree, segment) and chunk of columns, one thread for each
// column.
template <typename T>
__global__ void __launch_bounds__(reduce_threads)
    segment_reduce_kernel(Segments segments, SegmentOutput<T> output) {
  const int64_t first = int64_t(blockIdx.x) * segments.stride;
  const int64_t last_segment = segments.count - 1 - blockIdx.x % segments.count;
  const int64_t column = int64_t(blockIdx.y) * reduce_threads + threadIdx.x;
  if (column >= segments.columns) return;
  for (int64_t position = first; position < first + segments.stride; ++position) {
    const int64_t row = output.state[position];
    if (row < 0) continue;
    Sum<T> sum = output.tail[position * segments.columns + column];
    int64_t next = position;
    for (int64_t left = last_segment; left > 0; --left) {
      next += segments.stride;
      sum += output.head[next * segments.columns + column];
      if (output.state[next] != Segments::through) break;
    }
    output.store_row(row, segments.columns - 1, column, sum);
  }
}

template <typename T>
void clear_state(const Segments& segments, const SegmentOutput<T>& output, cudaStream_t stream) {
  const int64_t count = segments.positions();
  if (count == 0) return;
  launch(clear_state_kernel<T>, grid_size(divide_up(count, reduce_threads)), reduce_threads, 0, stream,
         output.state, count);
}

template <typename T>
void segment_reduce(const Segments& segments, const SegmentOutput<T>& output, cudaStream_t stream) {
  if (segments.positions() == 0) return;
  const dim3 grid(grid_size(segments.trees * segments.count),
                  static_cast<unsigned>(divide_up(segments.columns, reduce_threads)));
  launch(segment_reduce_kernel<T>, grid, reduce_threads, 0, stream, segments, output);
}

}  // namespace hstree
