// hstree::leaf_log_prob and its gradients: log-probability of a class within its leaf group, where all trees read
// the rows of one weight. tree_op_cuda.cpp registers the CUDA implementation.
#include "ops/cpu.h"
#include "ops/tree_op.h"

namespace hstree {

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "leaf_log_prob(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor group_offset, Tensor "
      "group, Tensor leaf_position, Tensor leaf_class, int max_width, Tensor? order=None) "
      "-> (Tensor log_prob, Tensor score, Tensor order, Tensor plan)");
  m.def(
      "leaf_log_prob_backward(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor target, Tensor "
      "group_offset, Tensor group, Tensor leaf_position, Tensor leaf_class, Tensor score, Tensor? "
      "order=None, "
      "Tensor? plan=None) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "leaf_log_prob_backward_sparse(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor target, "
      "Tensor "
      "group_offset, Tensor group, Tensor leaf_position, Tensor leaf_class, Tensor score, Tensor? "
      "order=None, "
      "Tensor? plan=None) -> (Tensor grad_hidden, Tensor index, Tensor grad_weight, Tensor bias_index, "
      "Tensor "
      "grad_bias)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("leaf_log_prob", HSTREE_CPU_BOX(&LeafOp::forward<tree_forward_cpu>));
  m.impl("leaf_log_prob_backward", HSTREE_CPU_BOX(&LeafOp::backward<leaf_backward_cpu>));
  m.impl("leaf_log_prob_backward_sparse", HSTREE_CPU_BOX(&LeafOp::backward_sparse<leaf_backward_cpu>));
}

}  // namespace hstree
