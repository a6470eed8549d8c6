// CPU kernels of the leaf op: the wide op for trees that read the rows of one weight, those of the classes.
//
//     z_v = dot(hidden[i], weight[v]) + bias[t, v], classes v of target[i]'s group in tree t
//     score = log_softmax(z)
//     log_prob[i, t] = score[target[i]]
//     d log_prob / d z_v = [v = target[i]] - exp(score_v)
//
// A class is read once for all trees, with the rows below its group in each of them, and its gradient is written
// once: memory is visited in the order of the classes. The rows of hidden and its gradient, 2 N D numbers, should
// fit into the cache.
//
// Ignored rows (target < 0) and classes without a group: log_prob 0, no gradient. Sums in float32 (float64 for
// float64); NaN and infinities propagate. Work O(N T W D) for groups of W classes; score [N, T, max_width] is kept
// for backward. No atomics; bitwise identical on every run and for every number of threads. Threads divide classes
// in the forward pass, features in the backward pass.
#pragma once

#include <vector>

#include "cpu/leaf_log_prob_kernels.h"
#include "cpu/tree_batch.h"
#include "cpu/wide_log_prob.h"

namespace hstree::cpu {

// The runs of rows below each group, and the runs that each class belongs to.
struct LeafPlan {
  std::vector<WidePlan> trees;
  std::vector<int32_t> chosen;       // children of the rows, run by run
  std::vector<LeafRun> run;          // of all trees
  std::vector<int64_t> visited;      // classes, increasing
  std::vector<int64_t> first_visit;  // [visited + 1] into visit
  std::vector<LeafVisit> visit;      // by class, then by tree
  int64_t slopes = 0;                // of all runs
};

// Throws std::runtime_error for a target or an entry of the tables that is out of range.
LeafPlan leaf_plan(const TreeBatch& batch);

// tree and class of each visited bias, in the order of its row-sparse gradient. index [2, visits].
void visited_biases(const LeafPlan& plan, int64_t* index);

template <typename T>
void leaf_log_prob(const TreeBatch& batch, const Forward<T>& tensors);

// Every row of grad_weight is written.
template <typename T>
void leaf_log_prob_backward(const TreeBatch& batch, const LeafPlan& plan, const Backward<T>& tensors);

}  // namespace hstree::cpu
