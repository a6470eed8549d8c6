#include "common.cuh"
#include "path.h"
#include "segment.cuh"
#include "tile.cuh"

namespace hstree {
namespace {

__device__ __forceinline__ float log_sigmoid(float x) {
  return fminf(x, 0.0f) - log1pf(expf(-fabsf(x)));
}
__device__ __forceinline__ double log_sigmoid(double x) {
  return fmin(x, 0.0) - log1p(exp(-fabs(x)));
}

// d log_sigmoid(left ? z : -z) / dz
__device__ __forceinline__ float path_slope(float z, bool left) {
  return left ? 1.0f / (1.0f + expf(z)) : -1.0f / (1.0f + expf(-z));
}
__device__ __forceinline__ double path_slope(double z, bool left) {
  return left ? 1.0 / (1.0 + exp(z)) : -1.0 / (1.0 + exp(-z));
}

// The tree path op, forward: hierarchical softmax (Morin and Bengio, 2005), path nodes l = 1 ... L.
//   z[i,t,l] = dot(input[i, subset_t], weight[t, node_l]) + bias[t, node_l];  score = z
//   log_prob[i,t] = sum_l log_sigmoid(left_l ? z : -z), over the path of target[i] in tree t
// Tensors: shapes at Tables, LeafOrder and PathForward; contiguous; input, weight, bias of one type T in
//   float32, float64, bfloat16, float16; log_prob and score Sum<T>.
// Ragged paths: score is 0 past a path's end. Ignored row: log_prob 0, score 0. Target, path, node or feature
//   out of range: log_prob NaN, score 0. N = 0 launches nothing; a path of no nodes gives 0.
// Sums in Sum<T>; log_sigmoid(x) = min(x, 0) - log1p(exp(-|x|)), exact to rounding at any x, -inf and 0 at
//   infinities.
// Work O(N T L S). Bytes: a weight row once for each tile of 16 rows below it, an input row once for each
//   tree. Keeps score for backward.
// No atomics; the order of every sum is fixed by S: deterministic, the same for a row in any batch.
// One block for each (tree, tile), one warp for each node of the tile, lanes over features.
template <typename T, int Vector>
__global__ void __launch_bounds__(dot_threads, 5)
    path_forward_kernel(Tables tables, LeafOrder leaf_order, PathForward tensors, int64_t tiles,
                        int columns) {
  using D = Dot<T, Vector>;
  using S = Sum<T>;
  __shared__ Tile tile;
  S* rows = reinterpret_cast<S*>(HSTREE_SHARED_MEMORY);  // [tile_rows, columns]
  S* z = rows + tile_rows * columns;                     // [tile_rows, stride]
  const int tree = static_cast<int>(blockIdx.x / tiles);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int stride = tables.stride;
  const T* weight = static_cast<const T*>(tensors.weight) + tree * tables.weight_rows * tables.features;
  tile.fill(tables, leaf_order, tree, blockIdx.x % tiles * tile_rows);
  for (int i = threadIdx.x; i < tile_rows * stride; i += dot_threads) z[i] = S(0);
  for (int64_t begin = 0; begin < tables.features; begin += D::chunk) {
    const int width =
        static_cast<int>(tables.features - begin < D::chunk ? tables.features - begin : D::chunk);
    __syncthreads();
    D::stage(tables, tile, tree, static_cast<const T*>(tensors.input), begin, width, columns, rows);
    __syncthreads();
    for (int k = warp; k < tile.items(); k += dot_threads / 32) {
      const Item item = tile.item(k);
      S value[D::steps][Vector];
      D::load_weight(weight + item.node * tables.features + begin, width, value);
      D::run(value, rows, columns, item.begin, item.end,
             [&](int r, S sum) { z[r * stride + item.level] += sum; });
    }
  }
  __syncthreads();
  for (int r = warp; r < tile_rows; r += dot_threads / 32) {
    const int64_t row = tile.row[r];
    if (row < 0) continue;
    S* score = static_cast<S*>(tensors.score) + (row * tables.trees + tree) * stride;
    S sum = 0;
    for (int level = lane; level < stride; level += 32) {
      S value = 0;
      if (level < tile.length[r]) {
        const int32_t entry = tables.path[tile.path_begin[r] + level];
        value = z[r * stride + level];
        if (tensors.bias != nullptr) {
          value += to_sum(static_cast<const T*>(tensors.bias)[tree * tables.weight_rows + (entry >> 1)]);
        }
        sum += log_sigmoid(entry & 1 ? value : -value);
      }
      score[level] = value;
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      static_cast<S*>(tensors.log_prob)[row * tables.trees + tree] = tile.length[r] < 0 ? S(nanf("")) : sum;
    }
  }
}

// The tree path op, gradient of input, one tree.
//   sum[i, subset_t] += sum_l grad_log_prob[i,t] * slope_l * weight[t, node_l],
//   slope_l = sigmoid(-z) if the path goes left, else -sigmoid(z)
// Tensors: shapes at PathBackward; sum [N, D] Sum<T>. Rows without a usable path add nothing.
// Sums in Sum<T>; the slope is exact to rounding at any z. Work and bytes as forward, and sum read and
// written. No atomics: a row stands once in a tree's order, and trees come one launch after another.
// Deterministic. One block for each (tile, chunk of columns), Vector columns of 16 rows for each thread.
template <typename T, int Vector>
__global__ void __launch_bounds__(row_threads)
    path_backward_input_kernel(Tables tables, LeafOrder leaf_order, PathBackward tensors, Sum<T>* total,
                               int tree) {
  using S = Sum<T>;
  __shared__ Tile tile;
  S* factor = reinterpret_cast<S*>(HSTREE_SHARED_MEMORY);  // [stride, tile_rows]
  tile.fill(tables, leaf_order, tree, int64_t(blockIdx.x) * tile_rows);
  for (int i = threadIdx.x; i < tile_rows * tables.stride; i += row_threads) {
    const int r = i / tables.stride, level = i % tables.stride;
    if (level >= tile.length[r]) continue;
    const int64_t at = tile.row[r] * tables.trees + tree;
    const bool left = tables.path[tile.path_begin[r] + level] & 1;
    factor[level * tile_rows + r] =
        static_cast<const S*>(tensors.grad_log_prob)[at] *
        path_slope(static_cast<const S*>(tensors.score)[at * tables.stride + level], left);
  }
  __syncthreads();
  const int64_t column = (int64_t(blockIdx.y) * row_threads + threadIdx.x) * Vector;
  if (column >= tables.features) return;
  const T* weight =
      static_cast<const T*>(tensors.weight) + tree * tables.weight_rows * tables.features + column;
  RowSums<T, Vector> sums;
  S value[Vector], next[Vector] = {};
  if (tile.items() > 0) load<Vector>(weight + tile.node[0] * tables.features, next);
  for (int k = 0; k < tile.items(); ++k) {
#pragma unroll
    for (int e = 0; e < Vector; ++e) value[e] = next[e];
    if (k + 1 < tile.items()) load<Vector>(weight + tile.node[k + 1] * tables.features, next);
    const Item item = tile.item(k);
    sums.add(value, factor + item.level * tile_rows, item.begin, item.end);
  }
  sums.add_to(tables, tile, tree, column, total);
}

constexpr int segment_rows = 8;            // rows whose features and slopes are in shared memory at a time
constexpr size_t shared_limit = 48 << 10;  // bytes of a block, static and dynamic

// Dynamic shared memory.
template <typename T>
constexpr size_t forward_bytes(int columns, int stride) {
  return sizeof(Sum<T>) * tile_rows * (columns + stride);
}
template <typename T>
constexpr size_t backward_weight_bytes(int threads, int stride) {
  return sizeof(int64_t) * (segment_rows + 1) * stride +
         sizeof(Sum<T>) * (segment_rows * (stride + threads) + stride * threads);
}
template <typename T>
constexpr int column_threads = sizeof(T) == 8 ? 64 : 128;  // of path_backward_weight_kernel, at most
static_assert(sizeof(Tile) + forward_bytes<float>(Dot<float, 1>::chunk, max_depth) <= shared_limit);
static_assert(sizeof(Tile) + forward_bytes<double>(Dot<double, 1>::chunk, max_depth) <= shared_limit);
static_assert(256 + backward_weight_bytes<float>(column_threads<float>, max_depth) <= shared_limit);
static_assert(256 + backward_weight_bytes<double>(column_threads<double>, max_depth) <= shared_limit);

// The tree path op, gradients of weight and bias.
//   grad_weight[t, node] = sum_i grad_log_prob[i,t] * slope[i,t,node] * input[i, subset_t], rows i below node
//   grad_bias[t, node] = the same without input: column S, whose input is 1
// Tensors: shapes at PathBackward and SegmentOutput; slot [T N + 1] int64, the sums of leaf_plan's count, or
//   null: then gradients are dense, row t M + node. Only rows of visited nodes are written. Rows without a
//   usable path add nothing.
// Sums in Sum<T>, rounded to T once. Work O(N T L S). Bytes: input once for each tree, each gradient row
//   once, and the workspace (segment.cuh).
// No atomics; the order of every sum depends on N and stride alone: deterministic.
// One block for each (tree, segment) and chunk of columns, one thread for each column, which walks the rows
//   with one running sum for each level of the current path.
template <typename T>
__global__ void __launch_bounds__(128)
    path_backward_weight_kernel(Tables tables, LeafOrder leaf_order, const int64_t* slot,
                                PathBackward tensors, Segments segments, SegmentOutput<T> output) {
  using S = Sum<T>;
  __shared__ int64_t row[segment_rows], path_at[segment_rows];
  __shared__ int length[segment_rows], shared[segment_rows + 1];
  const int stride = tables.stride, threads = blockDim.x, tid = threadIdx.x;
  int64_t* grad_row = reinterpret_cast<int64_t*>(HSTREE_SHARED_MEMORY);  // [segment_rows, stride]
  int64_t* grad_row_before = grad_row + segment_rows * stride;  // [stride], last row of the group before
  S* factor = reinterpret_cast<S*>(grad_row_before + stride);   // [segment_rows, stride]
  S* feature = factor + segment_rows * stride;                  // [segment_rows, threads]
  S* level_sum = feature + segment_rows * threads;              // [stride, threads]

  const int tree = static_cast<int>(blockIdx.x / segments.count);
  const int64_t segment = blockIdx.x % segments.count;
  const int64_t begin = segment * segments.places;
  const int64_t end = begin + segments.places < tables.rows ? begin + segments.places : tables.rows;
  const int64_t column = int64_t(blockIdx.y) * threads + tid;
  const bool active = column < segments.columns;
  const int64_t source = column < tables.features ? input_feature(tables, tree, column) : -1;
  const T* input = static_cast<const T*>(tensors.input);
  const int64_t position = blockIdx.x * segments.stride;  // of this segment in the workspace
  int incoming = stride;  // levels whose node came from the segment before and still goes on

  for (int64_t group = begin; group < end; group += segment_rows) {
    const int rows = static_cast<int>(end - group < segment_rows ? end - group : segment_rows);
    const int64_t place = tree * tables.rows + group;
    __syncthreads();
    if (tid < rows) {
      row[tid] = leaf_order.order[place + tid];
      length[tid] = leaf_order.length[place + tid] > 0 ? leaf_order.length[place + tid] : 0;
      path_at[tid] = length[tid] > 0 ? path_begin(tables, tree, row[tid]) : 0;
    }
    if (tid <= rows) shared[tid] = group + tid < tables.rows ? leaf_order.shared[place + tid] : 0;
    __syncthreads();
    for (int i = tid; i < rows * stride; i += threads) {
      const int r = i / stride, level = i % stride;
      if (level >= length[r]) continue;
      const int64_t at = row[r] * tables.trees + tree;
      const int32_t entry = tables.path[path_at[r] + level];
      factor[i] = static_cast<const S*>(tensors.grad_log_prob)[at] *
                  path_slope(static_cast<const S*>(tensors.score)[at * stride + level], entry & 1);
      if (slot == nullptr) {
        grad_row[i] = tree * tables.weight_rows + (entry >> 1);
      } else {
        int start = r;
        while (start >= 0 && shared[start] > level) --start;
        grad_row[i] = start < 0 ? grad_row_before[level] : slot[place + start] + level - shared[start];
      }
    }
    if (active) {
#pragma unroll
      for (int r = 0; r < segment_rows; ++r) {
        if (r >= rows || length[r] == 0) continue;
        feature[r * threads + tid] =
            source < 0 ? S(1) : to_sum(__ldg(input + row[r] * tables.in_features + source));
      }
    }
    __syncthreads();
    for (int r = 0; r < rows; ++r) {
      if (shared[r] < incoming) incoming = shared[r];
      if (!active) continue;
      const int fresh =
          group + r == begin ? 0 : shared[r];  // levels from here on start their sum with this row
      const int next = shared[r + 1];          // levels from here on end their sum with this row
      const bool at_end = group + r + 1 == end;
      for (int level = 0; level < length[r]; ++level) {
        S sum = factor[r * stride + level] * feature[r * threads + tid];
        if (level < fresh) sum += level_sum[level * threads + tid];
        if (level < next && !at_end) {
          level_sum[level * threads + tid] = sum;
        } else if (level < incoming) {
          output.head[(position + level) * segments.columns + column] = sum;
        } else if (level < next) {
          output.tail[(position + level) * segments.columns + column] = sum;
        } else {
          output.store_row(grad_row[r * stride + level], tables.features, column, sum);
        }
      }
    }
    if (group + rows == end) {
      for (int level = tid; level < shared[rows] && blockIdx.y == 0; level += threads) {
        output.state[position + level] =
            level < incoming ? Segments::through : grad_row[(rows - 1) * stride + level];
      }
    }
    for (int level = tid; level < length[rows - 1]; level += threads) {
      grad_row_before[level] = grad_row[(rows - 1) * stride + level];
    }
  }
}

template <typename T, int Vector>
void forward(const Tables& tables, const LeafOrder& leaf_order, const PathForward& tensors,
             cudaStream_t stream) {
  const int columns = Dot<T, Vector>::columns(tables.features);
  const size_t shared_bytes = forward_bytes<T>(columns, tables.stride);
  const int64_t tiles = tile_count(tables);
  launch(path_forward_kernel<T, Vector>, grid_size(tables.trees * tiles), dot_threads, shared_bytes, stream,
         tables, leaf_order, tensors, tiles, columns);
}

template <typename T, int Vector>
void backward_input(const Tables& tables, const LeafOrder& leaf_order, const PathBackward& tensors, void* sum,
                    cudaStream_t stream) {
  const dim3 grid(grid_size(tile_count(tables)),
                  static_cast<unsigned>(divide_up(tables.features, row_threads * Vector)));
  const size_t shared_bytes = sizeof(Sum<T>) * tile_rows * tables.stride;
  for (int tree = 0; tree < tables.trees; ++tree) {
    launch(path_backward_input_kernel<T, Vector>, grid, row_threads, shared_bytes, stream, tables, leaf_order,
           tensors, static_cast<Sum<T>*>(sum), tree);
  }
}

}  // namespace

void path_forward(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                  const PathForward& tensors, cudaStream_t stream) {
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

void path_backward_input(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                         const PathBackward& tensors, void* sum, void* grad_input, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int vector =
        sizeof(T) == 8 ? 2 : 4;  // more columns would need more registers than a thread has
    if (tables.features == 0) {
    } else if (aligned<T>(tensors.weight, tables.features, vector * sizeof(T))) {
      backward_input<T, vector>(tables, leaf_order, tensors, sum, stream);
    } else {
      backward_input<T, 1>(tables, leaf_order, tensors, sum, stream);
    }
    round_sums<T>(tables, sum, grad_input, stream);
  });
}

void path_backward_weight(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                          const int64_t* slot, const PathBackward& tensors, void* workspace,
                          void* grad_weight, void* grad_bias, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0 || tables.stride == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Segments segments(tables);
    const SegmentOutput<T> output(segments, workspace, grad_weight, grad_bias);
    const int64_t chunks = divide_up(segments.columns, column_threads<T>);
    const int threads = static_cast<int>(divide_up(divide_up(segments.columns, chunks), 32) * 32);
    const size_t shared_bytes = backward_weight_bytes<T>(threads, tables.stride);
    clear_state(segments, output, stream);
    launch(path_backward_weight_kernel<T>,
           dim3(grid_size(segments.trees * segments.count), static_cast<unsigned>(chunks)), threads,
           shared_bytes, stream, tables, leaf_order, slot, tensors, segments, output);
    segment_reduce(segments, output, stream);
  });
}

}  // namespace hstree
