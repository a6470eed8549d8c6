// CPU kernels of the tree-path op.
//
//     z = dot(hidden[i, subset_t], weight[t, node]) + bias[t, node]
//     log_prob[i, t] = sum over the nodes of target[i]'s path of log sigmoid(goes_left ? z : -z)
//     d log_prob / d z = goes_left ? sigmoid(-z) : -sigmoid(z)
//
// In leaf order, a row shares a prefix of its path with the previous row, and the rows that visit a node are
// consecutive. So the gradient of a node is finished before the next one begins.
//
// Ignored rows (target < 0): log_prob and score 0, no gradient. A path of no nodes: log_prob 0. Sums in
// float32 (float64 for float64); NaN and infinities propagate. Work O(N T L S) for paths of L nodes; score
// is kept for backward. No atomics; bitwise identical on every run and for every number of threads. Threads
// divide rows in the forward pass, trees or features in the backward pass.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/tree_batch.h"

namespace hstree::cpu {

// The rows of one tree and the nodes that each of them visits.
struct PathPlan {
  std::vector<int32_t> row;     // [n] rows that are not ignored, in leaf order
  std::vector<int64_t> offset;  // [n + 1] into entry
  std::vector<int32_t> entry;   // node << 1 | goes_left
  std::vector<int32_t> shared;  // [n + 1] leading nodes shared with the previous row; 0 at both ends
  std::vector<int64_t> slot;    // [n + 1] nodes first visited by earlier rows
  int64_t visited = 0;          // nodes, slot[n]
  int64_t longest = 0;          // largest number of nodes of a row

  int64_t rows() const { return static_cast<int64_t>(row.size()); }
};

// The rows of the batch in the order of their leaves in each tree: the rows below any inner node are consecutive. Those
// with a negative target come last. order [T, N]. Throws std::runtime_error for a target out of range.
void leaf_order(const TreeBatch& batch, int64_t* order);

// The plan of each tree. Throws std::runtime_error for a target or an entry of the tables that is out of range.
std::vector<PathPlan> path_plans(const TreeBatch& batch);

// Total number of weight rows that the trees visit.
int64_t visited(const std::vector<PathPlan>& plans);

// tree and node of each visited node, in the order of the row-sparse gradient. index [2, nnz].
void visited_index(const std::vector<PathPlan>& plans, int64_t* index);

template <typename T>
void path_log_prob(const TreeBatch& batch, const Forward<T>& tensors);

template <typename T>
void path_log_prob_backward(const TreeBatch& batch, const std::vector<PathPlan>& plans,
                            const Backward<T>& tensors);

}  // namespace hstree::cpu
