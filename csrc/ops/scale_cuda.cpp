// hstree::scale_ on CUDA. The schema is in scale.cpp.
#ifdef HSTREE_CUDA
#include "kernels/scale.h"
#include "ops/cuda.h"
#include "ops/tensor.h"

namespace hstree {
namespace {

void scale_cuda(const Tensor& x, const Tensor& factor) {
  const char* op = "hstree::scale_";
  const Dtype dtype = x.scalar_type();
  check(dtype == Dtype::BFloat16 || dtype == Dtype::Half, op, ": x: expected dtype bfloat16 or float16, got ",
        torch::headeronly::toString(dtype));
  check(x.is_contiguous(), op, ": x: expected a contiguous tensor, got shape ", shape_of(x));
  check(factor.numel() == 1, op, ": factor: expected one number, got shape ", shape_of(factor));
  check_dtype(op, "factor", factor, Dtype::Float);
  check_device(op, "factor", factor, x);
  const CudaCall call(x);
  scale(element_type(op, "x", x), x.mutable_data_ptr(), x.numel(), const_data<float>(factor), call.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("scale_", TORCH_BOX(&scale_cuda));
}

}  // namespace hstree
#endif
