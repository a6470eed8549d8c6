// Checked arguments of hstree::sparse_adam_, for both devices.
#pragma once

#include "cpu/sparse_adam.h"
#include "ops/tensor.h"

namespace hstree {

struct SparseAdamArguments {
  ScalarType type;
  Tensor index;        // [1, nnz] or [2, nnz], contiguous
  Tensor values;       // [nnz, S], contiguous
  int64_t outer_size;  // rows are outer_size inner_size; 1 where the index has one dimension
  int64_t inner_size;
  int64_t features;  // S
  cpu::AdamRule rule;

  int64_t visited() const { return index.size(1); }
  const int64_t* outer() const { return index.size(0) == 2 ? const_data<int64_t>(index) : nullptr; }
  const int64_t* inner() const { return const_data<int64_t>(index) + (index.size(0) - 1) * visited(); }
};

inline constexpr const char* sparse_adam_op = "hstree::sparse_adam_";

SparseAdamArguments sparse_adam_arguments(const Tensor& weight, const Tensor& exp_avg,
                                          const Tensor& exp_avg_sq, const Tensor& index, const Tensor& values,
                                          int64_t step, double lr, double beta1, double beta2, double eps,
                                          double weight_decay, bool maximize);

}  // namespace hstree
