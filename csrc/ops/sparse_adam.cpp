// hstree::sparse_adam_: Adam in the rows that a row-sparse gradient visits. sparse_adam_cuda.cpp registers the
// CUDA implementation.
#include "ops/sparse_adam.h"

#include <cmath>

namespace hstree {
namespace {

void check_state(const char* name, const Tensor& state, const Tensor& weight) {
  const char* op = sparse_adam_op;
  check_dtype(op, name, state, accumulate_dtype(weight));
  check_device(op, name, state, weight);
  bool same = state.dim() == weight.dim();
  for (int64_t d = 0; same && d < weight.dim(); ++d) same = state.size(d) == weight.size(d);
  check(same, op, ": ", name, ": expected the shape of weight, ", shape_of(weight), ", got ",
        shape_of(state));
  check(state.is_contiguous(), op, ": ", name, ": expected a contiguous tensor");
}

void check_between(const char* name, double value, double lowest, double limit) {
  check(value >= lowest && value < limit, sparse_adam_op, ": ", name, ": expected a value in [", lowest, ", ",
        limit, "), got ", value);
}

void sparse_adam_cpu(const Tensor& weight, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                     const Tensor& index, const Tensor& values, int64_t step, double lr, double beta1,
                     double beta2, double eps, bool maximize) {
  const SparseAdamArguments a = sparse_adam_arguments(weight, exp_avg, exp_avg_sq, index, values, step, lr,
                                                      beta1, beta2, eps, maximize);
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

SparseAdamArguments sparse_adam_arguments(const Tensor& weight, const Tensor& exp_avg,
                                          const Tensor& exp_avg_sq, const Tensor& index, const Tensor& values,
                                          int64_t step, double lr, double beta1, double beta2, double eps,
                                          bool maximize) {
  const char* op = sparse_adam_op;
  const ScalarType type = element_type(op, "weight", weight);
  check(weight.is_contiguous(), op, ": weight: expected a contiguous tensor");
  check_state("exp_avg", exp_avg, weight);
  check_state("exp_avg_sq", exp_avg_sq, weight);
  check_dim(op, "index", index, 2, "[1, nnz] or [2, nnz]");
  check_dtype(op, "index", index, Dtype::Long);
  check_device(op, "index", index, weight);
  const int64_t sparse = index.size(0);
  check((sparse == 1 || sparse == 2) && sparse <= weight.dim(), op,
        ": index: expected shape [1, nnz] or [2, ", "nnz], with no more rows than weight of shape ",
        shape_of(weight), " has dimensions, got ", shape_of(index));
  check_dtype(op, "values", values, weight.scalar_type());
  check_device(op, "values", values, weight);
  bool fits = values.dim() == weight.dim() - sparse + 1 && values.size(0) == index.size(1);
  int64_t features = 1;
  for (int64_t d = sparse; fits && d < weight.dim(); ++d) {
    fits = values.size(d - sparse + 1) == weight.size(d);
    features *= weight.size(d);
  }
  check(fits, op, ": values: expected shape [nnz, ...] with nnz = ", index.size(1),
        " and the last dimensions of weight of shape ", shape_of(weight), ", got ", shape_of(values));
  check(step >= 1, op, ": step: expected at least 1, got ", step);
  check_between("lr", lr, 0, INFINITY);
  check_between("beta1", beta1, 0, 1);
  check_between("beta2", beta2, 0, 1);
  check_between("eps", eps, 0, INFINITY);
  const double exponent = static_cast<double>(step);
  const double step_size = lr * std::sqrt(1 - std::pow(beta2, exponent)) / (1 - std::pow(beta1, exponent));
  return {type,
          torch::stable::contiguous(index),
          torch::stable::contiguous(values),
          sparse == 2 ? weight.size(0) : 1,
          weight.size(sparse - 1),
          features,
          {step_size, beta1, beta2, eps, maximize}};
}

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "sparse_adam_(Tensor(a!) weight, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor index, Tensor "
      "values, "
      "int step, float lr, float beta1, float beta2, float eps, bool maximize=False) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("sparse_adam_", TORCH_BOX(&sparse_adam_cpu));
}

}  // namespace hstree
