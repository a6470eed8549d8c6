#include "ops/tree_op.h"

namespace hstree {
namespace {

constexpr const char* of_trees = "trees of leaf_position";

}  // namespace

TreeArguments tree_arguments(const char* op, const TreeKind& kind, const Tensor& hidden, const Tensor& weight,
                             const Tensor& target, const Tensor& path_offset, const Tensor& path,
                             const Tensor& leaf_position, const std::optional<Tensor>& index,
                             int64_t longest) {
  check_dim(op, "hidden", hidden, 2, "[N, D]");
  check_dim(op, "weight", weight, kind.shared ? 2 : 3, kind.weight_shape);
  check_dim(op, "target", target, 1, "[N]");
  check_dim(op, "leaf_position", leaf_position, 2, "[T, V]");
  check_dim(op, kind.offset, path_offset, 2, "[T, V + 1]");
  check_dim(op, kind.path, path, kind.path_dim, kind.path_shape);

  const ScalarType type = element_type(op, "hidden", hidden);
  check(weight.scalar_type() == hidden.scalar_type(), op, ": weight: expected the dtype of hidden, ",
        torch::headeronly::toString(hidden.scalar_type()), ", got ",
        torch::headeronly::toString(weight.scalar_type()));
  check_dtype(op, "target", target, Dtype::Long);
  check_dtype(op, kind.offset, path_offset, Dtype::Long);
  check_dtype(op, kind.path, path, Dtype::Int);
  check_dtype(op, "leaf_position", leaf_position, Dtype::Int);
  check_device(op, "weight", weight, hidden);
  check_device(op, "target", target, hidden);
  check_device(op, kind.offset, path_offset, hidden);
  check_device(op, kind.path, path, hidden);
  check_device(op, "leaf_position", leaf_position, hidden);

  const int64_t trees = leaf_position.size(0);
  check_size(op, "target", target, 0, hidden.size(0), "rows of hidden");
  if (!kind.shared) check_size(op, "weight", weight, 0, trees, of_trees);
  check_size(op, kind.offset, path_offset, 0, trees, of_trees);
  check_size(op, kind.offset, path_offset, 1, leaf_position.size(1) + 1, "classes of leaf_position + 1");
  if (kind.wide) check_size(op, kind.path, path, 1, 3, "first_row, width, child");
  if (kind.shared) {
    check_dim(op, "leaf_class", *index, 2, "[T, V]");
    check_dtype(op, "leaf_class", *index, Dtype::Int);
    check_device(op, "leaf_class", *index, hidden);
    check_size(op, "leaf_class", *index, 0, trees, of_trees);
    check_size(op, "leaf_class", *index, 1, leaf_position.size(1), "classes of leaf_position");
    check_size(op, "weight", weight, 0, leaf_position.size(1), "classes of leaf_position");
    check_size(op, "weight", weight, 1, hidden.size(1), "features of hidden");
  } else if (index) {
    check_dim(op, "feature_index", *index, 2, "[T, S]");
    check_dtype(op, "feature_index", *index, Dtype::Int);
    check_device(op, "feature_index", *index, hidden);
    check_size(op, "feature_index", *index, 0, trees, of_trees);
    check_size(op, "feature_index", *index, 1, weight.size(2), "features of weight");
  } else {
    check_size(op, "weight", weight, 2, hidden.size(1), "features of hidden, as there is no feature_index");
  }
  check(hidden.size(0) < INT32_MAX, op, ": hidden: expected fewer than 2^31 - 1 rows, got ", hidden.size(0));
  check(trees < INT32_MAX, op, ": leaf_position: expected fewer than 2^31 - 1 trees, got ", trees);
  const int64_t weight_rows = weight.size(kind.shared ? 0 : 1);
  check(weight_rows < (1 << 30), op, ": weight: expected fewer than 2^30 rows in a tree, got ", weight_rows);
  check(longest >= 0 && longest <= kind.most, op, ": ", kind.longest, ": expected 0 to ", kind.most, ", got ",
        longest);

  const auto index_of = [&](bool shared) {
    return index && kind.shared == shared ? std::make_optional(torch::stable::contiguous(*index))
                                          : std::nullopt;
  };
  return {op,
          kind,
          type,
          torch::stable::contiguous(hidden),
          torch::stable::contiguous(weight),
          torch::stable::contiguous(target),
          torch::stable::contiguous(path_offset),
          torch::stable::contiguous(path),
          torch::stable::contiguous(leaf_position),
          index_of(false),
          index_of(true),
          longest};
}

std::optional<Tensor> checked_bias(const TreeArguments& a, const std::optional<Tensor>& bias) {
  if (!bias) return std::nullopt;
  check_dim(a.op, "bias", *bias, 2, a.kind.bias_shape);
  check_size(a.op, "bias", *bias, 0, a.trees(), of_trees);
  check_size(a.op, "bias", *bias, 1, a.weight_rows(),
             a.kind.shared ? "rows of weight" : "rows of weight in a tree");
  check(bias->scalar_type() == a.weight.scalar_type(), a.op, ": bias: expected the dtype of weight, ",
        torch::headeronly::toString(a.weight.scalar_type()), ", got ",
        torch::headeronly::toString(bias->scalar_type()));
  check_device(a.op, "bias", *bias, a.hidden);
  return torch::stable::contiguous(*bias);
}

std::tuple<Tensor, Tensor> checked_gradient(const TreeArguments& a, const Tensor& grad_log_prob,
                                            const Tensor& score) {
  check_dim(a.op, "grad_log_prob", grad_log_prob, 2, "[N, T]");
  check_size(a.op, "grad_log_prob", grad_log_prob, 0, a.rows(), "rows of hidden");
  check_size(a.op, "grad_log_prob", grad_log_prob, 1, a.trees(), of_trees);
  check_dtype(a.op, "grad_log_prob", grad_log_prob, accumulate_dtype(a.hidden));
  check_device(a.op, "grad_log_prob", grad_log_prob, a.hidden);
  check_size(a.op, "score", score, 0, a.rows(), "rows of hidden");
  check_size(a.op, "score", score, 1, a.trees(), of_trees);
  check_dtype(a.op, "score", score, accumulate_dtype(a.hidden));
  check_device(a.op, "score", score, a.hidden);
  return {torch::stable::contiguous(grad_log_prob), torch::stable::contiguous(score)};
}

std::optional<Tensor> checked_order(const TreeArguments& a, const std::optional<Tensor>& order) {
  if (!order) return std::nullopt;
  check_dim(a.op, "order", *order, 2, "[T, N]");
  check_dtype(a.op, "order", *order, Dtype::Long);
  check_device(a.op, "order", *order, a.hidden);
  check_size(a.op, "order", *order, 0, a.trees(), of_trees);
  check_size(a.op, "order", *order, 1, a.rows(), "rows of hidden");
  return torch::stable::contiguous(*order);
}

}  // namespace hstree
