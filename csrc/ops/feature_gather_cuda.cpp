// hstree::feature_gather and its backward on CUDA. The schemas are in feature_gather.cpp.
#ifdef HSTREE_CUDA
#include "kernels/feature_gather.h"
#include "ops/cuda.h"
#include "ops/feature_gather.h"

namespace hstree {
namespace {

Tensor feature_gather_cuda(const Tensor& hidden, const Tensor& feature_index) {
  const char* op = "hstree::feature_gather";
  const ScalarType type = element_type(op, "hidden", hidden);
  check_gather_input(op, hidden);
  const Tensor index = checked_gather_index(op, hidden, feature_index);
  const CudaCall call(hidden);
  const Tensor from = torch::stable::contiguous(hidden);
  const Tensor output = empty(hidden, {hidden.size(0), index.size(0), index.size(1)}, hidden.scalar_type());
  const FeatureGather sizes = {const_data<int32_t>(index), hidden.size(0), hidden.size(1), index.size(1),
                               static_cast<int>(index.size(0))};
  feature_gather(type, sizes, from.const_data_ptr(), output.mutable_data_ptr(), call.stream());
  return output;
}

Tensor feature_gather_backward_cuda(const Tensor& grad, const Tensor& feature_index, int64_t in_features) {
  const char* op = "hstree::feature_gather_backward";
  const ScalarType type = element_type(op, "grad", grad);
  check_gather_grad(op, grad, feature_index, in_features);
  const Tensor index = checked_gather_index(op, grad, feature_index);
  const CudaCall call(grad);
  const Tensor from = torch::stable::contiguous(grad);
  const Tensor grad_hidden = empty(grad, {grad.size(0), in_features}, grad.scalar_type());
  const Tensor inverse = empty(grad, {index.size(0), in_features}, Dtype::Int);
  const FeatureGather sizes = {const_data<int32_t>(index), grad.size(0), in_features, index.size(1),
                               static_cast<int>(index.size(0))};
  feature_gather_backward(type, sizes, from.const_data_ptr(), data<int32_t>(inverse),
                          grad_hidden.mutable_data_ptr(), call.stream());
  return grad_hidden;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("feature_gather", TORCH_BOX(&feature_gather_cuda));
  m.impl("feature_gather_backward", TORCH_BOX(&feature_gather_backward_cuda));
}

}  // namespace hstree
#endif
