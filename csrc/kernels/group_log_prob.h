// Launchers of the group op: log P of each row's target within its group of classes, in each of T partitions of the
// classes that share one output embedding E.
//
// The binding calls
//   1. group_keys, which also writes log_prob where there is no product;
//   2. rows = stable argsort of each row of key;
//   3. group_plan;
//   4. group_log_prob; or for each tree group_slopes, group_backward_hidden and group_backward_weight.
//
// Plain C++: no CUDA and no torch include. All tensors are contiguous, but for `cluster`, and on the device of the
// stream. Launchers throw std::runtime_error when a launch fails, launch nothing when rows or trees is 0, and never
// synchronize.
#pragma once

#include <cstdint>

#include "limits.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

// Dimensions: N rows, D features, T trees, V classes, C clusters.
struct GroupTables {
  const int64_t* target;   // [N]; negative: ignored row
  const int32_t* cluster;  // [T, V], each tree `cluster_stride` after the last
  const int32_t* order;    // [T, V] classes by cluster
  const int32_t* begin;    // [T, C + 1] first place of each cluster in order
  int64_t rows, features, classes, cluster_stride;
  int trees, clusters, max_width;
};

// The rows of each tree by cluster.
struct GroupRows {
  const int64_t* rows;      // [T, N] row at each place; those without a product last
  const int32_t* start;     // [T, C + 1] first place of each cluster
  const int32_t* row_tile;  // [T, C + 1] first tile of 64 rows of each cluster, and their number
  const int32_t*
      class_tile;  // [T, C + 1] first tile of 64 classes of each cluster with rows, and their number
};

// key [T, N]: the cluster of each target, or C for rows that are ignored, not valid, or alone in their group. Writes
// log_prob [N, T] of the latter: 0, or NaN where a target or a table is out of range. tree_valid [T]: memory.
void group_keys(ScalarType type, const GroupTables& tables, int32_t* tree_valid, int32_t* key, void* log_prob,
                cudaStream_t stream);

// Fills start, row_tile and class_tile from key and the rows sorted by it.
void group_plan(const GroupTables& tables, const int64_t* rows, const int32_t* key, int32_t* start,
                int32_t* row_tile, int32_t* class_tile, cudaStream_t stream);

struct GroupTensors {
  const void* hidden;  // [N, D]
  const void* weight;  // E [V, D]
  const void* bias;    // [T, V], or null
};

// log_prob, log_sum [N, T] accumulation dtype: of rows with a product.
void group_log_prob(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                    const GroupTensors& tensors, void* log_prob, void* log_sum, cudaStream_t stream);

// Elements of a row of the slopes.
inline int64_t group_slope_stride(const GroupTables& tables) {
  return (static_cast<int64_t>(tables.max_width) + 63) / 64 * 64;
}

// slope [N, group_slope_stride], by place: slopes of tree `tree`, each row times the mantissa of its upstream gradient.
// grad_log_prob, log_sum [N, T] accumulation dtype.
void group_slopes(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                  const GroupTensors& tensors, const void* grad_log_prob, const void* log_sum, int tree,
                  void* slope, cudaStream_t stream);

// Adds tree `tree` to sum [N, D], accumulation dtype.
void group_backward_hidden(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                           const GroupTensors& tensors, const void* grad_log_prob, const void* slope,
                           int tree, void* sum, cudaStream_t stream);

// Adds tree `tree` to sum [V or nnz, D], accumulation dtype, or null, and writes its grad_bias: [T, V] zero-filled or
// [biases], or null. slot: of group_count, for row-sparse gradients, or null.
void group_backward_weight(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                           const GroupTensors& tensors, const void* grad_log_prob, const void* slope,
                           int tree, const int64_t* slot, void* sum, void* grad_bias, cudaStream_t stream);

// gradient [count], rounded from sum unless they are one.
void group_round(ScalarType type, const void* sum, void* gradient, int64_t count, cudaStream_t stream);

// count [1 + V + T V]: count[0] = 0, count[1 + y] = 1 if a row of the batch visits class y in any tree, else 0, and
// count[1 + V + t V + y] = 1 if in tree t.
void group_count(const GroupTables& tables, const GroupRows& rows, int32_t* count, cudaStream_t stream);

// index [nnz]: the visited classes; bias_index [2, biases]: tree and class of each bias; in increasing order. slot: the
// inclusive sum of count.
void group_index(const GroupTables& tables, const int64_t* slot, int64_t nnz, int64_t biases, int64_t* index,
                 int64_t* bias_index, cudaStream_t stream);

}  // namespace hstree
