// hstree::piecewise and its backward: a piecewise polynomial by table lookup, elementwise.
#include "cpu/piecewise.h"

#include <tuple>

#include "kernels/piecewise.h"
#include "ops/cpu.h"
#include "ops/cuda.h"
#include "ops/logit_function.h"

namespace hstree {
namespace {

struct PiecewiseArguments {
  const char* op;
  ScalarType type;         // of input
  Tensor input;            // any shape, contiguous
  Tensor table;            // contiguous
  LogitFunction function;  // with table's pointer
};

PiecewiseArguments piecewise_arguments(const char* op, const Tensor& input, const Tensor& table,
                                       double radius) {
  const ScalarType type = element_type(op, "input", input);
  const Tensor kept = checked_table(op, table, "input", input);
  return {op, type, torch::stable::contiguous(input), kept, table_function(op, kept, radius)};
}

// grad: shape, dtype and device of input; returned contiguous.
Tensor checked_piecewise_grad(const char* op, const Tensor& grad, const Tensor& input) {
  bool same = grad.dim() == input.dim();
  for (int64_t d = 0; same && d < input.dim(); ++d) same = grad.size(d) == input.size(d);
  check(same, op, ": grad: expected the shape of input, ", shape_of(input), ", got ", shape_of(grad));
  check_like(op, "grad", grad, "input", input);
  return torch::stable::contiguous(grad);
}

#ifndef HSTREE_CUDA_ONLY
Tensor piecewise_cpu(const Tensor& input, const Tensor& table, double radius) {
  const PiecewiseArguments a = piecewise_arguments("hstree::piecewise", input, table, radius);
  const Tensor output = torch::stable::empty_like(a.input);
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    cpu::piecewise<T>(a.function, const_data<T>(a.input), a.input.numel(), data<T>(output));
  });
  return output;
}

std::tuple<Tensor, Tensor> piecewise_backward_cpu(const Tensor& grad, const Tensor& input,
                                                  const Tensor& table, double radius) {
  const PiecewiseArguments a = piecewise_arguments("hstree::piecewise_backward", input, table, radius);
  const Tensor from = checked_piecewise_grad(a.op, grad, input);
  const Tensor grad_input = torch::stable::empty_like(a.input);
  const Tensor grad_table = torch::stable::empty_like(a.table);
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    cpu::piecewise_backward<T>(a.function, const_data<T>(from), const_data<T>(a.input), a.input.numel(),
                               data<T>(grad_input), data<cpu::accumulate_t<T>>(grad_table));
  });
  return {grad_input, grad_table};
}

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("piecewise(Tensor input, Tensor table, float radius) -> Tensor");
  m.def("piecewise_backward(Tensor grad, Tensor input, Tensor table, float radius) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("piecewise", HSTREE_CPU_BOX(&piecewise_cpu));
  m.impl("piecewise_backward", HSTREE_CPU_BOX(&piecewise_backward_cpu));
}
#endif

#ifdef HSTREE_CUDA
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
  const Tensor workspace = zero_workspace(a.table, piecewise_workspace_bytes(a.function));
  piecewise_backward(a.type, a.function, a.input.numel(), from.const_data_ptr(), a.input.const_data_ptr(),
                     workspace.mutable_data_ptr(), grad_input.mutable_data_ptr(),
                     grad_table.mutable_data_ptr(), call.stream());
  return {grad_input, grad_table};
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("piecewise", TORCH_BOX(&piecewise_cuda));
  m.impl("piecewise_backward", TORCH_BOX(&piecewise_backward_cuda));
}
#endif

}  // namespace
}  // namespace hstree
