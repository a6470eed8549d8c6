// hstree::piecewise and its backward: a piecewise polynomial by table lookup, elementwise. piecewise_cuda.cpp
// registers the CUDA implementation.
#include "cpu/piecewise.h"

#include <tuple>

#include "ops/cpu.h"
#include "ops/logit_function.h"

namespace hstree {
namespace {

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

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("piecewise(Tensor input, Tensor table, float radius) -> Tensor");
  m.def("piecewise_backward(Tensor grad, Tensor input, Tensor table, float radius) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("piecewise", HSTREE_CPU_BOX(&piecewise_cpu));
  m.impl("piecewise_backward", HSTREE_CPU_BOX(&piecewise_backward_cpu));
}

}  // namespace hstree
