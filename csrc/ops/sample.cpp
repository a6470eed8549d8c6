// hstree::sample: draws from a mixture of trees. hstree::candidate_log_prob: log-probabilities of some classes of
// each row. sample_cuda.cpp registers the CUDA implementations.
#include "cpu/sample.h"

#include "ops/cpu.h"
#include "ops/sample.h"

namespace hstree {
namespace {

std::tuple<Tensor, Tensor> sample_cpu(
    const Tensor& hidden, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& wide_weight, const std::optional<Tensor>& wide_bias,
    const std::optional<Tensor>& leaf_weight, const std::optional<Tensor>& leaf_bias,
    const std::optional<Tensor>& root_log_prob, const Tensor& log_gate,
    const std::optional<Tensor>& feature_index, const Tensor& node, const Tensor& edge,
    const Tensor& leaf_edge, const Tensor& seed, int64_t n, double temperature) {
  constexpr const char* op = "hstree::sample";
  const TreeTensors tensors =
      tree_tensors(op, hidden, weight, bias, wide_weight, wide_bias, leaf_weight, leaf_bias, root_log_prob,
                   log_gate, feature_index, node, edge, leaf_edge);
  check_draws(tensors, seed, n, temperature);
  const Tensor index = empty(hidden, {tensors.rows(), n}, Dtype::Long);
  const Tensor log_prob = empty(hidden, {tensors.rows(), n}, tensors.sums);
  dispatch(tensors.type, [&](auto element) {
    using T = decltype(element);
    cpu::sample<T>(tree_vectors<T>(tensors, 1 / temperature),
                   {static_cast<uint64_t>(*const_data<int64_t>(seed)), n, data<int64_t>(index),
                    data<cpu::accumulate_t<T>>(log_prob)});
  });
  return {index, log_prob};
}

Tensor candidate_log_prob_cpu(const Tensor& hidden, const std::optional<Tensor>& weight,
                              const std::optional<Tensor>& bias, const std::optional<Tensor>& wide_weight,
                              const std::optional<Tensor>& wide_bias,
                              const std::optional<Tensor>& leaf_weight,
                              const std::optional<Tensor>& leaf_bias,
                              const std::optional<Tensor>& root_log_prob, const Tensor& log_gate,
                              const std::optional<Tensor>& feature_index, const Tensor& node,
                              const Tensor& edge, const Tensor& leaf_edge, const Tensor& candidates,
                              double temperature) {
  constexpr const char* op = "hstree::candidate_log_prob";
  const TreeTensors tensors =
      tree_tensors(op, hidden, weight, bias, wide_weight, wide_bias, leaf_weight, leaf_bias, root_log_prob,
                   log_gate, feature_index, node, edge, leaf_edge);
  check_candidates(tensors, candidates, temperature);
  const int64_t n = candidates.size(1);
  const Tensor index = torch::stable::contiguous(candidates);
  const Tensor log_prob = empty(hidden, {tensors.rows(), n}, tensors.sums);
  dispatch(tensors.type, [&](auto element) {
    using T = decltype(element);
    cpu::candidate_log_prob<T>(tree_vectors<T>(tensors, 1 / temperature),
                               {const_data<int64_t>(index), n, data<cpu::accumulate_t<T>>(log_prob)});
  });
  return log_prob;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("sample(" HSTREE_TREE_VECTORS_SCHEMA
        ", Tensor seed, int n, float temperature) -> (Tensor index, Tensor log_prob)");
  m.def("candidate_log_prob(" HSTREE_TREE_VECTORS_SCHEMA ", Tensor candidates, float temperature) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("sample", HSTREE_CPU_BOX(&sample_cpu));
  m.impl("candidate_log_prob", HSTREE_CPU_BOX(&candidate_log_prob_cpu));
}

}  // namespace hstree
