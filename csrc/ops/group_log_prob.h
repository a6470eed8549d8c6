// Checked, contiguous arguments of hstree::group_log_prob and its backward op, for both devices.
//
// Dimensions: N rows, D features, T trees, V classes, C clusters.
#pragma once

#include <tuple>

#include "ops/tensor.h"

namespace hstree {

struct GroupArguments {
  const char* op;
  ScalarType type;             // of hidden, weight and bias
  Tensor hidden;               // [N, D]
  Tensor weight;               // [V, D]
  std::optional<Tensor> bias;  // [T, V]
  Tensor target;               // [N] int64
  Tensor cluster;              // [T, V] int32, the classes side by side
  Tensor order;                // [T, V] int32
  Tensor begin;                // [T, C + 1] int32
  int64_t max_width;

  int64_t rows() const { return hidden.size(0); }
  int64_t features() const { return hidden.size(1); }
  int64_t trees() const { return order.size(0); }
  int64_t classes() const { return order.size(1); }
  int64_t clusters() const { return begin.size(1) - 1; }
  int64_t cluster_stride() const { return cluster.stride(0); }
};

// Throws std::runtime_error with the argument's name, the expected value and the actual one.
GroupArguments group_arguments(const char* op, const Tensor& hidden, const Tensor& weight,
                               const std::optional<Tensor>& bias, const Tensor& target, const Tensor& cluster,
                               const Tensor& order, const Tensor& begin, int64_t max_width);

// log_prob [N, T], saved, rows
using GroupResult = std::tuple<Tensor, Tensor, Tensor>;

// The further arguments of the backward op.
struct GroupGradient {
  Tensor grad_log_prob;                // [N, T] accumulation dtype
  Tensor saved, rows;                  // of the forward pass on the same arguments
  bool of_hidden, of_weight, of_bias;  // which gradients are wanted
  bool sparse;                         // whether those of weight and bias have the visited rows only
};

// grad_hidden, grad_weight, grad_bias, index [1, nnz] (class of each row of a sparse grad_weight), bias_index
// [2, biases] (tree and class of each sparse grad_bias). Gradients that are not wanted have no elements, and so have the
// indices of dense ones.
using GroupGradientResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// What the dispatcher calls.
template <GroupResult (*kernel)(const GroupArguments&)>
GroupResult group_forward(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                          const Tensor& target, const Tensor& cluster, const Tensor& order,
                          const Tensor& begin, int64_t max_width) {
  return kernel(group_arguments("hstree::group_log_prob", hidden, weight, bias, target, cluster, order, begin,
                                max_width));
}

template <GroupGradientResult (*kernel)(const GroupArguments&, const GroupGradient&)>
GroupGradientResult group_backward(const Tensor& grad_log_prob, const Tensor& hidden, const Tensor& weight,
                                   const std::optional<Tensor>& bias, const Tensor& target,
                                   const Tensor& cluster, const Tensor& order, const Tensor& begin,
                                   int64_t max_width, const Tensor& saved, const Tensor& rows,
                                   const std::vector<bool>& output_mask, bool sparse) {
  constexpr const char* op = "hstree::group_log_prob_backward";
  const GroupArguments a =
      group_arguments(op, hidden, weight, bias, target, cluster, order, begin, max_width);
  check_dim(op, "grad_log_prob", grad_log_prob, 2, "[N, T]");
  check_size(op, "grad_log_prob", grad_log_prob, 0, a.rows(), "rows of hidden");
  check_size(op, "grad_log_prob", grad_log_prob, 1, a.trees(), "trees of order");
  for (const auto& [name, tensor] : {std::pair("grad_log_prob", &grad_log_prob), {"saved", &saved}}) {
    check_dtype(op, name, *tensor, accumulate_dtype(hidden));
    check_device(op, name, *tensor, hidden);
  }
  check(output_mask.size() == 3, op, ": output_mask: expected 3 values, for hidden, weight and bias, got ",
        output_mask.size());
  return kernel(a, {torch::stable::contiguous(grad_log_prob), torch::stable::contiguous(saved),
                    torch::stable::contiguous(rows), output_mask[0], output_mask[1], output_mask[2], sparse});
}

}  // namespace hstree
