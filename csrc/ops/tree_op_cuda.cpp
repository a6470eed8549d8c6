// The path op, the wide op and the leaf op on CUDA: the call sequence that kernels/path_log_prob.h describes. The
// schemas are in tree_op.cpp.
#ifdef HSTREE_CUDA
#include "kernels/leaf_log_prob.h"
#include "kernels/path_log_prob.h"
#include "kernels/wide_log_prob.h"
#include "ops/leaf_order_cuda.h"
#include "ops/tree_op.h"

namespace hstree {
namespace {

// Elements of the plan: length, shared, row_length, count, tree_valid.
int64_t plan_size(const TreeArguments& a) {
  return 4 * a.trees() * a.rows() + 1 + a.trees();
}

// The tables on the device, the rows in leaf order and the plan of the nodes they visit. Owns their memory.
class Plan {
 public:
  // kept: the plan of the forward pass; without one it is computed.
  Plan(const TreeArguments& a, const std::optional<Tensor>& kept, cudaStream_t stream) {
    const int64_t trees = a.trees(), places = trees * a.rows();
    tables_ = {const_data<int64_t>(a.target),
               const_data<int64_t>(a.offset),
               const_data<int32_t>(a.path),
               const_data<int32_t>(a.leaf_position),
               a.feature_index ? const_data<int32_t>(*a.feature_index) : nullptr,
               a.leaf_class ? const_data<int32_t>(*a.leaf_class) : nullptr,
               nullptr,
               a.rows(),
               a.classes(),
               a.path.size(0),
               a.weight_rows(),
               a.in_features(),
               a.features(),
               static_cast<int>(trees),
               static_cast<int>(a.longest),
               a.path.dim() == 2};
    order_ = a.order ? *a.order : leaf_order_of(a.hidden, tables_, stream);
    plan_ = kept ? *kept : empty(a.hidden, {plan_size(a)}, Dtype::Int);
    int32_t* const length = data<int32_t>(plan_);
    int32_t *const shared = length + places, *const row_length = shared + places;
    int32_t *const count = row_length + places, *const tree_valid = count + places + 1;
    tables_.tree_valid = tree_valid;
    leaf_order_ = {const_data<int64_t>(order_), length, shared, row_length};
    if (kept) return;
    check_features(tables_, tree_valid, stream);
    check_classes(tables_, tree_valid, stream);
    check_paths(tables_, tree_valid, stream);
    leaf_plan(tables_, const_data<int64_t>(order_), length, shared, row_length, count, stream);
  }

  const Tables& tables() const { return tables_; }
  const LeafOrder& leaf_order() const { return leaf_order_; }
  const Tensor& order() const { return order_; }
  const Tensor& plan() const { return plan_; }
  // [T * N + 1] int64: first row of the row-sparse gradient that each place adds, and their number.
  Tensor slot() const {
    const int64_t places = tables_.trees * tables_.rows;
    Tensor plan = plan_;
    return cumulative_sum(torch::stable::narrow(plan, 0, 3 * places, places + 1));
  }

 private:
  Tables tables_;
  LeafOrder leaf_order_;
  Tensor order_, plan_;
};

bool nothing_to_do(const TreeArguments& a) {
  return a.rows() == 0 || a.trees() == 0;
}

// kernel(type, tables, order, tensors, stream) writes log_prob and score. Tensors: PathForward or WideForward.
template <typename Tensors, typename Kernel>
TreeResult forward(const TreeArguments& a, const Kernel& kernel) {
  const Dtype sums = accumulate_dtype(a.hidden);
  const Tensor log_prob = empty(a.hidden, {a.rows(), a.trees()}, sums);
  const Tensor score = empty(a.hidden, {a.rows(), a.trees(), a.longest}, sums);
  if (nothing_to_do(a)) {
    const Tensor order = empty(a.hidden, {a.trees(), a.rows()}, Dtype::Long);
    return {log_prob, score, new_order(a, order), empty(a.hidden, {plan_size(a)}, Dtype::Int)};
  }
  const CudaCall call(a.hidden);
  const Plan plan(a, std::nullopt, call.stream());
  const Tensors tensors = {a.hidden.const_data_ptr(), a.weight.const_data_ptr(),
                           a.bias ? a.bias->const_data_ptr() : nullptr, log_prob.mutable_data_ptr(),
                           score.mutable_data_ptr()};
  kernel(a.type, plan.tables(), plan.leaf_order(), tensors, call.stream());
  return {log_prob, score, new_order(a, plan.order()), plan.plan()};
}

TreeResult path_forward(const TreeArguments& a) {
  return forward<PathForward>(a, path_log_prob);
}

// Also of the leaf op: the tables tell whose weights the trees read.
TreeResult wide_forward(const TreeArguments& a) {
  return forward<WideForward>(a, wide_log_prob);
}

void check_plan(const TreeArguments& a, const std::optional<Tensor>& plan) {
  if (!plan) return;
  check_dtype(a.op, "plan", *plan, Dtype::Int);
  check_dim(a.op, "plan", *plan, 1, "[4 T N + 1 + T]");
  check_size(a.op, "plan", *plan, 0, plan_size(a), "4 T N + 1 + T");
  check_device(a.op, "plan", *plan, a.hidden);
  check(plan->is_contiguous() && a.order, a.op, ": plan: expected a contiguous tensor, and order with it");
}

// Tensors: PathBackward or WideBackward.
template <typename Tensors>
Tensors backward_tensors(const TreeArguments& a, const TreeBackward& b) {
  return {b.grad_log_prob.const_data_ptr(), b.score.const_data_ptr(), a.hidden.const_data_ptr(),
          a.weight.const_data_ptr()};
}

Tensor workspace_of(const TreeArguments& a, const Plan& plan) {
  return empty(a.hidden, {backward_workspace_bytes(a.type, plan.tables())}, Dtype::Byte);
}

Tensor path_grad_hidden(const TreeArguments& a, const Plan& plan, const PathBackward& tensors,
                        cudaStream_t stream) {
  const Tensor workspace = workspace_of(a, plan);
  const Tensor grad_hidden = empty(a.hidden, {a.rows(), a.in_features()}, a.hidden.scalar_type());
  path_log_prob_backward_hidden(a.type, plan.tables(), plan.leaf_order(), tensors,
                                workspace.mutable_data_ptr(), grad_hidden.mutable_data_ptr(), stream);
  return grad_hidden;
}

// Also of the leaf op.
Tensor wide_grad_hidden(const TreeArguments& a, const Plan& plan, const WideBackward& tensors,
                        cudaStream_t stream) {
  const Dtype dtype = a.hidden.scalar_type(), sums = accumulate_dtype(a.hidden);
  const Tensor sum = zeros(a.hidden, {a.rows(), a.in_features()}, sums);
  const Tensor grad_hidden = dtype == sums ? sum : empty(a.hidden, {a.rows(), a.in_features()}, dtype);
  wide_log_prob_backward_hidden(a.type, plan.tables(), plan.leaf_order(), tensors, sum.mutable_data_ptr(),
                                grad_hidden.mutable_data_ptr(), stream);
  return grad_hidden;
}

// Of the path op and the wide op; Tensors: PathBackward or WideBackward, the arguments of the functions.
template <typename Tensors, typename Hidden, typename Weight>
TreeGradients backward_of_trees(const TreeArguments& a, const TreeBackward& b, const Hidden& grad_hidden_of,
                                const Weight& backward_weight) {
  const Dtype dtype = a.hidden.scalar_type();
  Tensor grad_hidden = nothing(a.hidden, dtype), grad_weight = nothing(a.weight, dtype);
  Tensor grad_bias = nothing(a.weight, dtype), index = empty(a.hidden, {2, 0}, Dtype::Long);
  // Both are made where one is wanted: a kernel writes them together.
  const auto make_parameters = [&](int64_t nnz) {
    grad_weight = b.sparse ? empty(a.weight, {nnz, a.features()}, dtype)
                           : zeros(a.weight, {a.trees(), a.weight_rows(), a.features()}, dtype);
    if (!b.of_bias) return;
    grad_bias =
        b.sparse ? empty(a.weight, {nnz}, dtype) : zeros(a.weight, {a.trees(), a.weight_rows()}, dtype);
  };
  const auto result = [&]() -> TreeGradients {
    return {grad_hidden, b.of_weight ? grad_weight : nothing(a.weight, dtype), grad_bias, index,
            nothing(a.hidden, Dtype::Long)};
  };
  if (nothing_to_do(a)) {
    if (b.of_hidden) grad_hidden = zeros(a.hidden, {a.rows(), a.in_features()}, dtype);
    if (b.of_parameters()) make_parameters(0);
    return result();
  }
  check_plan(a, b.plan);
  const CudaCall call(a.hidden);
  const Plan plan(a, b.plan, call.stream());
  Tensor slot;
  int64_t nnz = 0;
  if (b.sparse) {
    slot = plan.slot();
    nnz = last_value(slot);  // synchronizes here, before more work is queued
  }
  const auto tensors = backward_tensors<Tensors>(a, b);
  if (b.of_hidden) grad_hidden = grad_hidden_of(a, plan, tensors, call.stream());
  if (b.sparse) {
    index = empty(a.hidden, {2, nnz}, Dtype::Long);
    slot_index(plan.tables(), plan.leaf_order(), const_data<int64_t>(slot), nnz, data<int64_t>(index),
               call.stream());
  }
  if (!b.of_parameters()) return result();
  make_parameters(nnz);
  backward_weight(a.type, plan.tables(), plan.leaf_order(), b.sparse ? const_data<int64_t>(slot) : nullptr,
                  tensors, workspace_of(a, plan).mutable_data_ptr(), grad_weight.mutable_data_ptr(),
                  b.of_bias ? grad_bias.mutable_data_ptr() : nullptr, call.stream());
  return result();
}

TreeGradients path_backward(const TreeArguments& a, const TreeBackward& b) {
  return backward_of_trees<PathBackward>(a, b, path_grad_hidden, path_log_prob_backward_weight);
}

TreeGradients wide_backward(const TreeArguments& a, const TreeBackward& b) {
  return backward_of_trees<WideBackward>(a, b, wide_grad_hidden, wide_log_prob_backward_weight);
}

TreeGradients leaf_backward(const TreeArguments& a, const TreeBackward& b) {
  const Dtype dtype = a.hidden.scalar_type(), sums = accumulate_dtype(a.hidden);
  Tensor grad_hidden = nothing(a.hidden, dtype), grad_weight = nothing(a.weight, dtype);
  Tensor grad_bias = nothing(a.weight, dtype), index = empty(a.hidden, {1, 0}, Dtype::Long);
  Tensor bias_index = empty(a.hidden, {2, 0}, Dtype::Long);
  int64_t rows = b.sparse ? 0 : a.classes(), biases = 0;
  const auto make_bias = [&] {
    if (!b.of_bias) return;
    grad_bias =
        b.sparse ? empty(a.weight, {biases}, dtype) : zeros(a.weight, {a.trees(), a.classes()}, dtype);
  };
  if (nothing_to_do(a)) {
    if (b.of_hidden) grad_hidden = zeros(a.hidden, {a.rows(), a.in_features()}, dtype);
    if (b.of_weight) grad_weight = zeros(a.weight, {rows, a.features()}, dtype);
    make_bias();
    return {grad_hidden, grad_weight, grad_bias, index, bias_index};
  }
  check_plan(a, b.plan);
  const CudaCall call(a.hidden);
  const Plan plan(a, b.plan, call.stream());
  Tensor slot;
  if (b.sparse) {
    const int64_t of_trees = a.trees() * a.classes();
    const Tensor count = zeros(a.hidden, {1 + a.classes() + of_trees}, Dtype::Int);
    leaf_count(plan.tables(), plan.leaf_order(), data<int32_t>(count), call.stream());
    slot = cumulative_sum(count);
    const auto [visited, total] = two_values(slot, a.classes(), a.classes() + of_trees);  // synchronizes
    rows = visited;
    biases = total - visited;
    index = empty(a.hidden, {1, rows}, Dtype::Long);
    bias_index = empty(a.hidden, {2, biases}, Dtype::Long);
    leaf_index(plan.tables(), const_data<int64_t>(slot), rows, biases, data<int64_t>(index),
               data<int64_t>(bias_index), call.stream());
  }
  const auto tensors = backward_tensors<WideBackward>(a, b);
  if (b.of_hidden) grad_hidden = wide_grad_hidden(a, plan, tensors, call.stream());
  if (!b.of_parameters()) return {grad_hidden, grad_weight, grad_bias, index, bias_index};
  const Tensor gradient = empty(a.weight, {rows, a.features()}, dtype);
  Tensor sum = gradient;
  if (dtype != sums) sum = empty(a.weight, {a.trees() > 1 ? rows : 0, a.features()}, sums);
  make_bias();
  const Tensor workspace = empty(a.hidden, {leaf_workspace_bytes(plan.tables())}, Dtype::Byte);
  leaf_log_prob_backward_weight(
      a.type, plan.tables(), plan.leaf_order(), b.sparse ? const_data<int64_t>(slot) : nullptr, tensors,
      workspace.mutable_data_ptr(), sum.mutable_data_ptr(), gradient.mutable_data_ptr(),
      b.of_bias ? grad_bias.mutable_data_ptr() : nullptr, call.stream());
  if (b.of_weight) grad_weight = gradient;
  return {grad_hidden, grad_weight, grad_bias, index, bias_index};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("path_log_prob", TORCH_BOX(&PathOp::forward<path_forward>));
  m.impl("path_log_prob_backward", TORCH_BOX(&PathOp::backward<path_backward>));
  m.impl("wide_log_prob", TORCH_BOX(&WideOp::forward<wide_forward>));
  m.impl("wide_log_prob_backward", TORCH_BOX(&WideOp::backward<wide_backward>));
  m.impl("leaf_log_prob", TORCH_BOX(&LeafOp::forward<wide_forward>));
  m.impl("leaf_log_prob_backward", TORCH_BOX(&LeafOp::backward<leaf_backward>));
}

}  // namespace hstree
#endif
