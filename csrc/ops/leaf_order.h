// Checked arguments of hstree::leaf_order, for both devices.
#pragma once

#include "ops/tensor.h"

namespace hstree {

constexpr const char* leaf_order_op = "hstree::leaf_order";

struct LeafOrderArguments {
  Tensor target;         // [N] int64, contiguous
  Tensor leaf_position;  // [T, V] int32, contiguous

  int64_t rows() const { return target.size(0); }
  int64_t trees() const { return leaf_position.size(0); }
  int64_t classes() const { return leaf_position.size(1); }
};

inline LeafOrderArguments leaf_order_arguments(const Tensor& target, const Tensor& leaf_position) {
  const char* op = leaf_order_op;
  check_dim(op, "target", target, 1, "[N]");
  check_dim(op, "leaf_position", leaf_position, 2, "[T, V]");
  check_dtype(op, "target", target, Dtype::Long);
  check_dtype(op, "leaf_position", leaf_position, Dtype::Int);
  check(target.device() == leaf_position.device(), op, ": leaf_position: expected the device of target");
  check(target.size(0) < INT32_MAX, op, ": target: expected fewer than 2^31 - 1 rows, got ", target.size(0));
  check(leaf_position.size(0) < INT32_MAX, op, ": leaf_position: expected fewer than 2^31 - 1 trees, got ",
        leaf_position.size(0));
  return {torch::stable::contiguous(target), torch::stable::contiguous(leaf_position)};
}

// [T, N] int64 of contiguous target [N] and leaf_position [T, V]; op: for messages.
Tensor leaf_order_cpu(const char* op, const Tensor& target, const Tensor& leaf_position);

}  // namespace hstree
