#include "common.cuh"
#include "path.h"
#include "product.cuh"
#include "weight_product.cuh"

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

// grad_log_prob[row, tree] * slope of the node at a level of its path, of which `entry` is the table's entry
template <typename S>
__device__ __forceinline__ S path_factor(const Tables& tables, const PathBackward& tensors, int tree,
                                         int64_t row, int level, int32_t entry) {
  const int64_t at = row * tables.trees + tree;
  return static_cast<const S*>(tensors.grad_log_prob)[at] *
         path_slope(static_cast<const S*>(tensors.score)[at * tables.stride + level], entry & 1);
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
//   tree: 32 bytes of it at a time, so that a random subset of D / 4 features reads all of it, and one of
//   blocks of 16 features a quarter. At N = 8192, D = 4096, T = 8, S = 1024, bfloat16 a tile reads 128 or 32
//   KiB of input and 2 KiB for each of its 39 nodes (Huffman; 52 balanced), instead of for each of 187 visits,
//   and makes about 600 matrix instructions. Keeps score for backward.
// No atomics; the order of every sum is fixed by S, max_depth and, for bfloat16 and float16, by whether rows
//   are read in vectors: deterministic, the same for a row in any batch.
// One block for each (tree, tile); a warp for each node of the tile, or for a share of the features:
//   product.cuh. Then eight threads for each row.
template <typename T, bool Aligned>
__global__ void __launch_bounds__(product_threads, forward_blocks)
    path_forward_kernel(Tables tables, LeafOrder leaf_order, PathForward tensors, int64_t tiles,
                        Staging staging) {
  using P = Product<T, Aligned>;
  using S = Sum<T>;
  constexpr int lanes = product_threads / tile_rows;  // of a row
  constexpr int ahead = 4;                            // levels of a lane at a time
  __shared__ Tile tile;
  static_assert(sizeof(Tile) + P::bytes({P::most, true}) + sizeof(S) * tile_rows * max_depth <=
                default_shared_bytes);
  S* z = reinterpret_cast<S*>(HSTREE_SHARED_MEMORY + P::bytes(staging));  // [tile_rows, stride]
  const int tree = static_cast<int>(blockIdx.x / tiles);
  const int stride = tables.stride;
  tile.fill(tables, leaf_order, tree, blockIdx.x % tiles * tile_rows, tables.rows);
  if (tile.items() > 0) {
    const P product(tables, tree, tensors.weight, tensors.input, staging, HSTREE_SHARED_MEMORY);
    int64_t begin = 0;
    do {
      const int64_t left = tables.features - begin;
      const int width = static_cast<int>(left < product.chunk ? left : product.chunk);
      product.stage(tile, begin, width);
      product.multiply(
          tile, begin, width, tile.items(), 0, tile_rows,
          [&](int k) {
            const Item item = tile.item(k);
            return Run{item.node, item.begin, item.end};
          },
          [&](int k, int r, S sum) {
            S& total = z[r * stride + tile.item(k).level];
            total = begin > 0 ? total + sum : sum;
          });
      begin += product.chunk;
    } while (begin < tables.features);
  }
  __syncthreads();
  const int r = threadIdx.x / lanes;
  const int64_t row = tile.row[r], at = row * tables.trees + tree;
  const int length = tile.length[r];
  const T* bias =
      tensors.bias == nullptr ? nullptr : static_cast<const T*>(tensors.bias) + tree * tables.weight_rows;
  S total = 0;
  for (int first = threadIdx.x % lanes; first < stride && row >= 0; first += ahead * lanes) {
    int32_t entry[ahead];
    S value[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const int level = first + i * lanes;
      entry[i] = level < length ? __ldg(tables.path + tile.path_begin[r] + level) : 0;
      value[i] = level < length ? z[r * stride + level] : S(0);
    }
    if (bias != nullptr) {
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        if (first + i * lanes < length) value[i] += to_sum(__ldg(bias + (entry[i] >> 1)));
      }
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const int level = first + i * lanes;
      if (level < length) total += log_sigmoid(entry[i] & 1 ? value[i] : -value[i]);
      if (level < stride) static_cast<S*>(tensors.score)[at * stride + level] = value[i];
    }
  }
#pragma unroll
  for (int bits = lanes / 2; bits > 0; bits /= 2) total += __shfl_xor_sync(all_lanes, total, bits);
  if (threadIdx.x % lanes == 0 && row >= 0) {
    static_cast<S*>(tensors.log_prob)[at] = length < 0 ? S(nanf("")) : total;
  }
}

constexpr int row_threads = 128;
constexpr int planes = 8;  // of a row of sums: features 0, 8, ..., then 1, 9, ..., so that banks differ
constexpr int plane_padding = 4;

// The tree path op, gradient of input.
//   grad_input[i, d] = sum_t sum_l grad_log_prob[i,t] * slope_l * weight[t, node_l, s], subset_t[s] = d,
//   slope_l = sigmoid(-z) if the path goes left, else -sigmoid(z)
// Tensors: shapes at PathBackward; grad_input [N, D] T, every element written. Rows without a usable path get
//   nothing from their tree.
// Sums in Sum<T>, rounded to T once; the slope is exact to rounding at any z.
// Work O(N T L S). Bytes: a weight row once for each row below it, from L2 for the most part, and grad_input
//   once. Tiles of 16 rows would read 39 weight rows instead of 187, but a row stands in another tile in every
//   tree, so that its sum would have to be read and written once for each tree: at the size above 187 KiB of
//   weights for each row against 39 KiB of weights and 256 KiB of sums, 32 bytes at a time, with 128 MiB to
//   keep them in. Work is 1.5e9 multiply-adds there, too little to be worth matrix instructions.
// No atomics; trees and levels in order: deterministic.
// One block for each row and window of features, in the order of the first tree, so that rows of one class,
//   whose paths agree in all trees, run together; Vector features for each thread, sums in shared memory.
template <typename T, int Vector>
__global__ void __launch_bounds__(row_threads)
    path_backward_input_kernel(Tables tables, LeafOrder leaf_order, PathBackward tensors, int window,
                               T* grad_input) {
  using S = Sum<T>;
  __shared__ int32_t node[max_depth];
  __shared__ S factor[max_depth];
  S* total = reinterpret_cast<S*>(HSTREE_SHARED_MEMORY);  // [planes, window / planes + plane_padding]
  const int plane = window / planes + plane_padding;
  const int64_t row = leaf_order.order[blockIdx.x];
  const int64_t first = int64_t(blockIdx.y) * window;
  for (int i = threadIdx.x; i < planes * plane; i += row_threads) total[i] = S(0);
  for (int tree = 0; tree < tables.trees; ++tree) {
    const int length = leaf_order.row_length[tree * tables.rows + row];
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < length) {
      const int level = threadIdx.x;
      const int32_t entry = tables.path[path_begin(tables, tree, row) + level];
      node[level] = entry >> 1;
      factor[level] = path_factor<S>(tables, tensors, tree, row, level, entry);
    }
    __syncthreads();
    if (length <= 0) continue;
    const T* weight = static_cast<const T*>(tensors.weight) + tree * tables.weight_rows * tables.features;
    for (int64_t begin = threadIdx.x * Vector; begin < tables.features; begin += row_threads * Vector) {
      int64_t feature[Vector];
      input_features<Vector>(tables, tree, begin, feature);
      if (feature[Vector - 1] < first || feature[0] >= first + window) continue;
      S sum[Vector] = {};
#pragma unroll 4
      for (int level = 0; level < length; ++level) {
        S value[Vector];
        load<Vector>(weight + node[level] * tables.features + begin, value);
#pragma unroll
        for (int k = 0; k < Vector; ++k) sum[k] += factor[level] * value[k];
      }
#pragma unroll
      for (int k = 0; k < Vector; ++k) {
        const auto at = static_cast<unsigned>(feature[k] - first);
        if (at < static_cast<unsigned>(window)) total[at % planes * plane + at / planes] += sum[k];
      }
    }
  }
  __syncthreads();
  grad_input += row * tables.in_features + first;
  for (int i = threadIdx.x; i < window && first + i < tables.in_features; i += row_threads) {
    store(grad_input + i, total[i % planes * plane + i / planes]);
  }
}

constexpr size_t shared_limit = 48 << 10;  // bytes of a block, static and dynamic

// Dynamic shared memory.
template <typename T>
constexpr size_t backward_weight_bytes(int stride) {
  return sizeof(Sum<T>) * stride * ColumnSums<T>::stride;
}
// Nodes whose factors are in shared memory at a time, path_backward_weight_kernel.
template <typename T>
constexpr int weight_items = sizeof(T) == 8 ? 32 : 48;
template <typename T>
constexpr bool weight_kernel_fits =
    sizeof(Tile) + sizeof(typename WeightProduct<T>::template Factors<weight_items<T>>) +
        sizeof(ItemSum) * weight_items<T> + 2 * max_depth * sizeof(int64_t) +
        backward_weight_bytes<T>(max_depth) <=
    shared_limit;
static_assert(weight_kernel_fits<float> && weight_kernel_fits<double> && weight_kernel_fits<__half>);
// The tree path op, gradients of weight and bias.
//   grad_weight[t, node] = sum_i grad_log_prob[i,t] * slope[i,t,node] * input[i, subset_t], rows i below node
//   grad_bias[t, node] = the same without input: column S, whose input is 1
// Tensors: shapes at PathBackward and SegmentOutput; slot [T N + 1] int64, the sums of leaf_plan's count, or
//   null: then gradients are dense, row t M + node. Only rows of visited nodes are written. Rows without a
//   usable path add nothing. A feature of bfloat16 or float16 that is not finite makes its column NaN for all
//   nodes of its tile.
// Sums in Sum<T>, rounded to T once. Work O(N T L S). Bytes: input once for each tree, each gradient row
//   once, and the workspace (segment.cuh). At N = 8192, D = 4096, T = 8, S = 1024, bfloat16 a tile reads 128
//   KiB of input for 187 visits in 39 nodes, of which 10 are carried in shared memory from tile to tile: a row
//   at a time, as many sums as visits would be read and written there, 1.5 MiB a tile instead of 80 KiB.
// No atomics; the order of every sum depends on N, T, S and stride alone: deterministic.
// One block for each (tree, segment) and chunk of columns, which walks the segment's tiles.
template <typename T>
__global__ void __launch_bounds__(weight_threads, 5)
    path_backward_weight_kernel(Tables tables, LeafOrder leaf_order, const int64_t* slot,
                                PathBackward tensors, Segments segments, SegmentOutput<T> output,
                                bool wide_stores) {
  using S = Sum<T>;
  using W = WeightProduct<T>;
  constexpr int items = weight_items<T>;
  __shared__ Tile tile;
  __shared__ typename W::template Factors<items> factors;
  __shared__ ItemSum item_sum[items];
  __shared__ int64_t carried_row[2][max_depth];  // rows of the sums that pass to this tile, and from it
  const int tree = static_cast<int>(blockIdx.x / segments.count);
  const int64_t begin = blockIdx.x % segments.count * segments.places;
  const int64_t end = begin + segments.places < tables.rows ? begin + segments.places : tables.rows;
  const int64_t position = blockIdx.x * segments.stride;
  const ColumnSums<T> sums = {item_sum,   reinterpret_cast<S*>(HSTREE_SHARED_MEMORY),   output,
                              position,   int64_t(blockIdx.y) * ColumnSums<T>::columns, tables.features,
                              wide_stores};
  W product(tables, tree, sums.first_column);
  int incoming = tables.stride;  // levels whose node came from the segment before and still goes on
  int parity = 0;
  for (int64_t place = begin; place < end; place += tile_rows, parity ^= 1) {
    tile.fill(tables, leaf_order, tree, place, end);
    product.load(tables, static_cast<const T*>(tensors.input),
                 [&](int r) { return tile.length[r] > 0 ? tile.row[r] : -1; });
    const int64_t at = tree * tables.rows + place;
    const int rows = static_cast<int>(end - place < tile_rows ? end - place : tile_rows);
    const int shared_before = leaf_order.shared[at];
    const int shared_after = place + rows < tables.rows ? leaf_order.shared[at + rows] : 0;
    const bool at_end = place + rows == end;
    if (shared_before < incoming) incoming = shared_before;
    for (int first = 0; first < tile.items(); first += items) {
      const int count = tile.items() - first < items ? tile.items() - first : items;
      __syncthreads();
      for (int i = threadIdx.x; i < divide_up(count, item_group) * item_group * tile_rows; i += W::threads) {
        const int k = i / tile_rows, r = i % tile_rows;
        S value = 0;
        if (k < count) {
          const Item item = tile.item(first + k);
          if (r >= item.begin && r < item.end) {
            const int32_t entry = tables.path[tile.path_begin[r] + item.level];
            value = path_factor<S>(tables, tensors, tree, tile.row[r], item.level, entry);
          }
          if (r == 0) {
            const bool continued = item.begin == 0 && item.level < shared_before;
            const bool is_incoming = item.begin == 0 && item.level < incoming;
            const bool outgoing = item.end == rows && item.level < shared_after;
            ItemSum to;
            to.position = item.level;
            to.carried = continued && place > begin;
            if (slot == nullptr) {
              to.grad_row = tree * tables.weight_rows + item.node;
            } else if (continued) {
              to.grad_row = to.carried ? carried_row[parity][item.level] : 0;
            } else {
              const int shared = item.begin == 0 ? shared_before : tile.shared[item.begin];
              to.grad_row = slot[at + item.begin] + item.level - shared;
            }
            to.goal = outgoing && !at_end ? ItemSum::carry
                      : is_incoming       ? ItemSum::head
                      : outgoing          ? ItemSum::tail
                                          : ItemSum::store;
            if (to.goal == ItemSum::carry) carried_row[parity ^ 1][item.level] = to.grad_row;
            if (outgoing && at_end && blockIdx.y == 0) {
              output.state[position + item.level] = is_incoming ? Segments::through : to.grad_row;
            }
            item_sum[k] = to;
          }
        }
        factors.set(k, r, value);
      }
      __syncthreads();
      for (int group = 0; group < count; group += item_group) {
        typename W::Sums sum;
        product.add(
            factors, group, [&](int k) { return k < count ? tile.item(first + k) : Item{0, 0, 0, 0}; }, sum);
        // Two nodes may be at one level, one carried to this tile and one from it.
        W::each(sum, [&](int k, int column, auto& part) {
          if (group + k < count) sums.add_before(group + k, column, part);
        });
        __syncwarp();
        W::each(sum, [&](int k, int column, auto& part) {
          if (group + k < count) sums.write(group + k, column, part);
        });
        __syncwarp();
      }
      if (blockIdx.y == 0) {
        const int k = threadIdx.x;
        S bias[1] = {};
        if (k < count) {
          bias[0] = factors.sum(k);
          sums.add_before(k, ColumnSums<T>::columns, bias);
        }
        __syncthreads();
        if (k < count) sums.write(k, ColumnSums<T>::columns, bias);
      }
    }
    for (int r = 1; r < rows; ++r) {
      if (tile.shared[r] < incoming) incoming = tile.shared[r];
    }
  }
}

template <typename T, int Vector>
void backward_input(const Tables& tables, const LeafOrder& leaf_order, const PathBackward& tensors,
                    void* grad_input, cudaStream_t stream) {
  constexpr int64_t widest = (40 << 10) / sizeof(Sum<T>);  // features of a window
  const int64_t windows = divide_up(tables.in_features, widest);
  const int64_t window = divide_up(divide_up(tables.in_features, windows), planes) * planes;
  const size_t shared_bytes = sizeof(Sum<T>) * (window + planes * plane_padding);
  launch(path_backward_input_kernel<T, Vector>, dim3(grid_size(tables.rows), static_cast<unsigned>(windows)),
         row_threads, shared_bytes, stream, tables, leaf_order, tensors, static_cast<int>(window),
         static_cast<T*>(grad_input));
}

}  // namespace

void path_forward(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                  const PathForward& tensors, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0) return;
  dispatch_aligned(type, tensors.weight, tables.features, [&](auto tag, auto is_aligned) {
    using T = typename decltype(tag)::type;
    launch_forward<T, is_aligned()>(path_forward_kernel<T, is_aligned()>, tables, leaf_order, tensors,
                                    sizeof(Sum<T>) * tile_rows * tables.stride, stream);
  });
}

void path_backward_input(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                         const PathBackward& tensors, void* grad_input, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0 || tables.in_features == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool index_aligned = reinterpret_cast<uintptr_t>(tables.feature_index) % 16 == 0;
    if (index_aligned && aligned<T>(tensors.weight, tables.features, 16)) {
      backward_input<T, 16 / sizeof(T)>(tables, leaf_order, tensors, grad_input, stream);
    } else {
      backward_input<T, 1>(tables, leaf_order, tensors, grad_input, stream);
    }
  });
}

void path_backward_weight(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                          const int64_t* slot, const PathBackward& tensors, void* workspace,
                          void* grad_weight, void* grad_bias, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0 || tables.stride == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    sum_weight_rows<T>(path_backward_weight_kernel<T>, tables, leaf_order, slot, tensors, workspace,
                       grad_weight, grad_bias, 1, backward_weight_bytes<T>(tables.stride), stream);
  });
}

}  // namespace hstree
