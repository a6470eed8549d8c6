#include "leaf_log_prob.h"
#include "leaf_product.cuh"
#include "wide_slope.cuh"

namespace hstree {
namespace {

constexpr int leaf_threads = 128;

// count of leaf_count. Reads leaf_class once for each node that the batch visits: O(N T + visited rows).
// Threads may store the same 1 (volatile: a relaxed atomic store of PTX); deterministic. One warp for each (tree,
// place).
__global__ void __launch_bounds__(leaf_threads)
    leaf_count_kernel(Tables tables, LeafOrder leaf_order, volatile int32_t* count) {
  const int64_t i = (int64_t(blockIdx.x) * leaf_threads + threadIdx.x) / 32;
  if (i >= tables.trees * tables.rows || leaf_order.length[i] <= leaf_order.shared[i]) return;
  const int tree = static_cast<int>(i / tables.rows);
  const int64_t begin = path_begin(tables, tree, leaf_order.order[i]);
  for (int level = leaf_order.shared[i]; level < leaf_order.length[i]; ++level) {
    const int32_t* entry = tables.path + 3 * (begin + level);
    for (int k = threadIdx.x % 32; k < entry[1]; k += 32) {
      const int32_t own = weight_row(tables, tree, entry[0] + k);
      count[1 + own] = 1;
      count[1 + (tree + 1) * tables.classes + own] = 1;
    }
  }
}

// index and bias_index of leaf_index. O(T V). No atomics; deterministic. One thread for each class of all
// trees together and of each tree.
__global__ void __launch_bounds__(leaf_threads)
    leaf_index_kernel(Tables tables, const int64_t* slot, int64_t nnz, int64_t biases, int64_t* index,
                      int64_t* bias_index) {
  const int64_t i = int64_t(blockIdx.x) * leaf_threads + threadIdx.x;
  if (i >= (tables.trees + 1) * tables.classes || slot[i + 1] == slot[i]) return;
  if (i < tables.classes) {
    index[slot[i]] = i;
  } else {
    const int64_t at = slot[i] - nnz;
    bias_index[at] = i / tables.classes - 1;
    bias_index[biases + at] = i % tables.classes;
  }
}

// What a block of leaf_log_prob_backward_weight_kernel sums at a time: classes first, first + 1, ... of a node, as
// many as LeafProduct has.
struct LeafItem {
  int32_t place;      // where the run of rows below the node begins
  int32_t level;      // of the node
  int32_t first_row;  // of the node in leaf_class
  int32_t children;
  int32_t first;
  int32_t column;  // of child 0 in score
};

// The parts of the workspace.
struct LeafItems {
  int64_t most;     // items of a tree
  LeafItem* item;   // [T, most]
  int32_t* number;  // [T]
  int32_t* begins;  // [V] trees - the first tree that adds to the class, 0 for none
  int32_t* ends;    // [V] one past the last tree that does

  __host__ static int64_t most_of(const Tables& tables) {
    // A node has at least one row of leaf_class of its own.
    const int64_t nodes = tables.rows * max_depth < tables.classes ? tables.rows * max_depth : tables.classes;
    return nodes + tables.classes / 16;
  }
  __host__ static int64_t bytes(const Tables& tables) {
    return most_of(tables) * tables.trees * sizeof(LeafItem) + (tables.trees + 2 * tables.classes) * 4;
  }
  __host__ LeafItems(const Tables& tables, void* workspace)
      : most(most_of(tables)),
        item(static_cast<LeafItem*>(workspace)),
        number(reinterpret_cast<int32_t*>(item + most * tables.trees)),
        begins(number + tables.trees),
        ends(begins + tables.classes) {}
};

constexpr int list_threads = 1024;

// The items of each tree, by place and level, and their number. O(N T L). No atomics; deterministic. One block for
// each tree, one thread for each place of list_threads at a time.
template <int Classes>
__global__ void __launch_bounds__(list_threads)
    leaf_item_kernel(Tables tables, LeafOrder leaf_order, LeafItems items) {
  __shared__ int64_t of_warp[list_threads / 32];
  const int tree = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  LeafItem* const item = items.item + tree * items.most;
  int64_t total = 0;
  for (int64_t first_place = 0; first_place < tables.rows; first_place += list_threads) {
    const int64_t place = first_place + threadIdx.x, at = tree * tables.rows + place;
    const int length = place < tables.rows ? leaf_order.length[at] : 0;
    const int shared = length > 0 ? leaf_order.shared[at] : 0;
    const int64_t begin = length > shared ? path_begin(tables, tree, leaf_order.order[at]) : 0;
    int64_t own = 0;
    for (int level = shared; level < length; ++level) {
      own += divide_up(tables.path[3 * (begin + level) + 1], Classes);
    }
    int64_t sum = own;  // of the items of the warp up to this place
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const int64_t before = __shfl_sync(all_lanes, sum, lane >= delta ? lane - delta : lane);
      if (lane >= delta) sum += before;
    }
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    int64_t to = total + sum - own;
    for (int k = 0; k < list_threads / 32; ++k) {
      if (k < warp) to += of_warp[k];
      total += of_warp[k];
    }
    __syncthreads();
    int32_t column = 0;
    for (int level = 0; level < length; ++level) {
      if (length <= shared) break;
      const int32_t* entry = tables.path + 3 * (begin + level);
      for (int32_t first = 0; level >= shared && first < entry[1]; first += Classes, ++to) {
        // Only tables whose nodes overlap have more than `most` items.
        if (to < items.most) {
          item[to] = {static_cast<int32_t>(place), level, entry[0], entry[1], first, column};
        }
      }
      column += entry[1];
    }
  }
  if (threadIdx.x == 0) items.number[tree] = static_cast<int32_t>(total < items.most ? total : items.most);
}

// begins and ends: which trees add to each class. Atomics for maxima of integers: deterministic. One warp for each
// (tree, item).
template <int Classes>
__global__ void __launch_bounds__(leaf_threads) leaf_span_kernel(Tables tables, LeafItems items) {
  const int tree = blockIdx.y, warps = gridDim.x * (leaf_threads / 32);
  for (int i = blockIdx.x * (leaf_threads / 32) + threadIdx.x / 32; i < items.number[tree]; i += warps) {
    const LeafItem item = items.item[tree * items.most + i];
    for (int k = item.first + threadIdx.x % 32; k < item.children && k < item.first + Classes; k += 32) {
      const int32_t own = weight_row(tables, tree, item.first_row + k);
      atomicMax(items.begins + own, tables.trees - tree);
      atomicMax(items.ends + own, tree + 1);
    }
  }
}

// begins and ends of no tree. One thread for each class.
__global__ void __launch_bounds__(leaf_threads) leaf_no_span_kernel(LeafItems items, int64_t classes) {
  const int64_t i = int64_t(blockIdx.x) * leaf_threads + threadIdx.x;
  if (i < classes) items.begins[i] = items.ends[i] = 0;
}

// grad_weight[y] = 0 for the classes that no tree adds to. grad_weight [V, D]. One warp for each class.
template <typename T>
__global__ void __launch_bounds__(leaf_threads)
    leaf_zero_kernel(LeafItems items, int64_t classes, int64_t features, T* grad_weight) {
  const int64_t i = (int64_t(blockIdx.x) * leaf_threads + threadIdx.x) / 32;
  if (i >= classes || items.ends[i] > 0) return;
  for (int64_t k = threadIdx.x % 32; k < features; k += 32) store(grad_weight + i * features + k, Sum<T>(0));
}

// Reads or writes Count consecutive elements at once if `wide`, else those below `left`.
template <typename S, int Count>
__device__ __forceinline__ void read_sums(const S* address, int64_t left, bool wide, S (&value)[Count]) {
  if constexpr (Count * sizeof(S) == 16) {
    if (wide) {
      const uint4 raw = *reinterpret_cast<const uint4*>(address);
      memcpy(value, &raw, sizeof raw);
      return;
    }
  }
#pragma unroll
  for (int e = 0; e < Count; ++e) {
    if (e < left) value[e] = address[e];
  }
}

template <typename T, int Count>
__device__ __forceinline__ void write_sums(T* address, int64_t left, bool wide,
                                           const Sum<T> (&value)[Count]) {
  if constexpr (Count * sizeof(T) == 16 || Count * sizeof(T) == 8) {
    if (wide) {
      std::conditional_t<Count * sizeof(T) == 16, uint4, uint2> raw;
      T rounded[Count];
#pragma unroll
      for (int e = 0; e < Count; ++e) rounded[e] = round_to<T>(value[e]);
      memcpy(&raw, rounded, sizeof raw);
      *reinterpret_cast<decltype(raw)*>(address) = raw;
      return;
    }
  }
#pragma unroll
  for (int e = 0; e < Count; ++e) {
    if (e < left) store(address + e, value[e]);
  }
}

constexpr int64_t leaf_columns = 1024;  // of a block
constexpr int64_t persistent_blocks = 1024;
constexpr int leaf_staged = 3;  // groups of 16 rows whose factors are computed once for all columns

// The leaf op, gradients of weight and bias, one tree.
//   grad_weight[y] = sum over trees t and rows i below the node of y in t of
//       grad_log_prob[i, t] * ([y = target_i] - exp(score[i, t, y])) * hidden[i]
//   grad_bias[t, y] = the same without hidden and the sum over t
// Tensors: shapes at WideBackward; slot of leaf_count for row-sparse gradients, or null; sum [V or nnz, D] Sum<T>,
//   or grad_weight itself if T is Sum<T>. Trees before this one left their sum of a class in sum, or nothing
//   if none of them adds to it; the last tree that does writes grad_weight. Only rows of visited classes are
//   written. A feature of bfloat16 or float16 that is not finite makes its column NaN for the node.
// Sums in Sum<T>, rounded to T once. Work O(N T width D). Bytes: of a row that k trees visit, k - 1 sums written
//   and read and one gradient written; hidden once for each `classes` children; score four times at D = 4096.
// No atomics; the trees add up in order and rows in the order of places: deterministic.
// One block for each item and share of the columns, item after item; it takes the rows of the run 16 at a time.
template <typename T>
__global__ void __launch_bounds__(LeafProduct<T>::threads, is_half<T> ? 2 : 4)
    leaf_log_prob_backward_weight_kernel(Tables tables, LeafOrder leaf_order, LeafItems items,
                                         WideBackward tensors, const int64_t* slot, int64_t share, int tree,
                                         Sum<T>* sum, T* grad_weight, T* grad_bias, bool wide) {
  using S = Sum<T>;
  using P = LeafProduct<T>;
  __shared__ typename P::Factors factors[leaf_staged];
  __shared__ int64_t row[leaf_staged][tile_rows];
  __shared__ int64_t to[P::classes];
  __shared__ bool added[P::classes], goes_on[P::classes];
  const int tid = threadIdx.x, lane = tid % 32;
  const int64_t features = tables.features, first_column = blockIdx.y * share;
  const int64_t last_column = first_column + share < features ? first_column + share : features;
  const int64_t* order = leaf_order.order + tree * tables.rows;
  const int32_t* shared = leaf_order.shared + tree * tables.rows;
  const auto* hidden = static_cast<const T*>(tensors.hidden);

  for (int i = blockIdx.x; i < items.number[tree]; i += gridDim.x) {
    const LeafItem item = items.item[tree * items.most + i];
    const int count = item.children - item.first < P::classes ? item.children - item.first : P::classes;
    int64_t run_end = item.place + 1;  // each warp finds the first place that does not share the node
    for (;; run_end += 32) {
      const int64_t at = run_end + lane;
      const unsigned stop = __ballot_sync(all_lanes, at >= tables.rows || shared[at] <= item.level);
      if (stop == 0) continue;
      run_end += __ffs(stop) - 1;
      break;
    }
    const int groups = static_cast<int>(divide_up(run_end - item.place, tile_rows));
    __syncthreads();
    if (tid < count) {
      const int32_t own = weight_row(tables, tree, item.first_row + item.first + tid);
      to[tid] = (slot == nullptr ? own : slot[own]) * features;
      added[tid] = items.begins[own] > tables.trees - tree;
      goes_on[tid] = items.ends[own] > tree + 1;
    }
    __syncthreads();
    S bias = 0;
    for (int64_t column = first_column; column == first_column || column < last_column;
         column += P::columns) {
      P product;
      product.each(count, [&](int k, int at, auto& part) {
        const int64_t left = features - column - at;
        if (added[k] && left > 0) read_sums(sum + to[k] + column + at, left, wide, part);
      });
      for (int group = 0; group < groups; ++group) {
        const int stage = groups <= leaf_staged ? group : 0;
        if (groups > leaf_staged || column == first_column) {
          __syncthreads();
          if (tid < tile_rows) {
            const int64_t place = item.place + group * tile_rows + tid;
            row[stage][tid] = place < run_end ? order[place] : -1;
          }
          __syncthreads();
          for (int k = tid / tile_rows; k < divide_up(count, 16) * 16; k += P::threads / tile_rows) {
            const int64_t own = row[stage][tid % tile_rows];
            S value = 0;
            if (k < count && own >= 0) {
              const int64_t at = own * tables.trees + tree, child = item.first + k;
              const int chosen = tables.path[3 * (path_begin(tables, tree, own) + item.level) + 2];
              const S score = static_cast<const S*>(tensors.score)[at * tables.stride + item.column + child];
              value = static_cast<const S*>(tensors.grad_log_prob)[at] * wide_slope(score, chosen == child);
            }
            factors[stage].set(k, tid % tile_rows, value);
          }
          __syncthreads();
          if (column == first_column && tid < count) bias += factors[stage].sum(tid);
        }
        product.load(hidden, row[stage], features, column);
        product.add(factors[stage], count);
      }
      product.each(count, [&](int k, int at, const auto& part) {
        const int64_t left = features - column - at, address = to[k] + column + at;
        if (left <= 0) return;
        if (goes_on[k]) {
          write_sums(sum + address, left, wide, part);
        } else {
          write_sums(grad_weight + address, left, wide, part);
        }
      });
    }
    if (blockIdx.y == 0 && tid < count && grad_bias != nullptr) {
      const int64_t own = weight_row(tables, tree, item.first_row + item.first + tid);
      const int64_t at = tree * tables.classes + own;
      store(grad_bias + (slot == nullptr ? at : slot[tables.classes + at] - slot[tables.classes]), bias);
    }
  }
}

}  // namespace

void leaf_count(const Tables& tables, const LeafOrder& leaf_order, int32_t* count, cudaStream_t stream) {
  const int64_t places = tables.trees * tables.rows;
  if (places == 0) return;
  launch(leaf_count_kernel, grid_size(divide_up(32 * places, leaf_threads)), leaf_threads, 0, stream, tables,
         leaf_order, count);
}

void leaf_index(const Tables& tables, const int64_t* slot, int64_t nnz, int64_t biases, int64_t* index,
                int64_t* bias_index, cudaStream_t stream) {
  if (nnz == 0) return;
  launch(leaf_index_kernel, grid_size(divide_up((tables.trees + 1) * tables.classes, leaf_threads)),
         leaf_threads, 0, stream, tables, slot, nnz, biases, index, bias_index);
}

int64_t leaf_workspace_bytes(const Tables& tables) {
  return LeafItems::bytes(tables);
}

void leaf_log_prob_backward_weight(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                                   const int64_t* slot, const WideBackward& tensors, void* workspace,
                                   void* sum, void* grad_weight, void* grad_bias, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using P = LeafProduct<T>;
    const LeafItems items(tables, workspace);
    auto* const gradient = static_cast<T*>(grad_weight);
    const auto trees = static_cast<unsigned>(tables.trees);
    launch(leaf_no_span_kernel, grid_size(divide_up(tables.classes, leaf_threads)), leaf_threads, 0, stream,
           items, tables.classes);
    launch(leaf_item_kernel<P::classes>, trees, list_threads, 0, stream, tables, leaf_order, items);
    launch(leaf_span_kernel<P::classes>, dim3(256, trees), leaf_threads, 0, stream, tables, items);
    if (slot == nullptr) {
      launch(leaf_zero_kernel<T>, grid_size(divide_up(32 * tables.classes, leaf_threads)), leaf_threads, 0,
             stream, items, tables.classes, tables.features, gradient);
    }
    const int64_t share = tables.features < leaf_columns ? tables.features : leaf_columns;
    const int64_t blocks = items.most < persistent_blocks ? items.most : persistent_blocks;
    const dim3 grid(grid_size(blocks),
                    tables.features > 0 ? static_cast<unsigned>(divide_up(tables.features, share)) : 1);
    const bool wide = aligned<T>(grad_weight, tables.features, 4 * sizeof(T)) &&
                      aligned<Sum<T>>(sum, tables.features, 4 * sizeof(Sum<T>));
    for (int tree = 0; tree < tables.trees; ++tree) {
      launch(leaf_log_prob_backward_weight_kernel<T>, grid, P::threads, 0, stream, tables, leaf_order, items,
             tensors, slot, share, tree, static_cast<Sum<T>*>(sum), gradient, static_cast<T*>(grad_bias),
             wide);
    }
  });
}

}  // namespace hstree
