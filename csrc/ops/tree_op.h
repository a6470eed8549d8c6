// The path op, the wide op and the leaf op: their arguments, checked and made contiguous for the kernels of both
// devices, and what the dispatcher calls.
//
// Dimensions: N rows, D hidden features, T trees, M weight rows of a tree, S features of a tree, V classes, P
// path entries.
#pragma once

#include <tuple>

#include "ops/tensor.h"

namespace hstree {

// The arguments as the dispatcher passes them. Each op has its own names for offset, path, index and longest.
struct TreeInputs {
  const Tensor &hidden, &weight;
  std::optional<Tensor> bias;
  const Tensor &target, &offset, &path, &leaf_position;
  std::optional<Tensor> index;
  int64_t longest;
  std::optional<Tensor> order;
  // Of a backward op, whose scores tell `longest`.
  const Tensor *grad_log_prob = nullptr, *score = nullptr;
};

struct TreeArguments {
  const char* op;
  ScalarType type;                      // of hidden and weight
  Tensor hidden;                        // [N, D]
  Tensor weight;                        // [T, M, S], of the leaf op [V, D]
  std::optional<Tensor> bias;           // [T, M], of the leaf op [T, V]
  Tensor target;                        // [N] int64
  Tensor offset;                        // [T, V + 1] int64
  Tensor path;                          // [P] int32, or [P, 3] if wide
  Tensor leaf_position;                 // [T, V] int32
  std::optional<Tensor> feature_index;  // [T, S] int32
  std::optional<Tensor> leaf_class;     // [T, V] int32, of the leaf op: the class of each row of a tree
  std::optional<Tensor> order;          // [T, N] int64, as hstree::leaf_order returns it
  int64_t longest;                      // max_depth or max_width, the last dimension of score

  int64_t rows() const { return hidden.size(0); }
  int64_t in_features() const { return hidden.size(1); }
  int64_t trees() const { return leaf_position.size(0); }
  int64_t classes() const { return leaf_position.size(1); }
  int64_t weight_rows() const { return weight.size(weight.dim() - 2); }
  int64_t features() const { return weight.size(weight.dim() - 1); }
};

// Throw std::runtime_error with the argument's name, the expected value and the actual one.
TreeArguments path_arguments(const TreeInputs& inputs);
TreeArguments wide_arguments(const TreeInputs& inputs);
TreeArguments leaf_arguments(const TreeInputs& inputs);

// The further arguments of a backward op.
struct TreeBackward {
  Tensor grad_log_prob;                // [N, T] accumulation dtype
  Tensor score;                        // [N, T, longest] accumulation dtype
  std::optional<Tensor> plan;          // device-specific, from the forward pass on the same arguments
  bool of_hidden, of_weight, of_bias;  // which gradients are wanted
  bool sparse;                         // whether those of weight and bias have the visited rows only

  bool of_parameters() const { return of_weight || of_bias; }
};

// log_prob, score, order, plan
using TreeResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// grad_hidden, grad_weight, grad_bias, index, bias_index. Gradients that are not wanted have no elements, and so
// have the indices of dense ones. index: of the rows of a sparse gradient of the weight, [2, nnz] (tree and row),
// which is also that of the bias; of the leaf op [1, nnz] (class), with bias_index [2, biases].
using TreeGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

inline Tensor nothing(const Tensor& like, Dtype dtype) {
  return empty(like, {0}, dtype);
}

// The result `order` of a forward op: empty if it was an argument, which an op may not return.
inline Tensor new_order(const TreeArguments& a, const Tensor& order) {
  return a.order ? empty(a.hidden, {0, 0}, Dtype::Long) : order;
}

// What the dispatcher calls. Index: Tensor if the op needs one, else std::optional<Tensor>.
template <TreeArguments (*check_arguments)(const TreeInputs&), typename Index>
struct TreeOp {
  template <TreeResult (*kernel)(const TreeArguments&)>
  static TreeResult forward(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                            const Tensor& target, const Tensor& offset, const Tensor& path,
                            const Tensor& leaf_position, const Index& index, int64_t longest,
                            const std::optional<Tensor>& order) {
    return kernel(
        check_arguments({hidden, weight, bias, target, offset, path, leaf_position, index, longest, order}));
  }

  template <TreeGradients (*kernel)(const TreeArguments&, const TreeBackward&)>
  static TreeGradients backward(const Tensor& grad_log_prob, const Tensor& hidden, const Tensor& weight,
                                const Tensor& target, const Tensor& offset, const Tensor& path,
                                const Tensor& leaf_position, const Index& index, const Tensor& score,
                                const std::optional<Tensor>& order, const std::optional<Tensor>& plan,
                                const std::vector<bool>& output_mask, bool sparse) {
    const TreeArguments arguments = check_arguments({hidden, weight, std::nullopt, target, offset, path,
                                                     leaf_position, index, 0, order, &grad_log_prob, &score});
    check(output_mask.size() == 3, arguments.op,
          ": output_mask: expected 3 values, for hidden, weight and bias, got ", output_mask.size());
    return kernel(arguments, {torch::stable::contiguous(grad_log_prob), torch::stable::contiguous(score),
                              plan, output_mask[0], output_mask[1], output_mask[2], sparse});
  }
};

using PathOp = TreeOp<path_arguments, std::optional<Tensor>>;
using WideOp = TreeOp<wide_arguments, std::optional<Tensor>>;
using LeafOp = TreeOp<leaf_arguments, Tensor>;

}  // namespace hstree
