// hstree::sample: draws from a mixture of trees. sample_cuda.cpp registers the CUDA implementation.
#include "cpu/sample.h"

#include "ops/cpu.h"
#include "ops/sample.h"

namespace hstree {
namespace {

std::tuple<Tensor, Tensor> sample_cpu(const Tensor& hidden, const std::optional<Tensor>& weight,
                                      const std::optional<Tensor>& bias,
                                      const std::optional<Tensor>& class_weight,
                                      const std::optional<Tensor>& class_bias,
                                      const std::optional<Tensor>& root_log_prob, const Tensor& log_gate,
                                      const std::optional<Tensor>& feature_index, const Tensor& node,
                                      const Tensor& edge, const Tensor& leaf_edge, const Tensor& seed,
                                      int64_t n, double temperature) {
  constexpr const char* op = "hstree::sample";
  const TreeTensors tensors = tree_tensors(op, hidden, weight, bias, class_weight, class_bias, root_log_prob,
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

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("sample(" HSTREE_TREE_VECTORS_SCHEMA
        ", Tensor seed, int n, float temperature) -> (Tensor index, Tensor log_prob)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("sample", HSTREE_CPU_BOX(&sample_cpu));
}

}  // namespace hstree
