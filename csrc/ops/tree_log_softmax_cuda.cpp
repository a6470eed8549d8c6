// hstree::tree_log_softmax on CUDA. The schema is in tree_log_softmax.cpp.
#ifdef HSTREE_CUDA
#include "kernels/tree_log_softmax.h"
#include "ops/cuda.h"
#include "ops/tree_log_softmax.h"

namespace hstree {
namespace {

Tensor tree_log_softmax_cuda(const Tensor& score, const Tensor& log_gate, const Tensor& node,
                             const Tensor& edge, int64_t root_begin, int64_t classes,
                             const std::optional<Tensor>& class_score,
                             const std::optional<Tensor>& class_bias) {
  const TreeLogSoftmaxArguments a = tree_log_softmax_arguments("hstree::tree_log_softmax", score, log_gate,
                                                               node, edge, root_begin, root_begin, classes);
  check_classes(a, class_score, class_bias);
  const CudaCall call(a.score);
  // Adjacent rows are read together. No copy where class_score is a transposed product.
  std::optional<Tensor> class_scores;
  if (class_score) class_scores = torch::stable::contiguous(torch::stable::transpose(*class_score, 0, 1));
  const std::optional<Tensor> class_biases = given(class_bias);
  const TreeScores scores = {a.score.const_data_ptr(),
                             a.log_gate.const_data_ptr(),
                             const_data<TreeNode>(a.node),
                             const_data<TreeEdge>(a.edge),
                             a.root_begin,
                             a.score.size(1),
                             a.rows(),
                             a.trees(),
                             a.node.size(1),
                             a.edge.size(1),
                             a.classes,
                             class_scores ? class_scores->const_data_ptr() : nullptr,
                             class_biases ? class_biases->const_data_ptr() : nullptr};
  const Dtype dtype = a.score.scalar_type();
  const Tensor place = zeros(a.score, {a.trees(), a.classes + scores.nodes}, Dtype::Long);
  const Tensor workspace = empty(a.score, {scores.sums()}, dtype);
  const Tensor log_prob = empty(a.score, {a.rows(), a.classes}, dtype);
  tree_log_softmax(element_type(a.op, "score", a.score), scores, place.mutable_data_ptr(),
                   workspace.mutable_data_ptr(), log_prob.mutable_data_ptr(), call.stream());
  return log_prob;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("tree_log_softmax", TORCH_BOX(&tree_log_softmax_cuda));
}

}  // namespace hstree
#endif
