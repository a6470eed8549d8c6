// hstree::tree_topk: the k most probable classes of a mixture of trees. CPU only: a search goes from one node to
// the next, each known only after the one before, which leaves a GPU idle. There TreeEnsemble.topk ranks the
// log-probabilities of all classes, from the kernel of tree_log_softmax, with torch.topk, in chunks of rows.
#include "cpu/tree_topk.h"

#include "ops/cpu.h"
#include "ops/tree_vectors.h"

namespace hstree {
namespace {

constexpr const char* op = "hstree::tree_topk";

std::tuple<Tensor, Tensor> tree_topk_cpu(const Tensor& hidden, const std::optional<Tensor>& weight,
                                         const std::optional<Tensor>& bias,
                                         const std::optional<Tensor>& class_weight,
                                         const std::optional<Tensor>& class_bias,
                                         const std::optional<Tensor>& root_log_prob, const Tensor& log_gate,
                                         const std::optional<Tensor>& feature_index, const Tensor& node,
                                         const Tensor& edge, const Tensor& leaf_edge, int64_t k,
                                         int64_t most_scored) {
  const TreeTensors tensors = tree_tensors(op, hidden, weight, bias, class_weight, class_bias, root_log_prob,
                                           log_gate, feature_index, node, edge, leaf_edge);
  check(k >= 1 && k <= tensors.classes(), op, ": k: expected 1 to ", tensors.classes(),
        " (the number of classes), got ", k);
  const Tensor log_prob = empty(hidden, {tensors.rows(), k}, tensors.sums);
  const Tensor index = empty(hidden, {tensors.rows(), k}, Dtype::Long);
  dispatch(tensors.type, [&](auto element) {
    using T = decltype(element);
    cpu::tree_topk<T>(tree_vectors(tensors),
                      {k, data<cpu::accumulate_t<T>>(log_prob), data<int64_t>(index), most_scored});
  });
  return {log_prob, index};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("tree_topk(" HSTREE_TREE_VECTORS_SCHEMA
        ", int k, int most_scored=-1) -> (Tensor log_prob, Tensor index)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("tree_topk", HSTREE_CPU_BOX(&tree_topk_cpu));
}

}  // namespace hstree
