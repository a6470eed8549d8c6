// The path op and the wide op on CUDA: the call sequence that kernels/path.h describes. The schemas are in
// path.cpp and wide.cpp.
#ifdef HSTREE_CUDA
#include "kernels/path.h"
#include "kernels/wide.h"
#include "ops/cuda.h"
#include "ops/tree_op.h"

namespace hstree {
namespace {

// The tables on the device, the rows in leaf order and what each of them visits first; owns their memory.
class Plan {
 public:
  Plan(const TreeArguments& a, cudaStream_t stream) {
    tables_ = {const_data<int64_t>(a.target),
               const_data<int64_t>(a.path_offset),
               const_data<int32_t>(a.path),
               const_data<int32_t>(a.leaf_position),
               a.feature_index ? const_data<int32_t>(*a.feature_index) : nullptr,
               nullptr,
               a.rows(),
               a.classes(),
               a.path.size(0),
               a.weight_rows(),
               a.in_features(),
               a.features(),
               static_cast<int>(a.trees()),
               static_cast<int>(a.longest),
               a.wide};
    if (a.feature_index) {
      tree_valid_ = empty(a.input, {a.trees()}, Dtype::Int);
      check_features(tables_, data<int32_t>(tree_valid_), stream);
      tables_.tree_valid = const_data<int32_t>(tree_valid_);
    }
    const std::vector<int64_t> shape = {a.trees(), a.rows()};
    const Tensor key = empty(a.input, shape, Dtype::Int);
    row_length_ = empty(a.input, shape, Dtype::Int);
    leaf_key(tables_, data<int32_t>(key), data<int32_t>(row_length_), stream);
    order_ = stable_argsort(key);
    length_ = empty(a.input, shape, Dtype::Int);
    shared_ = empty(a.input, shape, Dtype::Int);
    count_ = empty(a.input, {a.trees() * a.rows() + 1}, Dtype::Long);
    leaf_plan(tables_, const_data<int64_t>(order_), const_data<int32_t>(row_length_), data<int32_t>(length_),
              data<int32_t>(shared_), data<int64_t>(count_), stream);
  }

  const Tables& tables() const { return tables_; }
  LeafOrder leaf_order() const {
    return {const_data<int64_t>(order_), const_data<int32_t>(length_), const_data<int32_t>(shared_),
            const_data<int32_t>(row_length_)};
  }
  const Tensor& count() const { return count_; }

 private:
  Tables tables_;
  Tensor tree_valid_, row_length_, order_, length_, shared_, count_;
};

bool nothing_to_do(const TreeArguments& a) {
  return a.rows() == 0 || a.trees() == 0;
}

ForwardResult tree_forward_cuda(const TreeArguments& a, const std::optional<Tensor>& bias) {
  const Dtype sums = accumulate_dtype(a.input);
  const Tensor log_prob = empty(a.input, {a.rows(), a.trees()}, sums);
  const Tensor score = empty(a.input, {a.rows(), a.trees(), a.longest}, sums);
  if (nothing_to_do(a)) return {log_prob, score};
  const CudaCall call(a.input);
  const Plan plan(a, call.stream());
  const void* bias_data = bias ? bias->const_data_ptr() : nullptr;
  if (a.wide) {
    const WideForward tensors = {a.input.const_data_ptr(), a.weight.const_data_ptr(), bias_data,
                                 log_prob.mutable_data_ptr(), score.mutable_data_ptr()};
    wide_forward(a.type, plan.tables(), plan.leaf_order(), tensors, call.stream());
  } else {
    const PathForward tensors = {a.input.const_data_ptr(), a.weight.const_data_ptr(), bias_data,
                                 log_prob.mutable_data_ptr(), score.mutable_data_ptr()};
    path_forward(a.type, plan.tables(), plan.leaf_order(), tensors, call.stream());
  }
  return {log_prob, score};
}

SparseResult tree_backward_cuda(const TreeArguments& a, const Tensor& grad_log_prob, const Tensor& score,
                                bool sparse) {
  const Dtype dtype = a.input.scalar_type(), sums = accumulate_dtype(a.input);
  Tensor index = empty(a.input, {2, 0}, Dtype::Long);
  const auto dense_weight = [&] {
    return zeros(a.weight, {a.trees(), a.weight_rows(), a.features()}, dtype);
  };
  const auto dense_bias = [&] { return zeros(a.weight, {a.trees(), a.weight_rows()}, dtype); };
  if (nothing_to_do(a)) {
    const Tensor grad_input = zeros(a.input, {a.rows(), a.in_features()}, dtype);
    if (!sparse) return {grad_input, index, dense_weight(), dense_bias()};
    return {grad_input, index, empty(a.weight, {0, a.features()}, dtype), empty(a.weight, {0}, dtype)};
  }
  const CudaCall call(a.input);
  const Plan plan(a, call.stream());
  const LeafOrder order = plan.leaf_order();
  const WideBackward wide = {grad_log_prob.const_data_ptr(), score.const_data_ptr(), a.input.const_data_ptr(),
                             a.weight.const_data_ptr()};
  const PathBackward path = {wide.grad_log_prob, wide.score, wide.input, wide.weight};
  Tensor grad_input;
  if (a.wide) {
    const Tensor sum = zeros(a.input, {a.rows(), a.in_features()}, sums);
    grad_input = dtype == sums ? sum : empty(a.input, {a.rows(), a.in_features()}, dtype);
    wide_backward_input(a.type, plan.tables(), order, wide, sum.mutable_data_ptr(),
                        grad_input.mutable_data_ptr(), call.stream());
  } else {
    grad_input = empty(a.input, {a.rows(), a.in_features()}, dtype);
    path_backward_input(a.type, plan.tables(), order, path, grad_input.mutable_data_ptr(), call.stream());
  }
  Tensor slot, grad_weight, grad_bias;
  if (sparse) {
    slot = cumulative_sum(plan.count());
    const int64_t nnz = last_value(slot);
    index = empty(a.input, {2, nnz}, Dtype::Long);
    grad_weight = empty(a.weight, {nnz, a.features()}, dtype);
    grad_bias = empty(a.weight, {nnz}, dtype);
    slot_index(plan.tables(), order, const_data<int64_t>(slot), nnz, data<int64_t>(index), call.stream());
  } else {
    grad_weight = dense_weight();
    grad_bias = dense_bias();
  }
  const int64_t bytes = backward_workspace_bytes(a.type, plan.tables());
  const Tensor workspace = empty(a.input, {bytes}, Dtype::Byte);
  const auto run = [&](const auto& weight_gradient, const auto& tensors) {
    weight_gradient(a.type, plan.tables(), order, sparse ? const_data<int64_t>(slot) : nullptr, tensors,
                    workspace.mutable_data_ptr(), grad_weight.mutable_data_ptr(),
                    grad_bias.mutable_data_ptr(), call.stream());
  };
  if (a.wide) {
    run(wide_backward_weight, wide);
  } else {
    run(path_backward_weight, path);
  }
  return {grad_input, index, grad_weight, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  using PathOp = TreeOp<false>;
  m.impl("forward", TORCH_BOX(&PathOp::forward<tree_forward_cuda>));
  m.impl("backward", TORCH_BOX(&PathOp::backward<tree_backward_cuda>));
  m.impl("backward_sparse", TORCH_BOX(&PathOp::backward_sparse<tree_backward_cuda>));
  using WideOp = TreeOp<true>;
  m.impl("wide_log_prob", TORCH_BOX(&WideOp::forward<tree_forward_cuda>));
  m.impl("wide_log_prob_backward", TORCH_BOX(&WideOp::backward<tree_backward_cuda>));
  m.impl("wide_log_prob_backward_sparse", TORCH_BOX(&WideOp::backward_sparse<tree_backward_cuda>));
}

}  // namespace hstree
#endif
