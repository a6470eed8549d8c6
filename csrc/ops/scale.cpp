// hstree::scale_: multiplies numbers by one of float32, for gradients on CUDA, where the host must not read it.
#include "kernels/scale.h"

#include "ops/cpu.h"
#include "ops/cuda.h"

namespace hstree {
namespace {

template <void (*kernel)(const Tensor& x, const Tensor& factor)>
void scale_(const Tensor& x, const Tensor& factor) {
  const char* op = "hstree::scale_";
  const Dtype dtype = x.scalar_type();
  check(dtype == Dtype::Float || dtype == Dtype::BFloat16 || dtype == Dtype::Half, op,
        ": x: expected dtype float32, bfloat16 or float16, got ", torch::headeronly::toString(dtype));
  check(x.is_contiguous(), op, ": x: expected a contiguous tensor, got shape ", shape_of(x));
  check(factor.numel() == 1, op, ": factor: expected one number, got shape ", shape_of(factor));
  check_dtype(op, "factor", factor, Dtype::Float);
  check_device(op, "factor", factor, x);
  kernel(x, factor);
}

#ifndef HSTREE_CUDA_ONLY
void scale_cpu(const Tensor& x, const Tensor& factor) {
  using torch::stable::detail::from;
  StableIValue stack[2] = {from(x), from(factor)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mul_", "Tensor", stack, TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // x again
}

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("scale_(Tensor(a!) x, Tensor factor) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("scale_", HSTREE_CPU_BOX(&scale_<scale_cpu>));
}
#endif

#ifdef HSTREE_CUDA
void scale_cuda(const Tensor& x, const Tensor& factor) {
  const CudaCall call(x);
  scale(element_type("hstree::scale_", "x", x), x.mutable_data_ptr(), x.numel(), const_data<float>(factor),
        call.stream());
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("scale_", TORCH_BOX(&scale_<scale_cuda>));
}
#endif

}  // namespace
}  // namespace hstree
