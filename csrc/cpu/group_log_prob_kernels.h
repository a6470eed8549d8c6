// Products of runs of rows with the rows of E of their groups, their log-softmax and their gradients: one table of
// functions for each instruction set.
#pragma once

#include <cstdint>

#include "cpu/elements.h"
#include "cpu/features.h"

namespace hstree::cpu {

// Rows whose targets lie in one group, with all of its classes or with those of one panel: a piece.
struct GroupRun {
  int64_t begin, end;  // places of the rows
  int64_t first;       // of its classes in row_class
  int64_t width;       // classes
  int64_t slot;        // of its first class among those of all runs of the tree
  int64_t entry;       // of its first score among those of all runs of the tree
  int64_t group_width;
};

// The rows of one tree by group, and what they are multiplied with. n rows that are not ignored, D features, V classes.
template <typename T>
struct GroupTree {
  const int32_t* row;        // [n]
  const int32_t* child;      // [n] which class of its group each target is
  const int32_t* order;      // [V] classes by group
  const int32_t* row_class;  // classes of the runs (`order`) or of the pieces
  const int32_t* row_child;  // of pieces: which class of its group each is
  const T* hidden;           // [N, D]
  int64_t features;          // D
  const T* weight;           // E [V, D]
  const T* bias;             // [V] or null
  int64_t workspace_stride;  // workspace_stride(D)
};

// A run is processed in blocks of group_rows rows.
constexpr int64_t group_rows = 32;

// Elements of the workspaces of `scores` and `gradients`. widest: classes of a group.
inline int64_t group_scores_scratch(int64_t features, int64_t widest) {
  return group_rows * workspace_stride(features) + widest;
}
inline int64_t group_gradients_scratch(int64_t features) {
  return 2 * group_rows * workspace_stride(features);
}

// The gradients of one tree. Those of E are sums of the classes of a panel, to which the trees add one after another.
template <typename T>
struct GroupGradients {
  using A = accumulate_t<T>;

  const A* grad_log_prob;  // [N] of the tree, `trees` apart
  int64_t trees;
  const A* score;          // log-probabilities in the groups: by run, then [rows, group_width]
  A* grad_hidden;          // [N, D], or null
  A* slope;                // d log_prob / d score, as `score`
  A* sum;                  // [., sum_stride] of the features of the interval, added to, or null
  int64_t sum_stride;      // from row to row, whole vectors
  const int32_t* sum_row;  // of each class, from that of the first row of `sum` on
  T* grad_bias;            // [V], or one for each class of the runs if sparse, or null
  bool sparse;
};

template <typename T>
struct GroupKernels {
  using A = accumulate_t<T>;

  // score[run.entry + (j - run.begin) * run.width + c] = log_softmax_c(dot(hidden[row[j]], E_c) + bias_c) for the
  // places begin <= j < end of the run. Meanwhile prefetches the classes of `next`, if not null.
  void (*scores)(const GroupTree<T>& tree, const GroupRun& run, const GroupRun* next, int64_t begin,
                 int64_t end, A* score, A* scratch);

  // The slopes of a run, and the gradients of its bias. scratch [run.width + 16].
  void (*slopes)(const GroupTree<T>& tree, const GroupRun& run, const GroupGradients<T>& gradients,
                 A* scratch);

  // Gradients of a piece for the features begin <= s < end, multiples of 16 or end = D. The order of each sum does not
  // depend on the interval.
  void (*gradients)(const GroupTree<T>& tree, const GroupRun& run, const GroupRun* next, int64_t begin,
                    int64_t end, const GroupGradients<T>& gradients, A* scratch);

  // Rounds the first `count` sums of each of `rows` rows to those of `target` [., features]: to the listed rows, or,
  // if `row` is null, to the first ones. May read up to a vector beyond the sums.
  void (*store_sums)(const A* sum, int64_t sum_stride, int64_t count, const int64_t* row, int64_t rows,
                     T* target, int64_t features);
};

}  // namespace hstree::cpu
