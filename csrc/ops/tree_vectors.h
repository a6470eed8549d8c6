// The arguments that tree_topk and sample share: a mixture of trees with its vectors.
#pragma once

#include <optional>

#include "kernels/tree_vectors.h"
#include "ops/tensor.h"

namespace hstree {

#define HSTREE_TREE_VECTORS_SCHEMA                                                            \
  "Tensor hidden, Tensor? weight, Tensor? bias, Tensor? class_weight, Tensor? class_bias, "   \
  "Tensor? root_log_prob, Tensor log_gate, Tensor? feature_index, Tensor node, Tensor edge, " \
  "Tensor leaf_edge"

// Checked, contiguous tensors.
struct TreeTensors {
  const char* op;
  ScalarType type;
  Dtype sums;
  Tensor hidden;
  bool groups;                         // below the root are groups of classes, or binary nodes
  std::optional<Tensor> weight, bias;  // of the classes, or of the nodes
  std::optional<Tensor> root_log_prob;
  Tensor log_gate;
  std::optional<Tensor> feature_index;
  Tensor node, edge, leaf_edge;

  int64_t rows() const { return hidden.size(0); }
  int64_t trees() const { return log_gate.size(1); }
  int64_t classes() const { return leaf_edge.size(1); }
  int64_t features() const { return feature_index ? feature_index->size(1) : hidden.size(1); }
  int64_t weight_rows() const { return weight && !groups ? weight->size(1) : 0; }
};

inline Tensor checked_tree_table(const char* op, const char* name, const Tensor& tensor, const Tensor& hidden,
                                 int64_t dim, const char* shape) {
  check_dim(op, name, tensor, dim, shape);
  check_dtype(op, name, tensor, Dtype::Int);
  check_device(op, name, tensor, hidden);
  return torch::stable::contiguous(tensor);
}

// `weight` and `bias` of the binary nodes, or of the classes.
inline void check_vectors(const char* op, const char* name, const char* bias_name,
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

// Throws std::runtime_error for a wrong shape, dtype or device.
inline TreeTensors tree_tensors(const char* op, const Tensor& hidden, const std::optional<Tensor>& weight,
                                const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight,
                                const std::optional<Tensor>& class_bias,
                                const std::optional<Tensor>& root_log_prob, const Tensor& log_gate,
                                const std::optional<Tensor>& feature_index, const Tensor& node,
                                const Tensor& edge, const Tensor& leaf_edge) {
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
    index = checked_tree_table(op, "feature_index", *feature_index, hidden, 2, "[T, S]");
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
  const Tensor nodes = checked_tree_table(op, "node", node, hidden, 3, "[T, M, 5]");
  const Tensor edges = checked_tree_table(op, "edge", edge, hidden, 3, "[T, E, 2]");
  const Tensor leaves = checked_tree_table(op, "leaf_edge", leaf_edge, hidden, 2, "[T, V]");
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
  check(!weight || !class_weight, op, ": class_weight: expected None with weight: below the roots are ",
        "binary nodes or groups of classes");
  const bool groups = class_weight.has_value();
  return {op,
          type,
          sums,
          torch::stable::contiguous(hidden),
          groups,
          contiguous(groups ? class_weight : weight),
          contiguous(groups ? class_bias : bias),
          contiguous(root_log_prob),
          torch::stable::contiguous(log_gate),
          groups ? std::nullopt : index,  // groups read all features
          nodes,
          edges,
          leaves};
}

// sharpness: 1 / temperature.
inline TreeVectors tree_vectors(const TreeTensors& tensors, double sharpness = 1) {
  return {tensors.op,
          tensors.hidden.const_data_ptr(),
          const_data<void>(tensors.weight),
          const_data<void>(tensors.bias),
          tensors.weight_rows(),
          tensors.groups,
          const_data<void>(tensors.root_log_prob),
          tensors.root_log_prob ? tensors.root_log_prob->size(2) : 0,
          tensors.log_gate.const_data_ptr(),
          const_data<int32_t>(tensors.feature_index),
          const_data<TreeNode>(tensors.node),
          const_data<TreeEdge>(tensors.edge),
          const_data<int32_t>(tensors.leaf_edge),
          tensors.rows(),
          tensors.hidden.size(1),
          tensors.trees(),
          tensors.features(),
          tensors.node.size(1),
          tensors.edge.size(1),
          tensors.classes(),
          sharpness};
}

}  // namespace hstree
