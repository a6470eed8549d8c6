// hstree::forest_gradient_, the part of forest_log_prob that knows the scores of a chunk of rows.
// forest_log_prob_cuda.cpp registers the CUDA implementation.
#include "ops/forest_log_prob.h"

#include <tuple>

#include "cpu/forest_log_prob.h"
#include "ops/cpu.h"

namespace hstree {
namespace {

std::tuple<Tensor, Tensor> forest_gradient_cpu(const Tensor& score, const Tensor& cluster_score,
                                               const Tensor& log_prior, const Tensor& cluster,
                                               const Tensor& target, const std::optional<Tensor>&,
                                               const std::optional<Tensor>&,
                                               const std::optional<Tensor>& grad_log_prob,
                                               const std::optional<Tensor>& bias,
                                               const std::optional<Tensor>& grad_score) {
  check(!bias, forest_op, ": bias: expected None on the CPU, got shape ", bias ? shape_of(*bias) : "");
  check(!grad_score, forest_op, ": grad_score: expected None on the CPU, got shape ",
        grad_score ? shape_of(*grad_score) : "");
  const ForestArguments a = forest_arguments(score, cluster_score, log_prior, cluster, target, grad_log_prob);
  const auto run = [&](auto element) {
    using A = decltype(element);
    cpu::forest_log_prob<A>(forest_op,
                            {data<A>(a.score), data<A>(a.cluster_score), const_data<A>(a.log_prior),
                             const_data<int32_t>(a.cluster), const_data<int64_t>(a.target),
                             a.grad_log_prob ? const_data<A>(*a.grad_log_prob) : nullptr, data<A>(a.log_prob),
                             data<A>(a.grad_log_prior), a.rows(), a.classes(), a.trees(), a.clusters()});
  };
  if (a.type == ScalarType::float64) {
    run(double{});
  } else {
    run(float{});
  }
  return {a.log_prob, a.grad_log_prior};
}

}  // namespace

// order [T, V] and boundary [T, C + 1], int64: the classes of each tree by their clusters, and the first place of each
// cluster. CUDA needs them; the CPU ignores them. bias [V] is added to score, on CUDA only. The gradient of score is
// written to score or, on CUDA, to grad_score [V, R], which may be of half precision and have gaps between its rows.
STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "forest_gradient_(Tensor(a!) score, Tensor(b!) cluster_score, Tensor log_prior, Tensor cluster, Tensor "
      "target, Tensor? order, Tensor? boundary, Tensor? grad_log_prob, Tensor? bias=None, Tensor(c!)? "
      "grad_score=None) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("forest_gradient_", HSTREE_CPU_BOX(&forest_gradient_cpu));
}

}  // namespace hstree
