// hstree::path_log_prob and its gradient: schemas and CPU implementations. hstree::forward is the op with its first
// two results.
#include "ops/path_log_prob.h"

#include "cpu/path_log_prob.h"
#include "ops/cpu.h"
#include "ops/recycled.h"

namespace hstree {
namespace {

// The rows of the batch in the order of their leaves, [T, N].
Tensor leaf_order(const PathArguments& a) {
  const Tensor order = empty(a.hidden, {a.trees(), a.rows()}, Dtype::Long);
  cpu::parallel(a.trees(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      cpu::leaf_order(a.op, const_data<int32_t>(a.leaf_position) + t * a.classes(), a.classes(),
                      const_data<int64_t>(a.target), a.rows(), data<int64_t>(order) + t * a.rows());
    }
  });
  return order;
}

cpu::TreeBatch tree_batch(const PathArguments& a, const Tensor& order) {
  return {a.op,
          const_data<int64_t>(a.target),
          const_data<int64_t>(a.path_offset),
          const_data<int32_t>(a.path),
          const_data<int32_t>(a.leaf_position),
          a.feature_index ? const_data<int32_t>(*a.feature_index) : nullptr,
          const_data<int64_t>(order),
          a.rows(),
          a.in_features(),
          a.trees(),
          a.weight_rows(),
          a.features(),
          a.classes(),
          a.path.size(0),
          a.max_depth};
}

PathResult path_log_prob(const PathArguments& a) {
  const Dtype sums = accumulate_dtype(a.hidden);
  const Tensor log_prob = zeros(a.hidden, {a.rows(), a.trees()}, sums);
  const Tensor score = zeros(a.hidden, {a.rows(), a.trees(), a.max_depth}, sums);
  const Tensor order = leaf_order(a);
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    cpu::path_log_prob<T>(tree_batch(a, order),
                          {const_data<T>(a.hidden), const_data<T>(a.weight),
                           a.bias ? const_data<T>(*a.bias) : nullptr, data<A>(log_prob), data<A>(score)});
  });
  return {log_prob, score, order, empty(a.hidden, {0}, Dtype::Int)};
}

PathGradientResult path_log_prob_backward(const PathArguments& a, const PathGradient& g) {
  const Dtype dtype = a.hidden.scalar_type(), sums = accumulate_dtype(a.hidden);
  const cpu::TreeBatch batch = tree_batch(a, g.order);
  const auto plans = cpu::path_plans(batch);
  const int64_t nnz = g.sparse ? cpu::visited(plans) : 0;
  const Tensor index = empty(a.hidden, {2, nnz}, Dtype::Long);
  if (g.sparse) cpu::visited_index(plans, data<int64_t>(index));
  const auto nothing = [&] { return empty(a.hidden, {0}, dtype); };  // results may not share memory
  Tensor grad_hidden = nothing(), grad_weight = nothing(), grad_bias = nothing();
  if (g.of_hidden) grad_hidden = recycled(a.hidden, {a.rows(), a.in_features()}, sums);
  if (g.of_weight) {
    grad_weight = g.sparse ? recycled(a.weight, {nnz, a.features()}, dtype)
                           : zeros(a.weight, {a.trees(), a.weight_rows(), a.features()}, dtype);
  }
  if (g.of_bias) {
    grad_bias =
        g.sparse ? empty(a.weight, {nnz}, dtype) : zeros(a.weight, {a.trees(), a.weight_rows()}, dtype);
  }
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    cpu::path_log_prob_backward<T>(
        batch, plans,
        {const_data<A>(g.grad_log_prob), const_data<A>(g.score), const_data<T>(a.hidden),
         const_data<T>(a.weight), g.of_hidden ? data<A>(grad_hidden) : nullptr,
         g.of_weight ? data<T>(grad_weight) : nullptr, g.of_bias ? data<T>(grad_bias) : nullptr, g.sparse});
  });
  if (g.of_hidden && dtype != sums) grad_hidden = torch::stable::to(grad_hidden, dtype);
  return {grad_hidden, grad_weight, grad_bias, index};
}

// Calls hstree::path_log_prob through the dispatcher, so it runs on any device and is differentiable.
std::tuple<Tensor, Tensor> forward(const Tensor& input, const Tensor& weight,
                                   const std::optional<Tensor>& bias, const Tensor& target,
                                   const Tensor& path_offset, const Tensor& path, const Tensor& leaf_position,
                                   const std::optional<Tensor>& feature_index, int64_t max_depth) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  StableIValue stack[9] = {from(input),         from(weight),        from(bias),
                           from(target),        from(path_offset),   from(path),
                           from(leaf_position), from(feature_index), from(max_depth)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("hstree::path_log_prob", "", stack, TORCH_ABI_VERSION));
  const Tensor log_prob = to<Tensor>(stack[0]), score = to<Tensor>(stack[1]);
  to<Tensor>(stack[2]), to<Tensor>(stack[3]);  // order and plan, released
  return {log_prob, score};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "forward(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor path_offset, Tensor path, "
      "Tensor leaf_position, Tensor? feature_index, int max_depth) -> (Tensor log_prob, Tensor score)");
  // order: the rows of the batch in the order of their leaves, [T, N]. plan: on CUDA, of the nodes that they visit.
  m.def(
      "path_log_prob(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor path_offset, Tensor "
      "path, Tensor leaf_position, Tensor? feature_index, int max_depth) "
      "-> (Tensor log_prob, Tensor score, Tensor order, Tensor plan)");
  // output_mask: whether the gradients of hidden, weight and bias are wanted.
  m.def(
      "path_log_prob_backward(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor target, "
      "Tensor path_offset, Tensor path, Tensor leaf_position, Tensor? feature_index, Tensor score, Tensor "
      "order, Tensor plan, bool[3] output_mask, bool sparse) -> (Tensor grad_hidden, Tensor grad_weight, "
      "Tensor grad_bias, Tensor index)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CompositeImplicitAutograd, m) {
  m.impl("forward", TORCH_BOX(&forward));
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("path_log_prob", HSTREE_CPU_BOX(&path_forward<path_log_prob>));
  m.impl("path_log_prob_backward", HSTREE_CPU_BOX(&path_backward<path_log_prob_backward>));
}

}  // namespace hstree
