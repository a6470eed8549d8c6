#include "ops/tree_vectors.h"

namespace hstree {
namespace {

Tensor table(const char* op, const char* name, const Tensor& tensor, const Tensor& hidden, int64_t dim,
             const char* shape) {
  check_dim(op, name, tensor, dim, shape);
  check_dtype(op, name, tensor, Dtype::Int);
  check_device(op, name, tensor, hidden);
  return torch::stable::contiguous(tensor);
}

std::optional<Tensor> given(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional(torch::stable::contiguous(*tensor)) : std::nullopt;
}

// `weight` and `bias` of the binary nodes, or of the classes.
void check_vectors(const char* op, const char* name, const char* bias_name,
                   const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                   const Tensor& hidden, int64_t trees, int64_t dim, const char* shape) {
  if (!weight) {
    check(!bias, op, ": ", bias_name, ": expected None, as there is no ", name);
    return;
  }
  check_dim(op, name, *weight, dim, shape);
  check_dtype(op, name, *weight, hidden.scalar_type());
  check_device(op, name, *weight, hidden);
  if (dim == 3) check_size(op, name, *weight, 0, trees, "trees of log_gate");
  if (!bias) return;
  check_dim(op, bias_name, *bias, 2, dim == 3 ? "[T, M]" : "[T, V]");
  check_dtype(op, bias_name, *bias, hidden.scalar_type());
  check_device(op, bias_name, *bias, hidden);
  check_size(op, bias_name, *bias, 0, trees, "trees of log_gate");
  check_size(op, bias_name, *bias, 1, weight->size(dim - 2),
             dim == 3 ? "rows of weight" : "rows of class_weight");
}

}  // namespace

TreeTensors tree_tensors(const char* op, const Tensor& hidden, const std::optional<Tensor>& weight,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight,
                         const std::optional<Tensor>& class_bias, const std::optional<Tensor>& root_log_prob,
                         const Tensor& log_gate, const std::optional<Tensor>& feature_index,
                         const Tensor& node, const Tensor& edge, const Tensor& leaf_edge) {
  const ScalarType type = element_type(op, "hidden", hidden);
  const Dtype sums = accumulate_dtype(hidden);
  check_dim(op, "hidden", hidden, 2, "[N, D]");
  check_dim(op, "log_gate", log_gate, 2, "[N, T]");
  check_dtype(op, "log_gate", log_gate, sums);
  check_device(op, "log_gate", log_gate, hidden);
  check_size(op, "log_gate", log_gate, 0, hidden.size(0), "rows of hidden");
  const int64_t rows = hidden.size(0), trees = log_gate.size(1);
  check(trees > 0, op, ": log_gate: expected at least one tree, got shape ", shape_of(log_gate));
  std::optional<Tensor> index;
  if (feature_index) {
    index = table(op, "feature_index", *feature_index, hidden, 2, "[T, S]");
    check_size(op, "feature_index", *index, 0, trees, "trees of log_gate");
  }
  check_vectors(op, "weight", "bias", weight, bias, hidden, trees, 3, "[T, M, S]");
  if (weight) {
    check_size(op, "weight", *weight, 2, index ? index->size(1) : hidden.size(1),
               index ? "features of feature_index" : "features of hidden, as there is no feature_index");
  }
  if (root_log_prob) {
    check_dim(op, "root_log_prob", *root_log_prob, 3, "[T, N, C]");
    check_dtype(op, "root_log_prob", *root_log_prob, sums);
    check_device(op, "root_log_prob", *root_log_prob, hidden);
    check_size(op, "root_log_prob", *root_log_prob, 0, trees, "trees of log_gate");
    check_size(op, "root_log_prob", *root_log_prob, 1, rows, "rows of hidden");
  }
  const Tensor nodes = table(op, "node", node, hidden, 3, "[T, M, 5]");
  const Tensor edges = table(op, "edge", edge, hidden, 3, "[T, E, 2]");
  const Tensor leaves = table(op, "leaf_edge", leaf_edge, hidden, 2, "[T, V]");
  check_size(op, "node", nodes, 0, trees, "trees of log_gate");
  check_size(op, "node", nodes, 2, 5, "block, row, first edge, width, edge above");
  check_size(op, "edge", edges, 0, trees, "trees of log_gate");
  check_size(op, "edge", edges, 2, 2, "node above, node or class below");
  check_size(op, "leaf_edge", leaves, 0, trees, "trees of log_gate");
  const int64_t classes = leaves.size(1);
  check(classes > 0, op, ": leaf_edge: expected at least one class, got shape ", shape_of(leaf_edge));
  check(classes == 1 || nodes.size(1) > 0, op, ": node: expected at least one node of a tree over ", classes,
        " classes");
  check_vectors(op, "class_weight", "class_bias", class_weight, class_bias, hidden, trees, 2, "[V, D]");
  if (class_weight) {
    check_size(op, "class_weight", *class_weight, 0, classes, "classes of leaf_edge");
    check_size(op, "class_weight", *class_weight, 1, hidden.size(1), "features of hidden");
  }
  return {op,
          type,
          sums,
          torch::stable::contiguous(hidden),
          given(weight),
          given(bias),
          given(class_weight),
          given(class_bias),
          given(root_log_prob),
          torch::stable::contiguous(log_gate),
          index,
          nodes,
          edges,
          leaves};
}

}  // namespace hstree
