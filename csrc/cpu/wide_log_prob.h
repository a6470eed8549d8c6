// CPU kernels of the wide op and the leaf op, for nodes with a softmax over their children.
//
//     z_c = dot(hidden[i, subset_t], weight[t, first_row + c]) + bias[t, first_row + c], children c of a node
//     score = log_softmax(z)
//     log_prob[i, t] = sum over the wide nodes of target[i]'s path of score[child]
//     d log_prob / d z_c = [c = child] - exp(score_c)
//
// In the leaf op, which has a leaf_class, a row r of a tree is that of its class: weight[leaf_class[t, r]] and
// bias[t, leaf_class[t, r]], and the tree reads all features.
//
// In leaf order the rows below a node are consecutive, so that each node that the batch visits is a small matrix
// product in the forward pass and two in the backward pass. In the wide op the backward pass reads each weight once
// and writes each gradient once. In that of the leaf op the classes come in panels: all trees read the weights of a
// panel, and add to their gradients in the accumulation dtype, one after another, before each is written once.
//
// Ignored rows (target < 0): log_prob 0, no gradient. A path without wide nodes: log_prob 0. Sums in float32
// (float64 for float64); NaN and infinities propagate. Work O(N T W S) for W children on a path; score
// [N, T, max_width] is kept for backward, uninitialized beyond the children on the path. No atomics; bitwise
// identical on every run and for every number of threads. Threads divide scores in the forward pass, nodes or
// features in the backward pass, in the leaf op features.
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
  const int32_t* leaf_class;         // [V] of the leaf op, or null
  int64_t scores = 0;                // of all runs
  int64_t visited = 0;               // weight rows
};

// The plan of each tree. Throws std::runtime_error for a target or an entry of the tables that is out of range.
std::vector<WidePlan> wide_plans(const TreeBatch& batch);

// tree and row of each visited weight, in the order of the row-sparse gradient. index [2, nnz].
void visited_index(const std::vector<WidePlan>& plans, int64_t* index);

// In the leaf op, tree and class of each visited bias, increasing. index [2, nnz].
void visited_biases(const TreeBatch& batch, const std::vector<WidePlan>& plans, int64_t* index);

// The classes that the plans of the leaf op visit, increasing.
std::vector<int64_t> visited_classes(const TreeBatch& batch, const WidePlan* plans, int64_t trees);

template <typename T>
void wide_log_prob(const TreeBatch& batch, const Forward<T>& tensors);

template <typename T>
void wide_log_prob_backward(const TreeBatch& batch, const std::vector<WidePlan>& plans,
                            const Backward<T>& tensors);

// visited: the result of visited_classes, the rows of grad_weight if sparse. Every row of grad_weight is written.
template <typename T>
void leaf_log_prob_backward(const TreeBatch& batch, const std::vector<WidePlan>& plans,
                            const std::vector<int64_t>& visited, const Backward<T>& tensors);

}  // namespace hstree::cpu
