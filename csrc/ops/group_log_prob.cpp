// hstree::group_log_prob and its gradients. On CUDA: the call sequence that kernels/group_log_prob.h describes.
#include "cpu/group_log_prob.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "cpu/recycled_memory.h"
#include "kernels/group_log_prob.h"
#include "ops/cpu.h"
#include "ops/cuda.h"
#include "ops/recycled.h"

namespace hstree {
namespace {

struct GroupArguments {
  const char* op;
  ScalarType type;             // of hidden, weight and bias
  Tensor hidden;               // [N, D]
  Tensor weight;               // [V, D]
  std::optional<Tensor> bias;  // [T, V]
  Tensor target;               // [N] int64
  Tensor cluster;              // [T, V] int32, the classes side by side
  Tensor order;                // [T, V] int32
  Tensor begin;                // [T, C + 1] int32
  int64_t max_width;

  int64_t rows() const { return hidden.size(0); }
  int64_t features() const { return hidden.size(1); }
  int64_t trees() const { return order.size(0); }
  int64_t classes() const { return order.size(1); }
  int64_t clusters() const { return begin.size(1) - 1; }
  int64_t cluster_stride() const { return cluster.stride(0); }
};

// Throws std::runtime_error with the argument's name, the expected value and the actual one.
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
  check_same_dtype(op, "weight", weight, "hidden", hidden);
  check_device(op, "weight", weight, hidden);
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
    check_same_dtype(op, "bias", *bias, "weight", weight);
    check_device(op, "bias", *bias, hidden);
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
          contiguous(bias),
          torch::stable::contiguous(target),
          side_by_side ? cluster : torch::stable::contiguous(cluster),
          torch::stable::contiguous(order),
          torch::stable::contiguous(begin),
          max_width};
}

// log_prob [N, T], saved, rows
using GroupResult = std::tuple<Tensor, Tensor, Tensor>;

// The further arguments of the backward op.
struct GroupGradient {
  Tensor grad_log_prob;                // [N, T] accumulation dtype
  Tensor saved, rows;                  // of the forward pass on the same arguments
  bool of_hidden, of_weight, of_bias;  // which gradients are wanted
  bool sparse;                         // whether those of weight and bias have the visited rows only
};

// grad_hidden, grad_weight, grad_bias, index [1, nnz] (class of each row of a sparse grad_weight), bias_index
// [2, biases] (tree and class of each sparse grad_bias). Gradients that are not wanted have no elements, and so have the
// indices of dense ones.
using GroupGradientResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// What the dispatcher calls.
template <GroupResult (*kernel)(const GroupArguments&)>
GroupResult group_forward(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                          const Tensor& target, const Tensor& cluster, const Tensor& order,
                          const Tensor& begin, int64_t max_width) {
  return kernel(group_arguments("hstree::group_log_prob", hidden, weight, bias, target, cluster, order, begin,
                                max_width));
}

template <GroupGradientResult (*kernel)(const GroupArguments&, const GroupGradient&)>
GroupGradientResult group_backward(const Tensor& grad_log_prob, const Tensor& hidden, const Tensor& weight,
                                   const std::optional<Tensor>& bias, const Tensor& target,
                                   const Tensor& cluster, const Tensor& order, const Tensor& begin,
                                   int64_t max_width, const Tensor& saved, const Tensor& rows,
                                   const std::vector<bool>& output_mask, bool sparse) {
  constexpr const char* op = "hstree::group_log_prob_backward";
  const GroupArguments a =
      group_arguments(op, hidden, weight, bias, target, cluster, order, begin, max_width);
  check_dim(op, "grad_log_prob", grad_log_prob, 2, "[N, T]");
  check_size(op, "grad_log_prob", grad_log_prob, 0, a.rows(), "rows of hidden");
  check_size(op, "grad_log_prob", grad_log_prob, 1, a.trees(), "trees of order");
  for (const auto& [name, tensor] : {std::pair("grad_log_prob", &grad_log_prob), {"saved", &saved}}) {
    check_dtype(op, name, *tensor, accumulate_dtype(hidden));
    check_device(op, name, *tensor, hidden);
  }
  check(output_mask.size() == 3, op, ": output_mask: expected 3 values, for hidden, weight and bias, got ",
        output_mask.size());
  return kernel(a, {torch::stable::contiguous(grad_log_prob), torch::stable::contiguous(saved),
                    torch::stable::contiguous(rows), output_mask[0], output_mask[1], output_mask[2], sparse});
}

#ifndef HSTREE_CUDA_ONLY
cpu::GroupBatch group_batch(const GroupArguments& a) {
  return {a.op,
          const_data<int64_t>(a.target),
          const_data<int32_t>(a.cluster),
          const_data<int32_t>(a.order),
          const_data<int32_t>(a.begin),
          a.rows(),
          a.features(),
          a.trees(),
          a.classes(),
          a.clusters(),
          a.cluster_stride(),
          a.max_width};
}

// Scores of rows in their groups, one after another: room for N T max_width, whose size does not depend on the targets.
// Large memory lies in pages that the system provides at the first access, and what lies behind the last score is
// never touched.
Tensor scores(const GroupArguments& a) {
  constexpr int64_t largest_recycled = 1 << 26;
  const Dtype dtype = accumulate_dtype(a.hidden);
  const std::vector<int64_t> shape = {a.rows() * a.trees() * a.max_width};
  const int64_t bytes = shape[0] * (dtype == Dtype::Double ? 8 : 4);
  if (bytes < cpu::smallest_recycled) return zeros(a.hidden, shape, dtype);
  const bool recycled = bytes <= largest_recycled;
  void* const memory = recycled ? cpu::acquire(bytes) : cpu::acquire_zero_pages(bytes);
  return torch::stable::from_blob(memory, shape, {1}, a.hidden.device(), dtype,
                                  [recycled, bytes](void* address) {
                                    recycled ? cpu::release(address) : cpu::release_pages(address, bytes);
                                  });
}

GroupResult group_log_prob_cpu(const GroupArguments& a) {
  const Tensor log_prob = zeros(a.hidden, {a.rows(), a.trees()}, accumulate_dtype(a.hidden));
  const Tensor score = scores(a);
  const cpu::GroupBatch batch = group_batch(a);
  const auto plans = cpu::group_plans(batch);
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    cpu::group_log_prob<T>(batch, plans,
                           {const_data<T>(a.hidden), const_data<T>(a.weight), const_data<T>(a.bias),
                            data<A>(log_prob), data<A>(score)});
  });
  return {log_prob, score, empty(a.hidden, {0, 0}, Dtype::Long)};
}

GroupGradientResult group_log_prob_backward_cpu(const GroupArguments& a, const GroupGradient& g) {
  const Dtype dtype = a.hidden.scalar_type(), sums = accumulate_dtype(a.hidden);
  check_dim(a.op, "saved", g.saved, 1, "[N T max_width]");
  check_size(a.op, "saved", g.saved, 0, a.rows() * a.trees() * a.max_width, "N T max_width");
  const cpu::GroupBatch batch = group_batch(a);
  const auto plans = cpu::group_plans(batch);
  const std::vector<int64_t> visited = cpu::visited_classes(batch, plans.data(), 0, a.trees());
  int64_t classes = 0, biases = 0;
  if (g.sparse) {
    classes = visited.size();
    for (const cpu::GroupPlan& plan : plans) biases += plan.visited;
  }
  const Tensor index = empty(a.hidden, {1, classes}, Dtype::Long);
  const Tensor bias_index = empty(a.hidden, {2, biases}, Dtype::Long);
  if (g.sparse) {
    std::copy(visited.begin(), visited.end(), data<int64_t>(index));
    cpu::visited_biases(batch, plans, data<int64_t>(bias_index));
  }
  const auto nothing = [&] { return empty(a.hidden, {0}, dtype); };  // results may not share memory
  Tensor grad_hidden = nothing(), grad_weight = nothing(), grad_bias = nothing();
  if (g.of_hidden) grad_hidden = recycled(a.hidden, {a.rows(), a.features()}, sums);
  if (g.of_weight) grad_weight = recycled(a.weight, {g.sparse ? classes : a.classes(), a.features()}, dtype);
  if (g.of_bias) {
    grad_bias =
        g.sparse ? empty(a.weight, {biases}, dtype) : zeros(a.weight, {a.trees(), a.classes()}, dtype);
  }
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    cpu::group_log_prob_backward<T>(
        batch, plans, visited,
        {const_data<A>(g.grad_log_prob), const_data<A>(g.saved), const_data<T>(a.hidden),
         const_data<T>(a.weight), g.of_hidden ? data<A>(grad_hidden) : nullptr,
         g.of_weight ? data<T>(grad_weight) : nullptr, g.of_bias ? data<T>(grad_bias) : nullptr, g.sparse});
  });
  if (g.of_hidden && dtype != sums) grad_hidden = torch::stable::to(grad_hidden, dtype);
  return {grad_hidden, grad_weight, grad_bias, index, bias_index};
}

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "group_log_prob(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor cluster, Tensor "
      "order, Tensor begin, int max_width) -> (Tensor log_prob, Tensor saved, Tensor rows)");
  // saved: on a CPU the scores of the rows in their groups, on CUDA the logarithms of their sums. rows: on CUDA, sorted
  // by cluster. output_mask: whether the gradients of hidden, weight and bias are wanted.
  m.def(
      "group_log_prob_backward(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor? bias, Tensor "
      "target, Tensor cluster, Tensor order, Tensor begin, int max_width, Tensor saved, Tensor rows, bool[3] "
      "output_mask, bool sparse) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias, Tensor index, "
      "Tensor bias_index)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("group_log_prob", HSTREE_CPU_BOX(&group_forward<group_log_prob_cpu>));
  m.impl("group_log_prob_backward", HSTREE_CPU_BOX(&group_backward<group_log_prob_backward_cpu>));
}
#endif

#ifdef HSTREE_CUDA
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

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("group_log_prob", TORCH_BOX(&group_forward<group_log_prob_cuda>));
  m.impl("group_log_prob_backward", TORCH_BOX(&group_backward<group_log_prob_backward_cuda>));
}
#endif

}  // namespace
}  // namespace hstree
