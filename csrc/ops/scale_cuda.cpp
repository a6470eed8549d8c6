// hstree::scale_ on CUDA. The schema is in scale.cpp.
#ifdef HSTREE_CUDA
#include "kernels/scale.h"
#include "ops/cuda.h"
#include "ops/scale.h"

namespace hstree {
namespace {

void scale_cuda(const Tensor& x, const Tensor& factor) {
  check_scale(x, factor);
  const CudaCall call(x);
  scale(element_type("hstree::scale_", "x", x), x.mutable_data_ptr(), x.numel(), const_data<float>(factor),
        call.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("scale_", TORCH_BOX(&scale_cuda));
}

}  // namespace hstree
#endif
