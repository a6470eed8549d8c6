// hstree::tree_log_softmax and its gradient: log-probabilities of all classes of a mixture of trees. group_topk: the
// most probable ones. tree_log_softmax_cuda.cpp registers the CUDA implementation, hstree/ops/tree_queries.py that of
// the gradient.
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
          {0, a.class_begin, a.root_begin, a.score.size(1)},
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

// Calls f(mixture), with the scores and biases of classes in groups if there are any.
template <typename F>
void with_classes(const TreeLogSoftmaxArguments& arguments, const std::optional<Tensor>& class_score,
                  const std::optional<Tensor>& class_bias, const F& f) {
  check_classes(arguments, class_score, class_bias);
  const auto scores = given(class_score), biases = given(class_bias);
  dispatch_sums(arguments.score, [&](auto zero) {
    using A = decltype(zero);
    cpu::TreeMixture<A> mixture = mixture_of<A>(arguments);
    if (scores) {
      mixture.class_score = const_data<A>(*scores);
      mixture.class_bias = const_data<A>(*biases);
    }
    f(mixture);
  });
}

Tensor tree_log_softmax_cpu(const Tensor& score, const Tensor& log_gate, const Tensor& node,
                            const Tensor& edge, int64_t root_begin, int64_t classes,
                            const std::optional<Tensor>& class_score,
                            const std::optional<Tensor>& class_bias) {
  const TreeLogSoftmaxArguments arguments = tree_log_softmax_arguments(
      "hstree::tree_log_softmax", score, log_gate, node, edge, root_begin, root_begin, classes);
  const Tensor log_prob = empty(score, {arguments.rows(), classes}, score.scalar_type());
  with_classes(arguments, class_score, class_bias, [&](const auto& mixture) {
    using A = std::decay_t<decltype(*mixture.score)>;
    cpu::tree_log_softmax<A>(mixture, data<A>(log_prob));
  });
  return log_prob;
}

std::tuple<Tensor, Tensor> group_topk_cpu(const Tensor& score, const Tensor& log_gate, const Tensor& node,
                                          const Tensor& edge, int64_t root_begin, int64_t classes,
                                          const Tensor& class_score, const Tensor& class_bias, int64_t k) {
  const char* op = "hstree::group_topk";
  const TreeLogSoftmaxArguments arguments =
      tree_log_softmax_arguments(op, score, log_gate, node, edge, root_begin, root_begin, classes);
  check(k >= 1 && k <= classes, op, ": k: expected 1 to ", classes, " (the number of classes), got ", k);
  const Tensor log_prob = empty(score, {arguments.rows(), k}, score.scalar_type());
  const Tensor index = empty(score, {arguments.rows(), k}, Dtype::Long);
  with_classes(arguments, class_score, class_bias, [&](const auto& mixture) {
    using A = std::decay_t<decltype(*mixture.score)>;
    cpu::group_topk<A>(mixture, k, data<A>(log_prob), data<int64_t>(index));
  });
  return {log_prob, index};
}

std::tuple<Tensor, Tensor> tree_log_softmax_backward_cpu(const Tensor& grad, const Tensor& log_prob,
                                                         const Tensor& score, const Tensor& log_gate,
                                                         const Tensor& node, const Tensor& edge,
                                                         int64_t class_begin, int64_t root_begin) {
  const char* op = "hstree::tree_log_softmax_backward";
  check_dim(op, "log_prob", log_prob, 2, "[N, V]");
  const TreeLogSoftmaxArguments arguments =
      tree_log_softmax_arguments(op, score, log_gate, node, edge, class_begin, root_begin, log_prob.size(1));
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
      "tree_log_softmax(Tensor score, Tensor log_gate, Tensor node, Tensor edge, int root_begin, int "
      "n_classes, "
      "Tensor? class_score=None, Tensor? class_bias=None) -> Tensor");
  // class_begin: first row of score of the classes in groups, up to root_begin, where there are any.
  m.def(
      "tree_log_softmax_backward(Tensor grad, Tensor log_prob, Tensor score, Tensor log_gate, Tensor node, "
      "Tensor edge, int class_begin, int root_begin) -> (Tensor grad_score, Tensor grad_log_gate)");
  m.def(
      "group_topk(Tensor score, Tensor log_gate, Tensor node, Tensor edge, int root_begin, int n_classes, "
      "Tensor class_score, Tensor class_bias, int k) -> (Tensor log_prob, Tensor index)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("tree_log_softmax", HSTREE_CPU_BOX(&tree_log_softmax_cpu));
  m.impl("tree_log_softmax_backward", HSTREE_CPU_BOX(&tree_log_softmax_backward_cpu));
  m.impl("group_topk", HSTREE_CPU_BOX(&group_topk_cpu));
}

}  // namespace hstree
