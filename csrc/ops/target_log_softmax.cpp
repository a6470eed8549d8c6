// hstree::target_log_softmax and its backward: the log-softmax of an increasing function of the logits, at the
// target.
#include "cpu/target_log_softmax.h"

#include <tuple>

#include "kernels/target_log_softmax.h"
#include "ops/cpu.h"
#include "ops/cuda.h"
#include "ops/logit_function.h"

namespace hstree {
namespace {

#ifndef HSTREE_CUDA_ONLY
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
#endif

#ifdef HSTREE_CUDA
std::optional<Tensor> aligned_table(const std::optional<Tensor>& table) {
  return table ? std::optional<Tensor>(hstree::aligned_table(*table)) : std::nullopt;
}

const void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// grad_log_prob: checked, and so is log_normalizer; without it, log_prob is written.
Tensor backward(const MonotoneArguments& a, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& target_bias, const Tensor& grad_log_prob,
                const std::optional<Tensor>& log_normalizer, const std::optional<Tensor>& log_prob,
                bool table_gradient, const std::optional<Tensor>& low) {
  const CudaCall call(a.logits);
  const std::vector<int64_t> shape = grad_table_shape(a, table_gradient);
  if (a.rows() == 0) return zeros(a.logits, shape, Dtype::Double);
  const Tensor grad_table = empty(a.logits, shape, Dtype::Double);
  const Tensor workspace =
      zero_workspace(a.logits, table_gradient ? monotone_workspace_bytes(a.function) : 0);
  const MonotoneBackward tensors = {grad_log_prob.const_data_ptr(), const_data<int64_t>(a.target),
                                    data_or_null(log_normalizer),
                                    log_prob ? log_prob->mutable_data_ptr() : nullptr};
  LowRows rounded;
  if (low) rounded = {low->mutable_data_ptr(), low->stride(0), element_type(a.op, "low", *low)};
  target_log_softmax_backward(a.type, a.function, {a.rows(), a.classes(), a.stride()}, tensors,
                              a.logits.mutable_data_ptr(), data_or_null(bias), data_or_null(target_bias),
                              rounded, workspace.mutable_data_ptr(),
                              table_gradient ? data<double>(grad_table) : nullptr, call.stream());
  return grad_table;
}

std::tuple<Tensor, Tensor> target_log_softmax_cuda(const Tensor& logits, const Tensor& target, double c,
                                                   double k, const std::optional<Tensor>& table,
                                                   double radius) {
  const MonotoneArguments a = monotone_arguments("hstree::target_log_softmax", false, logits, target, c, k,
                                                 aligned_table(table), radius);
  const CudaCall call(a.logits);
  const Tensor log_prob = empty(a.logits, {a.rows()}, a.logits.scalar_type());
  const Tensor log_normalizer = empty(a.logits, {a.rows()}, a.logits.scalar_type());
  target_log_softmax(a.type, a.function, {a.rows(), a.classes(), a.stride()}, a.logits.const_data_ptr(),
                     const_data<int64_t>(a.target), log_prob.mutable_data_ptr(),
                     log_normalizer.mutable_data_ptr(), call.stream());
  return {log_prob, log_normalizer};
}

Tensor target_log_softmax_backward_cuda(const Tensor& logits, const Tensor& grad_log_prob,
                                        const Tensor& target, const Tensor& log_normalizer, double c,
                                        double k, const std::optional<Tensor>& table, double radius,
                                        bool table_gradient, const std::optional<Tensor>& low) {
  const MonotoneArguments a = monotone_arguments("hstree::target_log_softmax_backward_", true, logits, target,
                                                 c, k, aligned_table(table), radius);
  const Tensor grad = checked_row_values(a, "grad_log_prob", grad_log_prob);
  const Tensor kept = checked_row_values(a, "log_normalizer", log_normalizer);
  check_low(a, low);
  return backward(a, std::nullopt, std::nullopt, grad, kept, std::nullopt, table_gradient, low);
}

std::tuple<Tensor, Tensor> target_log_softmax_gradient_cuda(
    const Tensor& logits, const Tensor& grad_log_prob, const Tensor& target, double c, double k,
    const std::optional<Tensor>& table, double radius, bool table_gradient, const std::optional<Tensor>& low,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& target_bias) {
  const MonotoneArguments a = monotone_arguments("hstree::target_log_softmax_gradient_", true, logits, target,
                                                 c, k, aligned_table(table), radius);
  const Tensor grad = checked_row_values(a, "grad_log_prob", grad_log_prob);
  const auto of_classes = checked_bias(a, "bias", bias);
  const auto of_targets = target_bias ? checked_bias(a, "target_bias", target_bias) : of_classes;
  check(!(target_bias && table && table_gradient), a.op, ": target_bias: expected None with table_gradient");
  check_low(a, low);
  const Tensor log_prob = empty(a.logits, {a.rows()}, a.logits.scalar_type());
  return {log_prob, backward(a, of_classes, of_targets, grad, std::nullopt, log_prob, table_gradient, low)};
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("target_log_softmax", TORCH_BOX(&target_log_softmax_cuda));
  m.impl("target_log_softmax_backward_", TORCH_BOX(&target_log_softmax_backward_cuda));
  m.impl("target_log_softmax_gradient_", TORCH_BOX(&target_log_softmax_gradient_cuda));
}
#endif

}  // namespace
}  // namespace hstree
