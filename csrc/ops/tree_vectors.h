// The arguments that tree_topk and sample share: a mixture of trees with its vectors.
#pragma once

#include <optional>

#include "cpu/mixture_row.h"
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
  std::optional<Tensor> weight, bias;              // of the binary nodes
  std::optional<Tensor> class_weight, class_bias;  // of the classes in groups
  std::optional<Tensor> root_log_prob;
  Tensor log_gate;
  std::optional<Tensor> feature_index;
  Tensor node, edge, leaf_edge;

  int64_t rows() const { return hidden.size(0); }
  int64_t trees() const { return log_gate.size(1); }
  int64_t classes() const { return leaf_edge.size(1); }
  int64_t features() const { return feature_index ? feature_index->size(1) : hidden.size(1); }
  int64_t weight_rows() const { return weight ? weight->size(1) : 0; }
};

// Throws std::runtime_error for a wrong shape, dtype or device.
TreeTensors tree_tensors(const char* op, const Tensor& hidden, const std::optional<Tensor>& weight,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight,
                         const std::optional<Tensor>& class_bias, const std::optional<Tensor>& root_log_prob,
                         const Tensor& log_gate, const std::optional<Tensor>& feature_index,
                         const Tensor& node, const Tensor& edge, const Tensor& leaf_edge);

template <typename T>
cpu::TreeVectors<T> tree_vectors(const TreeTensors& tensors, double sharpness = 1) {
  using A = cpu::accumulate_t<T>;
  static const T nothing{};  // an empty tensor has no address, but it is there
  const auto at = [](const std::optional<Tensor>& tensor) {
    const T* const address = tensor ? const_data<T>(*tensor) : nullptr;
    return tensor && !address ? &nothing : address;
  };
  return {tensors.op,
          const_data<T>(tensors.hidden),
          at(tensors.weight),
          at(tensors.bias),
          tensors.weight_rows(),
          at(tensors.class_weight),
          at(tensors.class_bias),
          tensors.root_log_prob ? const_data<A>(*tensors.root_log_prob) : nullptr,
          tensors.root_log_prob ? tensors.root_log_prob->size(2) : 0,
          const_data<A>(tensors.log_gate),
          tensors.feature_index ? const_data<int32_t>(*tensors.feature_index) : nullptr,
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
          static_cast<A>(sharpness)};
}

}  // namespace hstree
