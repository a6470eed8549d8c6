// hstree::forest_gradient_, the part of forest_log_prob that knows the scores of a chunk of rows, and
// hstree::forest_log_softmax, all classes of such a chunk.
#include "cpu/forest_log_prob.h"

#include <algorithm>
#include <tuple>

#include "kernels/forest_log_prob.h"
#include "ops/cpu.h"
#include "ops/cuda.h"
#include "ops/recycled.h"

namespace hstree {
namespace {

constexpr const char* op = "hstree::forest_gradient_";

using Result = std::tuple<Tensor, Tensor>;

struct ForestArguments {
  ScalarType type;
  Tensor score;                         // [V, R], contiguous as all
  Tensor cluster_score;                 // [T, C, R]
  Tensor log_prior;                     // [T, R]
  Tensor cluster;                       // [V, T]
  Tensor target;                        // [R]
  std::optional<Tensor> grad_log_prob;  // [R]; without it nothing is overwritten
  Tensor log_prob;                      // [R], new
  Tensor grad_log_prior;                // [T, R], new; empty without grad_log_prob

  int64_t classes() const { return score.size(0); }
  int64_t rows() const { return score.size(1); }
  int64_t trees() const { return cluster_score.size(0); }
  int64_t clusters() const { return cluster_score.size(1); }
};

// Arguments that only one device has, not yet checked.
struct DeviceArguments {
  const std::optional<Tensor>&order, &boundary, &bias, &grad_score;
};

ForestArguments forest_arguments(const char* op, const Tensor& score, const Tensor& cluster_score,
                                 const Tensor& log_prior, const Tensor& cluster, const Tensor& target,
                                 const std::optional<Tensor>& grad_log_prob) {
  check_dim(op, "score", score, 2, "[V, R]");
  check_dim(op, "cluster_score", cluster_score, 3, "[T, C, R]");
  check_dim(op, "log_prior", log_prior, 2, "[T, R]");
  check_dim(op, "cluster", cluster, 2, "[V, T]");
  check_dim(op, "target", target, 1, "[R]");
  const int64_t classes = score.size(0), rows = score.size(1), trees = cluster_score.size(0);
  const auto check_values = [&](const char* name, const Tensor& tensor, bool in_place) {
    check_dtype(op, name, tensor, score.scalar_type());
    check_device(op, name, tensor, score);
    check(!in_place || tensor.is_contiguous(), op, ": ", name, ": expected a contiguous tensor, got shape ",
          shape_of(tensor));
  };
  check(score.scalar_type() == Dtype::Float || score.scalar_type() == Dtype::Double, op,
        ": score: expected dtype float32 or float64, got ", torch::headeronly::toString(score.scalar_type()));
  check_values("score", score, true);
  check_values("cluster_score", cluster_score, true);
  check_values("log_prior", log_prior, false);
  check_dtype(op, "cluster", cluster, Dtype::Int);
  check_device(op, "cluster", cluster, score);
  check_dtype(op, "target", target, Dtype::Long);
  check_device(op, "target", target, score);
  check(classes && trees && cluster_score.size(1), op,
        ": cluster_score: expected at least one class, tree and cluster, got score ", shape_of(score),
        " and cluster_score ", shape_of(cluster_score));
  check_size(op, "cluster_score", cluster_score, 2, rows, "rows of score");
  check_size(op, "log_prior", log_prior, 0, trees, "trees");
  check_size(op, "log_prior", log_prior, 1, rows, "rows of score");
  check_size(op, "cluster", cluster, 0, classes, "classes of score");
  check_size(op, "cluster", cluster, 1, trees, "trees");
  check_size(op, "target", target, 0, rows, "rows of score");
  if (grad_log_prob) {
    check_dim(op, "grad_log_prob", *grad_log_prob, 1, "[R]");
    check_size(op, "grad_log_prob", *grad_log_prob, 0, rows, "rows of score");
    check_values("grad_log_prob", *grad_log_prob, false);
  }
  return {element_type(op, "score", score),
          score,
          cluster_score,
          torch::stable::contiguous(log_prior),
          torch::stable::contiguous(cluster),
          torch::stable::contiguous(target),
          contiguous(grad_log_prob),
          empty(score, {rows}, score.scalar_type()),
          empty(score, {grad_log_prob ? trees : 0, rows}, score.scalar_type())};
}

template <Result (*kernel)(const ForestArguments&, const DeviceArguments&)>
Result forest_gradient_(const Tensor& score, const Tensor& cluster_score, const Tensor& log_prior,
                        const Tensor& cluster, const Tensor& target, const std::optional<Tensor>& order,
                        const std::optional<Tensor>& boundary, const std::optional<Tensor>& grad_log_prob,
                        const std::optional<Tensor>& bias, const std::optional<Tensor>& grad_score) {
  return kernel(forest_arguments(op, score, cluster_score, log_prior, cluster, target, grad_log_prob),
                {order, boundary, bias, grad_score});
}

#ifndef HSTREE_CUDA_ONLY
Result forest_gradient_cpu(const ForestArguments& a, const DeviceArguments& more) {
  for (const auto& [name, tensor] : {std::pair("bias", &more.bias), {"grad_score", &more.grad_score}}) {
    check(!*tensor, op, ": ", name, ": expected None on the CPU, got shape ",
          *tensor ? shape_of(**tensor) : "");
  }
  dispatch_sums(a.score.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    cpu::forest_log_prob<A>(op, {data<A>(a.score), data<A>(a.cluster_score), const_data<A>(a.log_prior),
                                 const_data<int32_t>(a.cluster), const_data<int64_t>(a.target),
                                 const_data<A>(a.grad_log_prob), nullptr, data<A>(a.log_prob),
                                 data<A>(a.grad_log_prior), a.rows(), a.classes(), a.trees(), a.clusters()});
  });
  return {a.log_prob, a.grad_log_prior};
}

Tensor forest_log_softmax_cpu(const Tensor& score, const Tensor& cluster_score, const Tensor& log_prior,
                              const Tensor& cluster) {
  constexpr const char* op = "hstree::forest_log_softmax";
  check_dim(op, "score", score, 2, "[V, R]");
  const int64_t classes = score.size(0), rows = score.size(1);
  const Tensor target = empty(score, {rows}, Dtype::Long);
  std::fill_n(data<int64_t>(target), rows, -1);
  const ForestArguments a =
      forest_arguments(op, score, cluster_score, log_prior, cluster, target, std::nullopt);
  const Tensor log_softmax = recycled(score, {rows, classes}, score.scalar_type());
  dispatch_sums(score.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    cpu::forest_log_prob<A>(
        op, {data<A>(a.score), data<A>(a.cluster_score), const_data<A>(a.log_prior),
             const_data<int32_t>(a.cluster), const_data<int64_t>(a.target), nullptr, data<A>(log_softmax),
             data<A>(a.log_prob), data<A>(a.grad_log_prior), rows, classes, a.trees(), a.clusters()});
  });
  return log_softmax;
}

// order [T, V] and boundary [T, C + 1], int64: the classes of each tree by their clusters, and the first place of each
// cluster. CUDA needs them; the CPU ignores them. bias [V] is added to score, on CUDA only. The gradient of score is
// written to score or, on CUDA, to grad_score [V, R], which may be of half precision and have gaps between its rows.
STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "forest_gradient_(Tensor(a!) score, Tensor(b!) cluster_score, Tensor log_prior, Tensor cluster, Tensor "
      "target, Tensor? order, Tensor? boundary, Tensor? grad_log_prob, Tensor? bias=None, Tensor(c!)? "
      "grad_score=None) -> (Tensor, Tensor)");
  // The log-probabilities [R, V] of all classes. CPU only.
  m.def("forest_log_softmax(Tensor score, Tensor cluster_score, Tensor log_prior, Tensor cluster) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("forest_gradient_", HSTREE_CPU_BOX(&forest_gradient_<forest_gradient_cpu>));
  m.impl("forest_log_softmax", HSTREE_CPU_BOX(&forest_log_softmax_cpu));
}
#endif

#ifdef HSTREE_CUDA
Tensor checked_places(const char* name, const std::optional<Tensor>& places, const Tensor& score,
                      int64_t trees, int64_t count, const char* shape) {
  check(places.has_value(), op, ": ", name, ": expected a tensor of shape ", shape, ", got None");
  check_dim(op, name, *places, 2, shape);
  check_size(op, name, *places, 0, trees, "trees");
  check_size(op, name, *places, 1, count, shape);
  check_dtype(op, name, *places, Dtype::Long);
  check_device(op, name, *places, score);
  return torch::stable::contiguous(*places);
}

Result forest_gradient_cuda(const ForestArguments& a, const DeviceArguments& more) {
  const auto& [order, boundary, bias, grad_score] = more;
  const Tensor& score = a.score;
  const Tensor classes = checked_places("order", order, score, a.trees(), a.classes(), "[T, V]");
  const Tensor first = checked_places("boundary", boundary, score, a.trees(), a.clusters() + 1, "[T, C + 1]");
  const Tensor output = grad_score ? *grad_score : score;
  check_dim(op, "grad_score", output, 2, "[V, R]");
  check_size(op, "grad_score", output, 0, a.classes(), "classes of score");
  check_size(op, "grad_score", output, 1, a.rows(), "rows of score");
  check_device(op, "grad_score", output, score);
  check(a.rows() == 0 || (output.stride(1) == 1 && output.stride(0) >= a.rows()), op,
        ": grad_score: expected contiguous rows, got strides ", output.stride(0), " and ", output.stride(1));
  if (bias) {
    check_dim(op, "bias", *bias, 1, "[V]");
    check_size(op, "bias", *bias, 0, a.classes(), "classes of score");
    check_dtype(op, "bias", *bias, score.scalar_type());
    check_device(op, "bias", *bias, score);
  }
  const std::optional<Tensor> of_classes = contiguous(bias);
  const CudaCall call(score);
  const Tensor log_sum = empty(score, {a.trees(), a.clusters(), a.rows()}, score.scalar_type());
  const Tensor of_trees = empty(score, {2, a.trees(), a.rows()}, Dtype::Double);
  const Forest forest = {score.const_data_ptr(),
                         const_data<void>(of_classes),
                         a.cluster_score.mutable_data_ptr(),
                         a.log_prior.const_data_ptr(),
                         const_data<int32_t>(a.cluster),
                         const_data<int64_t>(a.target),
                         const_data<int64_t>(classes),
                         const_data<int64_t>(first),
                         const_data<void>(a.grad_log_prob),
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
  forest_gradient(a.type, element_type(op, "grad_score", output), forest, call.stream());
  return {a.log_prob, a.grad_log_prior};
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("forest_gradient_", TORCH_BOX(&forest_gradient_<forest_gradient_cuda>));
}
#endif

}  // namespace
}  // namespace hstree
