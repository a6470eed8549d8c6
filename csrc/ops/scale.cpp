// hstree::scale_: multiplies numbers of 16 bits by one of float32, for gradients on CUDA, where the host must not read
// it.
#include "ops/scale.h"

#include "ops/cpu.h"

namespace hstree {
namespace {

void scale_cpu(const Tensor& x, const Tensor& factor) {
  check_scale(x, factor);
  using torch::stable::detail::from;
  StableIValue stack[2] = {from(x), from(factor)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mul_", "Tensor", stack, TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // x again
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("scale_(Tensor(a!) x, Tensor factor) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("scale_", HSTREE_CPU_BOX(&scale_cpu));
}

}  // namespace hstree
