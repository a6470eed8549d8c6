// hstree::plif and its backward: a piecewise polynomial by table lookup, elementwise. plif_cuda.cpp registers
// the CUDA implementation.
#include "cpu/plif.h"

#include <tuple>

#include "ops/logit_function.h"

namespace hstree {
namespace {

Tensor plif_cpu(const Tensor& input, const Tensor& table, double radius) {
  const PlifArguments a = plif_arguments("hstree::plif", input, table, radius);
  const Tensor output = torch::stable::empty_like(a.input);
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    cpu::plif<T>(a.function, const_data<T>(a.input), a.input.numel(), data<T>(output));
  });
  return output;
}

std::tuple<Tensor, Tensor> plif_backward_cpu(const Tensor& grad, const Tensor& input, const Tensor& table,
                                             double radius) {
  const PlifArguments a = plif_arguments("hstree::plif_backward", input, table, radius);
  const Tensor from = checked_plif_grad(a.op, grad, input);
  const Tensor grad_input = torch::stable::empty_like(a.input);
  const Tensor grad_table = torch::stable::empty_like(a.table);
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    cpu::plif_backward<T>(a.function, const_data<T>(from), const_data<T>(a.input), a.input.numel(),
                          data<T>(grad_input), data<cpu::accumulate_t<T>>(grad_table));
  });
  return {grad_input, grad_table};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("plif(Tensor input, Tensor table, float radius) -> Tensor");
  m.def("plif_backward(Tensor grad, Tensor input, Tensor table, float radius) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("plif", TORCH_BOX(&plif_cpu));
  m.impl("plif_backward", TORCH_BOX(&plif_backward_cpu));
}

}  // namespace hstree
