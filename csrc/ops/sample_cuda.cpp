// hstree::sample on CUDA. The schema is in sample.cpp.
#ifdef HSTREE_CUDA
#include "kernels/sample.h"
#include "ops/cuda.h"
#include "ops/sample.h"

namespace hstree {
namespace {

TreeVectors vectors_of(const TreeTensors& tensors, double temperature) {
  const auto at = [](const std::optional<Tensor>& tensor) {
    return tensor ? tensor->const_data_ptr() : nullptr;
  };
  return {tensors.hidden.const_data_ptr(),
          at(tensors.weight),
          at(tensors.bias),
          tensors.weight_rows(),
          tensors.class_weight.has_value(),
          at(tensors.class_weight),
          at(tensors.class_bias),
          at(tensors.root_log_prob),
          tensors.root_log_prob ? tensors.root_log_prob->size(2) : 0,
          tensors.log_gate.const_data_ptr(),
          tensors.feature_index ? const_data<int32_t>(*tensors.feature_index) : nullptr,
          const_data<TreeNode>(tensors.node),
          const_data<TreeEdge>(tensors.edge),
          const_data<int32_t>(tensors.leaf_edge),
          tensors.rows(),
          tensors.hidden.size(1),
          tensors.trees(),
          tensors.features(),
          tensors.node.size(1),
          tensors.edge.size(1),
          tensors.classes(),
          1 / temperature};
}

std::tuple<Tensor, Tensor> sample_cuda(const Tensor& hidden, const std::optional<Tensor>& weight,
                                       const std::optional<Tensor>& bias,
                                       const std::optional<Tensor>& class_weight,
                                       const std::optional<Tensor>& class_bias,
                                       const std::optional<Tensor>& root_log_prob, const Tensor& log_gate,
                                       const std::optional<Tensor>& feature_index, const Tensor& node,
                                       const Tensor& edge, const Tensor& leaf_edge, const Tensor& seed,
                                       int64_t n, double temperature) {
  const TreeTensors tensors = tree_tensors("hstree::sample", hidden, weight, bias, class_weight, class_bias,
                                           root_log_prob, log_gate, feature_index, node, edge, leaf_edge);
  check_draws(tensors, seed, n, temperature);
  const CudaCall call(tensors.hidden);
  const Tensor index = empty(hidden, {tensors.rows(), n}, Dtype::Long);
  const Tensor log_prob = empty(hidden, {tensors.rows(), n}, tensors.sums);
  const Tensor workspace = empty(hidden, {tensors.rows(), n, tensors.trees()}, tensors.sums);
  sample(tensors.type, vectors_of(tensors, temperature), const_data<int64_t>(seed), n, data<int64_t>(index),
         workspace.mutable_data_ptr(), log_prob.mutable_data_ptr(), call.stream());
  return {index, log_prob};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("sample", TORCH_BOX(&sample_cuda));
}

}  // namespace hstree
#endif
