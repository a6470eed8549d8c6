#include "async_copy.cuh"
#include "common.cuh"
#include "path_log_prob.h"
#include "product.cuh"
#include "row_group.cuh"
#include "run_product.cuh"

namespace hstree {
namespace {

// d log_sigmoid(left ? z : -z) / dz
__device__ __forceinline__ float path_slope(float z, bool left) {
  return left ? 1.0f / (1.0f + expf(z)) : -1.0f / (1.0f + expf(-z));
}
__device__ __forceinline__ double path_slope(double z, bool left) {
  return left ? 1.0 / (1.0 + exp(z)) : -1.0 / (1.0 + exp(-z));
}

// grad_log_prob[row, tree] * slope of the node at a level of its path; `entry`: that level's entry of the
// path
template <typename S>
__device__ __forceinline__ S path_factor(const Tables& tables, const PathBackward& tensors, int tree,
                                         int64_t row, int level, int32_t entry) {
  const int64_t at = row * tables.trees + tree;
  return static_cast<const S*>(tensors.grad_log_prob)[at] *
         path_slope(static_cast<const S*>(tensors.score)[at * tables.stride + level], entry & 1);
}

// The tree path op, forward: hierarchical softmax (Morin and Bengio, 2005), path nodes l = 1 ... L.
//   z[i,t,l] = dot(hidden[i, subset_t], weight[t, node_l]) + bias[t, node_l];  score = z
//   log_prob[i,t] = sum_l log_sigmoid(left_l ? z : -z), over the path of target[i] in tree t
// Tensors: shapes at Tables, LeafOrder and PathForward; contiguous; hidden, weight, bias of one type T in
//   float32, float64, bfloat16, float16; log_prob and score Sum<T>.
// Ragged paths: score is 0 past a path's end. Ignored row: log_prob 0, score 0. Target, path, node or feature
//   out of range: log_prob NaN, score 0. N = 0 launches nothing; a path of no nodes gives 0.
// Sums in Sum<T>; log_sigmoid(x) = min(x, 0) - log1p(exp(-|x|)), accurate to rounding at any x, -inf and 0 at
//   infinities.
// Work O(N T L S). Bytes: a weight row once for each tile of 16 rows below it, a hidden row once for each
//   tree: 32 bytes of it at a time, so that a random subset of D / 4 features reads all of it. At N = 8192, D = 4096, T = 8, S = 1024, bfloat16 a tile reads 128
//   KiB of hidden and 2 KiB for each of its 39 nodes (Huffman; 52 balanced), instead of for each of 187 visits,
//   and makes about 600 matrix instructions. Keeps score for backward.
// No atomics; the order of every sum is fixed by S, max_depth and, for bfloat16 and float16, by whether rows
//   are read in vectors: deterministic, and independent of the other rows of the batch.
// One block for each (tree, tile); a warp for each node of the tile, or for a share of the features:
//   product.cuh. Then eight threads for each row.
template <typename T, bool Aligned>
__global__ void __launch_bounds__(product_threads, forward_blocks)
    path_log_prob_kernel(Tables tables, LeafOrder leaf_order, PathForward tensors, int64_t tiles,
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
    const P product(tables, tree, tensors.weight, tensors.hidden, staging, HSTREE_SHARED_MEMORY);
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

constexpr int total_padding = 4;

// Writes 16 bytes of a row of gradients, or fewer at its end.
template <typename T>
__device__ __forceinline__ void store_sums(T* row, const Sum<T>* sum, int64_t left, bool wide) {
  constexpr int count = 16 / sizeof(T);
  if (wide && left >= count) {
    T rounded[count];
#pragma unroll
    for (int e = 0; e < count; ++e) rounded[e] = round_to<T>(sum[e]);
    uint4 raw;
    memcpy(&raw, rounded, sizeof raw);
    *reinterpret_cast<uint4*>(row) = raw;
    return;
  }
#pragma unroll
  for (int e = 0; e < count; ++e) {
    if (e < left) store(row + e, sum[e]);
  }
}

// The nodes that each group of rows visits in each tree, computed once for all blocks of
// path_log_prob_backward_hidden_kernel. Tensors: shapes at PathBackward; visits [N / 16 rounded up, T]
// GroupVisits.
// O(N T L). Atomics only on integers in shared memory, for a maximum: deterministic. One block for
//   each (group, tree).
template <typename T>
__global__ void __launch_bounds__(visit_threads)
    path_group_kernel(Tables tables, LeafOrder leaf_order, PathBackward tensors, unsigned char* visits) {
  using S = Sum<T>;
  __shared__ GroupOrder<S> order;
  const int tree = blockIdx.x % tables.trees;
  order.sort(tables, leaf_order, tree, int64_t(blockIdx.x / tables.trees) * group_rows);
  order.template list<GroupProduct<T, false>>(
      tables, reinterpret_cast<S*>(HSTREE_SHARED_MEMORY),
      GroupVisits<S>(tables.stride, visits + int64_t(blockIdx.x) * GroupVisits<S>::bytes(tables.stride)),
      [&](int64_t row, int level, int32_t entry) {
        return path_factor<S>(tables, tensors, tree, row, level, entry);
      });
}

// The tree path op, gradient of hidden.
//   grad_hidden[i, d] = sum_t sum_l grad_log_prob[i,t] * slope_l * weight[t, node_l, s], subset_t[s] = d,
//   slope_l = sigmoid(-z) if the path goes left, else -sigmoid(z)
// Tensors: shapes at PathBackward; visits of path_group_kernel; grad_hidden [N, D] T, every element written.
//   Rows without a valid path get nothing from their tree. A weight of bfloat16 or float16 that is not
//   finite makes its feature NaN for all rows of a group that have a path in its tree.
// Sums in Sum<T>, rounded to T once; the slope is accurate to rounding at any z.
// Work O(N T L S). Bytes: a weight row once for each group of 16 rows that visits it, and grad_hidden once.
//   Groups follow the leaf order of the first tree: rows of one class, whose paths agree in all trees, are
//   consecutive, and a group keeps the sums of all trees in shared memory. At N = 8192, D = 4096, T = 8, S =
//   1024, bfloat16 this reads 39 KiB of weights a row (Huffman; 102 for random balanced trees, whose orders
//   differ) instead of the 187 KiB (272) of the row's own visits. Tiles in each tree's own order would read
//   39 (54), but need a sum over trees outside the block: 256 KiB a row in float32.
// No atomics. Trees are summed in order, and within a tree the rows of the group fix the order:
// deterministic. One block for each group and window of features; a warp for 64 columns of a tree's subset,
// or 32:
//   row_group.cuh.
template <typename T, bool Aligned>
__global__ void __launch_bounds__(group_threads, 3)
    path_log_prob_backward_hidden_kernel(Tables tables, LeafOrder leaf_order, PathBackward tensors,
                                         const unsigned char* visits, int window, T* grad_hidden) {
  using S = Sum<T>;
  using P = GroupProduct<T, Aligned>;
  __shared__ int32_t
      columns[group_trees][2];  // of a tree's subset in the window: first, and one past the last
  const int total_stride = window + total_padding, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  S* total = reinterpret_cast<S*>(HSTREE_SHARED_MEMORY);  // [group_rows, total_stride]
  auto* staged = reinterpret_cast<unsigned char*>(total + group_rows * total_stride);  // two GroupVisits
  const auto bytes = static_cast<int>(GroupVisits<S>::bytes(tables.stride));
  visits += int64_t(blockIdx.x) * tables.trees * bytes;
  const auto stage = [&](int tree) {
    for (int i = 16 * threadIdx.x; i < bytes; i += 16 * group_threads) {
      async_copy<16>(staged + tree % 2 * bytes + i, visits + int64_t(tree) * bytes + i);
    }
    async_copy_commit();
  };
  const int64_t first = int64_t(blockIdx.y) * window;
  stage(0);
  for (int i = threadIdx.x; i < group_rows * total_stride; i += group_threads) total[i] = S(0);
  for (int tree = 0; tree < tables.trees; ++tree) {
    async_copy_wait<0>();
    __syncthreads();
    if (tree % group_trees == 0) {
      for (int i = warp; i < 2 * group_trees && tree + i / 2 < tables.trees; i += group_threads / 32) {
        const int64_t limit = first + i % 2 * window;
        int64_t column = limit < tables.features ? limit : tables.features;
        if (tables.feature_index != nullptr) {
          column =
              entries_below(tables.feature_index + (tree + i / 2) * tables.features, tables.features, limit);
        }
        if (lane == 0) columns[i / 2][i % 2] = static_cast<int32_t>(column);
      }
      __syncthreads();
    }
    if (tree + 1 < tables.trees) stage(tree + 1);
    P::multiply(tables, GroupVisits<S>(tables.stride, staged + tree % 2 * bytes), tree,
                columns[tree % group_trees][0], columns[tree % group_trees][1],
                static_cast<const T*>(tensors.weight) + tree * tables.weight_rows * tables.features, first,
                total, total_stride);
  }
  __syncthreads();
  constexpr int vector = 16 / sizeof(T);
  const bool wide = reinterpret_cast<uintptr_t>(grad_hidden) % 16 == 0 && tables.in_features % vector == 0;
  for (int r = warp; r < group_rows; r += group_threads / 32) {
    const int64_t place = int64_t(blockIdx.x) * group_rows + r;
    if (place >= tables.rows) break;
    T* row = grad_hidden + leaf_order.order[place] * tables.in_features + first;
    const int64_t width = tables.in_features - first < window ? tables.in_features - first : window;
    for (int64_t i = lane * vector; i < width; i += 32 * vector) {
      store_sums(row + i, total + r * total_stride + i, width - i, wide);
    }
  }
}

constexpr int factor_threads = 128;
constexpr int factor_levels = 4;  // for a thread

// factor[t, level, place] = grad_log_prob * slope of the row at a place of the leaf order, zero past the end
//   of its path and past the last place.
// Tensors: shapes at PathBackward; factor [T, stride, places] Sum<T>, places = N rounded up to a multiple of
//   16. Computed once for all blocks of path_log_prob_backward_weight_kernel, which then read consecutive
//   places: O(N T L) bytes.
// No atomics; deterministic. One thread for each (tree, place) and factor_levels levels.
template <typename T>
__global__ void __launch_bounds__(factor_threads)
    path_factor_kernel(Tables tables, LeafOrder leaf_order, PathBackward tensors, int64_t places,
                       Sum<T>* factor) {
  const int64_t i = int64_t(blockIdx.x) * factor_threads + threadIdx.x;
  const int tree = static_cast<int>(i / places);
  const int64_t place = i % places, at = tree * tables.rows + place;
  if (tree >= tables.trees) return;
  const int length = place < tables.rows ? leaf_order.length[at] : 0;
  const int64_t row = length > 0 ? leaf_order.order[at] : 0;
  const int64_t begin = length > 0 ? path_begin(tables, tree, row) : 0;
  const int first = blockIdx.y * factor_levels;
  factor += (int64_t(tree) * tables.stride + first) * places + place;
#pragma unroll
  for (int k = 0; k < factor_levels; ++k) {
    const int level = first + k;
    if (level >= tables.stride) break;
    Sum<T> value = 0;
    if (level < length) {
      value = path_factor<Sum<T>>(tables, tensors, tree, row, level, tables.path[begin + level]);
    }
    factor[k * places] = RunProduct<T>::factor(value);
  }
}

// The runs of rows below the nodes that a segment visits, computed once for all blocks of
// path_log_prob_backward_weight_kernel.
// Tensors: groups [T, C]; runs [T, C, segments.runs()] PlaceRun::bits; slot as there; state of SegmentOutput,
//   every element written. Rows of the gradient: slot + level if row-sparse, otherwise t M + node.
// O(N T L); no atomics; deterministic. One block for each (tree, segment), one thread for two places.
__global__ void __launch_bounds__(run_threads)
    path_run_kernel(Tables tables, LeafOrder leaf_order, const int64_t* slot, Segments segments,
                    int64_t* state, int32_t* groups, uint64_t* runs) {
  using Output = SegmentOutput<float>;
  __shared__ SegmentRuns list;
  const int tree = static_cast<int>(blockIdx.x / segments.count);
  const int64_t begin = blockIdx.x % segments.count * segments.places;
  const int rows =
      static_cast<int>(tables.rows - begin < segments.places ? tables.rows - begin : segments.places);
  const int64_t at = tree * tables.rows + begin, position = blockIdx.x * segments.stride;
  const int shared_before = leaf_order.shared[at];
  const int shared_after = begin + rows < tables.rows ? leaf_order.shared[at + rows] : 0;
  for (int level = shared_after + threadIdx.x; state != nullptr && level < segments.stride;
       level += run_threads) {
    state[position + level] = Segments::none;
  }
  list.list(
      tables, leaf_order, tree, begin, rows,
      [&](PlaceRun run) {
        const bool incoming = run.begin == 0 && run.level < shared_before;
        const bool outgoing = run.end == rows && run.level < shared_after;
        run.goal = Output::goal(incoming, outgoing);
        if (slot == nullptr) {
          const int64_t row = leaf_order.order[at + run.begin];
          run.row = tree * tables.weight_rows + (tables.path[path_begin(tables, tree, row) + run.level] >> 1);
        } else if (!incoming) {
          run.row = slot[at + run.begin] + run.level - leaf_order.shared[at + run.begin];
        }
        if (outgoing) state[position + run.level] = incoming ? Segments::through : run.row;
        return run;
      },
      runs + blockIdx.x * segments.runs(), groups + blockIdx.x);
}

// The tree path op, gradients of weight and bias.
//   grad_weight[t, node] = sum_i grad_log_prob[i,t] * slope[i,t,node] * hidden[i, subset_t], rows i below node
//   grad_bias[t, node] = the same without hidden: column S, where hidden is 1
// Tensors: shapes at PathBackward and SegmentOutput; factor of path_factor_kernel, groups and runs of
//   path_run_kernel. Only rows of visited nodes are written. Rows without a valid path add nothing. A
//   feature of bfloat16 or float16 that is not finite makes its column NaN for nodes of its segment.
// Sums in Sum<T>, rounded to T once. Work O(N T L S). Bytes: hidden once for each tree, each gradient row
//   once, and the workspace (segment.cuh). At N = 8192, D = 4096, T = 8, S = 1024, bfloat16 a segment is 512
//   places, which visit 936 nodes; their 64 columns of features take 66 KiB of shared memory, and 161
//   products of 16 runs and 16 places serve 5,988 visits.
// No atomics; the order of every sum depends on N, T, S, stride and type alone: deterministic.
// One block for each (tree, segment) and chunk of columns; a warp for 16 runs at a time, independent of the
//   other warps: run_product.cuh.
template <typename T>
__global__ void __launch_bounds__(run_threads, run_blocks)
    path_log_prob_backward_weight_kernel(Tables tables, LeafOrder leaf_order, const T* hidden,
                                         const Sum<T>* factor, const int32_t* groups, const uint64_t* runs,
                                         Segments segments, SegmentOutput<T> output, bool wide_stores) {
  using S = Sum<T>;
  using P = RunProduct<T>;
  using Goal = typename SegmentOutput<T>::Goal;
  __shared__ SegmentRows from;
  void* staged = HSTREE_SHARED_MEMORY;
  const int tree = static_cast<int>(blockIdx.x / segments.count), lane = threadIdx.x % 32;
  const int64_t begin = blockIdx.x % segments.count * segments.places;
  const int rows =
      static_cast<int>(tables.rows - begin < segments.places ? tables.rows - begin : segments.places);
  const int64_t position = blockIdx.x * segments.stride, places = segments.padded_rows;
  const int64_t first_column = int64_t(blockIdx.y) * P::columns;
  factor += int64_t(tree) * tables.stride * places + begin;
  runs += blockIdx.x * segments.runs();
  const int count = groups[blockIdx.x];
  from.fill(tables, leaf_order, tree, begin, rows);
  P::stage(tables, from, rows, tree, hidden, first_column, staged);
  __syncthreads();
  for (int group = threadIdx.x / 32; group < count; group += run_threads / 32) {
    const uint64_t own = __ldg(runs + group * run_group + lane % run_group);
    P::multiply(own, factor, places, staged, [&](const PlaceRun& run, int column, const auto& sum) {
      output.write(static_cast<Goal>(run.goal), run.row, position + run.level, tables.features,
                   first_column + column, sum, wide_stores);
    });
    if (blockIdx.y > 0) continue;
    S bias = 0;  // of the thread's own run
    for (int k = 0; k < run_group; ++k) {
      const PlaceRun run = PlaceRun::of(__shfl_sync(all_lanes, own, k));
      S sum = 0;
      for (int r = run.begin + lane; r < run.end; r += 32) {
        sum += P::value(__ldg(factor + run.level * places + r));
      }
      sum = warp_sum(sum);
      if (lane == k) bias = sum;
    }
    const PlaceRun run = PlaceRun::of(own);
    if (lane < run_group && run.end > 0) {
      output.write_bias(static_cast<Goal>(run.goal), run.row, position + run.level, tables.features, bias);
    }
  }
}

template <typename T, bool Aligned>
void backward_hidden(const Tables& tables, const LeafOrder& leaf_order, const PathBackward& tensors,
                     void* workspace, void* grad_hidden, cudaStream_t stream) {
  constexpr int64_t narrowest = 128, enough_blocks = 256;
  const int64_t widest = (has_large_shared_memory() ? 4096 : 2048) / sizeof(Sum<T>);  // features of a window
  const int64_t groups = divide_up(tables.rows, group_rows), features = tables.in_features;
  int64_t windows = divide_up(enough_blocks, groups);
  if (windows > divide_up(features, narrowest)) windows = divide_up(features, narrowest);
  if (windows < divide_up(features, widest)) windows = divide_up(features, widest);
  const int64_t window = divide_up(divide_up(features, windows), 16) * 16;
  auto* visits = static_cast<unsigned char*>(workspace);
  launch(path_group_kernel<T>, grid_size(groups * tables.trees), visit_threads,
         group_rows * tables.stride * (sizeof(Sum<T>) + sizeof(int32_t)), stream, tables, leaf_order, tensors,
         visits);
  const size_t shared_bytes =
      sizeof(Sum<T>) * group_rows * (window + total_padding) + 2 * GroupVisits<Sum<T>>::bytes(tables.stride);
  const dim3 grid(grid_size(groups), static_cast<unsigned>(divide_up(features, window)));
  launch(path_log_prob_backward_hidden_kernel<T, Aligned>, grid, group_threads, shared_bytes, stream, tables,
         leaf_order, tensors, static_cast<const unsigned char*>(visits), static_cast<int>(window),
         static_cast<T*>(grad_hidden));
}

template <typename T>
void backward_weight(ScalarType type, const Tables& tables, const LeafOrder& leaf_order, const int64_t* slot,
                     const PathBackward& tensors, void* workspace, void* grad_weight, void* grad_bias,
                     cudaStream_t stream) {
  using P = RunProduct<T>;
  const Segments segments(type, tables);
  const StoredRows<T> rows = {static_cast<T*>(grad_weight), static_cast<T*>(grad_bias)};
  const SegmentOutput<T> output(segments, workspace, rows);
  char* memory = static_cast<char*>(workspace);
  Sum<T>* factor = reinterpret_cast<Sum<T>*>(memory + segments.factor_at());
  int32_t* groups = reinterpret_cast<int32_t*>(memory + segments.groups_at());
  uint64_t* runs = reinterpret_cast<uint64_t*>(memory + segments.runs_at());
  const int64_t blocks = segments.trees * segments.count;
  const dim3 factor_grid(grid_size(divide_up(segments.trees * segments.padded_rows, factor_threads)),
                         static_cast<unsigned>(divide_up(tables.stride, factor_levels)));
  launch(path_factor_kernel<T>, factor_grid, factor_threads, 0, stream, tables, leaf_order, tensors,
         segments.padded_rows, factor);
  launch(path_run_kernel, grid_size(blocks), run_threads, 0, stream, tables, leaf_order, slot, segments,
         output.state, groups, runs);
  const int64_t chunks = tables.features > 0 ? divide_up(tables.features, P::columns) : 1;
  launch(path_log_prob_backward_weight_kernel<T>, dim3(grid_size(blocks), static_cast<unsigned>(chunks)),
         run_threads, P::bytes(segments.places), stream, tables, leaf_order,
         static_cast<const T*>(tensors.hidden), static_cast<const Sum<T>*>(factor),
         static_cast<const int32_t*>(groups), static_cast<const uint64_t*>(runs), segments, output,
         aligned<T>(grad_weight, tables.features, 16));
  segment_reduce(segments, output, stream);
}

}  // namespace

void path_log_prob(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                   const PathForward& tensors, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0) return;
  dispatch_aligned(type, tensors.weight, tables.features, [&](auto tag, auto is_aligned) {
    using T = typename decltype(tag)::type;
    launch_forward<T, is_aligned()>(path_log_prob_kernel<T, is_aligned()>, tables, leaf_order, tensors,
                                    sizeof(Sum<T>) * tile_rows * tables.stride, stream);
  });
}

void path_log_prob_backward_hidden(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                                   const PathBackward& tensors, void* workspace, void* grad_hidden,
                                   cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0 || tables.in_features == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool index_aligned = reinterpret_cast<uintptr_t>(tables.feature_index) % 16 == 0;
    if (is_half<T> && index_aligned && aligned<T>(tensors.weight, tables.features, 16)) {
      backward_hidden<T, is_half<T>>(tables, leaf_order, tensors, workspace, grad_hidden, stream);
    } else {
      backward_hidden<T, false>(tables, leaf_order, tensors, workspace, grad_hidden, stream);
    }
  });
}

void path_log_prob_backward_weight(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                                   const int64_t* slot, const PathBackward& tensors, void* workspace,
                                   void* grad_weight, void* grad_bias, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0 || tables.stride == 0) return;
  dispatch(type, [&](auto tag) {
    backward_weight<typename decltype(tag)::type>(type, tables, leaf_order, slot, tensors, workspace,
                                                  grad_weight, grad_bias, stream);
  });
}

}  // namespace hstree
