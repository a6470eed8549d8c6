// The arguments that the path op and the wide op share, checked and made contiguous for the kernels of both
// devices.
//
// Dimensions: N rows, D hidden features, T trees, M weight rows of a tree, S features of a tree, V classes, P
// path entries.
#pragma once

#include <tuple>

#include "ops/tensor.h"

namespace hstree {

// The differences between the path op, the wide op and the leaf op: names, and the shapes in error messages.
struct TreeKind {
  bool wide;
  bool shared;  // all trees read the rows of one weight [V, D] and the bias [T, V], through leaf_class
  const char *forward, *backward, *backward_sparse;
  const char *offset, *path, *longest;
  const char *weight_shape, *bias_shape, *path_shape, *score_shape;
  int64_t path_dim;
  int64_t most;  // the largest `longest`
};

inline constexpr TreeKind path_kind = {false,
                                       false,
                                       "hstree::path_log_prob",
                                       "hstree::path_log_prob_backward",
                                       "hstree::path_log_prob_backward_sparse",
                                       "path_offset",
                                       "path",
                                       "max_depth",
                                       "[T, M, S]",
                                       "[T, M]",
                                       "[P]",
                                       "[N, T, max_depth]",
                                       1,
                                       max_depth};
inline constexpr TreeKind wide_kind = {true,
                                       false,
                                       "hstree::wide_log_prob",
                                       "hstree::wide_log_prob_backward",
                                       "hstree::wide_log_prob_backward_sparse",
                                       "wide_offset",
                                       "wide_path",
                                       "max_width",
                                       "[T, R, S]",
                                       "[T, R]",
                                       "[P, 3]",
                                       "[N, T, max_width]",
                                       2,
                                       1 << 20};
inline constexpr TreeKind leaf_kind = {true,
                                       true,
                                       "hstree::leaf_log_prob",
                                       "hstree::leaf_log_prob_backward",
                                       "hstree::leaf_log_prob_backward_sparse",
                                       "group_offset",
                                       "group",
                                       "max_width",
                                       "[V, D]",
                                       "[T, V]",
                                       "[P, 3]",
                                       "[N, T, max_width]",
                                       2,
                                       1 << 20};

struct TreeArguments {
  const char* op;
  const TreeKind& kind;
  ScalarType type;                      // of hidden and weight
  Tensor hidden;                        // [N, D]
  Tensor weight;                        // [T, M, S], or [V, D] if shared
  Tensor target;                        // [N] int64
  Tensor path_offset;                   // [T, V + 1] int64
  Tensor path;                          // [P] int32, or [P, 3] if wide
  Tensor leaf_position;                 // [T, V] int32
  std::optional<Tensor> feature_index;  // [T, S] int32
  std::optional<Tensor> leaf_class;     // [T, V] int32, if shared: the class of each row of a tree
  int64_t longest;                      // max_depth or max_width

  int64_t rows() const { return hidden.size(0); }
  int64_t in_features() const { return hidden.size(1); }
  int64_t trees() const { return leaf_position.size(0); }
  int64_t weight_rows() const { return kind.shared ? classes() : weight.size(1); }
  int64_t features() const { return weight.size(kind.shared ? 1 : 2); }
  int64_t classes() const { return leaf_position.size(1); }
};

// index: feature_index, or leaf_class if shared. Throws std::runtime_error with the argument's name, the
// expected value and the actual one.
TreeArguments tree_arguments(const char* op, const TreeKind& kind, const Tensor& hidden, const Tensor& weight,
                             const Tensor& target, const Tensor& path_offset, const Tensor& path,
                             const Tensor& leaf_position, const std::optional<Tensor>& index,
                             int64_t longest);

// bias [T, M] or none; returned contiguous.
std::optional<Tensor> checked_bias(const TreeArguments& arguments, const std::optional<Tensor>& bias);

// grad_log_prob [N, T] and score [N, T, longest], of the accumulation dtype; returned contiguous.
std::tuple<Tensor, Tensor> checked_gradient(const TreeArguments& arguments, const Tensor& grad_log_prob,
                                            const Tensor& score);

// What forward computes once and backward reuses.
struct TreePlan {
  std::optional<Tensor> order;  // [T, N] int64, as hstree::leaf_order returns it
  std::optional<Tensor> plan;   // device-specific, from the forward pass on the same arguments
};

// order [T, N] int64 or none; returned contiguous.
std::optional<Tensor> checked_order(const TreeArguments& arguments, const std::optional<Tensor>& order);

// The output `order` of forward: empty if it was an input, because an op may not return its input.
inline Tensor new_order(const TreeArguments& a, const std::optional<Tensor>& given, const Tensor& order) {
  return given ? empty(a.hidden, {0, 0}, Dtype::Long) : order;
}

using ForwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // log_prob, score, order, plan
using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;         // grad_hidden, grad_weight, grad_bias
using SparseResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor>;  // grad_hidden, index, grad_weight, grad_bias
// grad_hidden, index [nnz] of the classes, grad_weight, index [2, .] of the biases, grad_bias
using SharedSparseResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

ForwardResult tree_forward_cpu(const TreeArguments& arguments, const std::optional<Tensor>& bias,
                               const std::optional<Tensor>& order);
SparseResult tree_backward_cpu(const TreeArguments& arguments, const Tensor& grad_log_prob,
                               const Tensor& score, const TreePlan& plan, bool sparse);
SharedSparseResult leaf_backward_cpu(const TreeArguments& arguments, const Tensor& grad_log_prob,
                                     const Tensor& score, const TreePlan& plan, bool sparse);

// What the dispatcher calls. kernel: the function of one device, with a signature as above.
template <const TreeKind& kind>
struct TreeOp {
  template <auto kernel>
  static ForwardResult forward(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                               const Tensor& target, const Tensor& offset, const Tensor& path,
                               const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                               int64_t longest, const std::optional<Tensor>& order) {
    const TreeArguments arguments = tree_arguments(kind.forward, kind, hidden, weight, target, offset, path,
                                                   leaf_position, feature_index, longest);
    return kernel(arguments, checked_bias(arguments, bias), checked_order(arguments, order));
  }

  template <auto kernel>
  static BackwardResult backward(const Tensor& grad_log_prob, const Tensor& hidden, const Tensor& weight,
                                 const Tensor& target, const Tensor& offset, const Tensor& path,
                                 const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                                 const Tensor& score, const std::optional<Tensor>& order,
                                 const std::optional<Tensor>& plan) {
    const auto [grad_hidden, index, grad_weight, grad_bias] =
        gradient<kernel>(kind.backward, false, grad_log_prob, hidden, weight, target, offset, path,
                         leaf_position, feature_index, score, order, plan);
    return {grad_hidden, grad_weight, grad_bias};
  }

  template <auto kernel>
  static SparseResult backward_sparse(const Tensor& grad_log_prob, const Tensor& hidden, const Tensor& weight,
                                      const Tensor& target, const Tensor& offset, const Tensor& path,
                                      const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                                      const Tensor& score, const std::optional<Tensor>& order,
                                      const std::optional<Tensor>& plan) {
    return gradient<kernel>(kind.backward_sparse, true, grad_log_prob, hidden, weight, target, offset, path,
                            leaf_position, feature_index, score, order, plan);
  }

  template <auto kernel>
  static auto gradient(const char* op, bool sparse, const Tensor& grad_log_prob, const Tensor& hidden,
                       const Tensor& weight, const Tensor& target, const Tensor& offset, const Tensor& path,
                       const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                       const Tensor& score, const std::optional<Tensor>& order,
                       const std::optional<Tensor>& plan) {
    check_dim(op, "score", score, 3, kind.score_shape);
    const TreeArguments arguments = tree_arguments(op, kind, hidden, weight, target, offset, path,
                                                   leaf_position, feature_index, score.size(2));
    const auto [grad, kept] = checked_gradient(arguments, grad_log_prob, score);
    return kernel(arguments, grad, kept, {checked_order(arguments, order), plan}, sparse);
  }
};

// The same for the leaf op.
struct LeafOp {
  template <auto kernel>
  static ForwardResult forward(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                               const Tensor& target, const Tensor& offset, const Tensor& path,
                               const Tensor& leaf_position, const Tensor& leaf_class, int64_t longest,
                               const std::optional<Tensor>& order) {
    return TreeOp<leaf_kind>::forward<kernel>(hidden, weight, bias, target, offset, path, leaf_position,
                                              leaf_class, longest, order);
  }

  template <auto kernel>
  static BackwardResult backward(const Tensor& grad_log_prob, const Tensor& hidden, const Tensor& weight,
                                 const Tensor& target, const Tensor& offset, const Tensor& path,
                                 const Tensor& leaf_position, const Tensor& leaf_class, const Tensor& score,
                                 const std::optional<Tensor>& order, const std::optional<Tensor>& plan) {
    const SharedSparseResult result =
        TreeOp<leaf_kind>::gradient<kernel>(leaf_kind.backward, false, grad_log_prob, hidden, weight, target,
                                            offset, path, leaf_position, leaf_class, score, order, plan);
    return {std::get<0>(result), std::get<2>(result), std::get<4>(result)};
  }

  template <auto kernel>
  static SharedSparseResult backward_sparse(const Tensor& grad_log_prob, const Tensor& hidden,
                                            const Tensor& weight, const Tensor& target, const Tensor& offset,
                                            const Tensor& path, const Tensor& leaf_position,
                                            const Tensor& leaf_class, const Tensor& score,
                                            const std::optional<Tensor>& order,
                                            const std::optional<Tensor>& plan) {
    return TreeOp<leaf_kind>::gradient<kernel>(leaf_kind.backward_sparse, true, grad_log_prob, hidden, weight,
                                               target, offset, path, leaf_position, leaf_class, score, order,
                                               plan);
  }
};

}  // namespace hstree
