// hstree::path_log_prob on CUDA: the call sequence that kernels/path_log_prob.h describes. The schemas are in
// path_log_prob.cpp.
#ifdef HSTREE_CUDA
#include "kernels/path_log_prob.h"
#include "ops/cuda.h"
#include "ops/path_log_prob.h"

namespace hstree {
namespace {

// Elements of the plan: length, shared, row_length, count, tree_valid.
int64_t plan_size(const PathArguments& a) {
  return 4 * a.trees() * a.rows() + 1 + a.trees();
}

// The tables on the device. plan: as above.
Tables tables_of(const PathArguments& a, const Tensor& plan) {
  return {const_data<int64_t>(a.target),
          const_data<int64_t>(a.path_offset),
          const_data<int32_t>(a.path),
          const_data<int32_t>(a.leaf_position),
          a.feature_index ? const_data<int32_t>(*a.feature_index) : nullptr,
          const_data<int32_t>(plan) + 4 * a.trees() * a.rows() + 1,
          a.rows(),
          a.classes(),
          a.path.size(0),
          a.weight_rows(),
          a.in_features(),
          a.features(),
          static_cast<int>(a.trees()),
          static_cast<int>(a.max_depth)};
}

LeafOrder leaf_order_of(const PathArguments& a, const Tensor& order, const Tensor& plan) {
  const int32_t* const length = const_data<int32_t>(plan);
  const int64_t places = a.trees() * a.rows();
  return {const_data<int64_t>(order), length, length + places, length + 2 * places};
}

bool nothing_to_do(const PathArguments& a) {
  return a.rows() == 0 || a.trees() == 0;
}

PathResult path_log_prob_cuda(const PathArguments& a) {
  const Dtype sums = accumulate_dtype(a.hidden);
  const Tensor log_prob = empty(a.hidden, {a.rows(), a.trees()}, sums);
  const Tensor score = empty(a.hidden, {a.rows(), a.trees(), a.max_depth}, sums);
  const Tensor plan = empty(a.hidden, {plan_size(a)}, Dtype::Int);
  if (nothing_to_do(a)) return {log_prob, score, empty(a.hidden, {a.trees(), a.rows()}, Dtype::Long), plan};
  const CudaCall call(a.hidden);
  const cudaStream_t stream = call.stream();
  const Tables tables = tables_of(a, plan);
  const Tensor key = empty(a.hidden, {a.trees(), a.rows()}, Dtype::Int);
  leaf_key(tables, data<int32_t>(key), stream);
  const Tensor order = stable_argsort(key);
  const int64_t places = a.trees() * a.rows();
  int32_t *const length = data<int32_t>(plan), *const shared = length + places;
  int32_t *const row_length = shared + places, *const count = row_length + places;
  int32_t* const tree_valid = count + places + 1;
  check_features(tables, tree_valid, stream);
  check_paths(tables, tree_valid, stream);
  leaf_plan(tables, const_data<int64_t>(order), length, shared, row_length, count, stream);
  const PathForward tensors = {a.hidden.const_data_ptr(), a.weight.const_data_ptr(),
                               a.bias ? a.bias->const_data_ptr() : nullptr, log_prob.mutable_data_ptr(),
                               score.mutable_data_ptr()};
  path_log_prob(a.type, tables, leaf_order_of(a, order, plan), tensors, stream);
  return {log_prob, score, order, plan};
}

PathGradientResult path_log_prob_backward_cuda(const PathArguments& a, const PathGradient& g) {
  check_dim(a.op, "plan", g.plan, 1, "[4 T N + 1 + T]");
  check_size(a.op, "plan", g.plan, 0, plan_size(a), "4 T N + 1 + T");
  check_dtype(a.op, "plan", g.plan, Dtype::Int);
  check_device(a.op, "plan", g.plan, a.hidden);
  const Dtype dtype = a.hidden.scalar_type();
  const auto nothing = [&] { return empty(a.hidden, {0}, dtype); };  // results may not share memory
  Tensor grad_hidden = nothing(), grad_weight = nothing(), grad_bias = nothing();
  Tensor index = empty(a.hidden, {2, 0}, Dtype::Long);
  const bool of_parameters = g.of_weight || g.of_bias;
  const auto make_parameters = [&](int64_t nnz) {
    // The kernel writes both, so that the weight's is made also where only the bias's is wanted.
    grad_weight = g.sparse ? empty(a.weight, {nnz, a.features()}, dtype)
                           : zeros(a.weight, {a.trees(), a.weight_rows(), a.features()}, dtype);
    if (!g.of_bias) return;
    grad_bias =
        g.sparse ? empty(a.weight, {nnz}, dtype) : zeros(a.weight, {a.trees(), a.weight_rows()}, dtype);
  };
  const auto result = [&]() -> PathGradientResult {
    return {grad_hidden, g.of_weight ? grad_weight : nothing(), grad_bias, index};
  };
  if (nothing_to_do(a)) {
    if (g.of_hidden) grad_hidden = zeros(a.hidden, {a.rows(), a.in_features()}, dtype);
    if (of_parameters) make_parameters(0);
    return result();
  }
  const CudaCall call(a.hidden);
  const cudaStream_t stream = call.stream();
  const Tables tables = tables_of(a, g.plan);
  const LeafOrder leaf_order = leaf_order_of(a, g.order, g.plan);
  Tensor slot;  // [T N + 1] first row of the row-sparse gradient that each place adds, and their number
  int64_t nnz = 0;
  if (g.sparse) {
    const int64_t places = a.trees() * a.rows();
    Tensor plan = g.plan;
    slot = cumulative_sum(torch::stable::narrow(plan, 0, 3 * places, places + 1));
    nnz = last_value(slot);  // synchronizes here, before more work is queued
  }
  const PathBackward tensors = {g.grad_log_prob.const_data_ptr(), g.score.const_data_ptr(),
                                a.hidden.const_data_ptr(), a.weight.const_data_ptr()};
  const Tensor workspace = empty(a.hidden, {backward_workspace_bytes(a.type, tables)}, Dtype::Byte);
  if (g.of_hidden) {
    grad_hidden = empty(a.hidden, {a.rows(), a.in_features()}, dtype);
    path_log_prob_backward_hidden(a.type, tables, leaf_order, tensors, workspace.mutable_data_ptr(),
                                  grad_hidden.mutable_data_ptr(), stream);
  }
  if (g.sparse) {
    index = empty(a.hidden, {2, nnz}, Dtype::Long);
    slot_index(tables, leaf_order, const_data<int64_t>(slot), nnz, data<int64_t>(index), stream);
  }
  if (!of_parameters) return result();
  make_parameters(nnz);
  path_log_prob_backward_weight(a.type, tables, leaf_order, g.sparse ? const_data<int64_t>(slot) : nullptr,
                                tensors, workspace.mutable_data_ptr(), grad_weight.mutable_data_ptr(),
                                g.of_bias ? grad_bias.mutable_data_ptr() : nullptr, stream);
  return result();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("path_log_prob", TORCH_BOX(&path_forward<path_log_prob_cuda>));
  m.impl("path_log_prob_backward", TORCH_BOX(&path_backward<path_log_prob_backward_cuda>));
}

}  // namespace hstree
#endif
