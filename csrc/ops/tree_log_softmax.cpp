// hstree::tree_log_softmax and its gradient: log-probabilities of all classes of a mixture of trees. group_topk: the
// most probable ones. On CUDA hstree/ops/tree_queries.py has the gradient.
#include "cpu/tree_log_softmax.h"

#include <tuple>

#include "kernels/tree_log_softmax.h"
#include "ops/cpu.h"
#include "ops/cuda.h"

namespace hstree {
namespace {

struct TreeLogSoftmaxArguments {
  const char* op;
  Tensor score;                     // [T, R, N] float32 or float64, contiguous as all of them
  Tensor log_gate;                  // [N, T], dtype of score
  Tensor node;                      // [T, M, 5] int32
  Tensor edge;                      // [T, E, 2] int32
  int64_t class_begin, root_begin;  // first rows of score of the classes of groups, and of a wide root
  int64_t classes;

  int64_t trees() const { return score.size(0); }
  int64_t rows() const { return score.size(2); }
};

void check_tree_table(const char* op, const char* name, const Tensor& table, const Tensor& score,
                      int64_t columns, const char* shape, const char* what) {
  check_dim(op, name, table, 3, shape);
  check_dtype(op, name, table, Dtype::Int);
  check_device(op, name, table, score);
  check_size(op, name, table, 0, score.size(0), "trees of score");
  check_size(op, name, table, 2, columns, what);
}

TreeLogSoftmaxArguments tree_log_softmax_arguments(const char* op, const Tensor& score,
                                                   const Tensor& log_gate, const Tensor& node,
                                                   const Tensor& edge, int64_t class_begin,
                                                   int64_t root_begin, int64_t classes) {
  check_dim(op, "score", score, 3, "[T, R, N]");
  check(score.scalar_type() == Dtype::Float || score.scalar_type() == Dtype::Double, op,
        ": score: expected dtype float32 or float64, got ", torch::headeronly::toString(score.scalar_type()));
  check(score.size(0) > 0, op, ": score: expected at least one tree, got shape ", shape_of(score));
  check_dim(op, "log_gate", log_gate, 2, "[N, T]");
  check_dtype(op, "log_gate", log_gate, score.scalar_type());
  check_device(op, "log_gate", log_gate, score);
  check_size(op, "log_gate", log_gate, 0, score.size(2), "rows, the last dimension of score");
  check_size(op, "log_gate", log_gate, 1, score.size(0), "trees of score");
  check_tree_table(op, "node", node, score, 5, "[T, M, 5]", "block, row, first edge, width, edge above");
  check_tree_table(op, "edge", edge, score, 2, "[T, E, 2]", "node above, node or class below");
  check(root_begin >= 0 && root_begin <= score.size(1), op, ": root_begin: expected 0 to ", score.size(1),
        " (the rows of score), got ", root_begin);
  check(class_begin >= 0 && class_begin <= root_begin, op, ": class_begin: expected 0 to ", root_begin,
        " (root_begin), got ", class_begin);
  check(classes == 1 || (classes > 1 && classes <= edge.size(1) && node.size(1) > 0), op,
        ": n_classes: expected 1, or at most as many as edges of a tree, ", edge.size(1),
        ", with a node, got ", classes);
  return {op,
          torch::stable::contiguous(score),
          torch::stable::contiguous(log_gate),
          torch::stable::contiguous(node),
          torch::stable::contiguous(edge),
          class_begin,
          root_begin,
          classes};
}

void check_classes(const TreeLogSoftmaxArguments& a, const std::optional<Tensor>& class_score,
                   const std::optional<Tensor>& class_bias) {
  check(class_score.has_value() == class_bias.has_value(), a.op,
        ": class_bias: expected a tensor with class_score, and none without");
  if (!class_score) return;
  check_dim(a.op, "class_score", *class_score, 2, "[N, V]");
  check_dtype(a.op, "class_score", *class_score, a.score.scalar_type());
  check_device(a.op, "class_score", *class_score, a.score);
  check_size(a.op, "class_score", *class_score, 0, a.rows(), "rows, the last dimension of score");
  check_size(a.op, "class_score", *class_score, 1, a.classes, "classes");
  check_dim(a.op, "class_bias", *class_bias, 2, "[T, V]");
  check_dtype(a.op, "class_bias", *class_bias, a.score.scalar_type());
  check_device(a.op, "class_bias", *class_bias, a.score);
  check_size(a.op, "class_bias", *class_bias, 0, a.trees(), "trees of score");
  check_size(a.op, "class_bias", *class_bias, 1, a.classes, "classes");
}

#ifndef HSTREE_CUDA_ONLY
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

// Calls f(mixture), with the scores and biases of classes in groups if there are any.
template <typename F>
void with_classes(const TreeLogSoftmaxArguments& arguments, const std::optional<Tensor>& class_score,
                  const std::optional<Tensor>& class_bias, const F& f) {
  check_classes(arguments, class_score, class_bias);
  const auto scores = contiguous(class_score), biases = contiguous(class_bias);
  dispatch_sums(arguments.score.scalar_type(), [&](auto zero) {
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
  dispatch_sums(score.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    cpu::tree_log_softmax_backward<A>(mixture_of<A>(arguments), const_data<A>(grads),
                                      const_data<A>(log_probs), data<A>(grad_score), data<A>(grad_log_gate));
  });
  return {grad_score, grad_log_gate};
}

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "tree_log_softmax(Tensor score, Tensor log_gate, Tensor node, Tensor edge, int root_begin, int "
      "n_classes, Tensor? class_score=None, Tensor? class_bias=None) -> Tensor");
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
#endif

#ifdef HSTREE_CUDA
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
  const std::optional<Tensor> class_biases = contiguous(class_bias);
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
                             const_data<void>(class_scores),
                             const_data<void>(class_biases)};
  const Dtype dtype = a.score.scalar_type();
  const Tensor place = zeros(a.score, {a.trees(), a.classes + scores.nodes}, Dtype::Long);
  const Tensor workspace = empty(a.score, {scores.sums()}, dtype);
  const Tensor log_prob = empty(a.score, {a.rows(), a.classes}, dtype);
  tree_log_softmax(element_type(a.op, "score", a.score), scores, place.mutable_data_ptr(),
                   workspace.mutable_data_ptr(), log_prob.mutable_data_ptr(), call.stream());
  return log_prob;
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("tree_log_softmax", TORCH_BOX(&tree_log_softmax_cuda));
}
#endif

}  // namespace
}  // namespace hstree
