// Checked arguments of hstree::tree_log_softmax, its gradient and hstree::group_topk, for both devices.
#pragma once

#include <optional>

#include "kernels/tree_nodes.h"
#include "ops/tensor.h"

namespace hstree {

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

inline void check_tree_table(const char* op, const char* name, const Tensor& table, const Tensor& score,
                             int64_t columns, const char* shape, const char* what) {
  check_dim(op, name, table, 3, shape);
  check_dtype(op, name, table, Dtype::Int);
  check_device(op, name, table, score);
  check_size(op, name, table, 0, score.size(0), "trees of score");
  check_size(op, name, table, 2, columns, what);
}

inline TreeLogSoftmaxArguments tree_log_softmax_arguments(const char* op, const Tensor& score,
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

inline void check_classes(const TreeLogSoftmaxArguments& a, const std::optional<Tensor>& class_score,
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

// Contiguous, if there is one.
inline std::optional<Tensor> given(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional(torch::stable::contiguous(*tensor)) : std::nullopt;
}

}  // namespace hstree
