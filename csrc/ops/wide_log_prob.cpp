// hstree::wide_log_prob and its gradients: log-probability of the chosen children at the wide nodes of a
// path. tree_op_cuda.cpp registers the CUDA implementation.
#include "ops/cpu.h"
#include "ops/tree_op.h"

namespace hstree {

using WideOp = TreeOp<wide_kind>;

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "wide_log_prob(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor wide_offset, Tensor "
      "wide_path, "
      "Tensor leaf_position, Tensor? feature_index, int max_width, Tensor? order=None) "
      "-> (Tensor log_prob, Tensor score, Tensor order, Tensor plan)");
  m.def(
      "wide_log_prob_backward(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor target, Tensor "
      "wide_offset, "
      "Tensor wide_path, Tensor leaf_position, Tensor? feature_index, Tensor score, Tensor? order=None, "
      "Tensor? "
      "plan=None) "
      "-> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "wide_log_prob_backward_sparse(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor target, "
      "Tensor wide_offset, "
      "Tensor wide_path, Tensor leaf_position, Tensor? feature_index, Tensor score, Tensor? order=None, "
      "Tensor? "
      "plan=None) "
      "-> (Tensor grad_hidden, Tensor index, Tensor grad_weight, Tensor grad_bias)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("wide_log_prob", HSTREE_CPU_BOX(&WideOp::forward<tree_forward_cpu>));
  m.impl("wide_log_prob_backward", HSTREE_CPU_BOX(&WideOp::backward<tree_backward_cpu>));
  m.impl("wide_log_prob_backward_sparse", HSTREE_CPU_BOX(&WideOp::backward_sparse<tree_backward_cpu>));
}

}  // namespace hstree
