// CPU kernels of the group op: log P of each row's target within its group of classes, in each of T partitions.
//
//     z_v = dot(hidden[i], weight[v]) + bias[t, v], classes v of the group that holds target[i] in tree t
//     score = log_softmax(z), log_prob[i, t] = score[target[i]]
//     d log_prob / d z_v = [v = target[i]] - exp(score_v)
//
// Rows of the same group are brought together, so that each group that the batch visits is a small matrix product in
// the forward pass and two in the backward pass. There the classes come in panels: all trees read the rows of E of a
// panel, and add to their gradients in the accumulation dtype, one after another, before each is written once.
//
// Ignored rows (target < 0): log_prob 0, no gradient; so have groups of one class. Sums in float32 (float64 for
// float64); NaN and infinities propagate. Work O(N T W D) for groups of W classes. The scores of the rows' own groups
// are kept for backward, one after another: nothing is padded. No atomics; bitwise identical on every run and for every
// number of threads. Threads divide scores in the forward pass, features in the backward pass.
#pragma once

#include <vector>

#include "cpu/group_log_prob_kernels.h"

namespace hstree::cpu {

// Pointers and sizes of the op's arguments. N rows, D features, T trees, V classes, C clusters.
struct GroupBatch {
  const char* op;          // for messages
  const int64_t* target;   // [N]
  const int32_t* cluster;  // [T, V], each tree `cluster_stride` after the last
  const int32_t* order;    // [T, V] classes by cluster
  const int32_t* begin;    // [T, C + 1] first place of each cluster in order
  int64_t rows, features, trees, classes, clusters, cluster_stride, max_width;
};

// The runs of rows of each group, of one tree.
struct GroupPlan {
  std::vector<int32_t> row;    // [n] rows that are not ignored and not alone in their group, by group
  std::vector<int32_t> child;  // [n] which class of its group each target is
  std::vector<GroupRun> run;
  int64_t scores = 0;   // of all runs
  int64_t visited = 0;  // classes of all runs
};

// The plan of each tree. Throws std::runtime_error for a target or an entry of the tables that is out of range.
std::vector<GroupPlan> group_plans(const GroupBatch& batch);

// The classes that the plans of some trees visit, increasing.
std::vector<int64_t> visited_classes(const GroupBatch& batch, const GroupPlan* plans, int64_t first_tree,
                                     int64_t trees);

// Tree and class of each visited bias, increasing, as many as the plans visit. index [2, nnz].
void visited_biases(const GroupBatch& batch, const std::vector<GroupPlan>& plans, int64_t* index);

template <typename T>
struct GroupForward {
  const T* hidden;            // [N, D]
  const T* weight;            // [V, D]
  const T* bias;              // [T, V] or null
  accumulate_t<T>* log_prob;  // [N, T] zeros
  accumulate_t<T>* score;     // of all runs of all trees
};

// Gradients that are not wanted are null.
template <typename T>
struct GroupBackward {
  const accumulate_t<T>* grad_log_prob;  // [N, T]
  const accumulate_t<T>* score;          // from the forward pass
  const T* hidden;                       // [N, D]
  const T* weight;                       // [V, D]
  accumulate_t<T>* grad_hidden;          // [N, D]
  T* grad_weight;                        // [V, D], or [nnz, D] if sparse; every row is written
  T* grad_bias;                          // [T, V] zeros, or [nnz] if sparse
  bool sparse;
};

template <typename T>
void group_log_prob(const GroupBatch& batch, const std::vector<GroupPlan>& plans,
                    const GroupForward<T>& tensors);

// visited: the visited classes of all trees, the rows of grad_weight if sparse.
template <typename T>
void group_log_prob_backward(const GroupBatch& batch, const std::vector<GroupPlan>& plans,
                             const std::vector<int64_t>& visited, const GroupBackward<T>& tensors);

}  // namespace hstree::cpu
