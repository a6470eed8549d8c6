// hstree::sample: draws from a mixture of trees.
#include "cpu/sample.h"

#include <cmath>
#include <tuple>

#include "kernels/sample.h"
#include "ops/cpu.h"
#include "ops/cuda.h"
#include "ops/tree_vectors.h"

namespace hstree {
namespace {

// Classes and their log-probabilities, [N, n].
struct Draws {
  const Tensor& seed;
  int64_t n;
  double temperature;
  Tensor index, log_prob;
};

template <void (*kernel)(const TreeTensors&, const Draws&)>
std::tuple<Tensor, Tensor> draw(const Tensor& hidden, const std::optional<Tensor>& weight,
                                const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight,
                                const std::optional<Tensor>& class_bias,
                                const std::optional<Tensor>& root_log_prob, const Tensor& log_gate,
                                const std::optional<Tensor>& feature_index, const Tensor& node,
                                const Tensor& edge, const Tensor& leaf_edge, const Tensor& seed, int64_t n,
                                double temperature) {
  const char* op = "hstree::sample";
  const TreeTensors tensors = tree_tensors(op, hidden, weight, bias, class_weight, class_bias, root_log_prob,
                                           log_gate, feature_index, node, edge, leaf_edge);
  check_dim(op, "seed", seed, 1, "[1]");
  check_size(op, "seed", seed, 0, 1, "one number");
  check_dtype(op, "seed", seed, Dtype::Long);
  check_device(op, "seed", seed, hidden);
  check(n >= 1, op, ": n: expected at least 1 draw of a row, got ", n);
  check(std::isfinite(temperature) && temperature > 0, op,
        ": temperature: expected a finite positive number, got ", temperature);
  const Draws draws = {seed, n, temperature, empty(hidden, {tensors.rows(), n}, Dtype::Long),
                       empty(hidden, {tensors.rows(), n}, tensors.sums)};
  kernel(tensors, draws);
  return {draws.index, draws.log_prob};
}

#ifndef HSTREE_CUDA_ONLY
void draw_cpu(const TreeTensors& tensors, const Draws& draws) {
  dispatch(tensors.type, [&](auto element) {
    using T = decltype(element);
    cpu::sample<T>(tree_vectors(tensors, 1 / draws.temperature),
                   {static_cast<uint64_t>(*const_data<int64_t>(draws.seed)), draws.n,
                    data<int64_t>(draws.index), data<cpu::accumulate_t<T>>(draws.log_prob)});
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("sample(" HSTREE_TREE_VECTORS_SCHEMA
        ", Tensor seed, int n, float temperature) -> (Tensor index, Tensor log_prob)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("sample", HSTREE_CPU_BOX(&draw<draw_cpu>));
}
#endif

#ifdef HSTREE_CUDA
void draw_cuda(const TreeTensors& tensors, const Draws& draws) {
  const CudaCall call(tensors.hidden);
  const Tensor workspace = empty(tensors.hidden, {tensors.rows(), draws.n, tensors.trees()}, tensors.sums);
  sample(tensors.type, tree_vectors(tensors, 1 / draws.temperature), const_data<int64_t>(draws.seed), draws.n,
         data<int64_t>(draws.index), workspace.mutable_data_ptr(), draws.log_prob.mutable_data_ptr(),
         call.stream());
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("sample", TORCH_BOX(&draw<draw_cuda>));
}
#endif

}  // namespace
}  // namespace hstree
