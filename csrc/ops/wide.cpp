// hstree::wide_log_prob and its backward: log-probability of the chosen children at the wide nodes of a path.
#include "ops/tree_op.h"

namespace hstree {
namespace {

template <auto forward>
ForwardResult wide_op(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                      const Tensor& target, const Tensor& wide_offset, const Tensor& wide_path,
                      const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                      int64_t max_width) {
  const TreeArguments arguments =
      tree_arguments("hstree::wide_log_prob", true, input, weight, target, wide_offset, wide_path,
                     leaf_position, feature_index, max_width);
  return forward(arguments, checked_bias(arguments, bias));
}

SparseResult gradient(const char* op, decltype(tree_backward_cpu)* backward, bool sparse,
                      const Tensor& grad_log_prob, const Tensor& input, const Tensor& weight,
                      const Tensor& target, const Tensor& wide_offset, const Tensor& wide_path,
                      const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                      const Tensor& score) {
  check_dim(op, "score", score, 3, "[N, T, max_width]");
  const TreeArguments arguments = tree_arguments(op, true, input, weight, target, wide_offset, wide_path,
                                                 leaf_position, feature_index, score.size(2));
  const auto [grad, kept] = checked_gradient(arguments, grad_log_prob, score);
  return backward(arguments, grad, kept, sparse);
}

template <auto backward>
BackwardResult wide_op_backward(const Tensor& grad_log_prob, const Tensor& input, const Tensor& weight,
                                const Tensor& target, const Tensor& wide_offset, const Tensor& wide_path,
                                const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                                const Tensor& score) {
  const auto [grad_input, index, grad_weight, grad_bias] =
      gradient("hstree::wide_log_prob_backward", backward, false, grad_log_prob, input, weight, target,
               wide_offset, wide_path, leaf_position, feature_index, score);
  return {grad_input, grad_weight, grad_bias};
}

template <auto backward>
SparseResult wide_op_backward_sparse(const Tensor& grad_log_prob, const Tensor& input, const Tensor& weight,
                                     const Tensor& target, const Tensor& wide_offset, const Tensor& wide_path,
                                     const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                                     const Tensor& score) {
  return gradient("hstree::wide_log_prob_backward_sparse", backward, true, grad_log_prob, input, weight,
                  target, wide_offset, wide_path, leaf_position, feature_index, score);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "wide_log_prob(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor wide_offset, Tensor "
      "wide_path, "
      "Tensor leaf_position, Tensor? feature_index, int max_width) -> (Tensor log_prob, Tensor score)");
  m.def(
      "wide_log_prob_backward(Tensor grad_log_prob, Tensor input, Tensor weight, Tensor target, Tensor "
      "wide_offset, "
      "Tensor wide_path, Tensor leaf_position, Tensor? feature_index, Tensor score) "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "wide_log_prob_backward_sparse(Tensor grad_log_prob, Tensor input, Tensor weight, Tensor target, "
      "Tensor wide_offset, "
      "Tensor wide_path, Tensor leaf_position, Tensor? feature_index, Tensor score) "
      "-> (Tensor grad_input, Tensor index, Tensor grad_weight, Tensor grad_bias)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("wide_log_prob", TORCH_BOX(&wide_op<tree_forward_cpu>));
  m.impl("wide_log_prob_backward", TORCH_BOX(&wide_op_backward<tree_backward_cpu>));
  m.impl("wide_log_prob_backward_sparse", TORCH_BOX(&wide_op_backward_sparse<tree_backward_cpu>));
}

#ifdef HSTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("wide_log_prob", TORCH_BOX(&wide_op<tree_forward_cuda>));
  m.impl("wide_log_prob_backward", TORCH_BOX(&wide_op_backward<tree_backward_cuda>));
  m.impl("wide_log_prob_backward_sparse", TORCH_BOX(&wide_op_backward_sparse<tree_backward_cuda>));
}
#endif

}  // namespace hstree
