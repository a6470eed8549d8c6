#include "common.cuh"
#include "segment.cuh"
#include "tile.cuh"
#include "wide.h"

namespace hstree {
namespace {

// Column of score at which the node at a level of a path begins: the widths of the nodes above it.
__device__ __forceinline__ int score_column(const Tables& tables, int64_t path_begin, int level) {
  int column = 0;
  for (int above = 0; above < level; ++above) column += tables.path[3 * (path_begin + above) + 1];
  return column;
}

// d log_softmax(z)[child] / dz[k] from score[k] = log_softmax(z)[k]
__device__ __forceinline__ float wide_slope(float score, bool chosen) {
  return (chosen ? 1.0f : 0.0f) - expf(score);
}
__device__ __forceinline__ double wide_slope(double score, bool chosen) {
  return (chosen ? 1.0 : 0.0) - exp(score);
}

// The wide op, first pass: logits of every child k of every wide node on the path of target[i].
//   score[i, t, c + k] = dot(input[i, subset_t], weight[t, first_row + k]) + bias[t, first_row + k],
//   c = sum of the widths of the nodes above
// Tensors: shapes at Tables, LeafOrder and WideForward; contiguous; input, weight, bias of one type T in
//   float32, float64, bfloat16, float16; score Sum<T>. The rest of score is left to the second pass.
// Sums in Sum<T>. Work O(N T width S). Bytes: a weight row once for each tile of 16 rows below it, an input
//   row once for each tree, score once for each chunk of features.
// No atomics; the order of every sum is fixed by S: deterministic.
// One block for each (tree, tile), one warp for each child of a node of the tile, lanes over features.
template <typename T, int Vector>
__global__ void __launch_bounds__(dot_threads, 5)
    wide_logit_kernel(Tables tables, LeafOrder leaf_order, WideForward tensors, int64_t tiles, int columns) {
  using D = Dot<T, Vector>;
  using S = Sum<T>;
  __shared__ Tile tile;
  S* rows = reinterpret_cast<S*>(HSTREE_SHARED_MEMORY);  // [tile_rows, columns]
  const int tree = static_cast<int>(blockIdx.x / tiles);
  const int warp = threadIdx.x / 32;
  const T* weight = static_cast<const T*>(tensors.weight) + tree * tables.weight_rows * tables.features;
  tile.fill(tables, leaf_order, tree, blockIdx.x % tiles * tile_rows);
  for (int64_t begin = 0; begin == 0 || begin < tables.features; begin += D::chunk) {
    const int width =
        static_cast<int>(tables.features - begin < D::chunk ? tables.features - begin : D::chunk);
    __syncthreads();
    D::stage(tables, tile, tree, static_cast<const T*>(tensors.input), begin, width, columns, rows);
    __syncthreads();
    for (int i = 0; i < tile.items(); ++i) {
      const Item item = tile.item(i);
      const int64_t path_begin = tile.path_begin[item.begin];
      const int children = tables.path[3 * (path_begin + item.level) + 1];
      const int first_column = score_column(tables, path_begin, item.level);
      for (int child = warp; child < children; child += dot_threads / 32) {
        const int64_t weight_row = item.node + child;
        S value[D::steps][Vector];
        D::load_weight(weight + weight_row * tables.features + begin, width, value);
        D::run(value, rows, columns, item.begin, item.end, [&](int r, S sum) {
          // The same lane meets this element in every chunk.
          S* score = static_cast<S*>(tensors.score) + (tile.row[r] * tables.trees + tree) * tables.stride +
                     first_column + child;
          if (begin > 0) {
            sum += *score;
          } else if (tensors.bias != nullptr) {
            sum += to_sum(static_cast<const T*>(tensors.bias)[tree * tables.weight_rows + weight_row]);
          }
          *score = sum;
        });
      }
    }
  }
}

// The wide op, second pass, in place.
//   score[i, t, columns of node] = log_softmax of them;  log_prob[i, t] = sum over nodes of score[child]
// Tensors as in the first pass; log_prob [N, T] Sum<T>. Columns past the path's nodes become 0. Ignored row:
//   log_prob 0, score 0. Target, path, row, child or feature out of range: log_prob NaN, score 0.
// (z - max) - log(sum exp(z - max)), exact to rounding at finite z; NaN if a z is inf or all are -inf.
// Bytes: score read three times and written once. Keeps score for backward. No atomics; deterministic.
// One warp for each (tree, place), lanes over columns.
template <typename S>
__global__ void __launch_bounds__(128)
    wide_softmax_kernel(Tables tables, LeafOrder leaf_order, S* scores, S* log_prob) {
  const int64_t place = (int64_t(blockIdx.x) * 128 + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (place >= tables.trees * tables.rows) return;
  const int tree = static_cast<int>(place / tables.rows);
  const int64_t row = leaf_order.order[place];
  const int length = leaf_order.length[place];
  S* score = scores + (row * tables.trees + tree) * tables.stride;
  S total = 0;
  int column = 0;
  if (length > 0) {
    const int64_t path_begin = hstree::path_begin(tables, tree, row);
    for (int level = 0; level < length; ++level) {
      const int children = tables.path[3 * (path_begin + level) + 1];
      const int chosen = tables.path[3 * (path_begin + level) + 2];
      S largest = -INFINITY;
      for (int k = lane; k < children; k += 32)
        largest = score[column + k] > largest ? score[column + k] : largest;
      largest = warp_max(largest);
      S sum = 0;
      for (int k = lane; k < children; k += 32) sum += exp(score[column + k] - largest);
      const S log_sum = log(warp_sum(sum));
      for (int k = lane; k < children; k += 32) {
        const S value = score[column + k] - largest - log_sum;
        score[column + k] = value;
        if (k == chosen) total += value;
      }
      column += children;
    }
  }
  for (int k = column + lane; k < tables.stride; k += 32) score[k] = 0;
  total = warp_sum(total);
  if (lane == 0) log_prob[row * tables.trees + tree] = length < 0 ? S(nanf("")) : total;
}

constexpr int child_group = 32;  // children whose factors are in shared memory at a time, grad_input

// The wide op, gradient of input, one tree:
//   sum[i, subset_t] += sum over nodes and children k of
//       grad_log_prob[i,t] * ([k = child] - exp(score[k])) * weight[t, first_row + k]
// Tensors: WideBackward says shapes; sum [N, D] Sum<T>. Rows without a usable path add nothing.
// Sums in Sum<T>. Work and bytes as the first pass of forward, and sum read and written once.
// No atomics: a row stands once in a tree's order, and trees come one launch after another. Deterministic.
// One block for each (tile, chunk of columns), Vector columns of 16 rows for each thread.
template <typename T, int Vector>
__global__ void __launch_bounds__(row_threads)
    wide_backward_input_kernel(Tables tables, LeafOrder leaf_order, WideBackward tensors, Sum<T>* total,
                               int tree) {
  using S = Sum<T>;
  __shared__ Tile tile;
  __shared__ S factor[child_group * tile_rows];
  tile.fill(tables, leaf_order, tree, int64_t(blockIdx.x) * tile_rows);
  const int64_t column = (int64_t(blockIdx.y) * row_threads + threadIdx.x) * Vector;
  const T* weight =
      static_cast<const T*>(tensors.weight) + tree * tables.weight_rows * tables.features + column;
  RowSums<T, Vector> sums;
  for (int i = 0; i < tile.items(); ++i) {
    const Item item = tile.item(i);
    const int64_t path_begin = tile.path_begin[item.begin];
    const int children = tables.path[3 * (path_begin + item.level) + 1];
    const int first_column = score_column(tables, path_begin, item.level);
    for (int first = 0; first < children; first += child_group) {
      const int count = children - first < child_group ? children - first : child_group;
      __syncthreads();
      for (int k = threadIdx.x; k < child_group * tile_rows; k += row_threads) {
        const int r = k / child_group, child = first + k % child_group;
        if (r < item.begin || r >= item.end || child >= children) continue;
        const int64_t at = tile.row[r] * tables.trees + tree;
        const S score = static_cast<const S*>(tensors.score)[at * tables.stride + first_column + child];
        const bool chosen = tables.path[3 * (tile.path_begin[r] + item.level) + 2] == child;
        factor[k % child_group * tile_rows + r] =
            static_cast<const S*>(tensors.grad_log_prob)[at] * wide_slope(score, chosen);
      }
      __syncthreads();
      if (column >= tables.features) continue;
      for (int k = 0; k < count; ++k) {
        S value[Vector];
        load<Vector>(weight + (int64_t(item.node) + first + k) * tables.features, value);
        sums.add(value, factor + k * tile_rows, item.begin, item.end);
      }
    }
  }
  sums.add_to(tables, tile, tree, column, total);
}

constexpr int child_sums = 16;  // children whose sums are in registers at a time, grad_weight
constexpr int group_rows = 32;  // rows whose factors are in shared memory at a time, grad_weight
constexpr int weight_threads = 128;

// The wide op, gradients of weight and bias.
//   grad_weight[t, first_row + k] = sum_i grad_log_prob[i,t] * ([k = child_i] - exp(score[i, t, c + k])) *
//       input[i, subset_t], rows i below the node
//   grad_bias[t, first_row + k] = the same without input: column S, whose input is 1
// Tensors: shapes at WideBackward and SegmentOutput; slot [T N + 1] int64, the sums of leaf_plan's count, or
//   null: then gradients are dense, row t R + first_row + k. Only rows of visited nodes are written. Rows
//   without a usable path add nothing.
// Sums in Sum<T>, rounded to T once. Work O(N T width S). Bytes: input once for each 16 children, each
//   gradient row once, and the workspace (segment.cuh).
// No atomics; the order of every sum depends on N and stride alone: deterministic.
// One block for each (tree, segment), chunk of columns and share of the children; one thread for each column,
//   16 children at a time.
template <typename T>
__global__ void __launch_bounds__(weight_threads, 3)
    wide_backward_weight_kernel(Tables tables, LeafOrder leaf_order, const int64_t* slot,
                                WideBackward tensors, Segments segments, SegmentOutput<T> output) {
  using S = Sum<T>;
  __shared__ int64_t row[group_rows];
  __shared__ S factor[group_rows * child_sums];
  const int tid = threadIdx.x, lane = tid % 32;
  const int tree = static_cast<int>(blockIdx.x / segments.count);
  const int64_t begin = blockIdx.x % segments.count * segments.places;
  const int64_t end = begin + segments.places < tables.rows ? begin + segments.places : tables.rows;
  const int64_t column = int64_t(blockIdx.y) * weight_threads + tid;
  const bool active = column < segments.columns;
  const int64_t source = column < tables.features ? input_feature(tables, tree, column) : -1;
  const T* input = static_cast<const T*>(tensors.input);
  const int64_t position = blockIdx.x * segments.stride;
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
        int64_t run_end = place + 1;  // every warp finds the first place that does not share the node
        for (;; run_end += 32) {
          const int64_t at = run_end + lane;
          const unsigned stop = __ballot_sync(all_lanes, at >= end || shared[at] <= level);
          if (stop == 0) continue;
          run_end += __ffs(stop) - 1;
          break;
        }
        const bool outgoing = run_end == end && end < tables.rows && shared[end] > level;
        for (int first = blockIdx.z * child_sums; first < children; first += gridDim.z * child_sums) {
          const int count = children - first < child_sums ? children - first : child_sums;
          S sum[child_sums] = {};
          for (int64_t group = place; group < run_end; group += group_rows) {
            const int rows = static_cast<int>(run_end - group < group_rows ? run_end - group : group_rows);
            __syncthreads();
            for (int i = tid; i < rows * child_sums; i += weight_threads) {
              const int r = i / child_sums, k = i % child_sums;
              const int64_t i_row = order[group + r];
              if (k == 0) row[r] = i_row;
              const int64_t at = i_row * tables.trees + tree;
              S value = 0;
              if (k < count) {
                const int chosen = tables.path[3 * (hstree::path_begin(tables, tree, i_row) + level) + 2];
                value =
                    static_cast<const S*>(tensors.grad_log_prob)[at] *
                    wide_slope(
                        static_cast<const S*>(tensors.score)[at * tables.stride + first_column + first + k],
                        chosen == first + k);
              }
              factor[i] = value;
            }
            __syncthreads();
            if (!active) continue;
#pragma unroll 4
            for (int r = 0; r < rows; ++r) {
              const S feature =
                  source < 0 ? S(1) : to_sum(__ldg(input + row[r] * tables.in_features + source));
#pragma unroll
              for (int k = 0; k < child_sums; ++k) sum[k] += factor[r * child_sums + k] * feature;
            }
          }
#pragma unroll
          for (int k = 0; k < child_sums; ++k) {
            if (k >= count) break;
            const int64_t at = position + first_column + first + k;
            const int64_t target_row = grad_row + first + k;
            if (outgoing && tid == 0 && blockIdx.y == 0)
              output.state[at] = incoming ? Segments::through : target_row;
            if (!active) continue;
            if (incoming) {
              output.head[at * segments.columns + column] = sum[k];
            } else if (outgoing) {
              output.tail[at * segments.columns + column] = sum[k];
            } else {
              output.store_row(target_row, tables.features, column, sum[k]);
            }
          }
        }
      }
      first_column += children;
      if (slot != nullptr && level >= shared[place]) grad_row += children;
    }
  }
}

template <typename T, int Vector>
void forward(const Tables& tables, const LeafOrder& leaf_order, const WideForward& tensors,
             cudaStream_t stream) {
  const int columns = Dot<T, Vector>::columns(tables.features);
  const int64_t tiles = tile_count(tables);
  launch(wide_logit_kernel<T, Vector>, grid_size(tables.trees * tiles), dot_threads,
         sizeof(Sum<T>) * tile_rows * columns, stream, tables, leaf_order, tensors, tiles, columns);
  launch(wide_softmax_kernel<Sum<T>>, grid_size(divide_up(32 * tables.trees * tables.rows, 128)), 128, 0,
         stream, tables, leaf_order, static_cast<Sum<T>*>(tensors.score),
         static_cast<Sum<T>*>(tensors.log_prob));
}

template <typename T, int Vector>
void backward_input(const Tables& tables, const LeafOrder& leaf_order, const WideBackward& tensors, void* sum,
                    cudaStream_t stream) {
  const dim3 grid(grid_size(tile_count(tables)),
                  static_cast<unsigned>(divide_up(tables.features, row_threads * Vector)));
  for (int tree = 0; tree < tables.trees; ++tree) {
    launch(wide_backward_input_kernel<T, Vector>, grid, row_threads, 0, stream, tables, leaf_order, tensors,
           static_cast<Sum<T>*>(sum), tree);
  }
}

}  // namespace

void wide_forward(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                  const WideForward& tensors, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (aligned<T>(tensors.weight, tables.features, 16)) {
      forward<T, 16 / sizeof(T)>(tables, leaf_order, tensors, stream);
    } else {
      forward<T, 1>(tables, leaf_order, tensors, stream);
    }
  });
}

void wide_backward_input(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                         const WideBackward& tensors, void* sum, void* grad_input, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int vector = sizeof(T) == 8 ? 2 : 4;
    if (tables.features == 0) {
    } else if (aligned<T>(tensors.weight, tables.features, vector * sizeof(T))) {
      backward_input<T, vector>(tables, leaf_order, tensors, sum, stream);
    } else {
      backward_input<T, 1>(tables, leaf_order, tensors, sum, stream);
    }
    round_sums<T>(tables, sum, grad_input, stream);
  });
}

void wide_backward_weight(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                          const int64_t* slot, const WideBackward& tensors, void* workspace,
                          void* grad_weight, void* grad_bias, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0 || tables.stride == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Segments segments(tables);
    const SegmentOutput<T> output(segments, workspace, grad_weight, grad_bias);
    const int64_t shares = divide_up(tables.stride, child_sums);
    const dim3 grid(grid_size(segments.trees * segments.count),
                    static_cast<unsigned>(divide_up(segments.columns, weight_threads)),
                    static_cast<unsigned>(shares < 16 ? shares : 16));
    clear_state(segments, output, stream);
    launch(wide_backward_weight_kernel<T>, grid, weight_threads, 0, stream, tables, leaf_order, slot, tensors,
           segments, output);
    segment_reduce(segments, output, stream);
  });
}

}  // namespace hstree
