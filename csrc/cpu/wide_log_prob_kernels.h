// Products of runs of rows with the weight rows of wide nodes, their log-softmax and their gradients: one table
// of functions for each instruction set.
#pragma once

#include <cstdint>

#include "cpu/elements.h"
#include "cpu/features.h"

namespace hstree::cpu {

// Consecutive rows in the leaf order of a tree whose paths share a wide node, with its children, or, in the leaf op,
// with those whose classes lie in one panel: a piece.
struct WideRun {
  int64_t begin, end;  // places of the rows
  int64_t first_row;   // of the node's weight rows; of a piece: in row_class
  int64_t width;       // children
  int64_t place;       // of its first child among the scores of a row
  int64_t depth;       // wide nodes above it
  int64_t slot;        // of its first child among all children of the tree's runs
  int64_t entry;       // scores of earlier runs
  int64_t node_width;  // children of the node
};

// The rows of one tree in leaf order, and the weights that they are multiplied with. N rows, n of them not
// ignored, D hidden features, S features of the tree, L scores of a row, V classes.
template <typename T>
struct WideTree {
  const int32_t* row;          // [n]
  const int64_t* first_child;  // [n + 1] into child
  const int32_t* child;        // by place, then by depth
  const int32_t* leaf_class;   // [V] row of `bias` for each row of the tree, or null: the same row
  const int32_t* row_class;    // of the leaf op: row of `weight` for each row of its runs or pieces
  const int32_t* row_child;    // of pieces: which child of the node each row is
  const T* hidden;             // [N, D]
  FeatureSubset subset;
  int64_t in_features;       // D
  int64_t features;          // S
  const T* weight;           // [., S]
  const T* bias;             // [.] or null
  int64_t score_stride;      // from row to row of score
  int64_t workspace_stride;  // workspace_stride(S)
};

// A run is processed in blocks of wide_rows rows and wide_children children.
constexpr int64_t wide_rows = 32;
constexpr int64_t wide_children = 64;

// Elements of the workspaces of `scores` and `gradients`. widest: children of a node.
inline int64_t wide_scores_scratch(int64_t features, int64_t widest) {
  return wide_rows * workspace_stride(features) + widest;
}
inline int64_t wide_gradients_scratch(int64_t features) {
  return (2 * wide_rows + wide_children) * workspace_stride(features) + (wide_rows + 1) * wide_children;
}

// The gradients of one tree. A tree's own weight rows have grad_weight; those that all trees share have sums of the
// classes of a panel, to which the trees add one after another.
template <typename T>
struct WideGradients {
  using A = accumulate_t<T>;

  const A* grad_log_prob;  // [N] of the tree, `trees` apart
  int64_t trees;
  const A* score;          // as in `scores`
  A* grad_hidden;          // [N, D], or null
  T* grad_weight;          // [., S], stored, or null
  A* slope;                // d log_prob / d z of the leaf op: by run, then [rows, node_width]
  A* sum;                  // [., sum_stride] of the features of the interval, added to, or null
  int64_t sum_stride;      // from row to row, whole vectors
  const int32_t* sum_row;  // of each class, from that of the first row of `sum` on
  T* grad_bias;            // or null
  // Whether rows of grad_weight and grad_bias are children of the runs; otherwise they are those of weight and bias.
  bool sparse;
};

template <typename T>
struct WideKernels {
  using A = accumulate_t<T>;

  // score[row * score_stride + run.place + c] = log_softmax_c(dot(hidden[row, subset], weight_c) + bias_c) for
  // the rows at begin <= place < end of the run. Meanwhile prefetches the weights of `next`, if not null.
  void (*scores)(const WideTree<T>& tree, const WideRun& run, const WideRun* next, int64_t begin, int64_t end,
                 A* score, A* scratch);

  // The slopes of a run, and the gradients of its bias. scratch [run.width + 16].
  void (*slopes)(const WideTree<T>& tree, const WideRun& run, const WideGradients<T>& gradients, A* scratch);

  // Gradients of a run or a piece for the features begin <= s < end, multiples of 16 or end = S. Those of the bias of a
  // run belong to the interval that begins at 0. The order of each sum does not depend on the interval.
  void (*gradients)(const WideTree<T>& tree, const WideRun& run, const WideRun* next, int64_t begin,
                    int64_t end, const WideGradients<T>& gradients, A* scratch);

  // Rounds the first `count` sums of each of `rows` rows to those of `target` [., features]: to the listed rows, or,
  // if `row` is null, to the first ones. May read up to a vector beyond the sums.
  void (*store_sums)(const A* sum, int64_t sum_stride, int64_t count, const int64_t* row, int64_t rows,
                     T* target, int64_t features);
};

}  // namespace hstree::cpu
