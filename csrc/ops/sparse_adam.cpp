// hstree::sparse_adam_: AdamW in the rows that a row-sparse gradient visits.
#include "cpu/sparse_adam.h"

#include <cmath>

#include "kernels/sparse_adam.h"
#include "ops/cpu.h"
#include "ops/cuda.h"

namespace hstree {
namespace {

constexpr const char* op = "hstree::sparse_adam_";

void check_state(const char* name, const Tensor& state, const Tensor& weight) {
  check_dtype(op, name, state, accumulate_dtype(weight));
  check_device(op, name, state, weight);
  bool same = state.dim() == weight.dim();
  for (int64_t d = 0; same && d < weight.dim(); ++d) same = state.size(d) == weight.size(d);
  check(same, op, ": ", name, ": expected the shape of weight, ", shape_of(weight), ", got ",
        shape_of(state));
  check(state.is_contiguous(), op, ": ", name, ": expected a contiguous tensor");
}

void check_between(const char* name, double value, double lowest, double limit) {
  check(value >= lowest && value < limit, op, ": ", name, ": expected a value in [", lowest, ", ", limit,
        "), got ", value);
}

template <void (*kernel)(ScalarType, const Tensor& weight, const SparseAdam&)>
void sparse_adam_(const Tensor& weight, const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& index,
                  const Tensor& values, int64_t step, double lr, double beta1, double beta2, double eps,
                  double weight_decay, bool maximize) {
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
  check_between("weight_decay", weight_decay, 0, INFINITY);
  const double exponent = static_cast<double>(step);
  // lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps), times sqrt(1 - beta2^step) above and below.
  const double root = std::sqrt(1 - std::pow(beta2, exponent));
  const double step_size = lr * root / (1 - std::pow(beta1, exponent));
  const Tensor indices = torch::stable::contiguous(index), gradients = torch::stable::contiguous(values);
  const int64_t* const last = const_data<int64_t>(indices) + (sparse - 1) * index.size(1);
  kernel(type, weight,
         {sparse == 2 ? const_data<int64_t>(indices) : nullptr,
          last,
          sparse == 2 ? weight.size(0) : 1,
          weight.size(sparse - 1),
          index.size(1),
          features,
          gradients.const_data_ptr(),
          weight.mutable_data_ptr(),
          exp_avg.mutable_data_ptr(),
          exp_avg_sq.mutable_data_ptr(),
          {1 - lr * weight_decay, step_size, beta1, beta2, eps * root, maximize}});
}

#ifndef HSTREE_CUDA_ONLY
void sparse_adam_cpu(ScalarType type, const Tensor&, const SparseAdam& tensors) {
  dispatch(type, [&](auto element) { cpu::sparse_adam<decltype(element)>(op, tensors); });
}

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "sparse_adam_(Tensor(a!) weight, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor index, Tensor "
      "values, int step, float lr, float beta1, float beta2, float eps, float weight_decay=0.0, bool "
      "maximize=False) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("sparse_adam_", HSTREE_CPU_BOX(&sparse_adam_<sparse_adam_cpu>));
}
#endif

#ifdef HSTREE_CUDA
void sparse_adam_cuda(ScalarType type, const Tensor& weight, const SparseAdam& tensors) {
  const CudaCall call(weight);
  sparse_adam(type, tensors, call.stream());
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("sparse_adam_", TORCH_BOX(&sparse_adam_<sparse_adam_cuda>));
}
#endif

}  // namespace
}  // namespace hstree
