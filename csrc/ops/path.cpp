// hstree::forward, backward and backward_sparse: log-probability of a class along its path of binary nodes.
#include "ops/tree_op.h"

namespace hstree {
namespace {

template <auto forward>
ForwardResult path_op(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                      const Tensor& target, const Tensor& path_offset, const Tensor& path,
                      const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                      int64_t max_depth) {
  const TreeArguments arguments = tree_arguments("hstree::forward", false, input, weight, target, path_offset,
                                                 path, leaf_position, feature_index, max_depth);
  return forward(arguments, checked_bias(arguments, bias));
}

SparseResult gradient(const char* op, decltype(tree_backward_cpu)* backward, bool sparse,
                      const Tensor& grad_log_prob, const Tensor& input, const Tensor& weight,
                      const Tensor& target, const Tensor& path_offset, const Tensor& path,
                      const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                      const Tensor& score) {
  check_dim(op, "score", score, 3, "[N, T, max_depth]");
  const TreeArguments arguments = tree_arguments(op, false, input, weight, target, path_offset, path,
                                                 leaf_position, feature_index, score.size(2));
  const auto [grad, kept] = checked_gradient(arguments, grad_log_prob, score);
  return backward(arguments, grad, kept, sparse);
}

template <auto backward>
BackwardResult path_op_backward(const Tensor& grad_log_prob, const Tensor& input, const Tensor& weight,
                                const Tensor& target, const Tensor& path_offset, const Tensor& path,
                                const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                                const Tensor& score) {
  const auto [grad_input, index, grad_weight, grad_bias] =
      gradient("hstree::backward", backward, false, grad_log_prob, input, weight, target, path_offset, path,
               leaf_position, feature_index, score);
  return {grad_input, grad_weight, grad_bias};
}

template <auto backward>
SparseResult path_op_backward_sparse(const Tensor& grad_log_prob, const Tensor& input, const Tensor& weight,
                                     const Tensor& target, const Tensor& path_offset, const Tensor& path,
                                     const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                                     const Tensor& score) {
  return gradient("hstree::backward_sparse", backward, true, grad_log_prob, input, weight, target,
                  path_offset, path, leaf_position, feature_index, score);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "forward(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor path_offset, Tensor path, "
      "Tensor leaf_position, Tensor? feature_index, int max_depth) -> (Tensor log_prob, Tensor score)");
  m.def(
      "backward(Tensor grad_log_prob, Tensor input, Tensor weight, Tensor target, Tensor path_offset, "
      "Tensor path, Tensor leaf_position, Tensor? feature_index, Tensor score) "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "backward_sparse(Tensor grad_log_prob, Tensor input, Tensor weight, Tensor target, Tensor path_offset, "
      "Tensor path, Tensor leaf_position, Tensor? feature_index, Tensor score) "
      "-> (Tensor grad_input, Tensor index, Tensor grad_weight, Tensor grad_bias)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("forward", TORCH_BOX(&path_op<tree_forward_cpu>));
  m.impl("backward", TORCH_BOX(&path_op_backward<tree_backward_cpu>));
  m.impl("backward_sparse", TORCH_BOX(&path_op_backward_sparse<tree_backward_cpu>));
}

#ifdef HSTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("forward", TORCH_BOX(&path_op<tree_forward_cuda>));
  m.impl("backward", TORCH_BOX(&path_op_backward<tree_backward_cuda>));
  m.impl("backward_sparse", TORCH_BOX(&path_op_backward_sparse<tree_backward_cuda>));
}
#endif

}  // namespace hstree
