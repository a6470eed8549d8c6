// hstree::group_log_prob and its gradients on CUDA: the call sequence that kernels/group_log_prob.h describes. The
// schemas are in group_log_prob.cpp.
#ifdef HSTREE_CUDA
#include <algorithm>

#include "kernels/group_log_prob.h"
#include "ops/cuda.h"
#include "ops/group_log_prob.h"

namespace hstree {
namespace {

constexpr int64_t slope_bytes = 128 << 20;  // of the trees that a backward pass takes at once
constexpr int64_t sum_bytes = 32 << 20;     // of sums that stay in the L2 cache

GroupTables group_tables(const GroupArguments& a) {
  return {const_data<int64_t>(a.target),
          const_data<int32_t>(a.cluster),
          const_data<int32_t>(a.order),
          const_data<int32_t>(a.begin),
          a.rows(),
          a.features(),
          a.classes(),
          a.cluster_stride(),
          static_cast<int>(a.trees()),
          static_cast<int>(a.clusters()),
          static_cast<int>(a.max_width)};
}

GroupTensors group_tensors(const GroupArguments& a) {
  return {a.hidden.const_data_ptr(), a.weight.const_data_ptr(), a.bias ? a.bias->const_data_ptr() : nullptr};
}

// The rows by cluster and their tiles. Owns their memory.
struct Plan {
  // log_prob: of the forward pass, whose rows without a product are written, or null. sorted: of the forward pass, or
  // null: computed.
  Plan(const GroupArguments& a, void* log_prob, const Tensor* sorted, cudaStream_t stream)
      : tables(group_tables(a)), key_(empty(a.hidden, {a.trees(), a.rows()}, Dtype::Int)) {
    const Tensor valid = empty(a.hidden, {a.trees()}, Dtype::Int);
    group_keys(a.type, tables, data<int32_t>(valid), data<int32_t>(key_), log_prob, stream);
    sorted_ = sorted ? *sorted : stable_argsort(key_);
    const int64_t size = a.trees() * (a.clusters() + 1);
    const int64_t of_rows = a.trees() * group_row_tiles(tables);
    const int64_t of_classes = a.trees() * group_class_tiles(tables);
    tiles_ = empty(a.hidden, {2 * (of_rows + of_classes) + size}, Dtype::Int);
    auto* const row_tile = reinterpret_cast<GroupTile*>(data<int32_t>(tiles_));
    GroupTile* const class_tile = row_tile + of_rows;
    auto* const start = reinterpret_cast<int32_t*>(class_tile + of_classes);
    rows = {const_data<int64_t>(sorted_), start, row_tile, class_tile};
    group_plan(tables, rows.rows, const_data<int32_t>(key_), start, row_tile, class_tile, stream);
  }

  const Tensor& sorted() const { return sorted_; }

  GroupTables tables;
  GroupRows rows;

 private:
  Tensor key_, sorted_, tiles_;
};

GroupResult group_log_prob_cuda(const GroupArguments& a) {
  const Dtype sums = accumulate_dtype(a.hidden);
  const Tensor log_prob = empty(a.hidden, {a.rows(), a.trees()}, sums);
  const Tensor log_sum = zeros(a.hidden, {a.rows() * a.trees()}, sums);  // also of rows that are alone
  if (a.rows() == 0 || a.trees() == 0) {
    return {log_prob, log_sum, empty(a.hidden, {a.trees(), a.rows()}, Dtype::Long)};
  }
  const CudaCall call(a.hidden);
  const Plan plan(a, log_prob.mutable_data_ptr(), nullptr, call.stream());
  group_log_prob(a.type, plan.tables, plan.rows, group_tensors(a), log_prob.mutable_data_ptr(),
                 log_sum.mutable_data_ptr(), call.stream());
  return {log_prob, log_sum, plan.sorted()};
}

GroupGradientResult group_log_prob_backward_cuda(const GroupArguments& a, const GroupGradient& g) {
  const Dtype dtype = a.hidden.scalar_type(), sums = accumulate_dtype(a.hidden);
  check_dim(a.op, "saved", g.saved, 1, "[N T]");
  check_size(a.op, "saved", g.saved, 0, a.rows() * a.trees(), "N T");
  check_dim(a.op, "rows", g.rows, 2, "[T, N]");
  check_dtype(a.op, "rows", g.rows, Dtype::Long);
  check_device(a.op, "rows", g.rows, a.hidden);
  check_size(a.op, "rows", g.rows, 0, a.trees(), "trees of order");
  check_size(a.op, "rows", g.rows, 1, a.rows(), "rows of hidden");
  Tensor index = empty(a.hidden, {1, 0}, Dtype::Long), bias_index = empty(a.hidden, {2, 0}, Dtype::Long);
  const auto nothing = [&] { return empty(a.hidden, {0}, dtype); };  // results may not share memory
  if (a.rows() == 0 || a.trees() == 0) {
    return {g.of_hidden ? zeros(a.hidden, {a.rows(), a.features()}, dtype) : nothing(),
            g.of_weight ? zeros(a.weight, {g.sparse ? 0 : a.classes(), a.features()}, dtype) : nothing(),
            !g.of_bias ? nothing()
            : g.sparse ? nothing()
                       : zeros(a.weight, {a.trees(), a.classes()}, dtype),
            index, bias_index};
  }
  const CudaCall call(a.hidden);
  const cudaStream_t stream = call.stream();
  const Plan plan(a, nullptr, &g.rows, stream);
  int64_t classes = a.classes(), biases = 0;
  Tensor slot;
  if (g.sparse) {
    const Tensor count = empty(a.hidden, {1 + (1 + a.trees()) * a.classes()}, Dtype::Int);
    group_count(plan.tables, plan.rows, data<int32_t>(count), stream);
    slot = cumulative_sum(count);
    const auto [visited, total] =
        two_values(slot, a.classes(), (1 + a.trees()) * a.classes());  // synchronizes
    classes = visited;
    biases = total - visited;
    index = empty(a.hidden, {1, classes}, Dtype::Long);
    bias_index = empty(a.hidden, {2, biases}, Dtype::Long);
    group_index(plan.tables, const_data<int64_t>(slot), classes, biases, data<int64_t>(index),
                data<int64_t>(bias_index), stream);
  }
  // Slopes of all trees, so that the sums of E's gradient are needed for a part of the columns at a time, which the L2
  // cache holds. Of a few trees at a time where they are large; then the sums are needed for all columns.
  const int64_t stride = group_slope_stride(plan.tables), features = a.features(), trees = a.trees();
  const auto element = static_cast<int64_t>(a.hidden.element_size());
  const int64_t of_tree = std::max<int64_t>(a.rows() * stride * element, 1);
  const int64_t at_once = std::clamp<int64_t>(slope_bytes / of_tree, 1, trees);
  const bool low = dtype != sums;
  const auto whole = low ? (features + 3) / 4 * 4 : features;
  const int64_t fit = sum_bytes / (4 * std::max<int64_t>(classes, 1)) / 128 * 128;
  const int64_t part = std::min(at_once == trees ? std::max<int64_t>(fit, 128) : whole, whole);
  Tensor of_hidden = nothing(), of_weight = nothing(), grad_bias = nothing();
  if (g.of_hidden) of_hidden = zeros(a.hidden, {a.rows(), whole}, sums);
  if (g.of_bias) {
    grad_bias = g.sparse ? empty(a.weight, {biases}, dtype) : zeros(a.weight, {trees, a.classes()}, dtype);
  }
  const Tensor slope = empty(a.hidden, {at_once, a.rows(), stride}, dtype);
  const GroupTensors tensors = group_tensors(a);
  const void* const grad = g.grad_log_prob.const_data_ptr();
  Tensor sum;  // of columns of E's gradient
  for (int64_t first = 0; first < trees; first += at_once) {
    const int64_t end = std::min(first + at_once, trees);
    const auto slope_of = [&](int64_t tree) {
      return static_cast<const char*>(slope.const_data_ptr()) + (tree - first) * of_tree;
    };
    group_slopes(a.type, plan.tables, plan.rows, tensors, grad, g.saved.const_data_ptr(),
                 static_cast<int>(first), static_cast<int>(end - first), slope.mutable_data_ptr(), stream);
    if (g.of_hidden) {
      const GroupSum to = {of_hidden.mutable_data_ptr(), whole, 0, whole};
      for (int64_t tree = first; tree < end; ++tree) {
        group_backward_hidden(a.type, plan.tables, plan.rows, tensors, grad, slope_of(tree),
                              static_cast<int>(tree), to, stream);
      }
      if (low && end == trees) {
        const Tensor rounded = empty(a.hidden, {a.rows(), features}, dtype);
        group_round(a.type, to, a.rows(), features, rounded.mutable_data_ptr(), stream);
        of_hidden = rounded;
      }
    }
    if (!g.of_weight && !g.of_bias) continue;
    if (first == 0 && g.of_weight) {
      const auto make = low ? empty : zeros;
      of_weight = make(a.weight, {classes, features}, dtype);
      if (low) sum = zeros(a.weight, {classes, part}, sums);
    }
    for (int64_t column = 0; column == 0 || column < features; column += part) {
      GroupSum to = {nullptr, features, column, std::min(part, whole - column)};
      if (low) to.stride = to.columns;
      if (low && g.of_weight) to.data = sum.mutable_data_ptr();
      if (!low && g.of_weight) to.data = static_cast<char*>(of_weight.mutable_data_ptr()) + column * element;
      for (int64_t tree = first; tree < end; ++tree) {
        group_backward_weight(a.type, plan.tables, plan.rows, tensors, grad, slope_of(tree),
                              static_cast<int>(tree), g.sparse ? const_data<int64_t>(slot) : nullptr, to,
                              g.of_bias && column == 0 ? grad_bias.mutable_data_ptr() : nullptr, stream);
      }
      if (low && g.of_weight && end == trees) {
        group_round(a.type, to, classes, features, of_weight.mutable_data_ptr(), stream);
      }
      if (!g.of_weight || part == 0) break;
    }
  }
  return {of_hidden, of_weight, grad_bias, index, bias_index};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("group_log_prob", TORCH_BOX(&group_forward<group_log_prob_cuda>));
  m.impl("group_log_prob_backward", TORCH_BOX(&group_backward<group_log_prob_backward_cuda>));
}

}  // namespace hstree
#endif
