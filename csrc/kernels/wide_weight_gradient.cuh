// Gradients of weight and bias of the wide op and of the leaf op.
#pragma once

#include "weight_product.cuh"
#include "wide_log_prob.h"

namespace hstree {

// d log_softmax(z)[child] / dz[k] from score[k] = log_softmax(z)[k]
__device__ __forceinline__ float wide_slope(float score, bool chosen) {
  return (chosen ? 1.0f : 0.0f) - expf(score);
}
__device__ __forceinline__ double wide_slope(double score, bool chosen) {
  return (chosen ? 1.0 : 0.0) - exp(score);
}

// The wide op, gradients of weight and bias, trees first_tree to first_tree + segments.trees - 1.
//   grad_weight[t, first_row + k] = sum_i grad_log_prob[i,t] * ([k = child_i] - exp(score[i, t, c + k])) *
//       hidden[i, subset_t], rows i below the node
//   grad_bias[t, first_row + k] = the same without hidden: column S, where hidden is 1
// Tensors: shapes at WideBackward and SegmentOutput; slot [T N + 1] int64, the sums of leaf_plan's count, or
//   null for rows numbered t R + first_row + k. Only rows of visited nodes are written. Rows
//   without a valid path add nothing.
//   A feature of bfloat16 or float16 that is not finite makes its column NaN for the node.
// Sums in Sum<T>, rounded to T once. Work O(N T width S). Bytes: hidden once for each 16 children, each
//   gradient row once, and the workspace (segment.cuh).
// No atomics; the order of every sum depends on N, T, S and stride alone: deterministic.
// One block for each (tree, segment), chunk of columns and share of the children, which takes the run of each
//   node 16 rows and 16 children at a time.
template <typename T, typename Rows>
__global__ void __launch_bounds__(weight_threads, 3)
    wide_log_prob_backward_weight_kernel(Tables tables, LeafOrder leaf_order, const int64_t* slot,
                                         WideBackward tensors, Segments segments,
                                         SegmentOutput<T, Rows> output, int first_tree, bool wide_stores) {
  using S = Sum<T>;
  using W = WeightProduct<T>;
  __shared__ int64_t row[tile_rows];
  __shared__ typename W::template Factors<item_group> factors;
  const int tid = threadIdx.x, lane = tid % 32;
  const int tree = first_tree + static_cast<int>(blockIdx.x / segments.count);
  const int64_t begin = blockIdx.x % segments.count * segments.places;
  const int64_t end = begin + segments.places < tables.rows ? begin + segments.places : tables.rows;
  const int64_t position = blockIdx.x * segments.stride;
  const int64_t block_column = int64_t(blockIdx.y) * weight_columns<T>;
  W product(tables, tree, block_column);
  const int64_t* order = leaf_order.order + tree * tables.rows;
  const int32_t* length = leaf_order.length + tree * tables.rows;
  const int32_t* shared = leaf_order.shared + tree * tables.rows;

  for (int64_t place = begin; place < end; ++place) {
    const int fresh = place == begin ? 0 : shared[place];
    if (length[place] <= fresh) continue;
    const int64_t path_begin = hstree::path_begin(tables, tree, order[place]);
    int64_t grad_row = slot == nullptr ? 0 : slot[tree * tables.rows + place];
    int first_column = 0;
    for (int level = 0; level < length[place]; ++level) {
      const int32_t* entry = tables.path + 3 * (path_begin + level);
      const int children = entry[1];
      const bool incoming = level < shared[place];
      if (slot == nullptr) grad_row = tree * tables.weight_rows + entry[0];
      if (level >= fresh) {
        int64_t run_end = place + 1;  // each warp finds the first place that does not share the node
        for (;; run_end += 32) {
          const int64_t at = run_end + lane;
          const unsigned stop = __ballot_sync(all_lanes, at >= end || shared[at] <= level);
          if (stop == 0) continue;
          run_end += __ffs(stop) - 1;
          break;
        }
        const bool outgoing = run_end == end && end < tables.rows && shared[end] > level;
        const auto goal = SegmentOutput<T, Rows>::goal(incoming, outgoing);
        for (int first = blockIdx.z * item_group; first < children; first += gridDim.z * item_group) {
          const int count = children - first < item_group ? children - first : item_group;
          typename W::Sums sum;
          S bias = 0;
          for (int64_t group = place; group < run_end; group += tile_rows) {
            const int rows = static_cast<int>(run_end - group < tile_rows ? run_end - group : tile_rows);
            __syncthreads();
            if (tid < tile_rows) row[tid] = tid < rows ? order[group + tid] : -1;
            if (tid < count && outgoing && group == place && blockIdx.y == 0) {
              output.state[position + first_column + first + tid] =
                  incoming ? Segments::through : grad_row + first + tid;
            }
            __syncthreads();
            for (int i = tid; i < item_group * tile_rows; i += W::threads) {
              const int k = i / tile_rows, r = i % tile_rows;
              S value = 0;
              if (k < count && r < rows) {
                const int64_t at = row[r] * tables.trees + tree;
                const int chosen = tables.path[3 * (hstree::path_begin(tables, tree, row[r]) + level) + 2];
                const S score =
                    static_cast<const S*>(tensors.score)[at * tables.stride + first_column + first + k];
                value =
                    static_cast<const S*>(tensors.grad_log_prob)[at] * wide_slope(score, chosen == first + k);
              }
              factors.set(k, r, value);
            }
            product.load(tables, static_cast<const T*>(tensors.hidden), [&](int r) { return row[r]; });
            __syncthreads();
            product.add(factors, 0, [&](int) { return Item{0, 0, 0, rows}; }, sum);
            if (tid < count) bias += factors.sum(tid);
          }
          const int64_t to = position + first_column + first;
          W::each(sum, [&](int k, int column, auto& part) {
            if (k >= count) return;
            output.write(goal, grad_row + first + k, to + k, tables.features, block_column + column, part,
                         wide_stores);
          });
          if (blockIdx.y == 0 && tid < count) {
            output.write_bias(goal, grad_row + first + tid, to + tid, tables.features, bias);
          }
        }
      }
      first_column += children;
      if (slot != nullptr && level >= shared[place]) grad_row += children;
    }
  }
}

// slot, first_tree: as at the kernel. wide_stores: whether Rows can put four columns of a row at once.
template <typename T, typename Rows>
void wide_weight_gradient(const Tables& tables, const LeafOrder& leaf_order, const int64_t* slot,
                          const WideBackward& tensors, const Segments& segments,
                          const SegmentOutput<T, Rows>& output, int first_tree, bool wide_stores,
                          cudaStream_t stream) {
  const int64_t chunks = tables.features > 0 ? divide_up(tables.features, weight_columns<T>) : 1;
  const int64_t shares = divide_up(tables.stride, item_group);
  const dim3 grid(grid_size(segments.trees * segments.count), static_cast<unsigned>(chunks),
                  static_cast<unsigned>(shares < 16 ? shares : 16));
  clear_state(segments, output, stream);
  launch(wide_log_prob_backward_weight_kernel<T, Rows>, grid, WeightProduct<T>::threads, 0, stream, tables,
         leaf_order, slot, tensors, segments, output, first_tree, wide_stores);
  segment_reduce(segments, output, stream);
}

}  // namespace hstree
