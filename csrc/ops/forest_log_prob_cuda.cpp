// hstree::forest_gradient_ on CUDA. The schema is in forest_log_prob.cpp.
#ifdef HSTREE_CUDA
#include <tuple>

#include "kernels/forest_log_prob.h"
#include "ops/cuda.h"
#include "ops/forest_log_prob.h"

namespace hstree {
namespace {

Tensor checked_places(const char* name, const std::optional<Tensor>& places, const Tensor& score,
                      int64_t trees, int64_t count, const char* shape) {
  check(places.has_value(), forest_op, ": ", name, ": expected a tensor of shape ", shape, ", got None");
  check_dim(forest_op, name, *places, 2, shape);
  check_size(forest_op, name, *places, 0, trees, "trees");
  check_size(forest_op, name, *places, 1, count, shape);
  check_dtype(forest_op, name, *places, Dtype::Long);
  check_device(forest_op, name, *places, score);
  return torch::stable::contiguous(*places);
}

std::tuple<Tensor, Tensor> forest_gradient_cuda(const Tensor& score, const Tensor& cluster_score,
                                                const Tensor& log_prior, const Tensor& cluster,
                                                const Tensor& target, const std::optional<Tensor>& order,
                                                const std::optional<Tensor>& boundary,
                                                const std::optional<Tensor>& grad_log_prob,
                                                const std::optional<Tensor>& bias,
                                                const std::optional<Tensor>& grad_score) {
  const ForestArguments a = forest_arguments(score, cluster_score, log_prior, cluster, target, grad_log_prob);
  const Tensor classes = checked_places("order", order, score, a.trees(), a.classes(), "[T, V]");
  const Tensor first = checked_places("boundary", boundary, score, a.trees(), a.clusters() + 1, "[T, C + 1]");
  const Tensor output = grad_score ? *grad_score : score;
  check_dim(forest_op, "grad_score", output, 2, "[V, R]");
  check_size(forest_op, "grad_score", output, 0, a.classes(), "classes of score");
  check_size(forest_op, "grad_score", output, 1, a.rows(), "rows of score");
  check_device(forest_op, "grad_score", output, score);
  check(a.rows() == 0 || (output.stride(1) == 1 && output.stride(0) >= a.rows()), forest_op,
        ": grad_score: expected contiguous rows, got strides ", output.stride(0), " and ", output.stride(1));
  std::optional<Tensor> of_classes;
  if (bias) {
    check_dim(forest_op, "bias", *bias, 1, "[V]");
    check_size(forest_op, "bias", *bias, 0, a.classes(), "classes of score");
    check_dtype(forest_op, "bias", *bias, score.scalar_type());
    check_device(forest_op, "bias", *bias, score);
    of_classes = torch::stable::contiguous(*bias);
  }
  const CudaCall call(score);
  const Tensor log_sum = empty(score, {a.trees(), a.clusters(), a.rows()}, score.scalar_type());
  const Tensor of_trees = empty(score, {2, a.trees(), a.rows()}, Dtype::Double);
  const Forest forest = {score.const_data_ptr(),
                         of_classes ? of_classes->const_data_ptr() : nullptr,
                         cluster_score.mutable_data_ptr(),
                         a.log_prior.const_data_ptr(),
                         const_data<int32_t>(a.cluster),
                         const_data<int64_t>(a.target),
                         const_data<int64_t>(classes),
                         const_data<int64_t>(first),
                         a.grad_log_prob ? a.grad_log_prob->const_data_ptr() : nullptr,
                         a.log_prob.mutable_data_ptr(),
                         a.grad_log_prior.mutable_data_ptr(),
                         output.mutable_data_ptr(),
                         output.stride(0),
                         log_sum.mutable_data_ptr(),
                         data<double>(of_trees),
                         a.rows(),
                         a.classes(),
                         a.trees(),
                         a.clusters()};
  forest_gradient(a.type, element_type(forest_op, "grad_score", output), forest, call.stream());
  return {a.log_prob, a.grad_log_prior};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("forest_gradient_", TORCH_BOX(&forest_gradient_cuda));
}

}  // namespace hstree
#endif
