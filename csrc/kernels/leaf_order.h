// The tables of a batch of path_log_prob.h, the order of its rows, and the plan of the nodes that they visit.
//
// Plain C++: no CUDA and no torch include. All tensors are contiguous and on the device of the stream.
// Launchers throw std::runtime_error when a launch fails, launch nothing when rows or trees is 0, and never
// synchronize.
#pragma once

#include <cstdint>

#include "limits.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

// Dimensions: N rows, T trees, V classes, D hidden features, S features of a tree, P path entries.
struct Tables {
  const int64_t* target;         // [N]; negative: ignored row
  const int64_t* offset;         // [T, V + 1], path_offset: entries of class y of tree t in path
  const int32_t* path;           // [P] node << 1 | goes_left
  const int32_t* leaf_position;  // [T, V]
  const int32_t* feature_index;  // [T, S] strictly increasing, or null: S = D, all features
  const int32_t* tree_valid;     // [T] from check_features and check_paths
  int64_t rows;                  // N
  int64_t classes;               // V
  int64_t entries;               // P
  int64_t weight_rows;           // M, inner nodes of one tree
  int64_t in_features;           // D
  int64_t features;              // S
  int trees;                     // T
  int stride;                    // last dimension of score: max_depth, at most 64
};

// The rows of each tree in leaf order, from left to right. Rows that are ignored or have a target out of
// range come last.
struct LeafOrder {
  const int64_t* order;       // [T, N] row at each place
  const int32_t* length;      // [T, N] nodes on the path of the row at each place; 0: ignored; -1: not valid
  const int32_t* shared;      // [T, N] leading nodes that its path shares with the place before; 0 at place 0
  const int32_t* row_length;  // [T, N] length by row
};

// key[t, i] = leaf position of target[i], or INT32_MAX for a row that is ignored or whose target is out of range.
// key [T, N]. A stable ascending sort of each row of key gives order.
void leaf_key(const Tables& tables, int32_t* key, cudaStream_t stream);

// tree_valid[t] = 0 if feature_index[t] leaves [0, D) or does not increase strictly; otherwise 1, also if it
// is null. tree_valid [T].
void check_features(const Tables& tables, int32_t* tree_valid, cudaStream_t stream);

// tree_valid[t] = 0 if the path of any row's target in tree t has an entry out of range.
void check_paths(const Tables& tables, int32_t* tree_valid, cudaStream_t stream);

// Fills length, shared and row_length [T, N] and count [T * N + 1]: count[0] = 0 and count[1 + t * N + j] =
// weight rows first visited at place j. The inclusive sum of count is slot: place j adds the rows from
// slot[t * N + j] up to slot[t * N + j + 1] of the row-sparse gradient, and slot[T * N] is nnz.
void leaf_plan(const Tables& tables, const int64_t* order, int32_t* length, int32_t* shared,
               int32_t* row_length, int32_t* count, cudaStream_t stream);

// index [2, nnz]: tree and weight row of every row of the row-sparse gradient. slot [T * N + 1].
void slot_index(const Tables& tables, const LeafOrder& leaf_order, const int64_t* slot, int64_t nnz,
                int64_t* index, cudaStream_t stream);

// Size of the workspace of path_log_prob_backward_hidden and path_log_prob_backward_weight, aligned to 16 bytes,
// content arbitrary; neither reads what the other left in it. The latter takes, unless the number of segments C is 1,
// 2 * T * C * stride * (S + 1) sums and T * C * stride int64; also T * stride * N sums, N up to a multiple of 16, and
// at most T * (N * stride + 33 C) int64. path_log_prob_backward_hidden takes less: T * N * (10 * stride + 8)
// bytes (float64: 14 and 12). C is N / 512 for batches that fill a GPU (float64: N / 256), and more for
// smaller ones, at most N / 128 (segment.cuh).
int64_t backward_workspace_bytes(ScalarType type, const Tables& tables);

}  // namespace hstree
