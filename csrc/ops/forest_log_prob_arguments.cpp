#include "ops/forest_log_prob.h"

namespace hstree {

ForestArguments forest_arguments(const Tensor& score, const Tensor& cluster_score, const Tensor& log_prior,
                                 const Tensor& cluster, const Tensor& target,
                                 const std::optional<Tensor>& grad_log_prob) {
  const char* op = forest_op;
  check_dim(op, "score", score, 2, "[V, R]");
  check_dim(op, "cluster_score", cluster_score, 3, "[T, C, R]");
  check_dim(op, "log_prior", log_prior, 2, "[T, R]");
  check_dim(op, "cluster", cluster, 2, "[V, T]");
  check_dim(op, "target", target, 1, "[R]");
  const int64_t classes = score.size(0), rows = score.size(1), trees = cluster_score.size(0);
  const auto check_values = [&](const char* name, const Tensor& tensor, bool in_place) {
    check_dtype(op, name, tensor, score.scalar_type());
    check_device(op, name, tensor, score);
    check(!in_place || tensor.is_contiguous(), op, ": ", name, ": expected a contiguous tensor, got shape ",
          shape_of(tensor));
  };
  check(score.scalar_type() == Dtype::Float || score.scalar_type() == Dtype::Double, op,
        ": score: expected dtype float32 or float64, got ", torch::headeronly::toString(score.scalar_type()));
  check_values("score", score, true);
  check_values("cluster_score", cluster_score, true);
  check_values("log_prior", log_prior, false);
  check_dtype(op, "cluster", cluster, Dtype::Int);
  check_device(op, "cluster", cluster, score);
  check_dtype(op, "target", target, Dtype::Long);
  check_device(op, "target", target, score);
  check(classes && trees && cluster_score.size(1), op,
        ": cluster_score: expected at least one class, tree and cluster, got score ", shape_of(score),
        " and cluster_score ", shape_of(cluster_score));
  check_size(op, "cluster_score", cluster_score, 2, rows, "rows of score");
  check_size(op, "log_prior", log_prior, 0, trees, "trees");
  check_size(op, "log_prior", log_prior, 1, rows, "rows of score");
  check_size(op, "cluster", cluster, 0, classes, "classes of score");
  check_size(op, "cluster", cluster, 1, trees, "trees");
  check_size(op, "target", target, 0, rows, "rows of score");
  std::optional<Tensor> grad;
  if (grad_log_prob) {
    check_dim(op, "grad_log_prob", *grad_log_prob, 1, "[R]");
    check_size(op, "grad_log_prob", *grad_log_prob, 0, rows, "rows of score");
    check_values("grad_log_prob", *grad_log_prob, false);
    grad = torch::stable::contiguous(*grad_log_prob);
  }
  return {element_type(op, "score", score),
          score,
          cluster_score,
          torch::stable::contiguous(log_prior),
          torch::stable::contiguous(cluster),
          torch::stable::contiguous(target),
          grad,
          empty(score, {rows}, score.scalar_type()),
          empty(score, {grad ? trees : 0, rows}, score.scalar_type())};
}

}  // namespace hstree
