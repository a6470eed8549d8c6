// hstree::tree_log_softmax and its gradient: log-probabilities of all classes of a mixture of trees.
// tree_log_softmax_cuda.cpp registers the CUDA implementation, hstree/ops/tree_log_softmax.py that of the gradient.
#include "cpu/tree_log_softmax.h"

#include "ops/cpu.h"
#include "ops/tree_log_softmax.h"

namespace hstree {
namespace {

template <typename A>
cpu::TreeMixture<A> mixture_of(const TreeLogSoftmaxArguments& a) {
  return {a.op,
          const_data<A>(a.score),
          const_data<A>(a.log_gate),
          const_data<TreeNode>(a.node),
          const_data<TreeEdge>(a.edge),
          {0, a.wide_begin, a.root_begin, a.score.size(1)},
          a.rows(),
          a.trees(),
          a.node.size(1),
          a.edge.size(1),
          a.classes,
          nullptr,
          nullptr};
}

// Calls f with a zero of the dtype of score.
template <typename F>
void dispatch_sums(const Tensor& score, const F& f) {
  if (score.scalar_type() == Dtype::Double) return f(double{});
  f(float{});
}

Tensor tree_log_softmax_cpu(const Tensor& score, const Tensor& log_gate, const Tensor& node,
                            const Tensor& edge, int64_t wide_begin, int64_t root_begin, int64_t classes) {
  const TreeLogSoftmaxArguments arguments = tree_log_softmax_arguments(
      "hstree::tree_log_softmax", score, log_gate, node, edge, wide_begin, root_begin, classes);
  const Tensor log_prob = empty(score, {arguments.rows(), classes}, score.scalar_type());
  dispatch_sums(score, [&](auto zero) {
    using A = decltype(zero);
    cpu::tree_log_softmax<A>(mixture_of<A>(arguments), data<A>(log_prob));
  });
  return log_prob;
}

// Calls f(mixture) with leaf groups.
template <typename F>
void with_leaves(const TreeLogSoftmaxArguments& arguments, const Tensor& leaf_score, const Tensor& leaf_bias,
                 const F& f) {
  check_leaves(arguments, leaf_score, leaf_bias);
  const Tensor leaf_scores = torch::stable::contiguous(leaf_score);
  const Tensor leaf_biases = torch::stable::contiguous(leaf_bias);
  dispatch_sums(arguments.score, [&](auto zero) {
    using A = decltype(zero);
    cpu::TreeMixture<A> mixture = mixture_of<A>(arguments);
    mixture.leaf_score = const_data<A>(leaf_scores);
    mixture.leaf_bias = const_data<A>(leaf_biases);
    f(mixture);
  });
}

Tensor leaf_tree_log_softmax_cpu(const Tensor& leaf_score, const Tensor& leaf_bias, const Tensor& score,
                                 const Tensor& log_gate, const Tensor& node, const Tensor& edge,
                                 int64_t wide_begin, int64_t root_begin, int64_t classes) {
  const TreeLogSoftmaxArguments arguments = tree_log_softmax_arguments(
      "hstree::leaf_tree_log_softmax", score, log_gate, node, edge, wide_begin, root_begin, classes);
  const Tensor log_prob = empty(score, {arguments.rows(), classes}, score.scalar_type());
  with_leaves(arguments, leaf_score, leaf_bias, [&](const auto& mixture) {
    using A = std::decay_t<decltype(*mixture.score)>;
    cpu::tree_log_softmax<A>(mixture, data<A>(log_prob));
  });
  return log_prob;
}

std::tuple<Tensor, Tensor> leaf_tree_topk_cpu(const Tensor& leaf_score, const Tensor& leaf_bias,
                                              const Tensor& score, const Tensor& log_gate, const Tensor& node,
                                              const Tensor& edge, int64_t wide_begin, int64_t root_begin,
                                              int64_t classes, int64_t k) {
  const char* op = "hstree::leaf_tree_topk";
  const TreeLogSoftmaxArguments arguments =
      tree_log_softmax_arguments(op, score, log_gate, node, edge, wide_begin, root_begin, classes);
  check(k >= 1 && k <= classes, op, ": k: expected 1 to ", classes, " (the number of classes), got ", k);
  const Tensor log_prob = empty(score, {arguments.rows(), k}, score.scalar_type());
  const Tensor index = empty(score, {arguments.rows(), k}, Dtype::Long);
  with_leaves(arguments, leaf_score, leaf_bias, [&](const auto& mixture) {
    using A = std::decay_t<decltype(*mixture.score)>;
    cpu::leaf_tree_topk<A>(mixture, k, data<A>(log_prob), data<int64_t>(index));
  });
  return {log_prob, index};
}

std::tuple<Tensor, Tensor> tree_log_softmax_backward_cpu(const Tensor& grad, const Tensor& log_prob,
                                                         const Tensor& score, const Tensor& log_gate,
                                                         const Tensor& node, const Tensor& edge,
                                                         int64_t wide_begin, int64_t root_begin) {
  const char* op = "hstree::tree_log_softmax_backward";
  check_dim(op, "log_prob", log_prob, 2, "[N, V]");
  const TreeLogSoftmaxArguments arguments =
      tree_log_softmax_arguments(op, score, log_gate, node, edge, wide_begin, root_begin, log_prob.size(1));
  check_dtype(op, "log_prob", log_prob, score.scalar_type());
  check_device(op, "log_prob", log_prob, score);
  check_size(op, "log_prob", log_prob, 0, arguments.rows(), "rows, the last dimension of score");
  check_dim(op, "grad", grad, 2, "[N, V]");
  check_dtype(op, "grad", grad, score.scalar_type());
  check_device(op, "grad", grad, score);
  check_size(op, "grad", grad, 0, arguments.rows(), "rows, the last dimension of score");
  check_size(op, "grad", grad, 1, log_prob.size(1), "classes of log_prob");
  const Tensor grads = torch::stable::contiguous(grad), log_probs = torch::stable::contiguous(log_prob);
  const Tensor grad_score =
      empty(score, {arguments.trees(), score.size(1), arguments.rows()}, score.scalar_type());
  const Tensor grad_log_gate = empty(score, {arguments.rows(), arguments.trees()}, score.scalar_type());
  dispatch_sums(score, [&](auto zero) {
    using A = decltype(zero);
    cpu::tree_log_softmax_backward<A>(mixture_of<A>(arguments), const_data<A>(grads),
                                      const_data<A>(log_probs), data<A>(grad_score), data<A>(grad_log_gate));
  });
  return {grad_score, grad_log_gate};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "tree_log_softmax(Tensor score, Tensor log_gate, Tensor node, Tensor edge, int wide_begin, int "
      "root_begin, "
      "int n_classes) -> Tensor");
  m.def(
      "leaf_tree_log_softmax(Tensor leaf_score, Tensor leaf_bias, Tensor score, Tensor log_gate, Tensor "
      "node, "
      "Tensor edge, int wide_begin, int root_begin, int n_classes) -> Tensor");
  m.def(
      "leaf_tree_topk(Tensor leaf_score, Tensor leaf_bias, Tensor score, Tensor log_gate, Tensor node, "
      "Tensor "
      "edge, int wide_begin, int root_begin, int n_classes, int k) -> (Tensor log_prob, Tensor index)");
  m.def(
      "tree_log_softmax_backward(Tensor grad, Tensor log_prob, Tensor score, Tensor log_gate, Tensor node, "
      "Tensor "
      "edge, "
      "int wide_begin, int root_begin) -> (Tensor grad_score, Tensor grad_log_gate)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("tree_log_softmax", HSTREE_CPU_BOX(&tree_log_softmax_cpu));
  m.impl("leaf_tree_log_softmax", HSTREE_CPU_BOX(&leaf_tree_log_softmax_cpu));
  m.impl("leaf_tree_topk", HSTREE_CPU_BOX(&leaf_tree_topk_cpu));
  m.impl("tree_log_softmax_backward", HSTREE_CPU_BOX(&tree_log_softmax_backward_cpu));
}

}  // namespace hstree
