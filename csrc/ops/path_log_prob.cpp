// hstree::path_log_prob and its gradients: log-probability of a class along its path of binary nodes.
// hstree::forward returns its first two outputs. tree_op_cuda.cpp registers the CUDA implementation.
#include "ops/cpu.h"
#include "ops/tree_op.h"

namespace hstree {
namespace {

using PathOp = TreeOp<path_kind>;

// Calls hstree::path_log_prob through the dispatcher, so it runs on any device and is differentiable.
std::tuple<Tensor, Tensor> forward(const Tensor& input, const Tensor& weight,
                                   const std::optional<Tensor>& bias, const Tensor& target,
                                   const Tensor& path_offset, const Tensor& path, const Tensor& leaf_position,
                                   const std::optional<Tensor>& feature_index, int64_t max_depth) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  StableIValue stack[10] = {
      from(input), from(weight),        from(bias),          from(target),    from(path_offset),
      from(path),  from(leaf_position), from(feature_index), from(max_depth), from(std::optional<Tensor>())};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("hstree::path_log_prob", "", stack, TORCH_ABI_VERSION));
  const Tensor log_prob = to<Tensor>(stack[0]), score = to<Tensor>(stack[1]);
  to<Tensor>(stack[2]), to<Tensor>(stack[3]);  // order and plan, released
  return {log_prob, score};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "forward(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor path_offset, Tensor path, "
      "Tensor leaf_position, Tensor? feature_index, int max_depth) -> (Tensor log_prob, Tensor score)");
  m.def(
      "path_log_prob(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor path_offset, Tensor "
      "path, "
      "Tensor leaf_position, Tensor? feature_index, int max_depth, Tensor? order=None) "
      "-> (Tensor log_prob, Tensor score, Tensor order, Tensor plan)");
  m.def(
      "path_log_prob_backward(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor target, Tensor "
      "path_offset, "
      "Tensor path, Tensor leaf_position, Tensor? feature_index, Tensor score, Tensor? order=None, "
      "Tensor? plan=None) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "path_log_prob_backward_sparse(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor target, "
      "Tensor path_offset, "
      "Tensor path, Tensor leaf_position, Tensor? feature_index, Tensor score, Tensor? order=None, "
      "Tensor? plan=None) -> (Tensor grad_hidden, Tensor index, Tensor grad_weight, Tensor grad_bias)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CompositeImplicitAutograd, m) {
  m.impl("forward", TORCH_BOX(&forward));
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("path_log_prob", HSTREE_CPU_BOX(&PathOp::forward<tree_forward_cpu>));
  m.impl("path_log_prob_backward", HSTREE_CPU_BOX(&PathOp::backward<tree_backward_cpu>));
  m.impl("path_log_prob_backward_sparse", HSTREE_CPU_BOX(&PathOp::backward_sparse<tree_backward_cpu>));
}

}  // namespace hstree
