// hstree::sample: classes drawn from a mixture of trees. sample_cuda.cpp registers the CUDA implementation.
#include "ops/tensor.h"

namespace hstree {

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "sample(Tensor hidden, Tensor? weight, Tensor? bias, Tensor? wide_weight, Tensor? wide_bias, "
      "Tensor? leaf_weight, Tensor? leaf_bias, Tensor? root_log_prob, Tensor log_gate, Tensor? "
      "feature_index, Tensor node, Tensor edge, Tensor leaf_edge, Tensor seed, int n, float temperature) -> "
      "(Tensor index, Tensor log_prob)");
}

}  // namespace hstree
