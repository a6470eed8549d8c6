// Launcher of forest_gradient_; the formulas are in cpu/forest_log_prob.h.
//
// Plain C++: no CUDA and no torch include. All arrays are contiguous and on the device of the stream; type is float32
// or float64, the type of all arrays without one, grad_type is type or, for float32, bfloat16 or float16; others throw. Throws std::runtime_error when a launch fails,
// launches nothing when there is no row, and never synchronizes.
#pragma once

#include <cstdint>

#include "limits.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

struct Forest {
  const void* score;          // s [V, R]
  const void* bias;           // [V], added to s; null: 0
  void* cluster_score;        // r [T, C, R], replaced by its gradient
  const void* log_prior;      // [T, R]
  const int32_t* cluster;     // c_t(v) [V, T]
  const int64_t* target;      // [R]: -1 for an ignored row, others outside [0, V) give NaN
  const int64_t* order;       // [T, V]: the classes of each tree by their clusters
  const int64_t* boundary;    // [T, C + 1]: the first place of each cluster in order
  const void* grad_log_prob;  // [R]; null: log_prob alone is computed
  void* log_prob;             // [R]
  void* grad_log_prior;       // [T, R]
  void* grad_score;           // [V, R] of grad_type; may be score; its rows may have gaps
  int64_t grad_stride;        // from a row of grad_score to the next
  void* log_sum;              // workspace [T, C, R]
  double* of_trees;           // workspace [2, T, R]
  int64_t rows;               // R
  int64_t classes;            // V, T, C: at least 1
  int64_t trees;
  int64_t clusters;
};

void forest_gradient(ScalarType type, ScalarType grad_type, const Forest& forest, cudaStream_t stream);

}  // namespace hstree
