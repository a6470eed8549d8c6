#include <utility>

#include "ops/group_log_prob.h"

namespace hstree {

GroupArguments group_arguments(const char* op, const Tensor& hidden, const Tensor& weight,
                               const std::optional<Tensor>& bias, const Tensor& target, const Tensor& cluster,
                               const Tensor& order, const Tensor& begin, int64_t max_width) {
  check_dim(op, "hidden", hidden, 2, "[N, D]");
  check_dim(op, "weight", weight, 2, "[V, D]");
  check_dim(op, "target", target, 1, "[N]");
  check_dim(op, "cluster", cluster, 2, "[T, V]");
  check_dim(op, "order", order, 2, "[T, V]");
  check_dim(op, "begin", begin, 2, "[T, C + 1]");
  const ScalarType type = element_type(op, "hidden", hidden);
  const auto check_values = [&](const char* name, const Tensor& tensor, const char* like,
                                const Tensor& other) {
    check(tensor.scalar_type() == other.scalar_type(), op, ": ", name, ": expected the dtype of ", like, ", ",
          torch::headeronly::toString(other.scalar_type()), ", got ",
          torch::headeronly::toString(tensor.scalar_type()));
    check_device(op, name, tensor, hidden);
  };
  check_values("weight", weight, "hidden", hidden);
  check_dtype(op, "target", target, Dtype::Long);
  check_device(op, "target", target, hidden);
  const int64_t rows = hidden.size(0), trees = order.size(0), classes = weight.size(0);
  check_size(op, "weight", weight, 1, hidden.size(1), "features of hidden");
  check_size(op, "target", target, 0, rows, "rows of hidden");
  for (const auto& [name, table] : {std::pair("cluster", &cluster), {"order", &order}, {"begin", &begin}}) {
    check_dtype(op, name, *table, Dtype::Int);
    check_device(op, name, *table, hidden);
    check_size(op, name, *table, 0, trees, "trees of order");
  }
  check_size(op, "cluster", cluster, 1, classes, "classes of weight");
  check_size(op, "order", order, 1, classes, "classes of weight");
  check(begin.size(1) > 0, op, ": begin: expected shape [T, C + 1], got ", shape_of(begin));
  if (bias) {
    check_dim(op, "bias", *bias, 2, "[T, V]");
    check_size(op, "bias", *bias, 0, trees, "trees of order");
    check_size(op, "bias", *bias, 1, classes, "classes of weight");
    check_values("bias", *bias, "weight", weight);
  }
  check(max_width >= 0 && max_width <= classes, op, ": max_width: expected 0 to ", classes,
        " (the number of classes), got ", max_width);
  check(rows < INT32_MAX, op, ": hidden: expected fewer than 2^31 - 1 rows, got ", rows);
  check(trees < INT32_MAX, op, ": order: expected fewer than 2^31 - 1 trees, got ", trees);
  check(classes < (1 << 30), op, ": weight: expected fewer than 2^30 classes, got ", classes);
  const bool side_by_side = cluster.stride(1) == 1 && cluster.stride(0) >= classes;
  return {op,
          type,
          torch::stable::contiguous(hidden),
          torch::stable::contiguous(weight),
          bias ? std::optional(torch::stable::contiguous(*bias)) : std::nullopt,
          torch::stable::contiguous(target),
          side_by_side ? cluster : torch::stable::contiguous(cluster),
          torch::stable::contiguous(order),
          torch::stable::contiguous(begin),
          max_width};
}

}  // namespace hstree
