// The arguments that tree_topk, sample and candidate_log_prob share: a mixture of trees with its vectors.
#pragma once

#include <optional>

#include "ops/tensor.h"

namespace hstree {

#define HSTREE_TREE_VECTORS_SCHEMA                                                        \
  "Tensor hidden, Tensor? weight, Tensor? bias, Tensor? wide_weight, Tensor? wide_bias, " \
  "Tensor? leaf_weight, Tensor? leaf_bias, Tensor? root_log_prob, Tensor log_gate, "      \
  "Tensor? feature_index, Tensor node, Tensor edge, Tensor leaf_edge"

// Checked, contiguous tensors. The weight and bias of each block of nodes, of the classes in leaf groups last.
struct TreeTensors {
  const char* op;
  ScalarType type;
  Dtype sums;
  Tensor hidden;
  std::optional<Tensor> weight[3], bias[3];
  std::optional<Tensor> root_log_prob;
  Tensor log_gate;
  std::optional<Tensor> feature_index;
  Tensor node, edge, leaf_edge;

  int64_t rows() const { return hidden.size(0); }
  int64_t trees() const { return log_gate.size(1); }
  int64_t classes() const { return leaf_edge.size(1); }
  int64_t features() const { return feature_index ? feature_index->size(1) : hidden.size(1); }
  int64_t weight_rows(int block) const { return weight[block] ? weight[block]->size(1) : 0; }
};

// Throws std::runtime_error for a wrong shape, dtype or device.
TreeTensors tree_tensors(const char* op, const Tensor& hidden, const std::optional<Tensor>& weight,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& wide_weight,
                         const std::optional<Tensor>& wide_bias, const std::optional<Tensor>& leaf_weight,
                         const std::optional<Tensor>& leaf_bias, const std::optional<Tensor>& root_log_prob,
                         const Tensor& log_gate, const std::optional<Tensor>& feature_index,
                         const Tensor& node, const Tensor& edge, const Tensor& leaf_edge);

}  // namespace hstree
