// hstree::tree_log_prob and its gradient: log-probabilities of all classes of a mixture of trees. CPU only:
// on other devices hstree/ops/_composed_tree_log_prob.py composes it from torch's operators.
#include "cpu/tree_log_prob.h"

#include "ops/tensor.h"

namespace hstree {
namespace {

struct TreeLogProbArguments {
  const char* op;
  Tensor score;     // [T, R, N]
  Tensor log_gate;  // [N, T]
  Tensor node;      // [T, M, 5] int32
  Tensor edge;      // [T, E, 2] int32
  int64_t wide_begin, root_begin, classes;

  int64_t trees() const { return score.size(0); }
  int64_t rows() const { return score.size(2); }

  template <typename A>
  cpu::TreeMixture<A> mixture() const {
    return {op,
            const_data<A>(score),
            const_data<A>(log_gate),
            const_data<cpu::TreeNode>(node),
            const_data<cpu::TreeEdge>(edge),
            {0, wide_begin, root_begin, score.size(1)},
            rows(),
            trees(),
            node.size(1),
            edge.size(1),
            classes,
            nullptr,
            nullptr};
  }
};

void check_table(const char* op, const char* name, const Tensor& table, const Tensor& score, int64_t columns,
                 const char* shape, const char* what) {
  check_dim(op, name, table, 3, shape);
  check_dtype(op, name, table, Dtype::Int);
  check_device(op, name, table, score);
  check_size(op, name, table, 0, score.size(0), "trees of score");
  check_size(op, name, table, 2, columns, what);
}

TreeLogProbArguments arguments_of(const char* op, const Tensor& score, const Tensor& log_gate,
                                  const Tensor& node, const Tensor& edge, int64_t wide_begin,
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
  check_table(op, "node", node, score, 5, "[T, M, 5]", "block, row, first edge, width, edge above");
  check_table(op, "edge", edge, score, 2, "[T, E, 2]", "node above, node or class below");
  check(wide_begin >= 0 && wide_begin <= root_begin && root_begin <= score.size(1), op,
        ": wide_begin, root_begin: expected increasing places of the ", score.size(1), " rows of score, got ",
        wide_begin, ", ", root_begin);
  check(classes == 1 || (classes > 1 && classes <= edge.size(1) && node.size(1) > 0), op,
        ": classes: expected 1, or at most as many as edges of a tree, ", edge.size(1), ", with a node, got ",
        classes);
  return {op,
          torch::stable::contiguous(score),
          torch::stable::contiguous(log_gate),
          torch::stable::contiguous(node),
          torch::stable::contiguous(edge),
          wide_begin,
          root_begin,
          classes};
}

// Calls f with a zero of the dtype of score.
template <typename F>
void dispatch_sums(const Tensor& score, const F& f) {
  if (score.scalar_type() == Dtype::Double) return f(double{});
  f(float{});
}

Tensor tree_log_prob_cpu(const Tensor& score, const Tensor& log_gate, const Tensor& node, const Tensor& edge,
                         int64_t wide_begin, int64_t root_begin, int64_t classes) {
  const TreeLogProbArguments arguments =
      arguments_of("hstree::tree_log_prob", score, log_gate, node, edge, wide_begin, root_begin, classes);
  const Tensor log_prob = empty(score, {arguments.rows(), classes}, score.scalar_type());
  dispatch_sums(score, [&](auto zero) {
    using A = decltype(zero);
    cpu::tree_log_prob<A>(arguments.mixture<A>(), data<A>(log_prob));
  });
  return log_prob;
}

Tensor leaf_tree_log_prob_cpu(const Tensor& leaf_score, const Tensor& leaf_bias, const Tensor& score,
                              const Tensor& log_gate, const Tensor& node, const Tensor& edge,
                              int64_t wide_begin, int64_t root_begin, int64_t classes) {
  const char* op = "hstree::leaf_tree_log_prob";
  const TreeLogProbArguments arguments =
      arguments_of(op, score, log_gate, node, edge, wide_begin, root_begin, classes);
  check_dim(op, "leaf_score", leaf_score, 2, "[N, V]");
  check_dtype(op, "leaf_score", leaf_score, score.scalar_type());
  check_device(op, "leaf_score", leaf_score, score);
  check_size(op, "leaf_score", leaf_score, 0, arguments.rows(), "rows, the last dimension of score");
  check_size(op, "leaf_score", leaf_score, 1, classes, "classes");
  check_dim(op, "leaf_bias", leaf_bias, 2, "[T, V]");
  check_dtype(op, "leaf_bias", leaf_bias, score.scalar_type());
  check_device(op, "leaf_bias", leaf_bias, score);
  check_size(op, "leaf_bias", leaf_bias, 0, arguments.trees(), "trees of score");
  check_size(op, "leaf_bias", leaf_bias, 1, classes, "classes");
  const Tensor leaf_scores = torch::stable::contiguous(leaf_score);
  const Tensor leaf_biases = torch::stable::contiguous(leaf_bias);
  const Tensor log_prob = empty(score, {arguments.rows(), classes}, score.scalar_type());
  dispatch_sums(score, [&](auto zero) {
    using A = decltype(zero);
    cpu::TreeMixture<A> mixture = arguments.mixture<A>();
    mixture.leaf_score = const_data<A>(leaf_scores);
    mixture.leaf_bias = const_data<A>(leaf_biases);
    cpu::tree_log_prob<A>(mixture, data<A>(log_prob));
  });
  return log_prob;
}

std::tuple<Tensor, Tensor> tree_log_prob_backward_cpu(const Tensor& grad, const Tensor& log_prob,
                                                      const Tensor& score, const Tensor& log_gate,
                                                      const Tensor& node, const Tensor& edge,
                                                      int64_t wide_begin, int64_t root_begin) {
  const char* op = "hstree::tree_log_prob_backward";
  check_dim(op, "log_prob", log_prob, 2, "[N, V]");
  const TreeLogProbArguments arguments =
      arguments_of(op, score, log_gate, node, edge, wide_begin, root_begin, log_prob.size(1));
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
    cpu::tree_log_prob_backward<A>(arguments.mixture<A>(), const_data<A>(grads), const_data<A>(log_probs),
                                   data<A>(grad_score), data<A>(grad_log_gate));
  });
  return {grad_score, grad_log_gate};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "tree_log_prob(Tensor score, Tensor log_gate, Tensor node, Tensor edge, int wide_begin, int "
      "root_begin, "
      "int classes) -> Tensor");
  m.def(
      "leaf_tree_log_prob(Tensor leaf_score, Tensor leaf_bias, Tensor score, Tensor log_gate, Tensor node, "
      "Tensor edge, int wide_begin, int root_begin, int classes) -> Tensor");
  m.def(
      "tree_log_prob_backward(Tensor grad, Tensor log_prob, Tensor score, Tensor log_gate, Tensor node, "
      "Tensor "
      "edge, "
      "int wide_begin, int root_begin) -> (Tensor grad_score, Tensor grad_log_gate)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("tree_log_prob", TORCH_BOX(&tree_log_prob_cpu));
  m.impl("leaf_tree_log_prob", TORCH_BOX(&leaf_tree_log_prob_cpu));
  m.impl("tree_log_prob_backward", TORCH_BOX(&tree_log_prob_backward_cpu));
}

}  // namespace hstree
