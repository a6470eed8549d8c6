// Checked arguments of hstree::feature_gather and its backward, for both devices.
#pragma once

#include "ops/tensor.h"

namespace hstree {

// Returns a contiguous feature_index. dims: rows and features of the op, from its first argument.
inline Tensor checked_gather_index(const char* op, const Tensor& first, const Tensor& feature_index) {
  check_dim(op, "feature_index", feature_index, 2, "[T, S]");
  check_dtype(op, "feature_index", feature_index, Dtype::Int);
  check_device(op, "feature_index", feature_index, first);
  return torch::stable::contiguous(feature_index);
}

inline void check_gather_input(const char* op, const Tensor& hidden) {
  check_dim(op, "hidden", hidden, 2, "[N, D]");
}

inline void check_gather_grad(const char* op, const Tensor& grad, const Tensor& feature_index,
                              int64_t in_features) {
  check_dim(op, "grad", grad, 3, "[N, T, S]");
  check_dim(op, "feature_index", feature_index, 2, "[T, S]");
  check_size(op, "grad", grad, 1, feature_index.size(0), "trees of feature_index");
  check_size(op, "grad", grad, 2, feature_index.size(1), "features of feature_index");
  check(in_features >= 0, op, ": in_features: expected at least 0, got ", in_features);
}

}  // namespace hstree
