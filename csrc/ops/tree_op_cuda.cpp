// The path op, the wide op and the leaf op on CUDA: the call sequence that kernels/path_log_prob.h describes. The
// schemas are in path_log_prob.cpp, wide_log_prob.cpp and leaf_log_prob.cpp.
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
  // kept: results of the forward pass; missing ones are computed.
  Plan(const TreeArguments& a, const TreePlan& kept, cudaStream_t stream) {
    const int64_t trees = a.trees(), places = trees * a.rows();
    tables_ = {const_data<int64_t>(a.target),
               const_data<int64_t>(a.path_offset),
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
               a.kind.wide};
    order_ = kept.order ? *kept.order : leaf_order_of(a.hidden, tables_, stream);
    plan_ = kept.plan ? *kept.plan : empty(a.hidden, {plan_size(a)}, Dtype::Int);
    int32_t* const length = data<int32_t>(plan_);
    int32_t *const shared = length + places, *const row_length = shared + places;
    int32_t *const count = row_length + places, *const tree_valid = count + places + 1;
    tables_.tree_valid = tree_valid;
    leaf_order_ = {const_data<int64_t>(order_), length, shared, row_length};
    if (kept.plan) return;
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

ForwardResult tree_forward_cuda(const TreeArguments& a, const std::optional<Tensor>& bias,
                                const std::optional<Tensor>& order) {
  const Dtype sums = accumulate_dtype(a.hidden);
  const Tensor log_prob = empty(a.hidden, {a.rows(), a.trees()}, sums);
  const Tensor score = empty(a.hidden, {a.rows(), a.trees(), a.longest}, sums);
  if (nothing_to_do(a)) {
    const Tensor rows = empty(a.hidden, {a.trees(), a.rows()}, Dtype::Long);
    return {log_prob, score, new_order(a, order, rows), empty(a.hidden, {plan_size(a)}, Dtype::Int)};
  }
  const CudaCall call(a.hidden);
  const Plan plan(a, {order, std::nullopt}, call.stream());
  const void* bias_data = bias ? bias->const_data_ptr() : nullptr;
  if (a.kind.wide) {
    const WideForward tensors = {a.hidden.const_data_ptr(), a.weight.const_data_ptr(), bias_data,
                                 log_prob.mutable_data_ptr(), score.mutable_data_ptr()};
    wide_log_prob(a.type, plan.tables(), plan.leaf_order(), tensors, call.stream());
  } else {
    const PathForward tensors = {a.hidden.const_data_ptr(), a.weight.const_data_ptr(), bias_data,
                                 log_prob.mutable_data_ptr(), score.mutable_data_ptr()};
    path_log_prob(a.type, plan.tables(), plan.leaf_order(), tensors, call.stream());
  }
  return {log_prob, score, new_order(a, order, plan.order()), plan.plan()};
}

void check_plan(const TreeArguments& a, const TreePlan& kept) {
  if (!kept.plan) return;
  check_dtype(a.op, "plan", *kept.plan, Dtype::Int);
  check_dim(a.op, "plan", *kept.plan, 1, "[4 T N + 1 + T]");
  check_size(a.op, "plan", *kept.plan, 0, plan_size(a), "4 T N + 1 + T");
  check_device(a.op, "plan", *kept.plan, a.hidden);
  check(kept.plan->is_contiguous() && kept.order, a.op,
        ": plan: expected a contiguous tensor, and order with it");
}

Tensor backward_workspace(const TreeArguments& a, const Plan& plan) {
  return empty(a.hidden, {backward_workspace_bytes(a.type, plan.tables())}, Dtype::Byte);
}

WideBackward wide_tensors(const TreeArguments& a, const Tensor& grad_log_prob, const Tensor& score) {
  return {grad_log_prob.const_data_ptr(), score.const_data_ptr(), a.hidden.const_data_ptr(),
          a.weight.const_data_ptr()};
}

// grad_hidden of the wide op and of the leaf op.
Tensor wide_grad_hidden(const TreeArguments& a, const Plan& plan, const WideBackward& tensors,
                        cudaStream_t stream) {
  const Dtype dtype = a.hidden.scalar_type(), sums = accumulate_dtype(a.hidden);
  const Tensor sum = zeros(a.hidden, {a.rows(), a.in_features()}, sums);
  const Tensor grad_hidden = dtype == sums ? sum : empty(a.hidden, {a.rows(), a.in_features()}, dtype);
  wide_log_prob_backward_hidden(a.type, plan.tables(), plan.leaf_order(), tensors, sum.mutable_data_ptr(),
                                grad_hidden.mutable_data_ptr(), stream);
  return grad_hidden;
}

SparseResult tree_backward_cuda(const TreeArguments& a, const Tensor& grad_log_prob, const Tensor& score,
                                const TreePlan& kept, bool sparse) {
  const Dtype dtype = a.hidden.scalar_type();
  Tensor index = empty(a.hidden, {2, 0}, Dtype::Long);
  const auto dense_weight = [&] {
    return zeros(a.weight, {a.trees(), a.weight_rows(), a.features()}, dtype);
  };
  const auto dense_bias = [&] { return zeros(a.weight, {a.trees(), a.weight_rows()}, dtype); };
  if (nothing_to_do(a)) {
    const Tensor grad_hidden = zeros(a.hidden, {a.rows(), a.in_features()}, dtype);
    if (!sparse) return {grad_hidden, index, dense_weight(), dense_bias()};
    return {grad_hidden, index, empty(a.weight, {0, a.features()}, dtype), empty(a.weight, {0}, dtype)};
  }
  check_plan(a, kept);
  const CudaCall call(a.hidden);
  const Plan plan(a, kept, call.stream());
  const LeafOrder order = plan.leaf_order();
  Tensor slot;
  int64_t nnz = 0;
  if (sparse) {
    slot = plan.slot();
    nnz = last_value(slot);  // synchronizes here, before more work is queued
  }
  const WideBackward wide = wide_tensors(a, grad_log_prob, score);
  const PathBackward path = {wide.grad_log_prob, wide.score, wide.hidden, wide.weight};
  const Tensor workspace = backward_workspace(a, plan);
  Tensor grad_hidden;
  if (a.kind.wide) {
    grad_hidden = wide_grad_hidden(a, plan, wide, call.stream());
  } else {
    grad_hidden = empty(a.hidden, {a.rows(), a.in_features()}, dtype);
    path_log_prob_backward_hidden(a.type, plan.tables(), order, path, workspace.mutable_data_ptr(),
                                  grad_hidden.mutable_data_ptr(), call.stream());
  }
  Tensor grad_weight, grad_bias;
  if (sparse) {
    index = empty(a.hidden, {2, nnz}, Dtype::Long);
    grad_weight = empty(a.weight, {nnz, a.features()}, dtype);
    grad_bias = empty(a.weight, {nnz}, dtype);
    slot_index(plan.tables(), order, const_data<int64_t>(slot), nnz, data<int64_t>(index), call.stream());
  } else {
    grad_weight = dense_weight();
    grad_bias = dense_bias();
  }
  const auto run = [&](const auto& weight_gradient, const auto& tensors) {
    weight_gradient(a.type, plan.tables(), order, sparse ? const_data<int64_t>(slot) : nullptr, tensors,
                    workspace.mutable_data_ptr(), grad_weight.mutable_data_ptr(),
                    grad_bias.mutable_data_ptr(), call.stream());
  };
  if (a.kind.wide) {
    run(wide_log_prob_backward_weight, wide);
  } else {
    run(path_log_prob_backward_weight, path);
  }
  return {grad_hidden, index, grad_weight, grad_bias};
}

SharedSparseResult leaf_backward_cuda(const TreeArguments& a, const Tensor& grad_log_prob,
                                      const Tensor& score, const TreePlan& kept, bool sparse) {
  const Dtype dtype = a.hidden.scalar_type(), sums = accumulate_dtype(a.hidden);
  const auto bias_zeros = [&] { return zeros(a.weight, {a.trees(), a.classes()}, dtype); };
  int64_t rows = sparse ? 0 : a.classes(), biases = 0;
  if (nothing_to_do(a)) {
    return {zeros(a.hidden, {a.rows(), a.in_features()}, dtype), empty(a.hidden, {0}, Dtype::Long),
            zeros(a.weight, {rows, a.features()}, dtype), empty(a.hidden, {2, 0}, Dtype::Long),
            sparse ? empty(a.weight, {0}, dtype) : bias_zeros()};
  }
  check_plan(a, kept);
  const CudaCall call(a.hidden);
  const Plan plan(a, kept, call.stream());
  Tensor slot;
  if (sparse) {
    const int64_t of_trees = a.trees() * a.classes();
    const Tensor count = zeros(a.hidden, {1 + a.classes() + of_trees}, Dtype::Int);
    leaf_count(plan.tables(), plan.leaf_order(), data<int32_t>(count), call.stream());
    slot = cumulative_sum(count);
    const auto [visited, total] = two_values(slot, a.classes(), a.classes() + of_trees);  // synchronizes
    rows = visited;
    biases = total - visited;
  }
  const WideBackward tensors = wide_tensors(a, grad_log_prob, score);
  const Tensor grad_hidden = wide_grad_hidden(a, plan, tensors, call.stream());
  const Tensor index = empty(a.hidden, {sparse ? rows : 0}, Dtype::Long);
  const Tensor bias_index = empty(a.hidden, {2, biases}, Dtype::Long);
  if (sparse) {
    leaf_index(plan.tables(), const_data<int64_t>(slot), rows, biases, data<int64_t>(index),
               data<int64_t>(bias_index), call.stream());
  }
  const Tensor grad_weight = empty(a.weight, {rows, a.features()}, dtype);
  Tensor sum = grad_weight;
  if (dtype != sums) sum = empty(a.weight, {a.trees() > 1 ? rows : 0, a.features()}, sums);
  const Tensor grad_bias = sparse ? empty(a.weight, {biases}, dtype) : bias_zeros();
  const Tensor workspace = empty(a.hidden, {leaf_workspace_bytes(plan.tables())}, Dtype::Byte);
  leaf_log_prob_backward_weight(a.type, plan.tables(), plan.leaf_order(),
                                sparse ? const_data<int64_t>(slot) : nullptr, tensors,
                                workspace.mutable_data_ptr(), sum.mutable_data_ptr(),
                                grad_weight.mutable_data_ptr(), grad_bias.mutable_data_ptr(), call.stream());
  return {grad_hidden, index, grad_weight, bias_index, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  using PathOp = TreeOp<path_kind>;
  m.impl("path_log_prob", TORCH_BOX(&PathOp::forward<tree_forward_cuda>));
  m.impl("path_log_prob_backward", TORCH_BOX(&PathOp::backward<tree_backward_cuda>));
  m.impl("path_log_prob_backward_sparse", TORCH_BOX(&PathOp::backward_sparse<tree_backward_cuda>));
  using WideOp = TreeOp<wide_kind>;
  m.impl("wide_log_prob", TORCH_BOX(&WideOp::forward<tree_forward_cuda>));
  m.impl("wide_log_prob_backward", TORCH_BOX(&WideOp::backward<tree_backward_cuda>));
  m.impl("wide_log_prob_backward_sparse", TORCH_BOX(&WideOp::backward_sparse<tree_backward_cuda>));
  m.impl("leaf_log_prob", TORCH_BOX(&LeafOp::forward<tree_forward_cuda>));
  m.impl("leaf_log_prob_backward", TORCH_BOX(&LeafOp::backward<leaf_backward_cuda>));
  m.impl("leaf_log_prob_backward_sparse", TORCH_BOX(&LeafOp::backward_sparse<leaf_backward_cuda>));
}

}  // namespace hstree
#endif
