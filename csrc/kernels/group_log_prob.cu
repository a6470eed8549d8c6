#include "group_log_prob.h"
#include "tile_product.cuh"

namespace hstree {
namespace {

constexpr int small_threads = 128;
constexpr int row_tile = 64, weight_tile = 64;      // the factor A of a product: rows, or classes
constexpr int class_tile = 128, column_tile = 128;  // the factor B: classes, or columns
constexpr int listed = 512;  // rows or classes of a product that a block lists at a time
constexpr int blocks_at_once = 2;

// The rows and classes of a cluster, or of a tile of it. No classes: none.
struct Cluster {
  int64_t place;  // of the first row, in the order of the tree
  int64_t rows;
  int64_t first;  // of its classes in order [T, V]
  int width;
};

__device__ __forceinline__ Cluster cluster_at(const GroupTables& tables, const int32_t* start, int tree,
                                              int64_t c) {
  const int64_t at = tree * (tables.clusters + int64_t{1}) + c;
  const int64_t begin = tables.begin[at], end = tables.begin[at + 1], place = start[at];
  const bool valid = begin >= 0 && end <= tables.classes && end - begin <= tables.max_width;
  return {place, start[at + 1] - place, tree * tables.classes + begin,
          valid ? static_cast<int>(end - begin) : 0};
}

// Of the block's tile of rows: its rows and all classes of their cluster.
__device__ __forceinline__ Cluster block_rows(const GroupTables& tables, const GroupRows& rows, int tree) {
  const GroupTile tile = rows.row_tile[int64_t(tree) * gridDim.x + blockIdx.x];
  if (tile.cluster < 0) return {0, 0, 0, 0};
  const Cluster whole = cluster_at(tables, rows.start, tree, tile.cluster);
  return {whole.place + tile.first, whole.rows - tile.first, whole.first, whole.width};
}

__device__ __forceinline__ int64_t row_at(const GroupTables& tables, const GroupRows& rows, int tree,
                                          int64_t place) {
  const int64_t row = rows.rows[tree * tables.rows + place];
  return row < 0 || row >= tables.rows ? -1 : row;
}

// tree_valid[t] = 0 if order[t] leaves [0, V) or begin[t] [0, V]. O(T V). Threads may store the same 0 (volatile: a
// relaxed atomic store of PTX); deterministic. One thread for each (tree, class).
__global__ void __launch_bounds__(small_threads)
    group_check_kernel(GroupTables tables, volatile int32_t* tree_valid) {
  const int64_t i = int64_t(blockIdx.x) * small_threads + threadIdx.x;
  if (i >= tables.trees * tables.classes) return;
  const int32_t own = tables.order[i];
  if (own < 0 || own >= tables.classes) tree_valid[i / tables.classes] = 0;
}

__global__ void __launch_bounds__(small_threads) group_valid_kernel(GroupTables tables, int32_t* tree_valid) {
  const int i = blockIdx.x * small_threads + threadIdx.x;
  if (i < tables.trees) tree_valid[i] = 1;
}

// key [T, N] and log_prob [N, T], see group_keys. One thread for each (tree, row).
template <typename S>
__global__ void __launch_bounds__(small_threads)
    group_key_kernel(GroupTables tables, const int32_t* tree_valid, int32_t* key, S* log_prob) {
  const int64_t i = int64_t(blockIdx.x) * small_threads + threadIdx.x;
  if (i >= tables.trees * tables.rows) return;
  const int64_t tree = i / tables.rows, row = i % tables.rows, target = tables.target[row];
  int32_t own = tables.clusters;
  bool valid = true;
  if (target >= 0) {
    valid = target < tables.classes && tree_valid[tree] != 0;
    const int32_t c = valid ? tables.cluster[tree * tables.cluster_stride + target] : -1;
    valid = valid && c >= 0 && c < tables.clusters;
    if (valid) {
      const int32_t* begin = tables.begin + tree * (tables.clusters + 1) + c;
      const int64_t first = begin[0], last = begin[1];
      valid = first >= 0 && last > first && last <= tables.classes && last - first <= tables.max_width;
      if (valid && last - first > 1) own = c;
    }
  }
  key[i] = own;
  if (log_prob != nullptr && own == tables.clusters) {
    log_prob[row * tables.trees + tree] = valid ? S(0) : S(nanf(""));
  }
}

// start[t, c]: number of places with a smaller key. One thread for each (tree, cluster) and one more, by bisection.
__global__ void __launch_bounds__(small_threads)
    group_start_kernel(GroupTables tables, GroupRows rows, const int32_t* key, int32_t* start) {
  const int64_t i = int64_t(blockIdx.x) * small_threads + threadIdx.x;
  if (i >= tables.trees * (tables.clusters + int64_t{1})) return;
  const int tree = static_cast<int>(i / (tables.clusters + 1)),
            c = static_cast<int>(i % (tables.clusters + 1));
  int64_t low = 0, high = tables.rows;
  while (low < high) {
    const int64_t middle = (low + high) / 2, row = row_at(tables, rows, tree, middle);
    const int32_t own = row < 0 ? tables.clusters : key[tree * tables.rows + row];
    if (own < c) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  start[i] = static_cast<int32_t>(low);
}

// row_tile [T, row_limit] and class_tile [T, class_limit], see GroupRows. One block for each (tree, list), a thread for a
// share of the clusters.
__global__ void __launch_bounds__(small_threads)
    group_tile_kernel(GroupTables tables, const int32_t* start, GroupTile* row_tiles, int64_t row_limit,
                      GroupTile* class_tiles, int64_t class_limit) {
  __shared__ int64_t of_thread[small_threads];
  const int tid = threadIdx.x, tree = blockIdx.x;
  const bool of_rows = blockIdx.y == 0;
  const int64_t limit = of_rows ? row_limit : class_limit;
  GroupTile* const tiles = (of_rows ? row_tiles : class_tiles) + tree * limit;
  const int64_t share = divide_up(tables.clusters, small_threads);
  const int64_t first = tid * share, last = first + share < tables.clusters ? first + share : tables.clusters;
  const auto count = [&](int64_t c) -> int64_t {
    const Cluster own = cluster_at(tables, start, tree, c);
    if (own.rows <= 0 || own.width <= 0) return 0;
    return of_rows ? divide_up(own.rows, row_tile) : divide_up(own.width, weight_tile);
  };
  int64_t sum = 0, at = 0, end = 0;
#pragma unroll 1
  for (int64_t c = first; c < last; ++c) sum += count(c);
  of_thread[tid] = sum;
  __syncthreads();
#pragma unroll 4
  for (int k = 0; k < small_threads; ++k) {
    if (k < tid) at += of_thread[k];
    end += of_thread[k];
  }
#pragma unroll 1
  for (int64_t c = first; c < last; ++c) {
    const int64_t own = count(c);
    for (int64_t i = 0; i < own && at < limit; ++i, ++at) {  // more than the limit only in corrupt tables
      tiles[at] = {static_cast<int32_t>(c), static_cast<int32_t>(i) * 64};
    }
  }
  for (int64_t i = end + tid; i < limit; i += small_threads) tiles[i] = {-1, 0};
}

// A tile of rows of a cluster and its scores, in shared memory.
template <typename T>
struct ScoreBlock {
  using Product = TileProduct<T, true, true>;
  static constexpr int32_t no_target = -2;

  int64_t row[row_tile];
  int32_t target[row_tile];
  int32_t cls[class_tile];
  Sum<T> bias[class_tile];

  // Calls take(product, k) with the products of the tile's rows and classes [k, k + 128) of the group, for all k.
  template <typename Take>
  __device__ __forceinline__ void each(const GroupTables& tables, const GroupRows& rows,
                                       const GroupTensors& tensors, int tree, const Cluster& own,
                                       bool aligned, const Take& take) {
    for (int r = threadIdx.x; r < row_tile; r += tile_threads) {
      row[r] = r < own.rows ? row_at(tables, rows, tree, own.place + r) : -1;
      target[r] = row[r] < 0 ? no_target : static_cast<int32_t>(tables.target[row[r]]);
    }
    const auto* const biases = static_cast<const T*>(tensors.bias);
    for (int k = 0; k < own.width; k += class_tile) {
      __syncthreads();
      for (int c = threadIdx.x; c < class_tile; c += tile_threads) {
        const int32_t v = k + c < own.width ? tables.order[own.first + k + c] : -1;
        cls[c] = v;
        bias[c] = v >= 0 && biases != nullptr ? to_sum(biases[tree * tables.classes + v]) : Sum<T>(0);
      }
      const auto load = [&](int64_t chunk, T* a, T* b) {
        const int64_t first = chunk * Product::depth;
        Product::A::load(
            static_cast<const T*>(tensors.hidden), tables.features, [&](int r) { return row[r]; }, first,
            tables.features, aligned, a);
        Product::B::load(
            static_cast<const T*>(tensors.weight), tables.features, [&](int c) { return int64_t(cls[c]); },
            first, tables.features, aligned, b);
      };
      Product product;
      product.add(HSTREE_SHARED_MEMORY, divide_up(tables.features, Product::depth), own.rows, own.width - k,
                  load);
      take(product, k);
    }
  }
};

// log sum exp as a largest score and a sum of exponentials relative to it.
template <typename S>
struct LogSum {
  S most = -INFINITY, sum = 0;

  __device__ __forceinline__ void add(const LogSum& other) {
    const S largest = other.most > most ? other.most : most;
    sum = sum * share(most, largest) + other.sum * share(other.most, largest);
    most = largest;
  }
};

// The group op, forward.
//   log_sum[i, t] = log sum_v exp(z_v), log_prob[i, t] = z_y - log_sum, z_v = dot(hidden[i], weight[v]) + bias[t, v],
//   classes v of the cluster of y = target[i] in tree t
// Tensors: shapes at GroupTables, GroupRows and GroupTensors; hidden, weight, bias of one type T in float32, float64,
//   bfloat16, float16; log_prob and log_sum Sum<T>. Rows of key C are not written.
// Sums in Sum<T>: over features in order of chunks, over the classes of a thread in order of tiles, and over threads in
//   a fixed order; NaN if a score is, or all are -inf.
// Work O(N T W D). Bytes: E once for each tile of 64 rows of a group, hidden once for each 128 classes, from the L2
//   cache. Nothing of the size of the scores is written.
// No atomics; deterministic. One block for each tile of 64 rows of a cluster, which takes 128 classes at a time; threads
//   as in TileProduct.
template <typename T>
__global__ void __launch_bounds__(tile_threads, sizeof(T) == 8 ? 1 : blocks_at_once)
    group_log_prob_kernel(GroupTables tables, GroupRows rows, GroupTensors tensors, Sum<T>* log_prob,
                          Sum<T>* log_sum, bool aligned) {
  using S = Sum<T>;
  using Product = typename ScoreBlock<T>::Product;
  __shared__ ScoreBlock<T> block;
  __shared__ S target_score[row_tile];
  __shared__ LogSum<S> part[Product::row_warps][row_tile];
  const int tree = blockIdx.y, tid = threadIdx.x;
  const Cluster own = block_rows(tables, rows, tree);
  if (own.width == 0) return;
  if (tid < row_tile) target_score[tid] = S(nanf(""));
  LogSum<S> of_row[Product::rows];
  block.each(tables, rows, tensors, tree, own, aligned, [&](const Product& product, int) {
#pragma unroll
    for (int j = 0; j < Product::rows; ++j) {
      const int r = Product::row(j);
      const int32_t target = block.target[r];
      S score[Product::columns];
      LogSum<S> more;
#pragma unroll
      for (int k = 0; k < Product::columns; ++k) {
        const int c = Product::column(k);
        score[k] = block.cls[c] < 0 ? -INFINITY : product.sum(j, k) + block.bias[c];
        if (block.cls[c] == target) target_score[r] = score[k];
        if (score[k] > more.most) more.most = score[k];
      }
      if (more.most < of_row[j].most) more.most = of_row[j].most;
      const S largest = more.most == -INFINITY ? S(0) : more.most;
#pragma unroll
      for (int k = 0; k < Product::columns; ++k) more.sum += exp(score[k] - largest);
      of_row[j].add(more);
    }
  });
#pragma unroll
  for (int j = 0; j < Product::rows; ++j) {
#pragma unroll
    for (int bits = 1; bits < Product::row_lanes; bits *= 2) {
      of_row[j].add({__shfl_xor_sync(all_lanes, of_row[j].most, bits),
                     __shfl_xor_sync(all_lanes, of_row[j].sum, bits)});
    }
    if (tid % Product::row_lanes == 0) part[Product::row_warp()][Product::row(j)] = of_row[j];
  }
  __syncthreads();
  if (tid >= row_tile || block.row[tid] < 0) return;
  LogSum<S> total;
#pragma unroll
  for (int k = 0; k < Product::row_warps; ++k) total.add(part[k][tid]);
  const int64_t at = block.row[tid] * tables.trees + tree;
  const S log_of_sum = log(total.sum);
  log_prob[at] = target_score[tid] - total.most - log_of_sum;
  log_sum[at] = total.most + log_of_sum;
}

// The power of two of an upstream gradient, and what is left of it, in [1, 2): slopes in float16 keep their digits, which
// have the range of float32 in bfloat16.
template <typename T>
constexpr bool scaled = std::is_same_v<T, __half>;
template <typename T>
__device__ __forceinline__ Sum<T> mantissa(Sum<T> gradient) {
  if constexpr (scaled<T>) return gradient * scale_of(fabsf(gradient)).inverse;
  return gradient;
}
template <typename T>
__device__ __forceinline__ Sum<T> power(Sum<T> gradient) {
  if constexpr (scaled<T>) return scale_of(fabsf(gradient)).back;
  return Sum<T>(1);
}

// slope[t, place, k] = mantissa(grad_log_prob[i, t]) ([v = target_i] - exp(z_v - log_sum[i, t])), v class k of the group,
// i the row at the place: z as in the forward pass. slope [trees, N, stride] T, of trees from `first_tree` on, one
// rounding; zeros behind the group up to a multiple of 64. Threads as in group_log_prob_kernel.
template <typename T>
__global__ void __launch_bounds__(tile_threads, sizeof(T) == 8 ? 1 : blocks_at_once)
    group_slope_kernel(GroupTables tables, GroupRows rows, GroupTensors tensors, const Sum<T>* grad_log_prob,
                       const Sum<T>* log_sum, int first_tree, T* slope, int64_t stride, bool aligned) {
  using S = Sum<T>;
  using Product = typename ScoreBlock<T>::Product;
  __shared__ ScoreBlock<T> block;
  __shared__ S of_row[row_tile], gradient[row_tile];
  const int tree = first_tree + blockIdx.y, tid = threadIdx.x;
  const Cluster own = block_rows(tables, rows, tree);
  if (own.width == 0) return;
  if (tid < row_tile) {
    const int64_t row = tid < own.rows ? row_at(tables, rows, tree, own.place + tid) : -1;
    of_row[tid] = row < 0 ? S(0) : log_sum[row * tables.trees + tree];
    gradient[tid] = row < 0 ? S(0) : mantissa<T>(grad_log_prob[row * tables.trees + tree]);
  }
  slope += (blockIdx.y * tables.rows + own.place) * stride;
  block.each(tables, rows, tensors, tree, own, aligned, [&](const Product& product, int first) {
#pragma unroll
    for (int j = 0; j < Product::rows; ++j) {
      const int r = Product::row(j);
      if (r >= own.rows) continue;
#pragma unroll
      for (int k = 0; k < Product::columns; k += Product::run) {
        const int column = Product::column(k);
        if (first + column >= stride) continue;
        T value[Product::run];
#pragma unroll
        for (int e = 0; e < Product::run; ++e) {
          const int c = column + e;
          const S p = exp(product.sum(j, k + e) + block.bias[c] - of_row[r]);
          const bool inside = block.row[r] >= 0 && block.cls[c] >= 0;
          store(value + e, inside ? gradient[r] * (S(block.cls[c] == block.target[r]) - p) : S(0));
        }
        T* const to = slope + r * stride + first + column;
        if constexpr (Product::run == 2) {
          *reinterpret_cast<uint32_t*>(to) = pack(value[0], value[1]);
        } else {
          *to = value[0];
        }
      }
    }
  });
}

// total += sum for one row and consecutive columns, four of 16-bit types in 16 bytes.
template <int Count, typename S>
__device__ __forceinline__ void add_to(S* total, const S (&sum)[Count]) {
  if constexpr (Count == 4) {
    uint4 raw = *reinterpret_cast<const uint4*>(total);
    S value[4];
    memcpy(value, &raw, sizeof raw);
#pragma unroll
    for (int e = 0; e < 4; ++e) value[e] += sum[e];
    memcpy(&raw, value, sizeof raw);
    *reinterpret_cast<uint4*>(total) = raw;
  } else {
#pragma unroll
    for (int e = 0; e < Count; ++e) total[e] += sum[e];
  }
}

// Adds the sums of a product to rows of `to` from column `first` on. line(r): the row of the product's row r, and -1 for
// none; factor(r): of it.
template <typename Product, typename S, typename Line, typename Factor>
__device__ __forceinline__ void add_sums(const Product& product, const GroupSum& to, int64_t first,
                                         const Line& line, const Factor& factor) {
#pragma unroll
  for (int j = 0; j < Product::rows; ++j) {
    const int64_t row = line(Product::row(j));
    if (row < 0) continue;
    const S scale = factor(Product::row(j));
#pragma unroll
    for (int k = 0; k < Product::columns; k += Product::run) {
      const int64_t column = first + Product::column(k);
      if (column >= to.columns) continue;
      S sum[Product::run];
#pragma unroll
      for (int e = 0; e < Product::run; ++e) sum[e] = product.sum(j, k + e) * scale;
      add_to(static_cast<S*>(to.data) + row * to.stride + column, sum);
    }
  }
}

// The group op, gradient of hidden, one tree:
//   to[i] += power(grad_log_prob[i, t]) sum_k slope[place of i, k] weight[class k]
// Tensors: shapes at group_backward_hidden; sums in Sum<T>, classes in order.
// Work O(N W D). Bytes: E once for each tile of 64 rows of a group, slopes once for each 128 columns; sums read and
//   written once. No atomics: a row appears once in a tree, and each tree has its own launch. Deterministic.
// One block for each tile of 64 rows of a cluster and 128 columns; threads as in TileProduct.
template <typename T>
__global__ void __launch_bounds__(tile_threads, sizeof(T) == 8 ? 1 : blocks_at_once)
    group_backward_hidden_kernel(GroupTables tables, GroupRows rows, GroupTensors tensors,
                                 const Sum<T>* grad_log_prob, const T* slope, int64_t slope_stride, int tree,
                                 GroupSum to, bool aligned) {
  using S = Sum<T>;
  using Product = TileProduct<T, true, false>;
  __shared__ int64_t row[row_tile];
  __shared__ S of_row[row_tile];
  __shared__ int32_t cls[listed];
  const int tid = threadIdx.x;
  const Cluster own = block_rows(tables, rows, tree);
  if (own.width == 0) return;
  const int64_t first_column = int64_t(blockIdx.y) * column_tile;
  if (tid < row_tile) {
    row[tid] = tid < own.rows ? row_at(tables, rows, tree, own.place + tid) : -1;
    of_row[tid] = row[tid] < 0 ? S(0) : power<T>(grad_log_prob[row[tid] * tables.trees + tree]);
  }
  Product product;
  // No warp reads the last list any more: barriers of add follow all reads of it.
  for (int first = 0; first < own.width; first += listed) {
    const int count = own.width - first < listed ? own.width - first : listed;
    for (int c = tid; c < listed; c += tile_threads) {
      cls[c] = c < count ? tables.order[own.first + first + c] : -1;
    }
    const auto load = [&](int64_t chunk, T* a, T* b) {
      const int k = static_cast<int>(chunk) * Product::depth;
      Product::A::load(
          slope, slope_stride, [&](int r) { return r < own.rows ? own.place + r : int64_t{-1}; }, first + k,
          slope_stride, true, a);
      Product::B::load(
          static_cast<const T*>(tensors.weight), tables.features, [&](int c) { return int64_t(cls[k + c]); },
          first_column, tables.features, aligned, b);
    };
    product.add(HSTREE_SHARED_MEMORY, divide_up(count, Product::depth), own.rows,
                tables.features - first_column, load);
  }
  add_sums<Product, S>(
      product, to, first_column, [&](int r) { return row[r]; }, [&](int r) { return of_row[r]; });
}

// Where number `at` of all classes, or of all pairs of a tree and a class from V on, is among those that are visited; -1
// where it is not, though in corrupt tables a group has it. slot: of group_count, or null: all are.
__device__ __forceinline__ int64_t visited_at(const int64_t* slot, int64_t at) {
  if (slot == nullptr) return at;
  return slot[at + 1] > slot[at] ? slot[at] : -1;
}

// The group op, gradients of weight and bias, one tree:
//   to[v] += sum over rows i of the cluster of v of power(grad_log_prob[i, t]) slope[place of i, k] hidden[i]
//   grad_bias[t, v] = the same without hidden
// Tensors: shapes at group_backward_weight; sums Sum<T>, a row for each class or, with slot, for each visited one.
// Sums in Sum<T>, rows in order; float16 factors are first divided by the largest power of two of their rows so far,
//   which keeps them within 2^-24 of it.
// Work O(N W D). Bytes: hidden once for each 64 classes of a group; slopes once for each 128 columns; sums read and
//   written once. No atomics: a class appears once in a tree, and each tree has its own launch. Deterministic.
// One block for each tile of 64 classes of a cluster with rows, and 128 columns; threads as in TileProduct.
template <typename T>
__global__ void __launch_bounds__(tile_threads, sizeof(T) == 8 ? 1 : blocks_at_once)
    group_backward_weight_kernel(GroupTables tables, GroupRows rows, GroupTensors tensors,
                                 const Sum<T>* grad_log_prob, const T* slope, int64_t slope_stride, int tree,
                                 const int64_t* slot, GroupSum to, T* grad_bias, bool aligned) {
  using S = Sum<T>;
  using Product = TileProduct<T, false, false>;
  constexpr int depth = Product::depth;
  __shared__ int64_t row[listed];
  __shared__ S of_row[scaled<T> ? listed : 1], of_chunk[scaled<T> ? listed / 32 : 1];
  __shared__ int64_t goal[weight_tile];  // the row of `to` of each class
  const int tid = threadIdx.x;
  const GroupTile tile = rows.class_tile[int64_t(tree) * gridDim.x + blockIdx.x];
  if (tile.cluster < 0) return;
  const Cluster own = cluster_at(tables, rows.start, tree, tile.cluster);
  const int64_t first_column = int64_t(blockIdx.y) * column_tile;
  const bool has_class = tid < weight_tile && tile.first + tid < own.width;
  const int32_t cls = has_class ? tables.order[own.first + tile.first + tid] : -1;
  if (tid < weight_tile) goal[tid] = has_class ? visited_at(slot, cls) : -1;
  Product product;
  S bias = 0, largest = scaled<T> ? S(0) : S(1);
  // No warp reads the last lists any more: barriers of add and before follow all reads of them.
  for (int64_t first = 0; first < own.rows; first += listed) {
    const int64_t count = own.rows - first < listed ? own.rows - first : listed;
    for (int i = tid; i < listed; i += tile_threads) {
      const int64_t i_row = i < count ? row_at(tables, rows, tree, own.place + first + i) : -1;
      row[i] = i_row;
      if constexpr (scaled<T>) {
        of_row[i] = i_row < 0 ? S(0) : power<T>(grad_log_prob[i_row * tables.trees + tree]);
        const S most = warp_max(of_row[i]);
        if (tid % 32 == 0) of_chunk[i / 32] = most;
      }
    }
    const auto load = [&](int64_t chunk, T* a, T* b) {
      const int k = static_cast<int>(chunk) * depth;
      const auto place = [&](int i) { return row[k + i] < 0 ? int64_t{-1} : own.place + first + k + i; };
      Product::A::load(slope, slope_stride, place, tile.first, slope_stride, true, a);
      if (to.data != nullptr) {
        Product::B::load(
            static_cast<const T*>(tensors.hidden), tables.features, [&](int i) { return row[k + i]; },
            to.first + first_column, tables.features, aligned, b);
      }
    };
    const auto before = [&](int64_t chunk, T* a) {
      if constexpr (scaled<T>) {
        static_assert(depth == 32);
        const S most = of_chunk[chunk];
        if (most > largest) {
          product.scale(largest / most);
          bias *= largest / most;
          largest = most;
        }
        for (int i = tid; i < depth * weight_tile; i += tile_threads) {
          T* const own_factor = a + i / weight_tile * Product::A::stride + i % weight_tile;
          const S of_own = most > 0 ? of_row[chunk * depth + i / weight_tile] / largest : S(0);
          store(own_factor, to_sum(*own_factor) * of_own);
        }
        __syncthreads();
      }
      if (grad_bias != nullptr && blockIdx.y == 0 && tid < weight_tile) {
        for (int r = 0; r < depth; ++r) bias += to_sum(a[r * Product::A::stride + tid]);
      }
    };
    product.add(HSTREE_SHARED_MEMORY, divide_up(count, depth), own.width - tile.first,
                to.data == nullptr ? 0 : to.columns - first_column, load, before);
  }
  if (to.data != nullptr) {
    add_sums<Product, S>(
        product, to, first_column, [&](int k) { return goal[k]; }, [&](int) { return largest; });
  }
  if (grad_bias != nullptr && blockIdx.y == 0 && has_class) {
    const int64_t own_bias = tree * tables.classes + cls, first_bias = slot == nullptr ? 0 : tables.classes;
    const int64_t at = visited_at(slot, first_bias + own_bias);
    if (at >= 0) store(grad_bias + (slot == nullptr ? at : at - slot[tables.classes]), bias * largest);
  }
}

// gradient[r, first + c] = sum[r, c], rounded, and clears the sum. One thread for each element of the sum.
template <typename T>
__global__ void __launch_bounds__(small_threads)
    group_round_kernel(GroupSum sum, int64_t count, int64_t features, T* gradient) {
  const int64_t i = int64_t(blockIdx.x) * small_threads + threadIdx.x;
  if (i >= count) return;
  const int64_t row = i / sum.columns, column = sum.first + i % sum.columns;
  auto* const own = static_cast<Sum<T>*>(sum.data) + i;
  if (column < features) store(gradient + row * features + column, *own);
  *own = 0;
}

// count of group_count. One thread for each class, and one more.
__global__ void __launch_bounds__(small_threads)
    group_count_kernel(GroupTables tables, GroupRows rows, int32_t* count) {
  const int64_t i = int64_t(blockIdx.x) * small_threads + threadIdx.x;
  if (i == tables.classes) count[0] = 0;
  if (i >= tables.classes) return;
  int32_t any = 0;
  for (int tree = 0; tree < tables.trees; ++tree) {
    const int32_t c = tables.cluster[tree * tables.cluster_stride + i];
    int32_t own = 0;
    if (c >= 0 && c < tables.clusters) {
      const int64_t at = int64_t(tree) * (tables.clusters + 1) + c;
      own = rows.start[at + 1] > rows.start[at];  // of clusters of several classes
    }
    count[1 + (tree + int64_t{1}) * tables.classes + i] = own;
    any |= own;
  }
  count[1 + i] = any;
}

// index and bias_index of group_index. One thread for each class of all trees together and of each tree.
__global__ void __launch_bounds__(small_threads)
    group_index_kernel(GroupTables tables, const int64_t* slot, int64_t nnz, int64_t biases, int64_t* index,
                       int64_t* bias_index) {
  const int64_t i = int64_t(blockIdx.x) * small_threads + threadIdx.x;
  if (i >= (tables.trees + int64_t{1}) * tables.classes || slot[i + 1] == slot[i]) return;
  if (i < tables.classes) {
    index[slot[i]] = i;
  } else {
    const int64_t at = slot[i] - nnz;
    bias_index[at] = i / tables.classes - 1;
    bias_index[biases + at] = i % tables.classes;
  }
}

bool nothing_to_do(const GroupTables& tables) {
  return tables.rows == 0 || tables.trees == 0 || tables.clusters == 0;
}

template <typename T>
bool is_aligned(const GroupTables& tables, const GroupTensors& tensors) {
  // Without features there is no address to copy from.
  return tables.features > 0 && aligned<T>(tensors.hidden, tables.features, 16) &&
         aligned<T>(tensors.weight, tables.features, 16);
}

}  // namespace

void group_keys(ScalarType type, const GroupTables& tables, int32_t* tree_valid, int32_t* key, void* log_prob,
                cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0) return;
  const auto blocks = [](int64_t threads) { return grid_size(divide_up(threads, small_threads)); };
  launch(group_valid_kernel, blocks(tables.trees), small_threads, 0, stream, tables, tree_valid);
  launch(group_check_kernel, blocks(tables.trees * tables.classes), small_threads, 0, stream, tables,
         tree_valid);
  dispatch(type, [&](auto tag) {
    using S = Sum<typename decltype(tag)::type>;
    launch(group_key_kernel<S>, blocks(tables.trees * tables.rows), small_threads, 0, stream, tables,
           static_cast<const int32_t*>(tree_valid), key, static_cast<S*>(log_prob));
  });
}

void group_plan(const GroupTables& tables, const int64_t* rows, const int32_t* key, int32_t* start,
                GroupTile* row_tile, GroupTile* class_tile, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0) return;
  const GroupRows sorted = {rows, start, nullptr, nullptr};
  const int64_t threads = tables.trees * (tables.clusters + int64_t{1});
  launch(group_start_kernel, grid_size(divide_up(threads, small_threads)), small_threads, 0, stream, tables,
         sorted, key, start);
  launch(group_tile_kernel, dim3(grid_size(tables.trees), 2), small_threads, 0, stream, tables,
         static_cast<const int32_t*>(start), row_tile, group_row_tiles(tables), class_tile,
         group_class_tiles(tables));
}

void group_log_prob(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                    const GroupTensors& tensors, void* log_prob, void* log_sum, cudaStream_t stream) {
  if (nothing_to_do(tables)) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = Sum<T>;
    const dim3 grid(grid_size(group_row_tiles(tables)), static_cast<unsigned>(tables.trees));
    launch(group_log_prob_kernel<T>, grid, tile_threads, ScoreBlock<T>::Product::bytes, stream, tables, rows,
           tensors, static_cast<S*>(log_prob), static_cast<S*>(log_sum), is_aligned<T>(tables, tensors));
  });
}

void group_slopes(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                  const GroupTensors& tensors, const void* grad_log_prob, const void* log_sum, int tree,
                  int trees, void* slope, cudaStream_t stream) {
  if (nothing_to_do(tables)) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = Sum<T>;
    const dim3 grid(grid_size(group_row_tiles(tables)), static_cast<unsigned>(trees));
    launch(group_slope_kernel<T>, grid, tile_threads, ScoreBlock<T>::Product::bytes, stream, tables, rows,
           tensors, static_cast<const S*>(grad_log_prob), static_cast<const S*>(log_sum), tree,
           static_cast<T*>(slope), group_slope_stride(tables), is_aligned<T>(tables, tensors));
  });
}

void group_backward_hidden(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                           const GroupTensors& tensors, const void* grad_log_prob, const void* slope,
                           int tree, const GroupSum& sum, cudaStream_t stream) {
  if (nothing_to_do(tables) || sum.columns == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const dim3 grid(grid_size(group_row_tiles(tables)),
                    static_cast<unsigned>(divide_up(sum.columns, column_tile)));
    launch(group_backward_hidden_kernel<T>, grid, tile_threads, TileProduct<T, true, false>::bytes, stream,
           tables, rows, tensors, static_cast<const Sum<T>*>(grad_log_prob), static_cast<const T*>(slope),
           group_slope_stride(tables), tree, sum, is_aligned<T>(tables, tensors));
  });
}

void group_backward_weight(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                           const GroupTensors& tensors, const void* grad_log_prob, const void* slope,
                           int tree, const int64_t* slot, const GroupSum& sum, void* grad_bias,
                           cudaStream_t stream) {
  if (nothing_to_do(tables)) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    GroupSum to = sum;
    if (to.columns == 0) to.data = nullptr;
    const int64_t columns = to.data == nullptr ? 1 : divide_up(to.columns, column_tile);
    const dim3 grid(grid_size(group_class_tiles(tables)), static_cast<unsigned>(columns));
    launch(group_backward_weight_kernel<T>, grid, tile_threads, TileProduct<T, false, false>::bytes, stream,
           tables, rows, tensors, static_cast<const Sum<T>*>(grad_log_prob), static_cast<const T*>(slope),
           group_slope_stride(tables), tree, slot, to, static_cast<T*>(grad_bias),
           is_aligned<T>(tables, tensors));
  });
}

void group_round(ScalarType type, const GroupSum& sum, int64_t rows, int64_t features, void* gradient,
                 cudaStream_t stream) {
  const int64_t count = rows * sum.columns;
  if (count == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(group_round_kernel<T>, grid_size(divide_up(count, small_threads)), small_threads, 0, stream, sum,
           count, features, static_cast<T*>(gradient));
  });
}

void group_count(const GroupTables& tables, const GroupRows& rows, int32_t* count, cudaStream_t stream) {
  launch(group_count_kernel, grid_size(divide_up(tables.classes + 1, small_threads)), small_threads, 0,
         stream, tables, rows, count);
}

void group_index(const GroupTables& tables, const int64_t* slot, int64_t nnz, int64_t biases, int64_t* index,
                 int64_t* bias_index, cudaStream_t stream) {
  if (nnz == 0) return;
  const int64_t threads = (tables.trees + int64_t{1}) * tables.classes;
  launch(group_index_kernel, grid_size(divide_up(threads, small_threads)), small_threads, 0, stream, tables,
         slot, nnz, biases, index, bias_index);
}

}  // namespace hstree
