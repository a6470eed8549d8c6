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

// The weight and bias of one block of nodes.
struct Block {
  std::optional<Tensor> weight, bias;
};

Block block(const char* op, const char* name, const char* bias_name, const std::optional<Tensor>& weight,
            const std::optional<Tensor>& bias, const Tensor& hidden, int64_t trees) {
  if (!weight) {
    check(!bias, op, ": ", bias_name, ": expected None, as there is no ", name);
    return {};
  }
  check_dim(op, name, *weight, 3, "[T, M, S]");
  check_dtype(op, name, *weight, hidden.scalar_type());
  check_device(op, name, *weight, hidden);
  check_size(op, name, *weight, 0, trees, "trees of log_gate");
  if (!bias) return {torch::stable::contiguous(*weight), std::nullopt};
  check_dim(op, bias_name, *bias, 2, "[T, M]");
  check_dtype(op, bias_name, *bias, hidden.scalar_type());
  check_device(op, bias_name, *bias, hidden);
  check_size(op, bias_name, *bias, 0, trees, "trees of log_gate");
  check_size(op, bias_name, *bias, 1, weight->size(1), "rows of its weight");
  return {torch::stable::contiguous(*weight), torch::stable::contiguous(*bias)};
}

// The weight [V, D] and bias [T, V] of the classes in leaf groups.
Block leaf_vectors(const char* op, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                   const Tensor& hidden, int64_t trees, int64_t classes) {
  if (!weight) {
    check(!bias, op, ": leaf_bias: expected None, as there is no leaf_weight");
    return {};
  }
  check_dim(op, "leaf_weight", *weight, 2, "[V, D]");
  check_dtype(op, "leaf_weight", *weight, hidden.scalar_type());
  check_device(op, "leaf_weight", *weight, hidden);
  check_size(op, "leaf_weight", *weight, 0, classes, "classes of leaf_edge");
  check_size(op, "leaf_weight", *weight, 1, hidden.size(1), "features of hidden");
  if (!bias) return {torch::stable::contiguous(*weight), std::nullopt};
  check_dim(op, "leaf_bias", *bias, 2, "[T, V]");
  check_dtype(op, "leaf_bias", *bias, hidden.scalar_type());
  check_device(op, "leaf_bias", *bias, hidden);
  check_size(op, "leaf_bias", *bias, 0, trees, "trees of log_gate");
  check_size(op, "leaf_bias", *bias, 1, classes, "classes of leaf_edge");
  return {torch::stable::contiguous(*weight), torch::stable::contiguous(*bias)};
}

}  // namespace

TreeTensors tree_tensors(const char* op, const Tensor& hidden, const std::optional<Tensor>& weight,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& wide_weight,
                         const std::optional<Tensor>& wide_bias, const std::optional<Tensor>& leaf_weight,
                         const std::optional<Tensor>& leaf_bias, const std::optional<Tensor>& root_log_prob,
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
  const Block blocks[2] = {block(op, "weight", "bias", weight, bias, hidden, trees),
                           block(op, "wide_weight", "wide_bias", wide_weight, wide_bias, hidden, trees)};
  std::optional<Tensor> index;
  if (feature_index) {
    index = table(op, "feature_index", *feature_index, hidden, 2, "[T, S]");
    check_size(op, "feature_index", *index, 0, trees, "trees of log_gate");
  }
  const int64_t features = index ? index->size(1) : hidden.size(1);
  for (int b = 0; b < 2; ++b) {
    if (!blocks[b].weight) continue;
    check_size(op, b ? "wide_weight" : "weight", *blocks[b].weight, 2, features,
               index ? "features of feature_index" : "features of hidden, as there is no feature_index");
  }
  std::optional<Tensor> root;
  if (root_log_prob) {
    check_dim(op, "root_log_prob", *root_log_prob, 3, "[T, N, C]");
    check_dtype(op, "root_log_prob", *root_log_prob, sums);
    check_device(op, "root_log_prob", *root_log_prob, hidden);
    check_size(op, "root_log_prob", *root_log_prob, 0, trees, "trees of log_gate");
    check_size(op, "root_log_prob", *root_log_prob, 1, rows, "rows of hidden");
    root = torch::stable::contiguous(*root_log_prob);
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
  const Block leaf = leaf_vectors(op, leaf_weight, leaf_bias, hidden, trees, classes);
  return {op,
          type,
          sums,
          torch::stable::contiguous(hidden),
          {blocks[0].weight, blocks[1].weight, leaf.weight},
          {blocks[0].bias, blocks[1].bias, leaf.bias},
          root,
          torch::stable::contiguous(log_gate),
          index,
          nodes,
          edges,
          leaves};
}

}  // namespace hstree
