#include "common.cuh"
#include "product.cuh"
#include "round.cuh"
#include "weight_product.cuh"
#include "wide_log_prob.h"
#include "wide_slope.cuh"

namespace hstree {
namespace {

// First column of score of the node at a level of a path: the sum of the widths of the nodes above it.
__device__ __forceinline__ int score_column(const Tables& tables, int64_t path_begin, int level) {
  int column = 0;
  for (int above = 0; above < level; ++above) column += tables.path[3 * (path_begin + above) + 1];
  return column;
}

// Replaces the logits of a row of the tile by their log-softmax, node by node, and clears the rest of score.
// Returns the sum over the chosen children, NaN for corrupt tables. One warp.
template <typename S>
__device__ __forceinline__ S log_softmax(const Tables& tables, const Tile& tile, int r, S* score) {
  const int lane = threadIdx.x % 32;
  S total = 0;
  int column = 0;
  for (int level = 0; level < tile.length[r]; ++level) {
    const int32_t* entry = tables.path + 3 * (tile.path_begin[r] + level);
    const int children = entry[1], chosen = entry[2];
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
  for (int k = column + lane; k < tables.stride; k += 32) score[k] = 0;
  total = warp_sum(total);
  return tile.length[r] < 0 ? S(nanf("")) : total;
}

// The wide op, forward.
//   score[i, t, c + k] = log_softmax(z)[k],  z[k] = dot(hidden[i, subset_t], weight[t, first_row + k])
//       + bias[t, first_row + k],  for every child k of every wide node on the path of target[i]; c = sum of the
//       widths of the nodes above
//   log_prob[i, t] = sum over nodes of score[c + child]
// Tensors: shapes at Tables, LeafOrder and WideForward; contiguous; hidden, weight, bias of one type T in
//   float32, float64, bfloat16, float16; log_prob and score Sum<T>. Columns past the path's nodes become 0.
//   Ignored row: log_prob 0, score 0. Target, path, row, child or feature out of range: log_prob NaN, score 0.
// Sums in Sum<T>; (z - max) - log(sum exp(z - max)), accurate to rounding at finite z; NaN if a z is inf or
//   all are -inf.
// Work O(N T width S). Bytes: a weight row once for each tile of 16 rows below it, a hidden row once for each
//   tree, or once for each of its nodes where it is read in vectors; score, in cache, once for each chunk of
//   features and four times for the softmax. Keeps score for backward.
// No atomics; the order of every sum is fixed by S and, for bfloat16 and float16, by whether rows are read in
//   vectors: deterministic.
// One block for each (tree, tile), which processes the nodes of the tile one after another; a warp for each
//   child, or for a share of the features: product.cuh. Then one warp for each row of the tile.
template <typename T, bool Aligned>
__global__ void __launch_bounds__(product_threads, forward_blocks)
    wide_log_prob_kernel(Tables tables, LeafOrder leaf_order, WideForward tensors, int64_t tiles,
                         Staging staging) {
  using P = Product<T, Aligned>;
  using S = Sum<T>;
  __shared__ Tile tile;
  const int tree = static_cast<int>(blockIdx.x / tiles);
  tile.fill(tables, leaf_order, tree, blockIdx.x % tiles * tile_rows, tables.rows);
  const P product(tables, tree, tensors.weight, tensors.hidden, staging, HSTREE_SHARED_MEMORY);
  int64_t begin = 0;
  do {
    if (tile.items() == 0) break;
    const int64_t left = tables.features - begin;
    const int width = static_cast<int>(left < product.chunk ? left : product.chunk);
    product.stage(tile, begin, width);
    for (int i = 0; i < tile.items(); ++i) {
      const Item item = tile.item(i);
      const int64_t path_begin = tile.path_begin[item.begin];
      const int children = tables.path[3 * (path_begin + item.level) + 1];
      const int first_column = score_column(tables, path_begin, item.level);
      product.multiply(
          tile, begin, width, children, item.begin, item.end,
          [&](int child) { return Run{weight_row(tables, tree, item.node + child), item.begin, item.end}; },
          [&](int child, int r, S sum) {
            S* score = static_cast<S*>(tensors.score) + (tile.row[r] * tables.trees + tree) * tables.stride +
                       first_column + child;
            if (begin > 0) {
              sum += *score;
            } else if (tensors.bias != nullptr) {
              const T* bias = static_cast<const T*>(tensors.bias) + tree * tables.weight_rows;
              sum += to_sum(__ldg(bias + weight_row(tables, tree, item.node + child)));
            }
            *score = sum;
          });
    }
    begin += product.chunk;
  } while (begin < tables.features);
  __syncthreads();
  for (int r = threadIdx.x / 32; r < tile_rows; r += product_threads / 32) {
    const int64_t row = tile.row[r];
    if (row < 0) continue;
    const S sum = log_softmax(tables, tile, r,
                              static_cast<S*>(tensors.score) + (row * tables.trees + tree) * tables.stride);
    if (threadIdx.x % 32 == 0) static_cast<S*>(tensors.log_prob)[row * tables.trees + tree] = sum;
  }
}

constexpr int most_row_threads = 256, least_row_threads = 64;

// grad_hidden of the rows of a tile: products of factors [16 rows, children] with weight rows [children, columns
// of the block], summed up over the nodes of the tile.
//
// float32 and float64: fused multiply-adds; a thread has `vector` columns of all rows in registers.
template <typename T, bool Aligned, bool Half = is_half<T>>
struct RowSums {
  static constexpr int vector = Aligned ? 16 / sizeof(T) : 1;
  static constexpr int columns = vector;  // of a thread
  static constexpr int children = 32;     // whose factors are in shared memory at a time

  struct Factors {
    T factor[children][tile_rows];
    __device__ __forceinline__ void set(int r, int child, T value) { factor[child][r] = value; }
  };

  T sum[tile_rows][vector] = {};

  // Adds those of the `count` rows weight_row[...] of `weight` to the rows of the item. first_column: of the
  // block.
  __device__ __forceinline__ void add(const Factors& factors, const Item& item, const T* weight,
                                      const int32_t* weight_row, int count, int64_t features,
                                      int64_t first_column) {
    const int64_t column = first_column + threadIdx.x * vector;
    if (column >= features) return;
    for (int k = 0; k < count; ++k) {
      T value[vector];
      load<vector>(weight + weight_row[k] * features + column, value);
#pragma unroll
      for (int group = 0; group < tile_rows; group += 4) {
        if (item.begin >= group + 4 || item.end <= group) continue;
#pragma unroll
        for (int r = group; r < group + 4; ++r) {
          if (r < item.begin || r >= item.end) continue;
#pragma unroll
          for (int e = 0; e < vector; ++e) sum[r][e] += factors.factor[k][r] * value[e];
        }
      }
    }
  }

  // Calls take(row of the tile, column of the block, sums of consecutive columns).
  template <typename Take>
  __device__ __forceinline__ void each(Take take) const {
#pragma unroll
    for (int r = 0; r < tile_rows; ++r) take(r, static_cast<int>(threadIdx.x * vector), sum[r]);
  }
};

// bfloat16 and float16: [16 rows] x [16 children] x [8 columns] by matrix instructions, factors as in
// SplitFactors. A lane reads eight columns of four children in 16 bytes each; column 8 n + j of a warp's 64
// is column n of instruction j.
template <typename T, bool Aligned>
struct RowSums<T, Aligned, true> {
  static constexpr int columns = 2;
  static constexpr int children = 16;
  using Factors = SplitFactors<T, tile_rows>;

  float sum[4][8] = {};  // columns 8 (2 t + i % 2) ... of row g + i / 2 * 8

  __device__ __forceinline__ void add(const Factors& factors, const Item& item, const T* weight,
                                      const int32_t* weight_row, int count, int64_t features,
                                      int64_t first_column) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int64_t column = first_column + threadIdx.x / 32 * 64 + 8 * g;
    uint32_t part[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = 2 * t + i % 2 + i / 2 * 8;
      const int64_t left = k < count ? features - column : 0;
      load_part(weight + (k < count ? weight_row[k] : 0) * features + column, left, part[i]);
    }
    uint32_t high[4], low[4];
    factors.operands(0, high, low);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t operand[2] = {pair(part[0][j / 2], part[1][j / 2], j % 2),
                                   pair(part[2][j / 2], part[3][j / 2], j % 2)};
      float product[4] = {};
      mma<T>(product, low, operand);
      mma<T>(product, high, operand);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = g + i / 2 * 8;
        if (r >= item.begin && r < item.end) sum[i][j] += product[i] * factors.scale[r];
      }
    }
  }

  template <typename Take>
  __device__ __forceinline__ void each(Take take) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      take(g + i / 2 * 8, static_cast<int>(threadIdx.x / 32 * 64 + 8 * (2 * t + i % 2)), sum[i]);
    }
  }

 private:
  // The lower or upper halves of two words.
  static __device__ __forceinline__ uint32_t pair(uint32_t first, uint32_t second, int upper) {
    return upper ? first >> 16 | (second & 0xffff0000u) : (first & 0xffffu) | second << 16;
  }

  // Eight elements, zero from `left` on.
  static __device__ __forceinline__ void load_part(const T* address, int64_t left, uint32_t (&part)[4]) {
    if (Aligned && left > 0) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(address));
      memcpy(part, &raw, sizeof raw);
      return;
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const T zero = round_to<T>(0.0f);
      part[word] = pack(2 * word < left ? __ldg(address + 2 * word) : zero,
                        2 * word + 1 < left ? __ldg(address + 2 * word + 1) : zero);
    }
  }
};

// total[column ...] += sum, for columns of a tree's subset; in accesses of 16 bytes if `wide`.
template <int Count, typename S>
__device__ __forceinline__ void add_to_row(const Tables& tables, int tree, int64_t column, bool wide,
                                           const S (&sum)[Count], S* total) {
  if constexpr (Count % 4 == 0 && sizeof(S) == 4) {
    if (wide && column + Count <= tables.features) {
#pragma unroll
      for (int k = 0; k < Count; k += 4) {
        uint4* address = reinterpret_cast<uint4*>(total + column + k);
        uint4 raw = *address;
        S value[4];
        memcpy(value, &raw, sizeof raw);
#pragma unroll
        for (int e = 0; e < 4; ++e) value[e] += sum[k + e];
        memcpy(&raw, value, sizeof raw);
        *address = raw;
      }
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    if (column + k < tables.features) total[hidden_feature(tables, tree, column + k)] += sum[k];
  }
}

// The wide op, gradient of hidden, one tree:
//   sum[i, subset_t] += sum over nodes and children k of
//       grad_log_prob[i,t] * ([k = child] - exp(score[k])) * weight[t, first_row + k]
// Tensors: shapes at WideBackward; sum [N, D] Sum<T>. Rows without a valid path add nothing. Sums in Sum<T>.
// Work O(N T width S). Bytes: a weight row once for each tile of 16 rows below it, and sum read and written
//   once. Unlike in the path op, a row of the batch visits many weight rows of a node, and sharing them
//   between rows saves more than the traffic of sum costs.
// No atomics: a row appears once in a tree's order, and each tree has its own launch. Deterministic.
// One block for each (tile, chunk of columns), which processes the nodes of the tile one after another.
template <typename T, bool Aligned>
__global__ void __launch_bounds__(most_row_threads, is_half<T> ? 1 : 2)
    wide_log_prob_backward_hidden_kernel(Tables tables, LeafOrder leaf_order, WideBackward tensors,
                                         Sum<T>* total, int tree, bool wide_sums) {
  using S = Sum<T>;
  using R = RowSums<T, Aligned>;
  __shared__ Tile tile;
  __shared__ typename R::Factors factors;
  __shared__ int32_t row_of_child[R::children];
  static_assert(R::children <= least_row_threads);
  tile.fill(tables, leaf_order, tree, int64_t(blockIdx.x) * tile_rows, tables.rows);
  const int64_t first_column = int64_t(blockIdx.y) * blockDim.x * R::columns;
  const T* weight = tree_weight<T>(tables, tree, tensors.weight);
  R sums;
  for (int i = 0; i < tile.items(); ++i) {
    const Item item = tile.item(i);
    const int64_t path_begin = tile.path_begin[item.begin];
    const int children = tables.path[3 * (path_begin + item.level) + 1];
    const int column = score_column(tables, path_begin, item.level);
    for (int first = 0; first < children; first += R::children) {
      const int count = children - first < R::children ? children - first : R::children;
      __syncthreads();
      for (int k = threadIdx.x; k < R::children * tile_rows; k += blockDim.x) {
        const int r = k / R::children, child = first + k % R::children;
        S value = 0;
        if (r >= item.begin && r < item.end && child < children) {
          const int64_t at = tile.row[r] * tables.trees + tree;
          const S score = static_cast<const S*>(tensors.score)[at * tables.stride + column + child];
          const bool chosen = tables.path[3 * (tile.path_begin[r] + item.level) + 2] == child;
          value = static_cast<const S*>(tensors.grad_log_prob)[at] * wide_slope(score, chosen);
        }
        factors.set(r, k % R::children, value);
      }
      const int own = static_cast<int>(threadIdx.x);
      if (own < count) row_of_child[own] = weight_row(tables, tree, item.node + first + own);
      __syncthreads();
      sums.add(factors, item, weight, row_of_child, count, tables.features, first_column);
    }
  }
  sums.each([&](int r, int at, const auto& sum) {
    if (tile.length[r] <= 0) return;
    add_to_row(tables, tree, first_column + at, wide_sums, sum, total + tile.row[r] * tables.in_features);
  });
}

template <typename T, bool Aligned>
void backward_hidden(const Tables& tables, const LeafOrder& leaf_order, const WideBackward& tensors,
                     Sum<T>* sum, cudaStream_t stream) {
  constexpr int columns = RowSums<T, Aligned>::columns;
  // A block computes the factors of its tile for itself: the fewer blocks share the columns, the better.
  int threads = most_row_threads;
  while (threads > least_row_threads && threads / 2 * columns >= tables.features) threads /= 2;
  const dim3 grid(grid_size(tile_count(tables)),
                  static_cast<unsigned>(divide_up(tables.features, threads * columns)));
  const bool wide_sums = tables.feature_index == nullptr && aligned<Sum<T>>(sum, tables.in_features, 16);
  for (int tree = 0; tree < tables.trees; ++tree) {
    launch(wide_log_prob_backward_hidden_kernel<T, Aligned>, grid, threads, 0, stream, tables, leaf_order,
           tensors, sum, tree, wide_sums);
  }
}

// The wide op, gradients of weight and bias.
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
template <typename T>
__global__ void __launch_bounds__(weight_threads, 3)
    wide_log_prob_backward_weight_kernel(Tables tables, LeafOrder leaf_order, const int64_t* slot,
                                         WideBackward tensors, Segments segments, SegmentOutput<T> output,
                                         bool wide_stores) {
  using S = Sum<T>;
  using W = WeightProduct<T>;
  __shared__ int64_t row[tile_rows];
  __shared__ typename W::template Factors<item_group> factors;
  const int tid = threadIdx.x, lane = tid % 32;
  const int tree = static_cast<int>(blockIdx.x / segments.count);
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
        const auto goal = SegmentOutput<T>::goal(incoming, outgoing);
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

}  // namespace

void wide_log_prob(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                   const WideForward& tensors, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0) return;
  dispatch_aligned(type, tensors.weight, tables.features, [&](auto tag, auto is_aligned) {
    using T = typename decltype(tag)::type;
    launch_forward<T, is_aligned()>(wide_log_prob_kernel<T, is_aligned()>, tables, leaf_order, tensors, 0,
                                    stream);
  });
}

void wide_log_prob_backward_hidden(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                                   const WideBackward& tensors, void* sum, void* grad_hidden,
                                   cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0) return;
  dispatch_aligned(type, tensors.weight, tables.features, [&](auto tag, auto is_aligned) {
    using T = typename decltype(tag)::type;
    if (tables.features > 0) {
      backward_hidden<T, is_aligned()>(tables, leaf_order, tensors, static_cast<Sum<T>*>(sum), stream);
    }
    round_sums<T>(sum, grad_hidden, tables.rows * tables.in_features, stream);
  });
}

void wide_log_prob_backward_weight(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                                   const int64_t* slot, const WideBackward& tensors, void* workspace,
                                   void* grad_weight, void* grad_bias, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0 || tables.stride == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Segments segments(type, tables);
    const StoredRows<T> rows = {static_cast<T*>(grad_weight), static_cast<T*>(grad_bias)};
    const SegmentOutput<T> output(segments, workspace, rows);
    const int64_t chunks = tables.features > 0 ? divide_up(tables.features, weight_columns<T>) : 1;
    const int64_t shares = divide_up(tables.stride, item_group);
    const dim3 grid(grid_size(segments.trees * segments.count), static_cast<unsigned>(chunks),
                    static_cast<unsigned>(shares < 16 ? shares : 16));
    clear_state(segments, output, stream);
    launch(wide_log_prob_backward_weight_kernel<T>, grid, WeightProduct<T>::threads, 0, stream, tables,
           leaf_order, slot, tensors, segments, output,
           aligned<T>(grad_weight, tables.features, 4 * sizeof(T)));
    segment_reduce(segments, output, stream);
  });
}

}  // namespace hstree
