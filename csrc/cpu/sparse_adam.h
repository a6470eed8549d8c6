// CPU kernel of sparse_adam_, in place in the rows r that the gradient g visits:
//   m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2,
//   w <- decay w - step_size m / (sqrt(v) + eps).
// Tensors, contiguous: index [1, nnz] or [2, nnz] int64, strictly increasing rows; values g [nnz, S]; weight w
//   [rows, S] of the type of g, float32, float64, bfloat16 or float16; exp_avg m, exp_avg_sq v [rows, S] of
//   the accumulation dtype.
// nnz = 0 and S = 0 write nothing. Rows that are not visited are unchanged. Infinities and NaN propagate.
// Computation in float32, float64 for float64, every operation rounded separately; w rounded once.
// Work O(nnz S). Reads 4 and writes 3 elements for each element of g.
// No atomics; rows are independent: deterministic for any number of threads.
// Threads over rows. Kingma and Ba, "Adam: A method for stochastic optimization" (ICLR 2015), algorithm 1,
//   with the decay of Loshchilov and Hutter, "Decoupled weight decay regularization" (ICLR 2019).
#pragma once

#include <cstdint>

#include "cpu/elements.h"
#include "kernels/sparse_adam.h"

namespace hstree::cpu {

// Throws std::runtime_error, before anything is written, if the index is out of range or not increasing.
template <typename T>
void sparse_adam(const char* op, const SparseAdam& tensors);

// The visited rows begin <= i < end.
template <typename T>
struct SparseAdamKernel {
  void (*run)(const SparseAdam& tensors, int64_t begin, int64_t end);
};

}  // namespace hstree::cpu
