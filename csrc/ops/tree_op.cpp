// The path op, the wide op and the leaf op with their gradients: schemas and CPU implementations. hstree::forward
// is the path op with its first two results.
#include "ops/tree_op.h"

#include <algorithm>

#include "cpu/path_log_prob.h"
#include "cpu/recycled_memory.h"
#include "cpu/wide_log_prob.h"
#include "ops/cpu.h"
#include "ops/leaf_order.h"
#include "ops/recycled.h"

namespace hstree {
namespace {

// The given order, or the one computed from the targets.
Tensor order_of(const TreeArguments& a) {
  return a.order ? *a.order : leaf_order_cpu(a.op, a.target, a.leaf_position);
}

cpu::TreeBatch tree_batch(const TreeArguments& a, const Tensor& order) {
  return {a.op,
          const_data<int64_t>(a.target),
          const_data<int64_t>(a.offset),
          const_data<int32_t>(a.path),
          const_data<int32_t>(a.leaf_position),
          a.feature_index ? const_data<int32_t>(*a.feature_index) : nullptr,
          a.leaf_class ? const_data<int32_t>(*a.leaf_class) : nullptr,
          const_data<int64_t>(order),
          a.rows(),
          a.in_features(),
          a.trees(),
          a.weight_rows(),
          a.features(),
          a.classes(),
          a.path.size(0),
          a.longest};
}

// kernel(batch, tensors) writes log_prob and score.
template <typename Kernel>
TreeResult forward(const TreeArguments& a, const Tensor& score, const Kernel& kernel) {
  const Tensor log_prob = zeros(a.hidden, {a.rows(), a.trees()}, accumulate_dtype(a.hidden));
  const Tensor order = order_of(a);
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    kernel(tree_batch(a, order),
           cpu::Forward<T>{const_data<T>(a.hidden), const_data<T>(a.weight),
                           a.bias ? const_data<T>(*a.bias) : nullptr, data<A>(log_prob), data<A>(score)});
  });
  return {log_prob, score, new_order(a, order), nothing(a.hidden, Dtype::Int)};
}

// The scores [N, T, longest] of the wide op and the leaf op, uninitialized: a few nodes are far wider than those of
// most rows. Large ones lie in pages that the system provides at the first access, since most are never touched.
Tensor wide_scores(const TreeArguments& a) {
  constexpr int64_t largest_recycled = 1 << 26;
  const Dtype dtype = accumulate_dtype(a.hidden);
  const int64_t row = a.trees() * a.longest, bytes = a.rows() * row * (dtype == Dtype::Double ? 8 : 4);
  const std::vector<int64_t> shape = {a.rows(), a.trees(), a.longest};
  if (bytes < cpu::smallest_recycled) return zeros(a.hidden, shape, dtype);
  const bool recycled = bytes <= largest_recycled;
  void* const memory = recycled ? cpu::acquire(bytes) : cpu::acquire_zero_pages(bytes);
  return torch::stable::from_blob(memory, shape, {row, a.longest, 1}, a.hidden.device(), dtype,
                                  [recycled, bytes](void* address) {
                                    recycled ? cpu::release(address) : cpu::release_pages(address, bytes);
                                  });
}

TreeResult path_log_prob(const TreeArguments& a) {
  const Tensor score = zeros(a.hidden, {a.rows(), a.trees(), a.longest}, accumulate_dtype(a.hidden));
  return forward(a, score,
                 [](const auto& batch, const auto& tensors) { cpu::path_log_prob(batch, tensors); });
}

TreeResult wide_log_prob(const TreeArguments& a) {
  return forward(a, wide_scores(a),
                 [](const auto& batch, const auto& tensors) { cpu::wide_log_prob(batch, tensors); });
}

// Runs kernel(tensors) with the tensors for the wanted gradients, null for the others. grad_weight, grad_bias:
// functions that make those.
template <typename Weight, typename Bias, typename Kernel>
TreeGradients backward(const TreeArguments& a, const TreeBackward& b, const Tensor& index,
                       const Tensor& bias_index, const Weight& grad_weight_of, const Bias& grad_bias_of,
                       const Kernel& kernel) {
  const Dtype dtype = a.hidden.scalar_type(), sums = accumulate_dtype(a.hidden);
  Tensor grad_hidden =
      b.of_hidden ? recycled(a.hidden, {a.rows(), a.in_features()}, sums) : nothing(a.hidden, dtype);
  const Tensor grad_weight = b.of_weight ? grad_weight_of() : nothing(a.weight, dtype);
  const Tensor grad_bias = b.of_bias ? grad_bias_of() : nothing(a.weight, dtype);
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    kernel(cpu::Backward<T>{const_data<A>(b.grad_log_prob), const_data<A>(b.score), const_data<T>(a.hidden),
                            const_data<T>(a.weight), b.of_hidden ? data<A>(grad_hidden) : nullptr,
                            b.of_weight ? data<T>(grad_weight) : nullptr,
                            b.of_bias ? data<T>(grad_bias) : nullptr, b.sparse});
  });
  if (b.of_hidden && dtype != sums) grad_hidden = torch::stable::to(grad_hidden, dtype);
  return {grad_hidden, grad_weight, grad_bias, index, bias_index};
}

// Of the path op and the wide op, with the plans of their trees.
template <typename Plans, typename Kernel>
TreeGradients backward_of_trees(const TreeArguments& a, const TreeBackward& b, const Plans& plans,
                                const Kernel& kernel) {
  const Dtype dtype = a.hidden.scalar_type();
  const int64_t nnz = b.sparse ? cpu::visited(plans) : 0;
  const Tensor index = empty(a.hidden, {2, nnz}, Dtype::Long);
  if (b.sparse) cpu::visited_index(plans, data<int64_t>(index));
  return backward(
      a, b, index, nothing(a.hidden, Dtype::Long),
      [&] {
        return b.sparse ? recycled(a.weight, {nnz, a.features()}, dtype)
                        : zeros(a.weight, {a.trees(), a.weight_rows(), a.features()}, dtype);
      },
      [&] {
        return b.sparse ? empty(a.weight, {nnz}, dtype)
                        : zeros(a.weight, {a.trees(), a.weight_rows()}, dtype);
      },
      kernel);
}

TreeGradients path_log_prob_backward(const TreeArguments& a, const TreeBackward& b) {
  const Tensor order = order_of(a);
  const cpu::TreeBatch batch = tree_batch(a, order);
  const auto plans = cpu::path_plans(batch);
  return backward_of_trees(a, b, plans,
                           [&](const auto& tensors) { cpu::path_log_prob_backward(batch, plans, tensors); });
}

TreeGradients wide_log_prob_backward(const TreeArguments& a, const TreeBackward& b) {
  const Tensor order = order_of(a);
  const cpu::TreeBatch batch = tree_batch(a, order);
  const auto plans = cpu::wide_plans(batch);
  return backward_of_trees(a, b, plans,
                           [&](const auto& tensors) { cpu::wide_log_prob_backward(batch, plans, tensors); });
}

TreeGradients leaf_log_prob_backward(const TreeArguments& a, const TreeBackward& b) {
  const Dtype dtype = a.hidden.scalar_type();
  const Tensor order = order_of(a);
  const cpu::TreeBatch batch = tree_batch(a, order);
  const auto plans = cpu::wide_plans(batch);
  const std::vector<int64_t> visited = cpu::visited_classes(batch, plans.data(), a.trees());
  const int64_t classes = b.sparse ? visited.size() : 0, biases = b.sparse ? cpu::visited(plans) : 0;
  const Tensor index = empty(a.hidden, {1, classes}, Dtype::Long);
  const Tensor bias_index = empty(a.hidden, {2, biases}, Dtype::Long);
  if (b.sparse) {
    std::copy(visited.begin(), visited.end(), data<int64_t>(index));
    cpu::visited_biases(batch, plans, data<int64_t>(bias_index));
  }
  return backward(
      a, b, index, bias_index,
      [&] { return recycled(a.weight, {b.sparse ? classes : a.classes(), a.features()}, dtype); },
      [&] {
        return b.sparse ? empty(a.weight, {biases}, dtype) : zeros(a.weight, {a.trees(), a.classes()}, dtype);
      },
      [&](const auto& tensors) { cpu::leaf_log_prob_backward(batch, plans, visited, tensors); });
}

// Calls hstree::path_log_prob through the dispatcher, so it runs on any device and is differentiable.
std::tuple<Tensor, Tensor> forward_op(const Tensor& input, const Tensor& weight,
                                      const std::optional<Tensor>& bias, const Tensor& target,
                                      const Tensor& path_offset, const Tensor& path,
                                      const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                                      int64_t max_depth) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  StableIValue stack[10] = {
      from(input), from(weight),        from(bias),          from(target),    from(path_offset),
      from(path),  from(leaf_position), from(feature_index), from(max_depth), from(std::optional<Tensor>())};
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
  m.def(
      "path_log_prob(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor path_offset, Tensor "
      "path, "
      "Tensor leaf_position, Tensor? feature_index, int max_depth, Tensor? order=None) "
      "-> (Tensor log_prob, Tensor score, Tensor order, Tensor plan)");
  m.def(
      "wide_log_prob(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor wide_offset, "
      "Tensor wide_path, Tensor leaf_position, Tensor? feature_index, int max_width, Tensor? order=None) "
      "-> (Tensor log_prob, Tensor score, Tensor order, Tensor plan)");
  m.def(
      "leaf_log_prob(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor group_offset, Tensor "
      "group, "
      "Tensor leaf_position, Tensor leaf_class, int max_width, Tensor? order=None) "
      "-> (Tensor log_prob, Tensor score, Tensor order, Tensor plan)");
  // output_mask: whether the gradients of hidden, weight and bias are wanted.
  m.def(
      "path_log_prob_backward(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor target, "
      "Tensor path_offset, Tensor path, Tensor leaf_position, Tensor? feature_index, Tensor score, Tensor? "
      "order, "
      "Tensor? plan, bool[3] output_mask, bool sparse) -> (Tensor grad_hidden, Tensor grad_weight, "
      "Tensor grad_bias, Tensor index, Tensor bias_index)");
  m.def(
      "wide_log_prob_backward(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor target, "
      "Tensor wide_offset, Tensor wide_path, Tensor leaf_position, Tensor? feature_index, Tensor score, "
      "Tensor? order, Tensor? plan, bool[3] output_mask, bool sparse) -> (Tensor grad_hidden, "
      "Tensor grad_weight, Tensor grad_bias, Tensor index, Tensor bias_index)");
  m.def(
      "leaf_log_prob_backward(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor target, "
      "Tensor group_offset, Tensor group, Tensor leaf_position, Tensor leaf_class, Tensor score, Tensor? "
      "order, "
      "Tensor? plan, bool[3] output_mask, bool sparse) -> (Tensor grad_hidden, Tensor grad_weight, "
      "Tensor grad_bias, Tensor index, Tensor bias_index)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CompositeImplicitAutograd, m) {
  m.impl("forward", TORCH_BOX(&forward_op));
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("path_log_prob", HSTREE_CPU_BOX(&PathOp::forward<path_log_prob>));
  m.impl("path_log_prob_backward", HSTREE_CPU_BOX(&PathOp::backward<path_log_prob_backward>));
  m.impl("wide_log_prob", HSTREE_CPU_BOX(&WideOp::forward<wide_log_prob>));
  m.impl("wide_log_prob_backward", HSTREE_CPU_BOX(&WideOp::backward<wide_log_prob_backward>));
  m.impl("leaf_log_prob", HSTREE_CPU_BOX(&LeafOp::forward<wide_log_prob>));
  m.impl("leaf_log_prob_backward", HSTREE_CPU_BOX(&LeafOp::backward<leaf_log_prob_backward>));
}

}  // namespace hstree
