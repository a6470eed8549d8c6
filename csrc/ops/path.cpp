// hstree::forward, backward and backward_sparse: log-probability of a class along its path of binary nodes.
// tree_op_cuda.cpp registers the CUDA implementation.
#include "ops/tree_op.h"

namespace hstree {

using PathOp = TreeOp<false>;

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
  m.impl("forward", TORCH_BOX(&PathOp::forward<tree_forward_cpu>));
  m.impl("backward", TORCH_BOX(&PathOp::backward<tree_backward_cpu>));
  m.impl("backward_sparse", TORCH_BOX(&PathOp::backward_sparse<tree_backward_cpu>));
}

}  // namespace hstree
