// Launcher of sparse_adam_, in place in the rows r that the gradient g visits:
//   m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2,
//   w <- decay w - step_size m / (sqrt(v) + eps).
//
// Plain C++: no CUDA and no torch include. All tensors are contiguous. Throws std::runtime_error when the
// launch fails and launches nothing when there is no element to write.
#pragma once

#include <cstdint>

#include "limits.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

struct AdamRule {
  double decay;      // 1 - lr weight_decay
  double step_size;  // lr sqrt(1 - beta2^step) / (1 - beta1^step)
  double beta1;
  double beta2;
  double eps;     // times sqrt(1 - beta2^step)
  bool maximize;  // the gradient is -g
};

struct SparseAdam {
  const int64_t* outer;  // [nnz]; null: all 0
  const int64_t* inner;  // [nnz]; no row twice; rows outside [0, outer_size) x [0, inner_size) are skipped
  int64_t outer_size;
  int64_t inner_size;
  int64_t visited;     // nnz
  int64_t features;    // S
  const void* values;  // g [nnz, S] of the type
  void* weight;        // w [outer_size, inner_size, S] of the type
  void* exp_avg;       // m, v like w, float32, or float64 for float64
  void* exp_avg_sq;
  AdamRule rule;
};

void sparse_adam(ScalarType type, const SparseAdam& tensors, cudaStream_t stream);

}  // namespace hstree
