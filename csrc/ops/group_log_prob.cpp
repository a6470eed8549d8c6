// hstree::group_log_prob and its gradients: schemas and CPU implementations.
#include "ops/group_log_prob.h"

#include <algorithm>

#include "cpu/group_log_prob.h"
#include "cpu/recycled_memory.h"
#include "ops/cpu.h"
#include "ops/recycled.h"

namespace hstree {
namespace {

cpu::GroupBatch group_batch(const GroupArguments& a) {
  return {a.op,
          const_data<int64_t>(a.target),
          const_data<int32_t>(a.cluster),
          const_data<int32_t>(a.order),
          const_data<int32_t>(a.begin),
          a.rows(),
          a.features(),
          a.trees(),
          a.classes(),
          a.clusters(),
          a.cluster_stride(),
          a.max_width};
}

// Scores of rows in their groups, one after another: room for N T max_width, whose size does not depend on the targets.
// Large memory lies in pages that the system provides at the first access, and what lies behind the last score is
// never touched.
Tensor scores(const GroupArguments& a) {
  constexpr int64_t largest_recycled = 1 << 26;
  const Dtype dtype = accumulate_dtype(a.hidden);
  const std::vector<int64_t> shape = {a.rows() * a.trees() * a.max_width};
  const int64_t bytes = shape[0] * (dtype == Dtype::Double ? 8 : 4);
  if (bytes < cpu::smallest_recycled) return zeros(a.hidden, shape, dtype);
  const bool recycled = bytes <= largest_recycled;
  void* const memory = recycled ? cpu::acquire(bytes) : cpu::acquire_zero_pages(bytes);
  return torch::stable::from_blob(memory, shape, {1}, a.hidden.device(), dtype,
                                  [recycled, bytes](void* address) {
                                    recycled ? cpu::release(address) : cpu::release_pages(address, bytes);
                                  });
}

GroupResult group_log_prob(const GroupArguments& a) {
  const Tensor log_prob = zeros(a.hidden, {a.rows(), a.trees()}, accumulate_dtype(a.hidden));
  const Tensor score = scores(a);
  const cpu::GroupBatch batch = group_batch(a);
  const auto plans = cpu::group_plans(batch);
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    cpu::group_log_prob<T>(batch, plans,
                           {const_data<T>(a.hidden), const_data<T>(a.weight), const_data<T>(a.bias),
                            data<A>(log_prob), data<A>(score)});
  });
  return {log_prob, score, empty(a.hidden, {0, 0}, Dtype::Long)};
}

GroupGradientResult group_log_prob_backward(const GroupArguments& a, const GroupGradient& g) {
  const Dtype dtype = a.hidden.scalar_type(), sums = accumulate_dtype(a.hidden);
  check_dim(a.op, "saved", g.saved, 1, "[N T max_width]");
  check_size(a.op, "saved", g.saved, 0, a.rows() * a.trees() * a.max_width, "N T max_width");
  const cpu::GroupBatch batch = group_batch(a);
  const auto plans = cpu::group_plans(batch);
  const std::vector<int64_t> visited = cpu::visited_classes(batch, plans.data(), 0, a.trees());
  int64_t classes = 0, biases = 0;
  if (g.sparse) {
    classes = visited.size();
    for (const cpu::GroupPlan& plan : plans) biases += plan.visited;
  }
  const Tensor index = empty(a.hidden, {1, classes}, Dtype::Long);
  const Tensor bias_index = empty(a.hidden, {2, biases}, Dtype::Long);
  if (g.sparse) {
    std::copy(visited.begin(), visited.end(), data<int64_t>(index));
    cpu::visited_biases(batch, plans, data<int64_t>(bias_index));
  }
  const auto nothing = [&] { return empty(a.hidden, {0}, dtype); };  // results may not share memory
  Tensor grad_hidden = nothing(), grad_weight = nothing(), grad_bias = nothing();
  if (g.of_hidden) grad_hidden = recycled(a.hidden, {a.rows(), a.features()}, sums);
  if (g.of_weight) grad_weight = recycled(a.weight, {g.sparse ? classes : a.classes(), a.features()}, dtype);
  if (g.of_bias) {
    grad_bias =
        g.sparse ? empty(a.weight, {biases}, dtype) : zeros(a.weight, {a.trees(), a.classes()}, dtype);
  }
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    cpu::group_log_prob_backward<T>(
        batch, plans, visited,
        {const_data<A>(g.grad_log_prob), const_data<A>(g.saved), const_data<T>(a.hidden),
         const_data<T>(a.weight), g.of_hidden ? data<A>(grad_hidden) : nullptr,
         g.of_weight ? data<T>(grad_weight) : nullptr, g.of_bias ? data<T>(grad_bias) : nullptr, g.sparse});
  });
  if (g.of_hidden && dtype != sums) grad_hidden = torch::stable::to(grad_hidden, dtype);
  return {grad_hidden, grad_weight, grad_bias, index, bias_index};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "group_log_prob(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor cluster, Tensor "
      "order, Tensor begin, int max_width) -> (Tensor log_prob, Tensor saved, Tensor rows)");
  // saved: on a CPU the scores of the rows in their groups, on CUDA the logarithms of their sums. rows: on CUDA, sorted
  // by cluster. output_mask: whether the gradients of hidden, weight and bias are wanted.
  m.def(
      "group_log_prob_backward(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor? bias, Tensor "
      "target, Tensor cluster, Tensor order, Tensor begin, int max_width, Tensor saved, Tensor rows, bool[3] "
      "output_mask, bool sparse) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias, Tensor index, "
      "Tensor bias_index)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("group_log_prob", HSTREE_CPU_BOX(&group_forward<group_log_prob>));
  m.impl("group_log_prob_backward", HSTREE_CPU_BOX(&group_backward<group_log_prob_backward>));
}

}  // namespace hstree
