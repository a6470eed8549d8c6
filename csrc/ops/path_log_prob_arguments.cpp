#include <utility>

#include "ops/path_log_prob.h"

namespace hstree {

PathArguments path_arguments(const char* op, const Tensor& hidden, const Tensor& weight,
                             const std::optional<Tensor>& bias, const Tensor& target,
                             const Tensor& path_offset, const Tensor& path, const Tensor& leaf_position,
                             const std::optional<Tensor>& feature_index, int64_t max_depth) {
  constexpr const char* of_trees = "trees of leaf_position";
  check_dim(op, "hidden", hidden, 2, "[N, D]");
  check_dim(op, "weight", weight, 3, "[T, M, S]");
  check_dim(op, "target", target, 1, "[N]");
  check_dim(op, "path_offset", path_offset, 2, "[T, V + 1]");
  check_dim(op, "path", path, 1, "[P]");
  check_dim(op, "leaf_position", leaf_position, 2, "[T, V]");
  const ScalarType type = element_type(op, "hidden", hidden);
  const auto check_values = [&](const char* name, const Tensor& tensor, const char* like,
                                const Tensor& other) {
    check(tensor.scalar_type() == other.scalar_type(), op, ": ", name, ": expected the dtype of ", like, ", ",
          torch::headeronly::toString(other.scalar_type()), ", got ",
          torch::headeronly::toString(tensor.scalar_type()));
    check_device(op, name, tensor, hidden);
  };
  const auto check_table = [&](const char* name, const Tensor& table, Dtype dtype) {
    check_dtype(op, name, table, dtype);
    check_device(op, name, table, hidden);
  };
  check_values("weight", weight, "hidden", hidden);
  check_table("target", target, Dtype::Long);
  check_table("path_offset", path_offset, Dtype::Long);
  check_table("path", path, Dtype::Int);
  check_table("leaf_position", leaf_position, Dtype::Int);
  const int64_t rows = hidden.size(0), trees = leaf_position.size(0), weight_rows = weight.size(1);
  check_size(op, "target", target, 0, rows, "rows of hidden");
  check_size(op, "path_offset", path_offset, 0, trees, of_trees);
  check_size(op, "path_offset", path_offset, 1, leaf_position.size(1) + 1, "classes of leaf_position + 1");
  check(rows < INT32_MAX, op, ": hidden: expected fewer than 2^31 - 1 rows, got ", rows);
  check(trees < INT32_MAX, op, ": leaf_position: expected fewer than 2^31 - 1 trees, got ", trees);
  check(weight_rows < (1 << 30), op, ": weight: expected fewer than 2^30 rows in a tree, got ", weight_rows);
  check_size(op, "weight", weight, 0, trees, of_trees);
  if (feature_index) {
    check_dim(op, "feature_index", *feature_index, 2, "[T, S]");
    check_table("feature_index", *feature_index, Dtype::Int);
    check_size(op, "feature_index", *feature_index, 0, trees, of_trees);
    check_size(op, "feature_index", *feature_index, 1, weight.size(2), "features of weight");
  } else {
    check_size(op, "weight", weight, 2, hidden.size(1), "features of hidden, as there is no feature_index");
  }
  if (bias) {
    check_dim(op, "bias", *bias, 2, "[T, M]");
    check_size(op, "bias", *bias, 0, trees, of_trees);
    check_size(op, "bias", *bias, 1, weight_rows, "rows of weight in a tree");
    check_values("bias", *bias, "weight", weight);
  }
  check(max_depth >= 0 && max_depth <= hstree::max_depth, op, ": max_depth: expected 0 to ",
        hstree::max_depth, ", got ", max_depth);
  const auto given = [](const std::optional<Tensor>& tensor) {
    return tensor ? std::optional(torch::stable::contiguous(*tensor)) : std::nullopt;
  };
  return {op,
          type,
          torch::stable::contiguous(hidden),
          torch::stable::contiguous(weight),
          given(bias),
          torch::stable::contiguous(target),
          torch::stable::contiguous(path_offset),
          torch::stable::contiguous(path),
          torch::stable::contiguous(leaf_position),
          given(feature_index),
          max_depth};
}

}  // namespace hstree
