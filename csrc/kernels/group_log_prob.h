// Launchers of the group op: log P of each row's target within its group of classes, in each of T partitions of the
// classes that share one output embedding E.
//
// The binding calls
//   1. group_keys, which also writes log_prob where there is no product;
//   2. rows = stable argsort of each row of key;
//   3. group_plan;
//   4. group_log_prob; or group_slopes, then for each tree group_backward_hidden, and for each part of the columns
//      group_backward_weight for each tree and, for 16-bit types, group_round.
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

// A tile of a cluster; cluster -1: none.
struct GroupTile {
  int32_t cluster, first;  // of its rows or classes
};

// The rows of each tree by cluster.
struct GroupRows {
  const int64_t* rows;          // [T, N] row at each place; those without a product last
  const int32_t* start;         // [T, C + 1] first place of each cluster
  const GroupTile* row_tile;    // [T, group_row_tiles] tiles of 64 rows of the clusters
  const GroupTile* class_tile;  // [T, group_class_tiles] tiles of 64 classes of the clusters with rows
};

// The most tiles that a tree can have.
inline int64_t group_row_tiles(const GroupTables& tables) {
  return tables.rows / 64 + (tables.clusters < tables.rows ? tables.clusters : tables.rows);
}
inline int64_t group_class_tiles(const GroupTables& tables) {
  return tables.classes / 64 + tables.clusters;
}

// key [T, N]: the cluster of each target, or C for rows that are ignored, not valid, or alone in their group. Writes
// log_prob [N, T] of the latter: 0, or NaN where a target or a table is out of range. tree_valid [T]: memory.
void group_keys(ScalarType type, const GroupTables& tables, int32_t* tree_valid, int32_t* key, void* log_prob,
                cudaStream_t stream);

// Fills start, row_tile and class_tile from key and the rows sorted by it.
void group_plan(const GroupTables& tables, const int64_t* rows, const int32_t* key, int32_t* start,
                GroupTile* row_tile, GroupTile* class_tile, cudaStream_t stream);

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

// slope [trees, N, group_slope_stride], by place: of `trees` trees from `tree` on, what a row's scores receive from its
// upstream gradient; float16: from the mantissa of that. grad_log_prob, log_sum [N, T] accumulation dtype.
void group_slopes(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                  const GroupTensors& tensors, const void* grad_log_prob, const void* log_sum, int tree,
                  int trees, void* slope, cudaStream_t stream);

// Columns [first, first + columns) of a gradient's sums, of the accumulation dtype. Rows begin `stride` elements apart;
// for 16-bit types columns = stride is a multiple of 4 and may exceed D - first.
struct GroupSum {
  void* data;
  int64_t stride, first, columns;
};

// Adds tree `tree`, whose slopes are slope [N, group_slope_stride], to sum [N].
void group_backward_hidden(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                           const GroupTensors& tensors, const void* grad_log_prob, const void* slope,
                           int tree, const GroupSum& sum, cudaStream_t stream);

// Adds tree `tree` to sum [V or nnz], whose data may be null, and writes its grad_bias: [T, V] zero-filled or [biases],
// or null. slot: of group_count, for row-sparse gradients, or null.
void group_backward_weight(ScalarType type, const GroupTables& tables, const GroupRows& rows,
                           const GroupTensors& tensors, const void* grad_log_prob, const void* slope,
                           int tree, const int64_t* slot, const GroupSum& sum, void* grad_bias,
                           cudaStream_t stream);

// The columns of sum in gradient [rows, features], rounded. Clears sum.
void group_round(ScalarType type, const GroupSum& sum, int64_t rows, int64_t features, void* gradient,
                 cudaStream_t stream);

// count [1 + V + T V]: count[0] = 0, count[1 + y] = 1 if a row of the batch visits class y in any tree, else 0, and
// count[1 + V + t V + y] = 1 if in tree t.
void group_count(const GroupTables& tables, const GroupRows& rows, int32_t* count, cudaStream_t stream);

// index [nnz]: the visited classes; bias_index [2, biases]: tree and class of each bias; in increasing order. slot: the
// inclusive sum of count.
void group_index(const GroupTables& tables, const int64_t* slot, int64_t nnz, int64_t biases, int64_t* index,
                 int64_t* bias_index, cudaStream_t stream);

}  // namespace hstree
