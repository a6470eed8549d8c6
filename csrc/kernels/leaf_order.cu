#include "common.cuh"
#include "leaf_order.h"
#include "row_group.cuh"
#include "segment.cuh"

namespace hstree {
namespace {

constexpr int block_threads = 128;

// Whether all entries of a class's path are in range.
__device__ bool is_sound(const Tables& tables, int tree, int64_t target) {
  const int64_t* offset = tables.offset + tree * (tables.classes + 1) + target;
  const int64_t begin = offset[0], end = offset[1];
  if (begin < 0 || end < begin || end > tables.entries || end - begin > tables.stride) return false;
  for (int64_t i = begin; i < end; ++i) {
    const int32_t entry = tables.path[i];
    if (entry < 0 || (entry >> 1) >= tables.weight_rows) return false;
  }
  return true;
}

// Number of nodes on the path of a row: 0 if it is ignored, -1 if its target or its tree is invalid.
__device__ __forceinline__ int path_length(const Tables& tables, int tree, int64_t row) {
  const int64_t target = tables.target[row];
  if (target < 0) return 0;
  if (target >= tables.classes || tables.tree_valid[tree] == 0) return -1;
  const int64_t* offset = tables.offset + tree * (tables.classes + 1) + target;
  return static_cast<int>(offset[1] - offset[0]);
}

__device__ __forceinline__ int32_t entry_node(const Tables& tables, int64_t entry) {
  return tables.path[entry] >> 1;
}

// tree_valid[t] = all(0 <= feature_index[t] < D and feature_index[t] increases strictly).
// feature_index [T, S] int32 -> tree_valid [T] int32. O(T S). Atomics for minima of integers: deterministic. One block
// for each tree.
__global__ void __launch_bounds__(block_threads) check_features_kernel(Tables tables, int32_t* tree_valid) {
  __shared__ int32_t least;
  const int tree = blockIdx.x;
  const int32_t* index =
      tables.feature_index == nullptr ? nullptr : tables.feature_index + tree * tables.features;
  int32_t valid = 1;
  if (threadIdx.x == 0) least = valid;
  __syncthreads();
  for (int64_t i = threadIdx.x; index != nullptr && i < tables.features; i += block_threads) {
    const int64_t own = index[i], before = i > 0 ? index[i - 1] : -1;
    if (own <= before || own >= tables.in_features) valid = 0;
  }
  atomicMin(&least, valid);
  __syncthreads();
  if (threadIdx.x == 0) tree_valid[tree] = least;
}

// key[t, i] = leaf_position[t, target[i]] in [0, INT32_MAX), or INT32_MAX for rows without a valid target.
// O(N T). No atomics; deterministic. One thread for each (tree, row).
__global__ void __launch_bounds__(block_threads) leaf_key_kernel(Tables tables, int32_t* key) {
  const int64_t i = int64_t(blockIdx.x) * block_threads + threadIdx.x;
  if (i >= tables.trees * tables.rows) return;
  const int64_t target = tables.target[i % tables.rows];
  int32_t value = 0x7fffffff;
  if (target >= 0 && target < tables.classes) {
    const int32_t position = tables.leaf_position[i / tables.rows * tables.classes + target];
    value = position < 0 ? 0 : position == 0x7fffffff ? position - 1 : position;
  }
  key[i] = value;
}

// tree_valid[t] = 0 if the path of a row's target is invalid. Reads every path entry of every row once: O(N T
// L). Safe for any values in the tables: reads nothing outside them. Threads may store the same 0 (volatile);
// deterministic. One thread for each (tree, row).
__global__ void __launch_bounds__(block_threads)
    check_paths_kernel(Tables tables, volatile int32_t* tree_valid) {
  const int64_t i = int64_t(blockIdx.x) * block_threads + threadIdx.x;
  if (i >= tables.trees * tables.rows) return;
  const int tree = static_cast<int>(i / tables.rows);
  const int64_t target = tables.target[i % tables.rows];
  if (target >= 0 && target < tables.classes && !is_sound(tables, tree, target)) tree_valid[tree] = 0;
}

// length[t, j], shared[t, j] and count[1 + t N + j] of the row at place j of the order, and row_length[t, row], as
// in leaf_order.h. Reads the path entries that consecutive rows share: O(N T L). A row without a valid path
// has shared 0 and count 0. No atomics; deterministic. One thread for each (tree, place).
__global__ void __launch_bounds__(block_threads)
    leaf_plan_kernel(Tables tables, const int64_t* order, int32_t* length, int32_t* shared,
                     int32_t* row_length, int32_t* count) {
  const int64_t i = int64_t(blockIdx.x) * block_threads + threadIdx.x;
  if (i == 0) count[0] = 0;
  if (i >= tables.trees * tables.rows) return;
  const int tree = static_cast<int>(i / tables.rows);
  const int own = path_length(tables, tree, order[i]);
  int common = 0;
  if (own > 0) {
    const int64_t begin = path_begin(tables, tree, order[i]);
    const int before = i % tables.rows > 0 ? path_length(tables, tree, order[i - 1]) : 0;
    if (before > 0) {
      const int64_t other = path_begin(tables, tree, order[i - 1]);
      const int limit = before < own ? before : own;
      while (common < limit && entry_node(tables, begin + common) == entry_node(tables, other + common))
        ++common;
    }
  }
  length[i] = own;
  shared[i] = common;
  row_length[tree * tables.rows + order[i]] = own;
  count[1 + i] = own > 0 ? own - common : 0;
}

// index[:, slot] = (tree, node) for every visited node, at the place that visits it first. slot [T N + 1] int64, index
// [2, nnz] int64; slots from nnz on are skipped. O(nnz + N T). No atomics; deterministic. One warp for each (tree,
// place), a lane for each level of its path.
__global__ void __launch_bounds__(block_threads)
    slot_index_kernel(Tables tables, LeafOrder leaf_order, const int64_t* slot, int64_t nnz, int64_t* index) {
  const int64_t i = (int64_t(blockIdx.x) * block_threads + threadIdx.x) / 32;
  if (i >= tables.trees * tables.rows || leaf_order.length[i] <= leaf_order.shared[i]) return;
  const int tree = static_cast<int>(i / tables.rows), shared = leaf_order.shared[i];
  const int64_t begin = path_begin(tables, tree, leaf_order.order[i]);
  for (int level = shared + threadIdx.x % 32; level < leaf_order.length[i]; level += 32) {
    const int64_t at = slot[i] + level - shared;
    if (at >= nnz) break;
    index[at] = tree;
    index[nnz + at] = entry_node(tables, begin + level);
  }
}

}  // namespace

void check_features(const Tables& tables, int32_t* tree_valid, cudaStream_t stream) {
  if (tables.trees == 0) return;
  launch(check_features_kernel, grid_size(tables.trees), block_threads, 0, stream, tables, tree_valid);
}

void check_paths(const Tables& tables, int32_t* tree_valid, cudaStream_t stream) {
  const int64_t places = tables.trees * tables.rows;
  if (places == 0) return;
  launch(check_paths_kernel, grid_size(divide_up(places, block_threads)), block_threads, 0, stream, tables,
         tree_valid);
}

void leaf_key(const Tables& tables, int32_t* key, cudaStream_t stream) {
  const int64_t places = tables.trees * tables.rows;
  if (places == 0) return;
  launch(leaf_key_kernel, grid_size(divide_up(places, block_threads)), block_threads, 0, stream, tables, key);
}

void leaf_plan(const Tables& tables, const int64_t* order, int32_t* length, int32_t* shared,
               int32_t* row_length, int32_t* count, cudaStream_t stream) {
  const int64_t places = tables.trees * tables.rows;
  if (places == 0) return;
  launch(leaf_plan_kernel, grid_size(divide_up(places, block_threads)), block_threads, 0, stream, tables,
         order, length, shared, row_length, count);
}

void slot_index(const Tables& tables, const LeafOrder& leaf_order, const int64_t* slot, int64_t nnz,
                int64_t* index, cudaStream_t stream) {
  const int64_t places = tables.trees * tables.rows;
  if (places == 0 || nnz == 0) return;
  launch(slot_index_kernel, grid_size(divide_up(32 * places, block_threads)), block_threads, 0, stream,
         tables, leaf_order, slot, nnz, index);
}

int64_t backward_workspace_bytes(ScalarType type, const Tables& tables) {
  const int64_t bytes = Segments(type, tables).bytes();
  const size_t group = type == ScalarType::float64 ? GroupVisits<double>::bytes(tables.stride)
                                                   : GroupVisits<float>::bytes(tables.stride);
  const int64_t visits = tables.trees * divide_up(tables.rows, group_rows) * static_cast<int64_t>(group);
  return bytes > visits ? bytes : visits;
}

}  // namespace hstree
