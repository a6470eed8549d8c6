// hstree::sparse_adam_: AdamW in the rows that a row-sparse gradient visits. sparse_adam_cuda.cpp registers the
// CUDA implementation.
#include "ops/sparse_adam.h"

#include "ops/cpu.h"

namespace hstree {
namespace {

void sparse_adam_cpu(const Tensor& weight, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                     const Tensor& index, const Tensor& values, int64_t step, double lr, double beta1,
                     double beta2, double eps, double weight_decay, bool maximize) {
  const SparseAdamArguments a = sparse_adam_arguments(weight, exp_avg, exp_avg_sq, index, values, step, lr,
                                                      beta1, beta2, eps, weight_decay, maximize);
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    const cpu::SparseAdam<T> tensors = {a.outer(),
                                        a.inner(),
                                        a.outer_size,
                                        a.inner_size,
                                        a.visited(),
                                        a.features,
                                        const_data<T>(a.values),
                                        data<T>(weight),
                                        data<A>(exp_avg),
                                        data<A>(exp_avg_sq)};
    cpu::sparse_adam<T>(sparse_adam_op, tensors, a.rule);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "sparse_adam_(Tensor(a!) weight, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor index, Tensor "
      "values, "
      "int step, float lr, float beta1, float beta2, float eps, float weight_decay=0.0, bool maximize=False) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("sparse_adam_", HSTREE_CPU_BOX(&sparse_adam_cpu));
}

}  // namespace hstree
