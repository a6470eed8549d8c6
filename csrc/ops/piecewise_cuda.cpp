// hstree::piecewise and its backward on CUDA. The schemas are in piecewise.cpp.
#ifdef HSTREE_CUDA
#include <tuple>

#include "kernels/piecewise.h"
#include "ops/logit_function_cuda.h"

namespace hstree {
namespace {

Tensor piecewise_cuda(const Tensor& input, const Tensor& table, double radius) {
  const PiecewiseArguments a = piecewise_arguments("hstree::piecewise", input, aligned_table(table), radius);
  const CudaCall call(a.input);
  const Tensor output = torch::stable::empty_like(a.input);
  piecewise(a.type, a.function, a.input.numel(), a.input.const_data_ptr(), output.mutable_data_ptr(),
            call.stream());
  return output;
}

std::tuple<Tensor, Tensor> piecewise_backward_cuda(const Tensor& grad, const Tensor& input,
                                                   const Tensor& table, double radius) {
  const PiecewiseArguments a =
      piecewise_arguments("hstree::piecewise_backward", input, aligned_table(table), radius);
  const Tensor from = checked_piecewise_grad(a.op, grad, input);
  const CudaCall call(a.input);
  const Tensor grad_input = torch::stable::empty_like(a.input);
  if (a.input.numel() == 0) {
    return {grad_input, zeros(a.table, {a.table.size(0), a.table.size(1)}, a.table.scalar_type())};
  }
  const Tensor grad_table = torch::stable::empty_like(a.table);
  const LogitFunction function = a.function;
  const Tensor workspace = zero_workspace(a.table, piecewise_workspace_bytes(function));
  piecewise_backward(a.type, function, a.input.numel(), from.const_data_ptr(), a.input.const_data_ptr(),
                     workspace.mutable_data_ptr(), grad_input.mutable_data_ptr(),
                     grad_table.mutable_data_ptr(), call.stream());
  return {grad_input, grad_table};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("piecewise", TORCH_BOX(&piecewise_cuda));
  m.impl("piecewise_backward", TORCH_BOX(&piecewise_backward_cuda));
}

}  // namespace hstree
#endif
