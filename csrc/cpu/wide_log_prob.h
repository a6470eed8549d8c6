// CPU kernels of the wide op, for nodes with a softmax over their children.
//
//     z_c = dot(hidden[i, subset_t], weight[t, first_row + c]) + bias[t, first_row + c], children c of a node
//     score = log_softmax(z)
//     log_prob[i, t] = sum over the wide nodes of target[i]'s path of score[child]
//     d log_prob / d z_c = [c = child] - exp(score_c)
//
// In leaf order the rows below a node are consecutive, and its weight rows are contiguous: each node that the
// batch visits is one small matrix product in the forward pass and two in the backward pass. The backward
// pass reads each weight once and writes each gradient once.
//
// Ignored rows (target < 0): log_prob 0, no gradient. A path without wide nodes: log_prob 0. Sums in float32
// (float64 for float64); NaN and infinities propagate. Work O(N T W S) for W children on a path; score
// [N, T, max_width] is kept for backward, uninitialized beyond the children on the path. No atomics; bitwise
// identical on every run and for every number of threads. Threads divide scores in the forward pass, nodes or
// features in the backward pass.
#pragma once

#include <vector>

#include "cpu/tree_batch.h"
#include "cpu/wide_log_prob_kernels.h"

namespace hstree::cpu {

// The runs of rows below each wide node, of one tree.
struct WidePlan {
  std::vector<int32_t> row;          // [n] rows that are not ignored, in leaf order
  std::vector<int64_t> first_child;  // [n + 1] into child
  std::vector<int32_t> child;        // on the path of each row, root first
  std::vector<WideRun> run;          // by first row, then by depth
  int64_t scores = 0;                // of all runs
  int64_t visited = 0;               // weight rows
};

// The plan of each tree, also for the leaf op. Throws std::runtime_error for a target or an entry of the tables that is out of
// range.
std::vector<WidePlan> wide_plans(const TreeBatch& batch);

// tree and weight row of each visited weight row, in the order of the row-sparse gradient. index [2, nnz].
void visited_index(const std::vector<WidePlan>& plans, int64_t* index);

template <typename T>
void wide_log_prob(const TreeBatch& batch, const Forward<T>& tensors);

template <typename T>
void wide_log_prob_backward(const TreeBatch& batch, const std::vector<WidePlan>& plans,
                            const Backward<T>& tensors);

}  // namespace hstree::cpu
