// The path op, the wide op and the leaf op on the CPU.
#include <algorithm>

#include "cpu/path_log_prob.h"
#include "cpu/recycled_memory.h"
#include "cpu/wide_log_prob.h"
#include "ops/leaf_order.h"
#include "ops/tree_op.h"

namespace hstree {
namespace {

// An uninitialized gradient [rows, features], in recycled memory.
Tensor gradient(const Tensor& like, int64_t rows, int64_t features, Dtype dtype, int64_t element_bytes) {
  const int64_t bytes = rows * features * element_bytes;
  if (bytes < cpu::smallest_recycled) return empty(like, {rows, features}, dtype);
  return torch::stable::from_blob(cpu::acquire(bytes), {rows, features}, {features, 1}, like.device(), dtype,
                                  cpu::release);
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

// The given order, or the one computed from the targets.
Tensor order_of(const TreeArguments& a, const std::optional<Tensor>& given) {
  return given ? *given : leaf_order_cpu(a.op, a.target, a.leaf_position);
}

cpu::TreeBatch tree_batch(const TreeArguments& a, const Tensor& order) {
  return {a.op,
          const_data<int64_t>(a.target),
          const_data<int64_t>(a.path_offset),
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

}  // namespace

ForwardResult tree_forward_cpu(const TreeArguments& a, const std::optional<Tensor>& bias,
                               const std::optional<Tensor>& order) {
  const Tensor log_prob = zeros(a.hidden, {a.rows(), a.trees()}, accumulate_dtype(a.hidden));
  const Tensor score = a.kind.wide
                           ? wide_scores(a)
                           : zeros(a.hidden, {a.rows(), a.trees(), a.longest}, accumulate_dtype(a.hidden));
  const Tensor rows = order_of(a, order);
  const cpu::TreeBatch batch = tree_batch(a, rows);
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    const cpu::Forward<T> tensors = {const_data<T>(a.hidden), const_data<T>(a.weight),
                                     bias ? const_data<T>(*bias) : nullptr, data<A>(log_prob),
                                     data<A>(score)};
    if (a.kind.wide) {
      cpu::wide_log_prob(batch, tensors);
    } else {
      cpu::path_log_prob(batch, tensors);
    }
  });
  return {log_prob, score, new_order(a, order, rows), empty(a.hidden, {0}, Dtype::Int)};
}

SparseResult tree_backward_cpu(const TreeArguments& a, const Tensor& grad_log_prob, const Tensor& score,
                               const TreePlan& plan, bool sparse) {
  const Dtype dtype = a.hidden.scalar_type();
  const Tensor order = order_of(a, plan.order);
  const cpu::TreeBatch batch = tree_batch(a, order);
  Tensor index = empty(a.hidden, {2, 0}, Dtype::Long), grad_hidden, grad_weight, grad_bias;
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    grad_hidden = gradient(a.hidden, a.rows(), a.in_features(), accumulate_dtype(a.hidden), sizeof(A));
    // plans: one per tree. backward(plans, tensors) fills the gradients.
    const auto run = [&](const auto& plans, const auto& backward) {
      if (sparse) {
        const int64_t nnz = cpu::visited(plans);
        index = empty(a.hidden, {2, nnz}, Dtype::Long);
        cpu::visited_index(plans, data<int64_t>(index));
        grad_weight = gradient(a.weight, nnz, a.features(), dtype, sizeof(T));
        grad_bias = empty(a.weight, {nnz}, dtype);
      } else {
        grad_weight = zeros(a.weight, {a.trees(), a.weight_rows(), a.features()}, dtype);
        grad_bias = zeros(a.weight, {a.trees(), a.weight_rows()}, dtype);
      }
      backward(plans, cpu::Backward<T>{const_data<A>(grad_log_prob), const_data<A>(score),
                                       const_data<T>(a.hidden), const_data<T>(a.weight), data<A>(grad_hidden),
                                       data<T>(grad_weight), data<T>(grad_bias), sparse});
    };
    if (a.kind.wide) {
      run(cpu::wide_plans(batch), [&](const auto& plans, const auto& tensors) {
        cpu::wide_log_prob_backward(batch, plans, tensors);
      });
    } else {
      run(cpu::path_plans(batch), [&](const auto& plans, const auto& tensors) {
        cpu::path_log_prob_backward(batch, plans, tensors);
      });
    }
  });
  if (dtype != accumulate_dtype(a.hidden)) grad_hidden = torch::stable::to(grad_hidden, dtype);
  return {grad_hidden, index, grad_weight, grad_bias};
}

SharedSparseResult leaf_backward_cpu(const TreeArguments& a, const Tensor& grad_log_prob, const Tensor& score,
                                     const TreePlan& given, bool sparse) {
  const Dtype dtype = a.hidden.scalar_type(), sums = accumulate_dtype(a.hidden);
  const Tensor order = order_of(a, given.order);
  const cpu::TreeBatch batch = tree_batch(a, order);
  const std::vector<cpu::WidePlan> plans = cpu::wide_plans(batch);
  const std::vector<int64_t> classes = cpu::visited_classes(batch, plans);
  const int64_t visited = sparse ? classes.size() : 0, biases = sparse ? cpu::visited(plans) : 0;
  const Tensor index = empty(a.hidden, {visited}, Dtype::Long);
  const Tensor bias_index = empty(a.hidden, {2, biases}, Dtype::Long);
  Tensor grad_hidden, grad_weight, grad_bias;
  if (sparse) {
    std::copy(classes.begin(), classes.end(), data<int64_t>(index));
    cpu::visited_index(plans, data<int64_t>(bias_index));
    grad_bias = empty(a.weight, {biases}, dtype);
  } else {
    grad_bias = zeros(a.weight, {a.trees(), a.classes()}, dtype);
  }
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    grad_hidden = gradient(a.hidden, a.rows(), a.in_features(), sums, sizeof(A));
    grad_weight = gradient(a.weight, sparse ? visited : a.classes(), a.features(), dtype, sizeof(T));
    cpu::leaf_log_prob_backward(
        batch, plans, classes,
        cpu::Backward<T>{const_data<A>(grad_log_prob), const_data<A>(score), const_data<T>(a.hidden),
                         const_data<T>(a.weight), data<A>(grad_hidden), data<T>(grad_weight),
                         data<T>(grad_bias), sparse});
  });
  if (dtype != sums) grad_hidden = torch::stable::to(grad_hidden, dtype);
  return {grad_hidden, index, grad_weight, bias_index, grad_bias};
}

}  // namespace hstree
