// Checked, contiguous arguments of hstree::path_log_prob and its backward op, for both devices.
//
// Dimensions: N rows, D hidden features, T trees, M inner nodes of a tree, S features of a tree, V classes, P path
// entries.
#pragma once

#include <tuple>

#include "ops/tensor.h"

namespace hstree {

struct PathArguments {
  const char* op;
  ScalarType type;                      // of hidden, weight and bias
  Tensor hidden;                        // [N, D]
  Tensor weight;                        // [T, M, S]
  std::optional<Tensor> bias;           // [T, M]
  Tensor target;                        // [N] int64
  Tensor path_offset;                   // [T, V + 1] int64
  Tensor path;                          // [P] int32
  Tensor leaf_position;                 // [T, V] int32
  std::optional<Tensor> feature_index;  // [T, S] int32
  int64_t max_depth;

  int64_t rows() const { return hidden.size(0); }
  int64_t in_features() const { return hidden.size(1); }
  int64_t trees() const { return leaf_position.size(0); }
  int64_t classes() const { return leaf_position.size(1); }
  int64_t weight_rows() const { return weight.size(1); }
  int64_t features() const { return weight.size(2); }
};

// Throws std::runtime_error with the argument's name, the expected value and the actual one.
PathArguments path_arguments(const char* op, const Tensor& hidden, const Tensor& weight,
                             const std::optional<Tensor>& bias, const Tensor& target,
                             const Tensor& path_offset, const Tensor& path, const Tensor& leaf_position,
                             const std::optional<Tensor>& feature_index, int64_t max_depth);

// log_prob [N, T], score [N, T, max_depth], order [T, N] int64 (rows in the order of their leaves), plan
using PathResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// The further arguments of the backward op.
struct PathGradient {
  Tensor grad_log_prob;                // [N, T] accumulation dtype
  Tensor score, order, plan;           // of the forward pass on the same arguments
  bool of_hidden, of_weight, of_bias;  // which gradients are wanted
  bool sparse;                         // whether those of weight and bias have the visited rows only
};

// grad_hidden, grad_weight, grad_bias, index [2, nnz] (tree and node of each row of sparse gradients). Gradients that
// are not wanted have no elements, and so has the index of dense ones.
using PathGradientResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// What the dispatcher calls.
template <PathResult (*kernel)(const PathArguments&)>
PathResult path_forward(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                        const Tensor& target, const Tensor& path_offset, const Tensor& path,
                        const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                        int64_t max_depth) {
  return kernel(path_arguments("hstree::path_log_prob", hidden, weight, bias, target, path_offset, path,
                               leaf_position, feature_index, max_depth));
}

template <PathGradientResult (*kernel)(const PathArguments&, const PathGradient&)>
PathGradientResult path_backward(const Tensor& grad_log_prob, const Tensor& hidden, const Tensor& weight,
                                 const Tensor& target, const Tensor& path_offset, const Tensor& path,
                                 const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                                 const Tensor& score, const Tensor& order, const Tensor& plan,
                                 const std::vector<bool>& output_mask, bool sparse) {
  constexpr const char* op = "hstree::path_log_prob_backward";
  check_dim(op, "score", score, 3, "[N, T, max_depth]");
  const PathArguments a = path_arguments(op, hidden, weight, std::nullopt, target, path_offset, path,
                                         leaf_position, feature_index, score.size(2));
  check_dim(op, "grad_log_prob", grad_log_prob, 2, "[N, T]");
  for (const auto& [name, tensor] : {std::pair("grad_log_prob", &grad_log_prob), {"score", &score}}) {
    check_size(op, name, *tensor, 0, a.rows(), "rows of hidden");
    check_size(op, name, *tensor, 1, a.trees(), "trees of leaf_position");
    check_dtype(op, name, *tensor, accumulate_dtype(hidden));
    check_device(op, name, *tensor, hidden);
  }
  check_dim(op, "order", order, 2, "[T, N]");
  check_dtype(op, "order", order, Dtype::Long);
  check_device(op, "order", order, hidden);
  check_size(op, "order", order, 0, a.trees(), "trees of leaf_position");
  check_size(op, "order", order, 1, a.rows(), "rows of hidden");
  check(output_mask.size() == 3, op, ": output_mask: expected 3 values, for hidden, weight and bias, got ",
        output_mask.size());
  return kernel(a, {torch::stable::contiguous(grad_log_prob), torch::stable::contiguous(score),
                    torch::stable::contiguous(order), torch::stable::contiguous(plan), output_mask[0],
                    output_mask[1], output_mask[2], sparse});
}

}  // namespace hstree
