// hstree::feature_gather and its backward: each tree's subset of the input's features.
#include "cpu/feature_gather.h"

#include "cpu/tree_batch.h"
#include "ops/tensor.h"
#ifdef HSTREE_CUDA
#include "kernels/feature_gather.h"
#include "ops/cuda.h"
#endif

namespace hstree {
namespace {

// Returns feature_index contiguous. dims: of the first argument, whose rows and features are those of the op.
Tensor checked_index(const char* op, const Tensor& first, const Tensor& feature_index) {
  check_dim(op, "feature_index", feature_index, 2, "[T, S]");
  check_dtype(op, "feature_index", feature_index, Dtype::Int);
  check_device(op, "feature_index", feature_index, first);
  return torch::stable::contiguous(feature_index);
}

void check_index_values(const char* op, const Tensor& index, int64_t in_features) {
  cpu::TreeBatch batch{};
  batch.op = op;
  batch.feature_index = const_data<int32_t>(index);
  batch.trees = index.size(0);
  batch.features = index.size(1);
  batch.in_features = in_features;
  cpu::check_feature_index(batch);
}

void check_input(const char* op, const Tensor& input) {
  check_dim(op, "input", input, 2, "[N, D]");
}

void check_grad(const char* op, const Tensor& grad, const Tensor& feature_index, int64_t in_features) {
  check_dim(op, "grad", grad, 3, "[N, T, S]");
  check_dim(op, "feature_index", feature_index, 2, "[T, S]");
  check_size(op, "grad", grad, 1, feature_index.size(0), "trees of feature_index");
  check_size(op, "grad", grad, 2, feature_index.size(1), "features of feature_index");
  check(in_features >= 0, op, ": in_features: expected at least 0, got ", in_features);
}

Tensor feature_gather_cpu(const Tensor& input, const Tensor& feature_index) {
  const char* op = "hstree::feature_gather";
  element_type(op, "input", input);
  check_input(op, input);
  const Tensor index = checked_index(op, input, feature_index);
  check_index_values(op, index, input.size(1));
  const Tensor from = torch::stable::contiguous(input);
  const Tensor output = empty(input, {input.size(0), index.size(0), index.size(1)}, input.scalar_type());
  cpu::feature_gather(static_cast<int64_t>(input.element_size()), from.const_data_ptr(),
                      const_data<int32_t>(index), input.size(0), input.size(1), index.size(0), index.size(1),
                      output.mutable_data_ptr());
  return output;
}

Tensor feature_gather_backward_cpu(const Tensor& grad, const Tensor& feature_index, int64_t in_features) {
  const char* op = "hstree::feature_gather_backward";
  element_type(op, "grad", grad);
  check_grad(op, grad, feature_index, in_features);
  const Tensor index = checked_index(op, grad, feature_index);
  check_index_values(op, index, in_features);
  const Dtype sums = accumulate_dtype(grad);
  const Tensor from = torch::stable::contiguous(torch::stable::to(grad, sums));
  Tensor grad_input = zeros(grad, {grad.size(0), in_features}, sums);
  const auto add = [&](auto element) {
    using A = decltype(element);
    cpu::feature_gather_backward<A>(const_data<A>(from), const_data<int32_t>(index), grad.size(0),
                                    in_features, grad.size(1), grad.size(2), data<A>(grad_input));
  };
  if (sums == Dtype::Double) {
    add(double{});
  } else {
    add(float{});
  }
  return grad.scalar_type() == sums ? grad_input : torch::stable::to(grad_input, grad.scalar_type());
}

#ifdef HSTREE_CUDA
Tensor feature_gather_cuda(const Tensor& input, const Tensor& feature_index) {
  const char* op = "hstree::feature_gather";
  const ScalarType type = element_type(op, "input", input);
  check_input(op, input);
  const Tensor index = checked_index(op, input, feature_index);
  const CudaCall call(input);
  const Tensor from = torch::stable::contiguous(input);
  const Tensor output = empty(input, {input.size(0), index.size(0), index.size(1)}, input.scalar_type());
  const FeatureGather sizes = {const_data<int32_t>(index), input.size(0), input.size(1), index.size(1),
                               static_cast<int>(index.size(0))};
  feature_gather(type, sizes, from.const_data_ptr(), output.mutable_data_ptr(), call.stream());
  return output;
}

Tensor feature_gather_backward_cuda(const Tensor& grad, const Tensor& feature_index, int64_t in_features) {
  const char* op = "hstree::feature_gather_backward";
  const ScalarType type = element_type(op, "grad", grad);
  check_grad(op, grad, feature_index, in_features);
  const Tensor index = checked_index(op, grad, feature_index);
  const CudaCall call(grad);
  const Tensor from = torch::stable::contiguous(grad);
  const Tensor grad_input = empty(grad, {grad.size(0), in_features}, grad.scalar_type());
  const Tensor inverse = empty(grad, {index.size(0), in_features}, Dtype::Int);
  const FeatureGather sizes = {const_data<int32_t>(index), grad.size(0), in_features, index.size(1),
                               static_cast<int>(index.size(0))};
  feature_gather_backward(type, sizes, from.const_data_ptr(), data<int32_t>(inverse),
                          grad_input.mutable_data_ptr(), call.stream());
  return grad_input;
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("feature_gather(Tensor input, Tensor feature_index) -> Tensor");
  m.def("feature_gather_backward(Tensor grad, Tensor feature_index, int in_features) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("feature_gather", TORCH_BOX(&feature_gather_cpu));
  m.impl("feature_gather_backward", TORCH_BOX(&feature_gather_backward_cpu));
}

#ifdef HSTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("feature_gather", TORCH_BOX(&feature_gather_cuda));
  m.impl("feature_gather_backward", TORCH_BOX(&feature_gather_backward_cuda));
}
#endif

}  // namespace hstree
