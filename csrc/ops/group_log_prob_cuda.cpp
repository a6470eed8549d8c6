// hstree::group_log_prob and its gradients on CUDA: the call sequence that kernels/group_log_prob.h describes. The
// schemas are in group_log_prob.cpp.
#ifdef HSTREE_CUDA
#include "kernels/group_log_prob.h"
#include "ops/cuda.h"
#include "ops/group_log_prob.h"

namespace hstree {
namespace {

GroupTables group_tables(const GroupArguments& a) {
  return {const_data<int64_t>(a.target),
          const_data<int32_t>(a.cluster),
          const_data<int32_t>(a.order),
          const_data<int32_t>(a.begin),
          a.rows(),
          a.features(),
          a.classes(),
          a.cluster_stride(),
          static_cast<int>(a.trees()),
          static_cast<int>(a.clusters()),
          static_cast<int>(a.max_width)};
}

GroupTensors group_tensors(const GroupArguments& a) {
  return {a.hidden.const_data_ptr(), a.weight.const_data_ptr(), a.bias ? a.bias->const_data_ptr() : nullptr};
}

// The rows by cluster and their tiles. Owns their memory.
struct Plan {
  // log_prob: of the forward pass, whose rows without a product are written, or null. sorted: of the forward pass, or
  // null: computed.
  Plan(const GroupArguments& a, void* log_prob, const Tensor* sorted, cudaStream_t stream)
      : tables(group_tables(a)), key_(empty(a.hidden, {a.trees(), a.rows()}, Dtype::Int)) {
    const Tensor valid = empty(a.hidden, {a.trees()}, Dtype::Int);
    group_keys(a.type, tables, data<int32_t>(valid), data<int32_t>(key_), log_prob, stream);
    sorted_ = sorted ? *sorted : stable_argsort(key_);
    const int64_t size = a.trees() * (a.clusters() + 1);
    tiles_ = empty(a.hidden, {3 * size}, Dtype::Int);
    int32_t* const start = data<int32_t>(tiles_);
    rows = {const_data<int64_t>(sorted_), start, start + size, start + 2 * size};
    group_plan(tables, rows.rows, const_data<int32_t>(key_), start, start + size, start + 2 * size, stream);
  }

  const Tensor& sorted() const { return sorted_; }

  GroupTables tables;
  GroupRows rows;

 private:
  Tensor key_, sorted_, tiles_;
};

GroupResult group_log_prob_cuda(const GroupArguments& a) {
  const Dtype sums = accumulate_dtype(a.hidden);
  const Tensor log_prob = empty(a.hidden, {a.rows(), a.trees()}, sums);
  const Tensor log_sum = zeros(a.hidden, {a.rows() * a.trees()}, sums);  // also of rows that are alone
  if (a.rows() == 0 || a.trees() == 0) {
    return {log_prob, log_sum, empty(a.hidden, {a.trees(), a.rows()}, Dtype::Long)};
  }
  const CudaCall call(a.hidden);
  const Plan plan(a, log_prob.mutable_data_ptr(), nullptr, call.stream());
  group_log_prob(a.type, plan.tables, plan.rows, group_tensors(a), log_prob.mutable_data_ptr(),
                 log_sum.mutable_data_ptr(), call.stream());
  return {log_prob, log_sum, plan.sorted()};
}

GroupGradientResult group_log_prob_backward_cuda(const GroupArguments& a, const GroupGradient& g) {
  const Dtype dtype = a.hidden.scalar_type(), sums = accumulate_dtype(a.hidden);
  check_dim(a.op, "saved", g.saved, 1, "[N T]");
  check_size(a.op, "saved", g.saved, 0, a.rows() * a.trees(), "N T");
  check_dim(a.op, "rows", g.rows, 2, "[T, N]");
  check_dtype(a.op, "rows", g.rows, Dtype::Long);
  check_device(a.op, "rows", g.rows, a.hidden);
  check_size(a.op, "rows", g.rows, 0, a.trees(), "trees of order");
  check_size(a.op, "rows", g.rows, 1, a.rows(), "rows of hidden");
  Tensor index = empty(a.hidden, {1, 0}, Dtype::Long), bias_index = empty(a.hidden, {2, 0}, Dtype::Long);
  const auto nothing = [&] { return empty(a.hidden, {0}, dtype); };  // results may not share memory
  if (a.rows() == 0 || a.trees() == 0) {
    return {g.of_hidden ? zeros(a.hidden, {a.rows(), a.features()}, dtype) : nothing(),
            g.of_weight ? zeros(a.weight, {g.sparse ? 0 : a.classes(), a.features()}, dtype) : nothing(),
            !g.of_bias ? nothing()
            : g.sparse ? nothing()
                       : zeros(a.weight, {a.trees(), a.classes()}, dtype),
            index, bias_index};
  }
  const CudaCall call(a.hidden);
  const cudaStream_t stream = call.stream();
  const Plan plan(a, nullptr, &g.rows, stream);
  int64_t classes = a.classes(), biases = 0;
  Tensor slot;
  if (g.sparse) {
    const Tensor count = empty(a.hidden, {1 + (1 + a.trees()) * a.classes()}, Dtype::Int);
    group_count(plan.tables, plan.rows, data<int32_t>(count), stream);
    slot = cumulative_sum(count);
    const auto [visited, total] =
        two_values(slot, a.classes(), (1 + a.trees()) * a.classes());  // synchronizes
    classes = visited;
    biases = total - visited;
    index = empty(a.hidden, {1, classes}, Dtype::Long);
    bias_index = empty(a.hidden, {2, biases}, Dtype::Long);
    group_index(plan.tables, const_data<int64_t>(slot), classes, biases, data<int64_t>(index),
                data<int64_t>(bias_index), stream);
  }
  Tensor of_hidden = nothing(), of_weight = nothing(), grad_bias = nothing();
  if (g.of_hidden) of_hidden = zeros(a.hidden, {a.rows(), a.features()}, sums);
  if (g.of_weight) of_weight = zeros(a.weight, {classes, a.features()}, sums);
  if (g.of_bias) {
    grad_bias =
        g.sparse ? empty(a.weight, {biases}, dtype) : zeros(a.weight, {a.trees(), a.classes()}, dtype);
  }
  const Tensor slope = empty(a.hidden, {a.rows(), group_slope_stride(plan.tables)}, dtype);
  const GroupTensors tensors = group_tensors(a);
  const void* const grad = g.grad_log_prob.const_data_ptr();
  for (int tree = 0; tree < static_cast<int>(a.trees()); ++tree) {
    group_slopes(a.type, plan.tables, plan.rows, tensors, grad, g.saved.const_data_ptr(), tree,
                 slope.mutable_data_ptr(), stream);
    if (g.of_hidden) {
      group_backward_hidden(a.type, plan.tables, plan.rows, tensors, grad, slope.const_data_ptr(), tree,
                            of_hidden.mutable_data_ptr(), stream);
    }
    if (g.of_weight || g.of_bias) {
      group_backward_weight(a.type, plan.tables, plan.rows, tensors, grad, slope.const_data_ptr(), tree,
                            g.sparse ? const_data<int64_t>(slot) : nullptr,
                            g.of_weight ? of_weight.mutable_data_ptr() : nullptr,
                            g.of_bias ? grad_bias.mutable_data_ptr() : nullptr, stream);
    }
  }
  const auto rounded = [&](const Tensor& sum, int64_t rows, bool wanted) {
    if (!wanted || dtype == sums) return sum;
    const Tensor gradient = empty(a.hidden, {rows, a.features()}, dtype);
    group_round(a.type, sum.const_data_ptr(), gradient.mutable_data_ptr(), rows * a.features(), stream);
    return gradient;
  };
  return {rounded(of_hidden, a.rows(), g.of_hidden), rounded(of_weight, classes, g.of_weight), grad_bias,
          index, bias_index};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("group_log_prob", TORCH_BOX(&group_forward<group_log_prob_cuda>));
  m.impl("group_log_prob_backward", TORCH_BOX(&group_backward<group_log_prob_backward_cuda>));
}

}  // namespace hstree
#endif
