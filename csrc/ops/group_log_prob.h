// Checked, contiguous arguments of hstree::group_log_prob and its backward op, for both devices.
//
// Dimensions: N rows, D features, T trees, V classes, C clusters.
#pragma once

#include <tuple>
#include <utility>

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
inline GroupArguments group_arguments(const char* op, const Tensor& hidden, const Tensor& weight,
                                      const std::optional<Tensor>& bias, const Tensor& target,
                                      const Tensor& cluster, const Tensor& order, const Tensor& begin,
                                      int64_t max_width) {
  check_dim(op, "hidden", hidden, 2, "[N, D]");
  check_dim(op, "weight", weight, 2, "[V, D]");
  check_dim(op, "target", target, 1, "[N]");
  check_dim(op, "cluster", cluster, 2, "[T, V]");
  check_dim(op, "order", order, 2, "[T, V]");
  check_dim(op, "begin", begin, 2, "[T, C + 1]");
  const ScalarType type = element_type(op, "hidden", hidden);
  check_same_dtype(op, "weight", weight, "hidden", hidden);
  check_device(op, "weight", weight, hidden);
  check_dtype(op, "target", target, Dtype::Long);
  check_device(op, "target", target, hidden);
  const int64_t rows = hidden.size(0), trees = order.size(0), classes = weight.size(0);
  check_size(op, "weight", weight, 1, hidden.size(1), "features of hidden");
  check_size(op, "target", target, 0, rows, "rows of hidden");
  for (const auto& [name, table] : {std::pair("cluster", &cluster), {"order", &order}, {"begin", &begin}}) {
    check_dtype(op, name, *table, Dtype::Int);
    check_device(op, name, *table, hidden);
    check_size(op, name, *table, 0, trees, "trees of order");
  }
  check_size(op, "cluster", cluster, 1, classes, "classes of weight");
  check_size(op, "order", order, 1, classes, "classes of weight");
  check(begin.size(1) > 0, op, ": begin: expected shape [T, C + 1], got ", shape_of(begin));
  if (bias) {
    check_dim(op, "bias", *bias, 2, "[T, V]");
    check_size(op, "bias", *bias, 0, trees, "trees of order");
    check_size(op, "bias", *bias, 1, classes, "classes of weight");
    check_same_dtype(op, "bias", *bias, "weight", weight);
    check_device(op, "bias", *bias, hidden);
  }
  check(max_width >= 0 && max_width <= classes, op, ": max_width: expected 0 to ", classes,
        " (the number of classes), got ", max_width);
  check(rows < INT32_MAX, op, ": hidden: expected fewer than 2^31 - 1 rows, got ", rows);
  check(trees < INT32_MAX, op, ": order: expected fewer than 2^31 - 1 trees, got ", trees);
  check(classes < (1 << 30), op, ": weight: expected fewer than 2^30 classes, got ", classes);
  const bool side_by_side = cluster.stride(1) == 1 && cluster.stride(0) >= classes;
  return {op,
          type,
          torch::stable::contiguous(hidden),
          torch::stable::contiguous(weight),
          contiguous(bias),
          torch::stable::contiguous(target),
          side_by_side ? cluster : torch::stable::contiguous(cluster),
          torch::stable::contiguous(order),
          torch::stable::contiguous(begin),
          max_width};
}

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
