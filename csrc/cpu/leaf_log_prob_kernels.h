// Products of the classes of leaf groups with the rows below them in all trees, their log-softmax and their
// gradients: one table of functions for each instruction set.
#pragma once

#include <cstdint>

#include "cpu/elements.h"
#include "cpu/interrupt.h"

namespace hstree::cpu {

// The rows of the batch below a group of a tree.
struct LeafRun {
  const int32_t* row;         // [rows]
  const int32_t* chosen;      // [rows] child of each
  const int32_t* leaf_class;  // [width] classes of the group
  int64_t rows, width;
  int64_t tree;
  int64_t column;       // of its first child in a row of score [N, T L]
  int64_t entry;        // of its first slope
  int64_t slope_width;  // from row to row of its slopes: whole vectors
  int64_t slot;         // of its first child in the row-sparse gradient of the bias
};

// A class as a child of a group.
struct LeafVisit {
  int32_t run, child;
};

// The classes of all runs in increasing order, and the runs of each in the order of the trees. N rows, D features,
// T trees, L scores of a row and tree, V classes, n visited classes.
template <typename T>
struct LeafBatch {
  using A = accumulate_t<T>;

  const LeafRun* run;
  const LeafVisit* visit;
  const int64_t* first_visit;  // [n + 1]
  const int64_t* visited;      // [n] classes
  int64_t n_visited;           // n
  const A* x;                  // [N, D] hidden
  const T* weight;             // [V, D]
  const T* bias;               // [T, V] or null
  A* score;                    // [N, T L]
  int64_t features, classes, trees, score_stride;
};

// Slopes are stored in whole vectors of any instruction set.
inline int64_t slope_width(int64_t width) {
  return (width + 15) / 16 * 16;
}

template <typename T>
struct LeafKernels {
  using A = accumulate_t<T>;

  // x = hidden [N, D] in A.
  void (*widen)(const T* hidden, int64_t count, A* x);

  // score[row, column + child] = dot(x[row], weight[class]) for the visited classes begin <= n < end.
  // scratch [D].
  void (*scores)(const LeafBatch<T>& batch, int64_t begin, int64_t end, A* scratch);

  // The log-softmax of a run's scores plus bias, in place. scratch [width].
  void (*normalize)(const LeafBatch<T>& batch, const LeafRun& run, A* scratch);

  // slope[run.entry + j * run.slope_width + child] = grad_log_prob[row, tree] ([child = chosen] - exp(score)), and
  // their sums over the rows: the gradients of the bias, [T, V] or from run.slot on. scratch [slope_width].
  void (*slopes)(const LeafBatch<T>& batch, const LeafRun& run, const A* grad_log_prob, A* slope,
                 T* grad_bias, bool sparse, A* scratch);

  // The gradients of all visited classes for the features begin <= s < end, multiples of 16 or end = D: stores
  // those of weight, [V, D] or [n, D] if sparse, and adds to grad_hidden [N, D]. The order of each sum does not
  // depend on the interval. scratch [2 (end - begin) + 64].
  void (*gradients)(const LeafBatch<T>& batch, const A* slope, int64_t begin, int64_t end, A* grad_hidden,
                    T* grad_weight, bool sparse, A* scratch);
};

template <typename T>
const LeafKernels<T>* leaf_kernels_portable();
template <typename T>
const LeafKernels<T>* leaf_kernels_avx2();
template <typename T>
const LeafKernels<T>* leaf_kernels_avx512();

}  // namespace hstree::cpu
