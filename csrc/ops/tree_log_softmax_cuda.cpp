// hstree::tree_log_softmax and leaf_tree_log_softmax on CUDA. The schemas are in tree_log_softmax.cpp.
#ifdef HSTREE_CUDA
#include "kernels/tree_log_softmax.h"
#include "ops/cuda.h"
#include "ops/tree_log_softmax.h"

namespace hstree {
namespace {

Tensor mixed(const TreeLogSoftmaxArguments& a, const void* leaf_score, const void* leaf_bias,
             const CudaCall& call) {
  const TreeScores scores = {a.score.const_data_ptr(),
                             a.log_gate.const_data_ptr(),
                             const_data<TreeNode>(a.node),
                             const_data<TreeEdge>(a.edge),
                             {0, a.wide_begin, a.root_begin, a.score.size(1)},
                             a.rows(),
                             a.trees(),
                             a.node.size(1),
                             a.edge.size(1),
                             a.classes,
                             leaf_score,
                             leaf_bias};
  const Dtype dtype = a.score.scalar_type();
  const Tensor place = zeros(a.score, {a.trees(), a.classes + scores.nodes}, Dtype::Long);
  const Tensor workspace = empty(a.score, {scores.sums()}, dtype);
  const Tensor log_prob = empty(a.score, {a.rows(), a.classes}, dtype);
  tree_log_softmax(element_type(a.op, "score", a.score), scores, place.mutable_data_ptr(),
                   workspace.mutable_data_ptr(), log_prob.mutable_data_ptr(), call.stream());
  return log_prob;
}

Tensor tree_log_softmax_cuda(const Tensor& score, const Tensor& log_gate, const Tensor& node,
                             const Tensor& edge, int64_t wide_begin, int64_t root_begin, int64_t classes) {
  const TreeLogSoftmaxArguments a = tree_log_softmax_arguments("hstree::tree_log_softmax", score, log_gate,
                                                               node, edge, wide_begin, root_begin, classes);
  return mixed(a, nullptr, nullptr, CudaCall(a.score));
}

Tensor leaf_tree_log_softmax_cuda(const Tensor& leaf_score, const Tensor& leaf_bias, const Tensor& score,
                                  const Tensor& log_gate, const Tensor& node, const Tensor& edge,
                                  int64_t wide_begin, int64_t root_begin, int64_t classes) {
  const TreeLogSoftmaxArguments a = tree_log_softmax_arguments(
      "hstree::leaf_tree_log_softmax", score, log_gate, node, edge, wide_begin, root_begin, classes);
  check_leaves(a, leaf_score, leaf_bias);
  const CudaCall call(a.score);
  // Adjacent rows are read together. No copy where leaf_score is a transposed product.
  const Tensor scores = torch::stable::contiguous(torch::stable::transpose(leaf_score, 0, 1));
  const Tensor biases = torch::stable::contiguous(leaf_bias);
  return mixed(a, scores.const_data_ptr(), biases.const_data_ptr(), call);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("tree_log_softmax", TORCH_BOX(&tree_log_softmax_cuda));
  m.impl("leaf_tree_log_softmax", TORCH_BOX(&leaf_tree_log_softmax_cuda));
}

}  // namespace hstree
#endif
