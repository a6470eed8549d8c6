// hstree::feature_gather and its backward: each tree's subset of the features of hidden.
#include "cpu/feature_gather.h"

#include "cpu/tree_batch.h"
#include "kernels/feature_gather.h"
#include "ops/cpu.h"
#include "ops/cuda.h"

namespace hstree {
namespace {

// Contiguous; `first` is the op's first argument.
Tensor checked_index(const char* op, const Tensor& first, const Tensor& feature_index) {
  check_dim(op, "feature_index", feature_index, 2, "[T, S]");
  check_dtype(op, "feature_index", feature_index, Dtype::Int);
  check_device(op, "feature_index", feature_index, first);
  return torch::stable::contiguous(feature_index);
}

struct GatherArguments {
  const char* op;
  ScalarType type;
  Tensor values;  // hidden [N, D] or grad [N, T, S], contiguous
  Tensor index;   // [T, S]
  int64_t in_features;

  int64_t rows() const { return values.size(0); }
  int64_t trees() const { return index.size(0); }
  int64_t features() const { return index.size(1); }
};

template <Tensor (*kernel)(const GatherArguments&)>
Tensor gather(const Tensor& hidden, const Tensor& feature_index) {
  const char* op = "hstree::feature_gather";
  const ScalarType type = element_type(op, "hidden", hidden);
  check_dim(op, "hidden", hidden, 2, "[N, D]");
  const Tensor index = checked_index(op, hidden, feature_index);
  return kernel({op, type, torch::stable::contiguous(hidden), index, hidden.size(1)});
}

template <Tensor (*kernel)(const GatherArguments&)>
Tensor gather_backward(const Tensor& grad, const Tensor& feature_index, int64_t in_features) {
  const char* op = "hstree::feature_gather_backward";
  const ScalarType type = element_type(op, "grad", grad);
  check_dim(op, "grad", grad, 3, "[N, T, S]");
  check_dim(op, "feature_index", feature_index, 2, "[T, S]");
  check_size(op, "grad", grad, 1, feature_index.size(0), "trees of feature_index");
  check_size(op, "grad", grad, 2, feature_index.size(1), "features of feature_index");
  check(in_features >= 0, op, ": in_features: expected at least 0, got ", in_features);
  const Tensor index = checked_index(op, grad, feature_index);
  return kernel({op, type, torch::stable::contiguous(grad), index, in_features});
}

#ifndef HSTREE_CUDA_ONLY
void check_index_values(const GatherArguments& a) {
  cpu::check_feature_index(a.op, {const_data<int32_t>(a.index), a.trees(), a.features(), a.in_features});
}

Tensor gather_cpu(const GatherArguments& a) {
  check_index_values(a);
  const Tensor output = empty(a.values, {a.rows(), a.trees(), a.features()}, a.values.scalar_type());
  cpu::feature_gather(static_cast<int64_t>(a.values.element_size()), a.values.const_data_ptr(),
                      const_data<int32_t>(a.index), a.rows(), a.in_features, a.trees(), a.features(),
                      output.mutable_data_ptr());
  return output;
}

Tensor gather_backward_cpu(const GatherArguments& a) {
  check_index_values(a);
  const Dtype dtype = a.values.scalar_type(), sums = accumulate_dtype(a.values);
  const Tensor from = torch::stable::to(a.values, sums);
  const Tensor grad_hidden = zeros(a.values, {a.rows(), a.in_features}, sums);
  dispatch_sums(sums, [&](auto zero) {
    using A = decltype(zero);
    cpu::feature_gather_backward<A>(const_data<A>(from), const_data<int32_t>(a.index), a.rows(),
                                    a.in_features, a.trees(), a.features(), data<A>(grad_hidden));
  });
  return dtype == sums ? grad_hidden : torch::stable::to(grad_hidden, dtype);
}

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("feature_gather(Tensor hidden, Tensor feature_index) -> Tensor");
  m.def("feature_gather_backward(Tensor grad, Tensor feature_index, int in_features) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("feature_gather", HSTREE_CPU_BOX(&gather<gather_cpu>));
  m.impl("feature_gather_backward", HSTREE_CPU_BOX(&gather_backward<gather_backward_cpu>));
}
#endif

#ifdef HSTREE_CUDA
FeatureGather sizes(const GatherArguments& a) {
  return {const_data<int32_t>(a.index), a.rows(), a.in_features, a.features(), static_cast<int>(a.trees())};
}

Tensor gather_cuda(const GatherArguments& a) {
  const CudaCall call(a.values);
  const Tensor output = empty(a.values, {a.rows(), a.trees(), a.features()}, a.values.scalar_type());
  feature_gather(a.type, sizes(a), a.values.const_data_ptr(), output.mutable_data_ptr(), call.stream());
  return output;
}

Tensor gather_backward_cuda(const GatherArguments& a) {
  const CudaCall call(a.values);
  const Tensor grad_hidden = empty(a.values, {a.rows(), a.in_features}, a.values.scalar_type());
  const Tensor inverse = empty(a.values, {a.trees(), a.in_features}, Dtype::Int);
  feature_gather_backward(a.type, sizes(a), a.values.const_data_ptr(), data<int32_t>(inverse),
                          grad_hidden.mutable_data_ptr(), call.stream());
  return grad_hidden;
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("feature_gather", TORCH_BOX(&gather<gather_cuda>));
  m.impl("feature_gather_backward", TORCH_BOX(&gather_backward<gather_backward_cuda>));
}
#endif

}  // namespace
}  // namespace hstree
