// Kernels of the path op: products of a batch's rows with the weight rows that they visit, and their gradients;
// one table of functions for each instruction set, chosen once at run time.
#pragma once

#include <cstdint>

#include "cpu/elements.h"

namespace hstree::cpu {

// One tree's rows in leaf order (PathPlan's arrays), and what they are multiplied with.
// D input features, S features of the tree, n rows. T: float, double, BFloat16 or Half.
template <typename T>
struct PathRows {
  const int32_t* row;             // [n]
  const int64_t* offset;          // [n + 1]
  const int32_t* entry;           // node << 1 | goes_left
  const int32_t* shared;          // [n + 1]
  const int64_t* slot;            // [n + 1]
  int64_t rows;                   // n
  int64_t longest;                // most entries of a row
  const T* input;                 // [N, D]
  const int32_t* feature_index;   // [S] sorted, in [0, D); null: all of them, S = D
  const uint16_t* feature_lanes;  // [D / 16 rounded up] the same as bits, 16 features each
  int64_t in_features;            // D
  int64_t features;               // S
  const T* weight;                // [., S]
  const T* bias;                  // [.] or null
};

// Rows are taken in tiles of this many neighbours: weight rows that all of them visit, a prefix of their paths,
// are read once for the tile, and their gradients are added up once.
constexpr int tile_rows = 4;

// Elements of the scratch for `width` features: a few rows of input and, in `gradients`, as many of its gradient
// and the sums of the open weight rows.
inline int64_t scores_scratch(int64_t width) {
  return tile_rows * (width + 48);
}
inline int64_t gradients_scratch(int64_t longest, int64_t width) {
  return (longest + 2 * tile_rows) * (width + 48);
}

template <typename T>
struct PathKernels {
  using A = accumulate_t<T>;

  // score[row * score_stride + l] = dot(input[row, subset], weight[w_l]) + bias[w_l] for rows begin <= j <
  // end, w_l their weight rows. An interval begins at a tile, so that the order of each sum does not depend on
  // it. pointers: `longest`.
  void (*scores)(const PathRows<T>& tree, int64_t begin, int64_t end, A* score, int64_t score_stride,
                 A* scratch, const T** pointers);

  // Gradients of the features begin <= s < end of all rows, from grad_score (laid out like entry). A weight
  // row is summed in scratch while its run of rows lasts and stored once: to grad_weight[slot] if sparse,
  // else to grad_weight[weight row]. grad_input [N, D] is added to, or if not `add`, for a tree of all
  // features, overwritten in the rows of the tree. Each element's sum has a fixed order, whatever the
  // interval. pointers: tile_rows `longest`; targets: (tile_rows + 1) `longest`.
  void (*gradients)(const PathRows<T>& tree, int64_t begin, int64_t end, const A* grad_score, A* grad_input,
                    bool add, T* grad_weight, bool sparse, A* scratch, const T** pointers, T** targets);

  // The same for the bias: grad_bias[slot] or grad_bias[weight row]. sums, targets: `longest`.
  void (*bias_gradients)(const PathRows<T>& tree, const A* grad_score, T* grad_bias, bool sparse, A* sums,
                         T** targets);

  // Sum over the tree's nodes of log sigmoid(+-score), one row.
  A (*log_sigmoid_sum)(const A* score, const int32_t* entry, int64_t count);

  // grad_score = grad * d log sigmoid(+-score) / d score, one row.
  void (*log_sigmoid_grad)(const A* score, const int32_t* entry, int64_t count, A grad, A* grad_score);
};

// Tables by instruction set, the AVX ones on x86-64 only; capability.h picks one.
template <typename T>
const PathKernels<T>* path_kernels_portable();
template <typename T>
const PathKernels<T>* path_kernels_avx2();
template <typename T>
const PathKernels<T>* path_kernels_avx512();

}  // namespace hstree::cpu
