// Kernels of the path op: products of a batch's rows with the weight rows that they visit, and their
// gradients; one table of functions for each instruction set, chosen once at run time.
#pragma once

#include <cstdint>

#include "cpu/elements.h"
#include "cpu/features.h"

namespace hstree::cpu {

// The rows of one tree in leaf order (arrays of PathPlan), and the weights that they are multiplied with.
// S features of the tree, n rows. T: float, double, BFloat16 or Half.
template <typename T>
struct PathRows {
  using A = accumulate_t<T>;
  const int32_t* row;     // [n]
  const int64_t* offset;  // [n + 1]
  const int32_t* entry;   // node << 1 | goes_left
  const int32_t* shared;  // [n + 1]
  const int64_t* slot;    // [n + 1]
  int64_t rows;           // n
  int64_t longest;        // largest number of entries of a row
  int64_t features;       // S
  const T* weight;        // [., S]
  const T* bias;          // [.] or null
  const T* hidden;        // [N, S], where the tree reads all features
  const A* x;             // [n, x_stride] its features in leaf order; null: those of hidden
  int64_t x_stride;       // of x and its gradient
  int64_t sum_stride;     // workspace_stride(S)
};

// Rows are processed in tiles of this many consecutive rows. Weight rows that all of them visit, a prefix of
// their paths, are read once for the tile, and their gradients are added once.
constexpr int tile_rows = 4;

// Elements of the scratch of `gradients`.
inline int64_t gradients_scratch(int64_t longest, int64_t features) {
  return (longest + 2 * tile_rows) * workspace_stride(features);
}

// The entries of a class's path.
struct PathSpan {
  int64_t begin, end;
};

// The destination of the copied paths of a tree's rows (arrays of PathPlan).
struct PathCopies {
  const int32_t* path;
  const PathSpan* span;  // [rows] of each in path
  int64_t rows;
  int64_t weight_rows;
  const int64_t* offset;  // [rows + 1]
  int32_t* entry;         // [offset[rows]]
  int32_t* shared;        // [rows + 1]
};

// Features of the rows of some trees, gathered in leaf order.
template <typename A>
struct GatheredRows {
  const FeatureSubset* subset;  // [trees]
  const int32_t* place;         // [N, trees] of a row; negative if it is ignored
  int64_t trees;
  int64_t rows;         // N
  int64_t in_features;  // D
  int64_t features;     // S
  A* x;                 // [trees, N, stride]
  int64_t stride;
};

template <typename T>
struct PathKernels {
  using A = accumulate_t<T>;

  // Copies the paths and counts the leading nodes that each row shares with the previous one. Returns the
  // index in `path` of a node that is out of range, or -1.
  int64_t (*copy_paths)(const PathCopies& copies);

  // x = the features of the rows begin <= i < end of hidden [N, D].
  void (*gather)(const GatheredRows<A>& gathered, int64_t begin, int64_t end, const T* hidden);

  // grad_hidden [N, D] = the sum over the trees of x in its features, or if `add`, grad_hidden plus that, one
  // tree after another, for the rows begin <= i < end.
  void (*scatter)(const GatheredRows<A>& gathered, int64_t begin, int64_t end, bool add, A* grad_hidden);

  // For rows begin <= j < end: z_l = dot(x, weight[w_l]) + bias[w_l], w_l their weight rows,
  // log_prob[row * trees] = sum over l of log sigmoid(+-z_l), and score[row * score_stride + l] = z_l.
  // Intervals must begin at a tile, so that they do not change the order of the sums. scratch: tile_rows *
  // sum_stride; pointers: `longest`.
  void (*scores)(const PathRows<T>& tree, int64_t begin, int64_t end, A* log_prob, int64_t trees, A* score,
                 int64_t score_stride, A* scratch, const T** pointers);

  // grad_score (laid out like entry) = grad_log_prob[row * trees] * d log sigmoid(+-score) / d score, for the
  // rows begin <= j < end.
  void (*score_gradients)(const PathRows<T>& tree, int64_t begin, int64_t end, const A* grad_log_prob,
                          int64_t trees, const A* score, int64_t score_stride, A* grad_score);

  // Gradients of the features begin <= s < end of all rows from grad_score. The gradient of a weight row is
  // summed in scratch during its run of rows and stored once: to grad_weight[slot] if sparse, otherwise to
  // grad_weight[weight row]. grad_x has the layout of x, which it may overwrite; it is added to, or stored if
  // not `add`. The order of each sum does not depend on the interval. pointers, targets: `longest`.
  void (*gradients)(const PathRows<T>& tree, int64_t begin, int64_t end, const A* grad_score, A* grad_x,
                    bool add, T* grad_weight, bool sparse, A* scratch, const T** pointers, T** targets);

  // grad_x alone, for all features of the rows begin <= j < end: the same bits. pointers: `longest`.
  void (*hidden_gradients)(const PathRows<T>& tree, int64_t begin, int64_t end, const A* grad_score,
                           A* grad_x, bool add, const T** pointers);

  // The same for the bias: grad_bias[slot] or grad_bias[weight row]. sums, targets: `longest`.
  void (*bias_gradients)(const PathRows<T>& tree, const A* grad_score, T* grad_bias, bool sparse, A* sums,
                         T** targets);
};

}  // namespace hstree::cpu
