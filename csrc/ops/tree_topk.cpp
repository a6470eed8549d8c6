// hstree::tree_topk: the k most probable classes of a mixture of trees. CPU only: on a GPU TreeEnsemble.topk
// ranks the log-probabilities of all classes.
#include "cpu/tree_topk.h"

#include "ops/tensor.h"

namespace hstree {
namespace {

constexpr const char* op = "hstree::tree_topk";

Tensor table(const char* name, const Tensor& tensor, const Tensor& hidden, int64_t dim, const char* shape) {
  check_dim(op, name, tensor, dim, shape);
  check_dtype(op, name, tensor, Dtype::Int);
  check_device(op, name, tensor, hidden);
  return torch::stable::contiguous(tensor);
}

// The weight and bias of one block of nodes.
struct Block {
  std::optional<Tensor> weight, bias;

  int64_t rows() const { return weight ? weight->size(1) : 0; }
};

Block block(const char* name, const char* bias_name, const std::optional<Tensor>& weight,
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
Block leaf_vectors(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
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

std::tuple<Tensor, Tensor> tree_topk_cpu(const Tensor& hidden, const std::optional<Tensor>& weight,
                                         const std::optional<Tensor>& bias,
                                         const std::optional<Tensor>& wide_weight,
                                         const std::optional<Tensor>& wide_bias,
                                         const std::optional<Tensor>& leaf_weight,
                                         const std::optional<Tensor>& leaf_bias,
                                         const std::optional<Tensor>& root_log_prob, const Tensor& log_gate,
                                         const std::optional<Tensor>& feature_index, const Tensor& node,
                                         const Tensor& edge, const Tensor& leaf_edge, int64_t k) {
  const ScalarType type = element_type(op, "hidden", hidden);
  const Dtype sums = accumulate_dtype(hidden);
  check_dim(op, "hidden", hidden, 2, "[N, D]");
  check_dim(op, "log_gate", log_gate, 2, "[N, T]");
  check_dtype(op, "log_gate", log_gate, sums);
  check_device(op, "log_gate", log_gate, hidden);
  check_size(op, "log_gate", log_gate, 0, hidden.size(0), "rows of hidden");
  const int64_t rows = hidden.size(0), trees = log_gate.size(1);
  check(trees > 0, op, ": log_gate: expected at least one tree, got shape ", shape_of(log_gate));
  const Block blocks[2] = {block("weight", "bias", weight, bias, hidden, trees),
                           block("wide_weight", "wide_bias", wide_weight, wide_bias, hidden, trees)};
  std::optional<Tensor> index;
  if (feature_index) {
    index = table("feature_index", *feature_index, hidden, 2, "[T, S]");
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
  const Tensor nodes = table("node", node, hidden, 3, "[T, M, 5]");
  const Tensor edges = table("edge", edge, hidden, 3, "[T, E, 2]");
  const Tensor leaves = table("leaf_edge", leaf_edge, hidden, 2, "[T, V]");
  check_size(op, "node", nodes, 0, trees, "trees of log_gate");
  check_size(op, "node", nodes, 2, 5, "block, row, first edge, width, edge above");
  check_size(op, "edge", edges, 0, trees, "trees of log_gate");
  check_size(op, "edge", edges, 2, 2, "node above, node or class below");
  check_size(op, "leaf_edge", leaves, 0, trees, "trees of log_gate");
  const int64_t classes = leaves.size(1);
  check(k >= 1 && k <= classes, op, ": k: expected 1 to ", classes, " (the number of classes), got ", k);
  check(classes == 1 || nodes.size(1) > 0, op, ": node: expected at least one node of a tree over ", classes,
        " classes");

  const Block leaf = leaf_vectors(leaf_weight, leaf_bias, hidden, trees, classes);
  const Tensor from = torch::stable::contiguous(hidden), gate = torch::stable::contiguous(log_gate);
  const Tensor log_prob = empty(hidden, {rows, k}, sums), found = empty(hidden, {rows, k}, Dtype::Long);
  dispatch(type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    const auto at = [](const std::optional<Tensor>& tensor) {
      return tensor ? const_data<T>(*tensor) : nullptr;
    };
    cpu::tree_topk<T>({op,
                       const_data<T>(from),
                       {at(blocks[0].weight), at(blocks[1].weight)},
                       {at(blocks[0].bias), at(blocks[1].bias)},
                       {blocks[0].rows(), blocks[1].rows()},
                       at(leaf.weight),
                       at(leaf.bias),
                       root ? const_data<A>(*root) : nullptr,
                       root ? root->size(2) : 0,
                       const_data<A>(gate),
                       index ? const_data<int32_t>(*index) : nullptr,
                       const_data<TreeNode>(nodes),
                       const_data<TreeEdge>(edges),
                       const_data<int32_t>(leaves),
                       rows,
                       hidden.size(1),
                       trees,
                       features,
                       nodes.size(1),
                       edges.size(1),
                       classes,
                       k,
                       data<A>(log_prob),
                       data<int64_t>(found)});
  });
  return {log_prob, found};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "tree_topk(Tensor hidden, Tensor? weight, Tensor? bias, Tensor? wide_weight, Tensor? wide_bias, "
      "Tensor? leaf_weight, Tensor? leaf_bias, Tensor? root_log_prob, Tensor log_gate, Tensor? "
      "feature_index, Tensor node, Tensor edge, "
      "Tensor leaf_edge, int k) -> (Tensor log_prob, Tensor index)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("tree_topk", TORCH_BOX(&tree_topk_cpu));
}

}  // namespace hstree
