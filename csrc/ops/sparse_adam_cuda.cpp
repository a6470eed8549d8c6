// hstree::sparse_adam_ on CUDA. The schema is in sparse_adam.cpp.
#ifdef HSTREE_CUDA
#include "kernels/sparse_adam.h"
#include "ops/cuda.h"
#include "ops/sparse_adam.h"

namespace hstree {
namespace {

void sparse_adam_cuda(const Tensor& weight, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                      const Tensor& index, const Tensor& values, int64_t step, double lr, double beta1,
                      double beta2, double eps, double weight_decay, bool maximize) {
  const SparseAdamArguments a = sparse_adam_arguments(weight, exp_avg, exp_avg_sq, index, values, step, lr,
                                                      beta1, beta2, eps, weight_decay, maximize);
  const CudaCall call(weight);
  const SparseAdam tensors = {a.outer(),
                              a.inner(),
                              a.outer_size,
                              a.inner_size,
                              a.visited(),
                              a.features,
                              a.values.const_data_ptr(),
                              weight.mutable_data_ptr(),
                              exp_avg.mutable_data_ptr(),
                              exp_avg_sq.mutable_data_ptr(),
                              a.rule.decay,
                              a.rule.step_size,
                              a.rule.beta1,
                              a.rule.beta2,
                              a.rule.eps,
                              a.rule.maximize};
  sparse_adam(a.type, tensors, call.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("sparse_adam_", TORCH_BOX(&sparse_adam_cuda));
}

}  // namespace hstree
#endif
