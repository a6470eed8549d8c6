// hstree::target_log_softmax and its backward: the log-softmax of an increasing function of the logits, at the
// target. target_log_softmax_cuda.cpp registers the CUDA implementation.
#include "cpu/target_log_softmax.h"

#include <tuple>

#include "ops/cpu.h"
#include "ops/logit_function.h"

namespace hstree {
namespace {

cpu::MonotoneRows monotone_rows(const MonotoneArguments& a) {
  return {a.op, a.function, const_data<int64_t>(a.target), a.rows(), a.classes(), a.stride()};
}

void round_to(std::optional<Tensor> low, const Tensor& logits) {
  if (!low) return;
  const bool same_memory = low->const_data_ptr() == logits.const_data_ptr();
  torch::stable::copy_(*low, same_memory ? torch::stable::clone(logits) : logits);
}

std::tuple<Tensor, Tensor> target_log_softmax_cpu(const Tensor& logits, const Tensor& target, double c,
                                                  double k, const std::optional<Tensor>& table,
                                                  double radius) {
  const MonotoneArguments a =
      monotone_arguments("hstree::target_log_softmax", false, logits, target, c, k, table, radius);
  const Tensor log_prob = empty(a.logits, {a.rows()}, a.logits.scalar_type());
  const Tensor log_normalizer = empty(a.logits, {a.rows()}, a.logits.scalar_type());
  dispatch_sums(a.logits.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    cpu::target_log_softmax<A>(monotone_rows(a), const_data<A>(a.logits), data<A>(log_prob),
                               data<A>(log_normalizer));
  });
  return {log_prob, log_normalizer};
}

Tensor target_log_softmax_backward_cpu(const Tensor& logits, const Tensor& grad_log_prob,
                                       const Tensor& target, const Tensor& log_normalizer, double c, double k,
                                       const std::optional<Tensor>& table, double radius, bool table_gradient,
                                       const std::optional<Tensor>& low) {
  const MonotoneArguments a =
      monotone_arguments("hstree::target_log_softmax_backward_", true, logits, target, c, k, table, radius);
  const Tensor grad = checked_row_values(a, "grad_log_prob", grad_log_prob);
  const Tensor kept = checked_row_values(a, "log_normalizer", log_normalizer);
  check_low(a, low);
  const Tensor grad_table = empty(logits, grad_table_shape(a, table_gradient), Dtype::Double);
  dispatch_sums(a.logits.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    cpu::target_log_softmax_backward<A>(monotone_rows(a), data<A>(logits), const_data<A>(grad),
                                        const_data<A>(kept),
                                        table_gradient ? data<double>(grad_table) : nullptr);
  });
  round_to(low, logits);
  return grad_table;
}

std::tuple<Tensor, Tensor> target_log_softmax_gradient_cpu(
    const Tensor& logits, const Tensor& grad_log_prob, const Tensor& target, double c, double k,
    const std::optional<Tensor>& table, double radius, bool table_gradient, const std::optional<Tensor>& low,
    const std::optional<Tensor>& bias, const std::optional<Tensor>&) {
  const MonotoneArguments a =
      monotone_arguments("hstree::target_log_softmax_gradient_", true, logits, target, c, k, table, radius);
  const Tensor grad = checked_row_values(a, "grad_log_prob", grad_log_prob);
  check(!bias, a.op, ": bias: expected None on the CPU, got shape ", bias ? shape_of(*bias) : "");
  check_low(a, low);
  const Tensor log_prob = empty(a.logits, {a.rows()}, a.logits.scalar_type());
  const Tensor grad_table = empty(logits, grad_table_shape(a, table_gradient), Dtype::Double);
  dispatch_sums(a.logits.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    cpu::target_log_softmax_gradient<A>(monotone_rows(a), data<A>(logits), const_data<A>(grad),
                                        data<A>(log_prob),
                                        table_gradient ? data<double>(grad_table) : nullptr);
  });
  round_to(low, logits);
  return {log_prob, grad_table};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "target_log_softmax(Tensor logits, Tensor target, float c, float k, Tensor? table, float radius) -> "
      "(Tensor, Tensor)");
  m.def(
      "target_log_softmax_backward_(Tensor(a!) logits, Tensor grad_log_prob, Tensor target, Tensor "
      "log_normalizer, float c, float k, Tensor? table, float radius, bool table_gradient=True, "
      "Tensor(b!)? low=None) -> Tensor");
  // Forward and backward at once, for a grad_log_prob known beforehand: the gradient overwrites logits, or is
  // rounded to low, whose rows may begin where those of logits do; other numbers of logits are then arbitrary. On CUDA
  // bias [V] is added to logits, or target_bias [V] to that of the target.
  m.def(
      "target_log_softmax_gradient_(Tensor(a!) logits, Tensor grad_log_prob, Tensor target, float c, float "
      "k, Tensor? table, float radius, bool table_gradient=True, Tensor(b!)? low=None, Tensor? bias=None, "
      "Tensor? target_bias=None) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("target_log_softmax", HSTREE_CPU_BOX(&target_log_softmax_cpu));
  m.impl("target_log_softmax_backward_", HSTREE_CPU_BOX(&target_log_softmax_backward_cpu));
  m.impl("target_log_softmax_gradient_", HSTREE_CPU_BOX(&target_log_softmax_gradient_cpu));
}

}  // namespace hstree
