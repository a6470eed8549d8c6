#include "async_copy.cuh"
#include "group_log_prob.h"
#include "round.cuh"
#include "split.cuh"

namespace hstree {
namespace {

constexpr int small_threads = 128;
constexpr int group_threads = 256;  // of a tile
constexpr int row_tile = 64, class_tile = 128, column_tile = 128, weight_tile = 64;
constexpr int blocks_at_once = 2;

// The rows and classes of one cluster that a block works on.
struct Work {
  int64_t place;      // of the first row, in the order of the tree
  int64_t rows_left;  // from there to the end of the cluster
  int64_t first;      // of its classes in order [V]
  int width;
};

__device__ __forceinline__ int64_t row_at(const GroupTables& tables, const GroupRows& rows, int tree,
                                          int64_t place) {
  const int64_t row = rows.rows[tree * tables.rows + place];
  return row < 0 || row >= tables.rows ? -1 : row;
}

// The cluster whose tiles, from first[c] to first[c + 1], include this one; -1 behind the last.
__device__ __forceinline__ int cluster_of(const int32_t* first, int clusters, int tile) {
  if (tile >= first[clusters]) return -1;
  int low = 0, high = clusters;  // first[low] <= tile < first[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first[middle] <= tile ? low : high) = middle;
  }
  return low;
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

// row_tile and class_tile [T, C + 1]: running sums of the tiles of each cluster. One block for each tree, a thread for a
// share of the clusters.
__global__ void __launch_bounds__(small_threads)
    group_tile_kernel(GroupTables tables, const int32_t* start, int32_t* row_tiles, int32_t* class_tiles) {
  __shared__ int32_t of_thread[2][small_threads];
  const int clusters = tables.clusters, tid = threadIdx.x;
  const int64_t base = int64_t(blockIdx.x) * (clusters + 1);
  const int share = (clusters + small_threads - 1) / small_threads;
  const int first = tid * share < clusters ? tid * share : clusters;
  const int last = first + share < clusters ? first + share : clusters;
  const auto rows_of = [&](int c) { return start[base + c + 1] - start[base + c]; };
  const auto row_tiles_of = [&](int c) { return (rows_of(c) + row_tile - 1) / row_tile; };
  const auto class_tiles_of = [&](int c) {
    const int32_t width = rows_of(c) > 0 ? tables.begin[base + c + 1] - tables.begin[base + c] : 0;
    return (width + weight_tile - 1) / weight_tile;
  };
  int32_t sum[2] = {0, 0};
  for (int c = first; c < last; ++c) {
    sum[0] += row_tiles_of(c);
    sum[1] += class_tiles_of(c);
  }
  of_thread[0][tid] = sum[0];
  of_thread[1][tid] = sum[1];
  __syncthreads();
  int32_t before[2] = {0, 0};
  for (int k = 0; k < tid; ++k) {
    before[0] += of_thread[0][k];
    before[1] += of_thread[1][k];
  }
  for (int c = first; c < last; ++c) {
    row_tiles[base + c] = before[0];
    class_tiles[base + c] = before[1];
    before[0] += row_tiles_of(c);
    before[1] += class_tiles_of(c);
  }
  if (last == clusters && (first < last || tid == 0)) {
    row_tiles[base + clusters] = before[0];
    class_tiles[base + clusters] = before[1];
  }
}

// Products of tiles A [M rows, K] and B [128 columns, K], both in shared memory, for the `group_threads` threads of a
// block, and what they hold of the sums.
//
// float32 and float64: fused multiply-adds; a thread has every eighth row and every 32nd column, so that a warp reads
// one element of A for all its lanes. M = 8 rows_of_thread.
template <typename T, int M, bool Half = is_half<T>>
struct TileSums {
  static constexpr int depth = 16;  // of a stage
  static constexpr int rows = M / 8;

  T sum[rows][4] = {};

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[r][k] = 0;
    }
  }

  // a(row, k), b(column, k)
  template <typename A, typename B>
  __device__ __forceinline__ void add(const A& a, const B& b) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
    for (int k = 0; k < depth; ++k) {
      T column[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) column[j] = b(lane + 32 * j, k);
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const T own = a(warp + 8 * r, k);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[r][j] += own * column[j];
      }
    }
  }

  // take(row, column, sum)
  template <typename Take>
  __device__ __forceinline__ void each(const Take& take) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) take(warp + 8 * r, lane + 32 * j, sum[r][j]);
    }
  }
};

// bfloat16 and float16: matrix instructions; eight warps have 32 x 32 each (M = 64). Operands are words of two elements
// along K.
template <typename T, int M>
struct TileSums<T, M, true> {
  static_assert(M == 64);
  static constexpr int depth = 32;

  float sum[2][4][4] = {};

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = 0;
      }
    }
  }

  // a(m, step, operand): rows of a warp's fragment m; b(step, operands of the four fragments).
  template <typename A, typename B>
  __device__ __forceinline__ void add(const A& a, const B& b) {
#pragma unroll
    for (int step = 0; step < depth / 16; ++step) {
      uint32_t column[4][2];
      b(step, column);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t own[4];
        a(m, step, own);
#pragma unroll
        for (int n = 0; n < 4; ++n) mma<T>(sum[m][n], own, column[n]);
      }
    }
  }
};

__device__ __forceinline__ int warp_row() {
  return threadIdx.x / 128 * 32;
}
__device__ __forceinline__ int warp_column() {
  return threadIdx.x / 32 % 4 * 32;
}

// Calls take(row, column, sum) where rows are fragments of 16 in order: row g + 8 (i / 2) of fragment m.
// paired_rows, paired_columns: whether rows 2 g and 2 g + 1, or the columns of two fragments, alternate, as where an
// operand is packed from two words of adjacent K (pair_rows, pair_columns).
template <bool paired_rows, bool paired_columns, typename Sums, typename Take>
__device__ __forceinline__ void each_sum(Sums& sums, const Take& take) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = paired_rows ? 2 * g + i / 2 : g + 8 * (i / 2);
        const int column = paired_columns ? n / 2 * 16 + 2 * (2 * t + i % 2) + n % 2 : 8 * n + 2 * t + i % 2;
        take(warp_row() + 16 * m + row, warp_column() + column, sums.sum[m][n][i]);
      }
    }
  }
}

// Stages of a product in shared memory. Rows are listed, -1 for zeros.
//
// `Rows` rows of `Depth` consecutive elements each from column `first` on, zero beyond `columns`. Rows begin
// `row_stride` elements apart in `source`; in shared memory `stride` apart. `aligned`: 16 bytes at a time.
template <typename T, int Rows, int Depth, typename RowOf>
__device__ __forceinline__ void stage_rows(const T* source, int64_t row_stride, const RowOf& row_of,
                                           int64_t first, int64_t columns, bool aligned, T* shared,
                                           int stride) {
  if constexpr (is_half<T>) {
    if (aligned) {
      constexpr int pieces = Depth * static_cast<int>(sizeof(T)) / 16, elements = 16 / sizeof(T);
#pragma unroll
      for (int i = threadIdx.x; i < Rows * pieces; i += group_threads) {
        const int r = i / pieces, at = i % pieces * elements;
        const int64_t row = row_of(r);
        const bool inside = row >= 0 && first + at < columns;
        async_copy_or_zero<16>(shared + r * stride + at,
                               inside ? source + row * row_stride + first + at : source, inside);
      }
      return;
    }
  }
  const T zero = round_to<T>(Sum<T>(0));
  for (int i = threadIdx.x; i < Rows * Depth; i += group_threads) {
    const int r = i / Depth, at = i % Depth;
    const int64_t row = row_of(r);
    shared[r * stride + at] =
        row >= 0 && first + at < columns ? __ldg(source + row * row_stride + first + at) : zero;
  }
}

// The scores of a tile, [64 rows, 128 classes], into shared memory.
template <typename T>
struct ScoreTile {
  using S = Sum<T>;
  using Sums = TileSums<T, row_tile>;
  static constexpr int depth = Sums::depth;
  static constexpr int stride = is_half<T> ? depth + 8 : depth + 1;  // the banks of a warp's words differ
  static constexpr int stage = (row_tile + class_tile) * stride;     // elements
  static constexpr int stages = is_half<T> ? 2 : 1;
  static constexpr int score_stride = class_tile + 1;

  static __host__ __device__ constexpr size_t bytes() {
    const size_t staged = sizeof(T) * stages * stage, scores = sizeof(S) * row_tile * score_stride;
    return staged > scores ? staged : scores;
  }

  // row [64], cls [128] in shared memory. Begins and ends with a barrier.
  static __device__ __forceinline__ void compute(const GroupTables& tables, const GroupTensors& tensors,
                                                 const int64_t* row, const int32_t* cls, bool aligned,
                                                 unsigned char* memory) {
    T* const staged = reinterpret_cast<T*>(memory);
    S* const scores = reinterpret_cast<S*>(memory);
    const auto load = [&](int64_t first, int which) {
      T* const to = staged + which * stage;
      stage_rows<T, row_tile, depth>(
          static_cast<const T*>(tensors.hidden), tables.features, [&](int r) { return row[r]; }, first,
          tables.features, aligned, to, stride);
      stage_rows<T, class_tile, depth>(
          static_cast<const T*>(tensors.weight), tables.features, [&](int r) { return int64_t(cls[r]); },
          first, tables.features, aligned, to + row_tile * stride, stride);
    };
    Sums sums;
    __syncthreads();
    load(0, 0);
    async_copy_commit();
    int which = 0;
    for (int64_t first = 0; first < tables.features; first += depth) {
      const int64_t next = first + depth;
      if (stages == 2) {
        if (next < tables.features) load(next, 1 - which);
        async_copy_commit();
        async_copy_wait<1>();
      } else {
        async_copy_wait<0>();
      }
      __syncthreads();
      const T* const a = staged + which * stage;
      const T* const b = a + row_tile * stride;
      if constexpr (is_half<T>) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        sums.add(
            [&](int m, int step, uint32_t (&operand)[4]) {
              const T* const from = a + (warp_row() + 16 * m + g) * stride + 16 * step + 2 * t;
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                memcpy(&operand[i], from + i % 2 * 8 * stride + i / 2 * 8, sizeof(uint32_t));
              }
            },
            [&](int step, uint32_t (&operand)[4][2]) {
#pragma unroll
              for (int n = 0; n < 4; ++n) {
                const T* const from = b + (warp_column() + 8 * n + g) * stride + 16 * step + 2 * t;
                memcpy(&operand[n][0], from, sizeof(uint32_t));
                memcpy(&operand[n][1], from + 8, sizeof(uint32_t));
              }
            });
      } else {
        sums.add([&](int r, int k) { return a[r * stride + k]; },
                 [&](int c, int k) { return b[c * stride + k]; });
      }
      __syncthreads();
      if (stages == 2) {
        which = 1 - which;
      } else if (next < tables.features) {
        load(next, 0);
      }
    }
    async_copy_wait<0>();
    __syncthreads();
    const auto put = [&](int r, int k, S sum) { scores[r * score_stride + k] = sum; };
    if constexpr (is_half<T>) {
      each_sum<false, false>(sums, put);
    } else {
      sums.each(put);
    }
    __syncthreads();
  }
};

// What the forward pass and the slopes have in common, in shared memory.
template <typename T>
struct ScoreBlock {
  int64_t row[row_tile];
  int32_t cls[class_tile];
  Sum<T> bias[class_tile];
  Work work;
  bool used;

  // Whether the block has a tile.
  __device__ bool begin(const GroupTables& tables, const GroupRows& rows, int tree) {
    const int64_t base = int64_t(tree) * (tables.clusters + 1);
    if (threadIdx.x == 0) {
      const int tile = static_cast<int>(blockIdx.x);
      const int c = cluster_of(rows.row_tile + base, tables.clusters, tile);
      used = c >= 0;
      if (used) {
        const int64_t within = int64_t(tile - rows.row_tile[base + c]) * row_tile;
        work.place = rows.start[base + c] + within;
        work.rows_left = rows.start[base + c + 1] - work.place;
        work.first = tables.begin[base + c];
        work.width = tables.begin[base + c + 1] - tables.begin[base + c];
      }
    }
    __syncthreads();
    if (!used) return false;
    for (int r = threadIdx.x; r < row_tile; r += group_threads) {
      row[r] = r < work.rows_left ? row_at(tables, rows, tree, work.place + r) : -1;
    }
    return true;
  }

  // The classes from number k of the group on.
  __device__ void load_classes(const GroupTables& tables, const void* biases, int tree, int k) {
    const auto* own = static_cast<const T*>(biases);
    __syncthreads();
    for (int c = threadIdx.x; c < class_tile; c += group_threads) {
      const int64_t at = int64_t(tree) * tables.classes;
      const int32_t v = k + c < work.width ? tables.order[at + work.first + k + c] : -1;
      cls[c] = v;
      bias[c] = v >= 0 && own != nullptr ? to_sum(own[at + v]) : Sum<T>(0);
    }
  }
};

// The group op, forward.
//   log_sum[i, t] = log sum_v exp(z_v), log_prob[i, t] = z_y - log_sum, z_v = dot(hidden[i], weight[v]) + bias[t, v],
//   classes v of the cluster of y = target[i] in tree t
// Tensors: shapes at GroupTables, GroupRows and GroupTensors; hidden, weight, bias of one type T in float32, float64,
//   bfloat16, float16; log_prob and log_sum Sum<T>. Rows of key C are not written.
// Sums in Sum<T>: over features in order of chunks, over classes in order of tiles; NaN if a score is, or all are -inf.
// Work O(N T W D). Bytes: E once for each tile of 64 rows of a group, hidden once for each 128 classes. Nothing of the
//   size of the scores is written.
// No atomics; deterministic. One block for each tile of 64 rows of a cluster, which takes 128 classes at a time; then a
//   warp has eight rows.
template <typename T>
__global__ void __launch_bounds__(group_threads, sizeof(T) == 8 ? 1 : blocks_at_once)
    group_log_prob_kernel(GroupTables tables, GroupRows rows, GroupTensors tensors, Sum<T>* log_prob,
                          Sum<T>* log_sum, bool aligned) {
  using S = Sum<T>;
  using Tile = ScoreTile<T>;
  __shared__ ScoreBlock<T> block;
  __shared__ S target_score[row_tile];
  const int tree = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (!block.begin(tables, rows, tree)) return;
  unsigned char* const memory = HSTREE_SHARED_MEMORY;
  const S* const scores = reinterpret_cast<const S*>(memory);
  constexpr int own_rows = row_tile / (group_threads / 32);
  S most[own_rows], sum[own_rows];
#pragma unroll
  for (int j = 0; j < own_rows; ++j) {
    most[j] = -INFINITY;
    sum[j] = 0;
    if (lane == 0) target_score[warp * own_rows + j] = S(nanf(""));
  }
  for (int k = 0; k < block.work.width; k += class_tile) {
    block.load_classes(tables, tensors.bias, tree, k);
    Tile::compute(tables, tensors, block.row, block.cls, aligned, memory);
#pragma unroll
    for (int j = 0; j < own_rows; ++j) {
      const int r = warp * own_rows + j;
      const int64_t row = block.row[r];
      if (row < 0) continue;  // the same for the warp
      const int64_t target = tables.target[row];
      S value[class_tile / 32], largest = most[j];
#pragma unroll
      for (int c = 0; c < class_tile / 32; ++c) {
        const int at = lane + 32 * c;
        value[c] = -INFINITY;
        if (block.cls[at] < 0) continue;
        value[c] = scores[r * Tile::score_stride + at] + block.bias[at];
        if (block.cls[at] == target) target_score[r] = value[c];
        largest = value[c] > largest ? value[c] : largest;
      }
      largest = warp_max(largest);
      S part = 0;
#pragma unroll
      for (int c = 0; c < class_tile / 32; ++c) {
        if (block.cls[lane + 32 * c] >= 0) part += exp(value[c] - largest);
      }
      if (most[j] != largest) sum[j] *= exp(most[j] - largest);
      sum[j] += warp_sum(part);
      most[j] = largest;
    }
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < own_rows; ++j) {
    const int r = warp * own_rows + j;
    const int64_t row = block.row[r];
    if (row < 0 || lane > 0) continue;
    const S log_of_sum = log(sum[j]);
    log_prob[row * tables.trees + tree] = target_score[r] - most[j] - log_of_sum;
    log_sum[row * tables.trees + tree] = most[j] + log_of_sum;
  }
}

// The power of two of an upstream gradient, and what is left of it, in [1, 2): 16-bit slopes keep their digits.
template <typename T>
__device__ __forceinline__ Sum<T> mantissa(Sum<T> gradient) {
  if constexpr (is_half<T>) return gradient * scale_of(fabsf(gradient)).inverse;
  return gradient;
}
template <typename T>
__device__ __forceinline__ Sum<T> power(Sum<T> gradient) {
  if constexpr (is_half<T>) return scale_of(fabsf(gradient)).back;
  return Sum<T>(1);
}

// slope[place, k] = mantissa(grad_log_prob[i, t]) ([v = target_i] - exp(z_v - log_sum[i, t])), v class k of the group,
// i the row at the place: z as in the forward pass. slope [N, stride] T, one rounding; zeros behind the group up to a
// multiple of 64. Threads as in group_log_prob_kernel.
template <typename T>
__global__ void __launch_bounds__(group_threads, blocks_at_once)
    group_slope_kernel(GroupTables tables, GroupRows rows, GroupTensors tensors, const Sum<T>* grad_log_prob,
                       const Sum<T>* log_sum, int tree, T* slope, int64_t stride, bool aligned) {
  using S = Sum<T>;
  using Tile = ScoreTile<T>;
  __shared__ ScoreBlock<T> block;
  if (!block.begin(tables, rows, tree)) return;
  unsigned char* const memory = HSTREE_SHARED_MEMORY;
  const S* const scores = reinterpret_cast<const S*>(memory);
  for (int k = 0; k < block.work.width; k += class_tile) {
    block.load_classes(tables, tensors.bias, tree, k);
    Tile::compute(tables, tensors, block.row, block.cls, aligned, memory);
    for (int i = threadIdx.x; i < row_tile * class_tile; i += group_threads) {
      const int r = i / class_tile, c = i % class_tile;
      const int64_t row = block.row[r];
      if (r >= block.work.rows_left || k + c >= stride) continue;
      S value = 0;
      if (row >= 0 && block.cls[c] >= 0) {
        const int64_t at = row * tables.trees + tree;
        const S own = exp(scores[r * Tile::score_stride + c] + block.bias[c] - log_sum[at]);
        value = mantissa<T>(grad_log_prob[at]) * ((block.cls[c] == tables.target[row] ? S(1) : S(0)) - own);
      }
      store(slope + (block.work.place + r) * stride + k + c, value);
    }
  }
}

// The stages of a product with rows of E or of hidden, [depth, 128 columns], whose pairs lie along K.
template <typename T>
struct ColumnTile {
  static constexpr int stride =
      column_tile + 16 / static_cast<int>(sizeof(T));  // the banks of a warp's words differ

  // Operands of the four fragments of a warp: columns 2 g and 2 g + 1 of 16 go to two of them.
  static __device__ __forceinline__ void operands(const T* tile, int step, uint32_t (&operand)[4][2]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int strip = 0; strip < 2; ++strip) {
      const T* const from = tile + (16 * step + 2 * t) * stride + warp_column() + 16 * strip + 2 * g;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t above, below;
        memcpy(&above, from + 8 * k * stride, sizeof above);
        memcpy(&below, from + (8 * k + 1) * stride, sizeof below);
        operand[2 * strip][k] = halves(above, below, false);
        operand[2 * strip + 1][k] = halves(above, below, true);
      }
    }
  }
};

// The group op, gradient of hidden, one tree:
//   total[i] += power(grad_log_prob[i, t]) sum_k slope[place of i, k] weight[class k]
// Tensors: shapes at group_backward_hidden; total Sum<T>. Sums in Sum<T>, classes in order.
// Work O(N W D). Bytes: E once for each tile of 64 rows of a group, slopes once for each 128 columns; total read and
//   written once. No atomics: a row appears once in a tree, and each tree has its own launch. Deterministic.
// One block for each tile of 64 rows of a cluster and 128 columns.
template <typename T>
__global__ void __launch_bounds__(group_threads, blocks_at_once)
    group_backward_hidden_kernel(GroupTables tables, GroupRows rows, GroupTensors tensors,
                                 const Sum<T>* grad_log_prob, const T* slope, int64_t slope_stride, int tree,
                                 Sum<T>* total, bool aligned) {
  using S = Sum<T>;
  using Sums = TileSums<T, row_tile>;
  constexpr int depth = Sums::depth, row_stride = is_half<T> ? depth + 8 : depth + 1;
  constexpr int column_stride = ColumnTile<T>::stride;
  constexpr int stage = row_tile * row_stride + depth * column_stride, stages = is_half<T> ? 2 : 1;
  __shared__ ScoreBlock<T> block;
  if (!block.begin(tables, rows, tree)) return;
  T* const staged = reinterpret_cast<T*>(HSTREE_SHARED_MEMORY);
  const int64_t first_column = int64_t(blockIdx.y) * column_tile;
  const int64_t order = int64_t(tree) * tables.classes + block.work.first;
  const int width = block.work.width;
  const auto load = [&](int k, int which) {
    T* const to = staged + which * stage;
    stage_rows<T, row_tile, depth>(
        slope, slope_stride,
        [&](int r) { return r < block.work.rows_left ? block.work.place + r : int64_t{-1}; }, k, slope_stride,
        true, to, row_stride);
    stage_rows<T, depth, column_tile>(
        static_cast<const T*>(tensors.weight), tables.features,
        [&](int c) { return k + c < width ? int64_t(tables.order[order + k + c]) : int64_t{-1}; },
        first_column, tables.features, aligned, to + row_tile * row_stride, column_stride);
  };
  Sums sums;
  load(0, 0);
  async_copy_commit();
  int which = 0;
  for (int k = 0; k < width; k += depth) {
    if (stages == 2) {
      if (k + depth < width) load(k + depth, 1 - which);
      async_copy_commit();
      async_copy_wait<1>();
    } else {
      async_copy_wait<0>();
    }
    __syncthreads();
    const T* const a = staged + which * stage;
    const T* const b = a + row_tile * row_stride;
    if constexpr (is_half<T>) {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
      sums.add(
          [&](int m, int step, uint32_t (&operand)[4]) {
            const T* const from = a + (warp_row() + 16 * m + g) * row_stride + 16 * step + 2 * t;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              memcpy(&operand[i], from + i % 2 * 8 * row_stride + i / 2 * 8, sizeof(uint32_t));
            }
          },
          [&](int step, uint32_t (&operand)[4][2]) { ColumnTile<T>::operands(b, step, operand); });
    } else {
      sums.add([&](int r, int i) { return a[r * row_stride + i]; },
               [&](int c, int i) { return b[i * column_stride + c]; });
    }
    __syncthreads();
    if (stages == 2) {
      which = 1 - which;
    } else if (k + depth < width) {
      load(k + depth, 0);
    }
  }
  async_copy_wait<0>();
  const auto put = [&](int r, int c, S sum) {
    const int64_t row = block.row[r], column = first_column + c;
    if (row < 0 || column >= tables.features) return;
    total[row * tables.features + column] += sum * power<T>(grad_log_prob[row * tables.trees + tree]);
  };
  if constexpr (is_half<T>) {
    each_sum<false, true>(sums, put);
  } else {
    sums.each(put);
  }
}

// The group op, gradients of weight and bias, one tree:
//   total[v] += sum over rows i of the cluster of v of power(grad_log_prob[i, t]) slope[place of i, k] hidden[i]
//   grad_bias[t, v] = the same without hidden
// Tensors: shapes at group_backward_weight; total Sum<T>, a row for each class or, with slot, for each visited one.
// Sums in Sum<T>, rows in order; 16-bit factors are first scaled by the largest power of two of their 32 rows, which
//   keeps bfloat16 exact, and float16 within 2^-24 of the largest.
// Work O(N W D). Bytes: hidden once for each 64 classes of a group; slopes once for each 128 columns; total read and
//   written once. No atomics: a class appears once in a tree, and each tree has its own launch. Deterministic.
// One block for each tile of 64 classes of a cluster with rows, and 128 columns.
template <typename T>
__global__ void __launch_bounds__(group_threads, blocks_at_once)
    group_backward_weight_kernel(GroupTables tables, GroupRows rows, GroupTensors tensors,
                                 const Sum<T>* grad_log_prob, const T* slope, int64_t slope_stride, int tree,
                                 const int64_t* slot, Sum<T>* total, T* grad_bias, bool aligned) {
  using S = Sum<T>;
  using Sums = TileSums<T, weight_tile>;
  constexpr int depth = Sums::depth, column_stride = ColumnTile<T>::stride;
  constexpr int factor_stride = weight_tile + 16 / static_cast<int>(sizeof(T));
  __shared__ Work work;
  __shared__ bool used;
  __shared__ int64_t row[depth];
  __shared__ S of_row[depth];
  __shared__ S largest;
  __shared__ int offset;  // of its classes in a row of slopes
  __shared__ int32_t cls[weight_tile];
  T* const factor = reinterpret_cast<T*>(HSTREE_SHARED_MEMORY);  // [depth, factor_stride]
  T* const feature = factor + depth * factor_stride;             // [depth, column_stride]
  const int tid = threadIdx.x;
  const int64_t base = int64_t(tree) * (tables.clusters + 1),
                first_column = int64_t(blockIdx.y) * column_tile;
  if (tid == 0) {
    const int tile = static_cast<int>(blockIdx.x),
              c = cluster_of(rows.class_tile + base, tables.clusters, tile);
    used = c >= 0;
    if (used) {
      const int within = (tile - rows.class_tile[base + c]) * weight_tile;
      work = {rows.start[base + c], rows.start[base + c + 1] - int64_t(rows.start[base + c]),
              tables.begin[base + c] + int64_t(within),
              tables.begin[base + c + 1] - tables.begin[base + c] - within};
      offset = within;
    }
  }
  __syncthreads();
  if (!used) return;
  if (tid < weight_tile) {
    cls[tid] = tid < work.width ? tables.order[int64_t(tree) * tables.classes + work.first + tid] : -1;
  }
  Sums sums;
  S bias = 0;
  for (int64_t first = 0; first < work.rows_left; first += depth) {
    __syncthreads();
    if (tid < 32) {  // a warp
      int64_t own = -1;
      S scale = 0;
      if (tid < depth && first + tid < work.rows_left)
        own = row_at(tables, rows, tree, work.place + first + tid);
      if (own >= 0) scale = power<T>(grad_log_prob[own * tables.trees + tree]);
      const S most = warp_max(scale);
      if (tid < depth) {
        row[tid] = own;
        of_row[tid] = most > 0 ? scale / most : S(0);  // powers of two
      }
      if (tid == 0) largest = most;
    }
    __syncthreads();
    stage_rows<T, depth, column_tile>(
        static_cast<const T*>(tensors.hidden), tables.features, [&](int r) { return row[r]; }, first_column,
        tables.features, aligned, feature, column_stride);
    async_copy_commit();
    for (int i = tid; i < depth * weight_tile; i += group_threads) {
      const int r = i / weight_tile, k = i % weight_tile;
      S value = 0;
      if (row[r] >= 0 && k < work.width) {
        value = to_sum(slope[(work.place + first + r) * slope_stride + offset + k]) * of_row[r];
      }
      store(factor + r * factor_stride + k, value);
    }
    async_copy_wait<0>();
    __syncthreads();
    if (blockIdx.y == 0 && tid < weight_tile) {
      S part = 0;
      for (int r = 0; r < depth; ++r) part += to_sum(factor[r * factor_stride + tid]);
      bias += part * largest;
    }
    if (total == nullptr) continue;
    if constexpr (is_half<T>) {
      const int g = tid % 32 / 4, t = tid % 4;
      Sums part;
      part.add(
          [&](int m, int step,
              uint32_t (&operand)[4]) {  // classes 2 g and 2 g + 1 of 16 are rows g and g + 8
            const T* const from = factor + (16 * step + 2 * t) * factor_stride + warp_row() + 16 * m + 2 * g;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              uint32_t above, below;
              memcpy(&above, from + 8 * k * factor_stride, sizeof above);
              memcpy(&below, from + (8 * k + 1) * factor_stride, sizeof below);
              operand[2 * k] = halves(above, below, false);
              operand[2 * k + 1] = halves(above, below, true);
            }
          },
          [&](int step, uint32_t (&operand)[4][2]) { ColumnTile<T>::operands(feature, step, operand); });
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums.sum[m][n][i] += part.sum[m][n][i] * largest;
        }
      }
    } else {
      sums.add([&](int k, int r) { return factor[r * factor_stride + k]; },
               [&](int c, int r) { return feature[r * column_stride + c]; });
    }
  }
  const auto put = [&](int k, int c, S sum) {
    const int64_t column = first_column + c;
    if (cls[k] < 0 || column >= tables.features) return;
    const int64_t to = slot == nullptr ? cls[k] : slot[cls[k]];
    total[to * tables.features + column] += sum;
  };
  if (total != nullptr) {
    if constexpr (is_half<T>) {
      each_sum<true, true>(sums, put);
    } else {
      sums.each(put);
    }
  }
  if (grad_bias != nullptr && blockIdx.y == 0 && tid < weight_tile && cls[tid] >= 0) {
    const int64_t at = int64_t(tree) * tables.classes + cls[tid];
    store(grad_bias + (slot == nullptr ? at : slot[tables.classes + at] - slot[tables.classes]), bias);
  }
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

// Blocks for all tiles of 64 rows of a tree.
unsigned row_tiles(const GroupTables& tables) {
  const int64_t clusters = tables.clusters < tables.rows ? tables.clusters : tables.rows;
  return grid_size(tables.rows / row_tile + clusters);
}

template <typename T>
bool is_aligned(const GroupTables& tables, const GroupTensors& tensors) {
  // Without features there is no address to copy from.
  return tables.features > 0 && aligned<T>(tensors.hidden, tables.features, 16) &&
         aligned<T>(tensors.weight, tables.features, 16);
}

unsigned column_tiles(const GroupTables& tables) {
  const int64_t tiles = divide_up(tables.features, column_tile);
  return static_cast<unsigned>(tiles > 0 ? tiles : 1);
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
                int32_t* row_tile, int32_t* class_tile, cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0) return;
  const GroupRows sorted = {rows, start, nullptr, nullptr};
  const int64_t threads = tables.trees * (tables.clusters + int64_t{1});
  launch(group_start_kernel, grid_size(divide_up(threads, small_threads)), small_threads, 0, stream, tables,
         sorted, key, start);
  launch(group_tile_kernel, grid_size(tables.trees), small_threads, 0, stream, tables,
         static_cast<const int32_t*>(start), row_tile, class_tile);
}

void group_log_prob(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                    const GroupTensors& tensors, void* log_prob, void* log_sum, cudaStream_t stream) {
  if (nothing_to_do(tables)) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = Sum<T>;
    const dim3 grid(row_tiles(tables), static_cast<unsigned>(tables.trees));
    launch(group_log_prob_kernel<T>, grid, group_threads, ScoreTile<T>::bytes(), stream, tables, rows,
           tensors, static_cast<S*>(log_prob), static_cast<S*>(log_sum), is_aligned<T>(tables, tensors));
  });
}

void group_slopes(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                  const GroupTensors& tensors, const void* grad_log_prob, const void* log_sum, int tree,
                  void* slope, cudaStream_t stream) {
  if (nothing_to_do(tables)) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = Sum<T>;
    launch(group_slope_kernel<T>, row_tiles(tables), group_threads, ScoreTile<T>::bytes(), stream, tables,
           rows, tensors, static_cast<const S*>(grad_log_prob), static_cast<const S*>(log_sum), tree,
           static_cast<T*>(slope), group_slope_stride(tables), is_aligned<T>(tables, tensors));
  });
}

void group_backward_hidden(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                           const GroupTensors& tensors, const void* grad_log_prob, const void* slope,
                           int tree, void* sum, cudaStream_t stream) {
  if (nothing_to_do(tables) || tables.features == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = Sum<T>;
    constexpr int depth = TileSums<T, row_tile>::depth;
    constexpr int row_stride = is_half<T> ? depth + 8 : depth + 1;
    constexpr size_t bytes =
        sizeof(T) * (is_half<T> ? 2 : 1) * (row_tile * row_stride + depth * ColumnTile<T>::stride);
    launch(group_backward_hidden_kernel<T>, dim3(row_tiles(tables), column_tiles(tables)), group_threads,
           bytes, stream, tables, rows, tensors, static_cast<const S*>(grad_log_prob),
           static_cast<const T*>(slope), group_slope_stride(tables), tree, static_cast<S*>(sum),
           is_aligned<T>(tables, tensors));
  });
}

void group_backward_weight(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                           const GroupTensors& tensors, const void* grad_log_prob, const void* slope,
                           int tree, const int64_t* slot, void* sum, void* grad_bias, cudaStream_t stream) {
  if (nothing_to_do(tables)) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = Sum<T>;
    constexpr int depth = TileSums<T, weight_tile>::depth;
    constexpr size_t bytes = sizeof(T) * depth * (weight_tile + 16 / sizeof(T) + ColumnTile<T>::stride);
    const unsigned tiles = grid_size(tables.classes / weight_tile + tables.clusters);
    const unsigned columns = sum == nullptr ? 1 : column_tiles(tables);
    launch(group_backward_weight_kernel<T>, dim3(tiles, columns), group_threads, bytes, stream, tables, rows,
           tensors, static_cast<const S*>(grad_log_prob), static_cast<const T*>(slope),
           group_slope_stride(tables), tree, slot, static_cast<S*>(sum), static_cast<T*>(grad_bias),
           is_aligned<T>(tables, tensors));
  });
}

void group_round(ScalarType type, const void* sum, void* gradient, int64_t count, cudaStream_t stream) {
  dispatch(type, [&](auto tag) { round_sums<typename decltype(tag)::type>(sum, gradient, count, stream); });
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
