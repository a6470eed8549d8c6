// hstree::feature_gather and its backward: each tree's subset of the features of hidden.
// feature_gather_cuda.cpp registers the CUDA implementation.
#include "cpu/feature_gather.h"

#include "cpu/tree_batch.h"
#include "ops/cpu.h"
#include "ops/feature_gather.h"

namespace hstree {
namespace {

void check_index_values(const char* op, const Tensor& index, int64_t in_features) {
  cpu::TreeBatch batch{};
  batch.op = op;
  batch.feature_index = const_data<int32_t>(index);
  batch.trees = index.size(0);
  batch.features = index.size(1);
  batch.in_features = in_features;
  cpu::check_feature_index(batch);
}

Tensor feature_gather_cpu(const Tensor& hidden, const Tensor& feature_index) {
  const char* op = "hstree::feature_gather";
  element_type(op, "hidden", hidden);
  check_gather_input(op, hidden);
  const Tensor index = checked_gather_index(op, hidden, feature_index);
  check_index_values(op, index, hidden.size(1));
  const Tensor from = torch::stable::contiguous(hidden);
  const Tensor output = empty(hidden, {hidden.size(0), index.size(0), index.size(1)}, hidden.scalar_type());
  cpu::feature_gather(static_cast<int64_t>(hidden.element_size()), from.const_data_ptr(),
                      const_data<int32_t>(index), hidden.size(0), hidden.size(1), index.size(0),
                      index.size(1), output.mutable_data_ptr());
  return output;
}

Tensor feature_gather_backward_cpu(const Tensor& grad, const Tensor& feature_index, int64_t in_features) {
  const char* op = "hstree::feature_gather_backward";
  element_type(op, "grad", grad);
  check_gather_grad(op, grad, feature_index, in_features);
  const Tensor index = checked_gather_index(op, grad, feature_index);
  check_index_values(op, index, in_features);
  const Dtype sums = accumulate_dtype(grad);
  const Tensor from = torch::stable::contiguous(torch::stable::to(grad, sums));
  Tensor grad_hidden = zeros(grad, {grad.size(0), in_features}, sums);
  const auto add = [&](auto element) {
    using A = decltype(element);
    cpu::feature_gather_backward<A>(const_data<A>(from), const_data<int32_t>(index), grad.size(0),
                                    in_features, grad.size(1), grad.size(2), data<A>(grad_hidden));
  };
  if (sums == Dtype::Double) {
    add(double{});
  } else {
    add(float{});
  }
  return grad.scalar_type() == sums ? grad_hidden : torch::stable::to(grad_hidden, grad.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("feature_gather(Tensor hidden, Tensor feature_index) -> Tensor");
  m.def("feature_gather_backward(Tensor grad, Tensor feature_index, int in_features) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("feature_gather", HSTREE_CPU_BOX(&feature_gather_cpu));
  m.impl("feature_gather_backward", HSTREE_CPU_BOX(&feature_gather_backward_cpu));
}

}  // namespace hstree
