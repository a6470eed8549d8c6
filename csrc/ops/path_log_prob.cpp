// hstree::path_log_prob and its gradient. hstree::forward is the op with its first two results.
//
// Dimensions: N rows, D hidden features, T trees, M inner nodes of a tree, S features of a tree, V classes, P path
// entries.
#include "cpu/path_log_prob.h"

#include <tuple>
#include <utility>

#include "kernels/path_log_prob.h"
#include "ops/cpu.h"
#include "ops/cuda.h"
#include "ops/recycled.h"

namespace hstree {
namespace {

// Checked, contiguous.
struct PathArguments {
  const char* op;
  ScalarType type;                      // of hidden, weight and bias
  Tensor hidden;                        // [N, D]
  Tensor weight;                        // [T, M, S]
  std::optional<Tensor> bias;           // [T, M]
  Tensor target;                        // [N] int64
  Tensor path_offset;                   // [T, V + 1] int64
  Tensor path;                          // [P] int32
  Tensor leaf_position;                 // [T, V] int32
  std::optional<Tensor> feature_index;  // [T, S] int32
  int64_t max_depth;

  int64_t rows() const { return hidden.size(0); }
  int64_t in_features() const { return hidden.size(1); }
  int64_t trees() const { return leaf_position.size(0); }
  int64_t classes() const { return leaf_position.size(1); }
  int64_t weight_rows() const { return weight.size(1); }
  int64_t features() const { return weight.size(2); }
};

PathArguments path_arguments(const char* op, const Tensor& hidden, const Tensor& weight,
                             const std::optional<Tensor>& bias, const Tensor& target,
                             const Tensor& path_offset, const Tensor& path, const Tensor& leaf_position,
                             const std::optional<Tensor>& feature_index, int64_t max_depth) {
  constexpr const char* of_trees = "trees of leaf_position";
  check_dim(op, "hidden", hidden, 2, "[N, D]");
  check_dim(op, "weight", weight, 3, "[T, M, S]");
  check_dim(op, "target", target, 1, "[N]");
  check_dim(op, "path_offset", path_offset, 2, "[T, V + 1]");
  check_dim(op, "path", path, 1, "[P]");
  check_dim(op, "leaf_position", leaf_position, 2, "[T, V]");
  const ScalarType type = element_type(op, "hidden", hidden);
  const auto check_table = [&](const char* name, const Tensor& table, Dtype dtype) {
    check_dtype(op, name, table, dtype);
    check_device(op, name, table, hidden);
  };
  check_same_dtype(op, "weight", weight, "hidden", hidden);
  check_device(op, "weight", weight, hidden);
  check_table("target", target, Dtype::Long);
  check_table("path_offset", path_offset, Dtype::Long);
  check_table("path", path, Dtype::Int);
  check_table("leaf_position", leaf_position, Dtype::Int);
  const int64_t rows = hidden.size(0), trees = leaf_position.size(0), weight_rows = weight.size(1);
  check_size(op, "target", target, 0, rows, "rows of hidden");
  check_size(op, "path_offset", path_offset, 0, trees, of_trees);
  check_size(op, "path_offset", path_offset, 1, leaf_position.size(1) + 1, "classes of leaf_position + 1");
  check(rows < INT32_MAX, op, ": hidden: expected fewer than 2^31 - 1 rows, got ", rows);
  check(trees < INT32_MAX, op, ": leaf_position: expected fewer than 2^31 - 1 trees, got ", trees);
  check(weight_rows < (1 << 30), op, ": weight: expected fewer than 2^30 rows in a tree, got ", weight_rows);
  check_size(op, "weight", weight, 0, trees, of_trees);
  if (feature_index) {
    check_dim(op, "feature_index", *feature_index, 2, "[T, S]");
    check_table("feature_index", *feature_index, Dtype::Int);
    check_size(op, "feature_index", *feature_index, 0, trees, of_trees);
    check_size(op, "feature_index", *feature_index, 1, weight.size(2), "features of weight");
  } else {
    check_size(op, "weight", weight, 2, hidden.size(1), "features of hidden, as there is no feature_index");
  }
  if (bias) {
    check_dim(op, "bias", *bias, 2, "[T, M]");
    check_size(op, "bias", *bias, 0, trees, of_trees);
    check_size(op, "bias", *bias, 1, weight_rows, "rows of weight in a tree");
    check_same_dtype(op, "bias", *bias, "weight", weight);
    check_device(op, "bias", *bias, hidden);
  }
  check(max_depth >= 0 && max_depth <= hstree::max_depth, op, ": max_depth: expected 0 to ",
        hstree::max_depth, ", got ", max_depth);
  return {op,
          type,
          torch::stable::contiguous(hidden),
          torch::stable::contiguous(weight),
          contiguous(bias),
          torch::stable::contiguous(target),
          torch::stable::contiguous(path_offset),
          torch::stable::contiguous(path),
          torch::stable::contiguous(leaf_position),
          contiguous(feature_index),
          max_depth};
}

// log_prob [N, T], score [N, T, max_depth], order [T, N] int64 (rows in the order of their leaves), plan
using PathResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// The further arguments of the backward op.
struct PathGradient {
  Tensor grad_log_prob;                // [N, T] accumulation dtype
  Tensor score, order, plan;           // of the forward pass on the same arguments
  bool of_hidden, of_weight, of_bias;  // which gradients are wanted
  bool sparse;                         // whether those of weight and bias have the visited rows only
};

// grad_hidden, grad_weight, grad_bias, index [2, nnz] (tree and node of each row of sparse gradients). Gradients that
// are not wanted have no elements, and so has the index of dense ones.
using PathGradientResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// What the dispatcher calls.
template <PathResult (*kernel)(const PathArguments&)>
PathResult path_forward(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                        const Tensor& target, const Tensor& path_offset, const Tensor& path,
                        const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                        int64_t max_depth) {
  return kernel(path_arguments("hstree::path_log_prob", hidden, weight, bias, target, path_offset, path,
                               leaf_position, feature_index, max_depth));
}

template <PathGradientResult (*kernel)(const PathArguments&, const PathGradient&)>
PathGradientResult path_backward(const Tensor& grad_log_prob, const Tensor& hidden, const Tensor& weight,
                                 const Tensor& target, const Tensor& path_offset, const Tensor& path,
                                 const Tensor& leaf_position, const std::optional<Tensor>& feature_index,
                                 const Tensor& score, const Tensor& order, const Tensor& plan,
                                 const std::vector<bool>& output_mask, bool sparse) {
  constexpr const char* op = "hstree::path_log_prob_backward";
  check_dim(op, "score", score, 3, "[N, T, max_depth]");
  const PathArguments a = path_arguments(op, hidden, weight, std::nullopt, target, path_offset, path,
                                         leaf_position, feature_index, score.size(2));
  check_dim(op, "grad_log_prob", grad_log_prob, 2, "[N, T]");
  for (const auto& [name, tensor] : {std::pair("grad_log_prob", &grad_log_prob), {"score", &score}}) {
    check_size(op, name, *tensor, 0, a.rows(), "rows of hidden");
    check_size(op, name, *tensor, 1, a.trees(), "trees of leaf_position");
    check_dtype(op, name, *tensor, accumulate_dtype(hidden));
    check_device(op, name, *tensor, hidden);
  }
  check_dim(op, "order", order, 2, "[T, N]");
  check_dtype(op, "order", order, Dtype::Long);
  check_device(op, "order", order, hidden);
  check_size(op, "order", order, 0, a.trees(), "trees of leaf_position");
  check_size(op, "order", order, 1, a.rows(), "rows of hidden");
  check(output_mask.size() == 3, op, ": output_mask: expected 3 values, for hidden, weight and bias, got ",
        output_mask.size());
  return kernel(a, {torch::stable::contiguous(grad_log_prob), torch::stable::contiguous(score),
                    torch::stable::contiguous(order), torch::stable::contiguous(plan), output_mask[0],
                    output_mask[1], output_mask[2], sparse});
}

#ifndef HSTREE_CUDA_ONLY
cpu::TreeBatch tree_batch(const PathArguments& a, const Tensor& order) {
  return {a.op,
          const_data<int64_t>(a.target),
          const_data<int64_t>(a.path_offset),
          const_data<int32_t>(a.path),
          const_data<int32_t>(a.leaf_position),
          const_data<int32_t>(a.feature_index),
          const_data<int64_t>(order),
          a.rows(),
          a.in_features(),
          a.trees(),
          a.weight_rows(),
          a.features(),
          a.classes(),
          a.path.size(0),
          a.max_depth};
}

PathResult path_log_prob_cpu(const PathArguments& a) {
  const Dtype sums = accumulate_dtype(a.hidden);
  const Tensor log_prob = zeros(a.hidden, {a.rows(), a.trees()}, sums);
  const Tensor score = zeros(a.hidden, {a.rows(), a.trees(), a.max_depth}, sums);
  const Tensor order = empty(a.hidden, {a.trees(), a.rows()}, Dtype::Long);
  const cpu::TreeBatch batch = tree_batch(a, order);
  cpu::leaf_order(batch, data<int64_t>(order));
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    cpu::path_log_prob<T>(batch, {const_data<T>(a.hidden), const_data<T>(a.weight), const_data<T>(a.bias),
                                  data<A>(log_prob), data<A>(score)});
  });
  return {log_prob, score, order, empty(a.hidden, {0}, Dtype::Int)};
}

PathGradientResult path_log_prob_backward_cpu(const PathArguments& a, const PathGradient& g) {
  const Dtype dtype = a.hidden.scalar_type(), sums = accumulate_dtype(a.hidden);
  const cpu::TreeBatch batch = tree_batch(a, g.order);
  const auto plans = cpu::path_plans(batch);
  const int64_t nnz = g.sparse ? cpu::visited(plans) : 0;
  const Tensor index = empty(a.hidden, {2, nnz}, Dtype::Long);
  if (g.sparse) cpu::visited_index(plans, data<int64_t>(index));
  const auto nothing = [&] { return empty(a.hidden, {0}, dtype); };  // results may not share memory
  Tensor grad_hidden = nothing(), grad_weight = nothing(), grad_bias = nothing();
  if (g.of_hidden) grad_hidden = recycled(a.hidden, {a.rows(), a.in_features()}, sums);
  if (g.of_weight) {
    grad_weight = g.sparse ? recycled(a.weight, {nnz, a.features()}, dtype)
                           : zeros(a.weight, {a.trees(), a.weight_rows(), a.features()}, dtype);
  }
  if (g.of_bias) {
    grad_bias =
        g.sparse ? empty(a.weight, {nnz}, dtype) : zeros(a.weight, {a.trees(), a.weight_rows()}, dtype);
  }
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    using A = cpu::accumulate_t<T>;
    cpu::path_log_prob_backward<T>(
        batch, plans,
        {const_data<A>(g.grad_log_prob), const_data<A>(g.score), const_data<T>(a.hidden),
         const_data<T>(a.weight), g.of_hidden ? data<A>(grad_hidden) : nullptr,
         g.of_weight ? data<T>(grad_weight) : nullptr, g.of_bias ? data<T>(grad_bias) : nullptr, g.sparse});
  });
  if (g.of_hidden && dtype != sums) grad_hidden = torch::stable::to(grad_hidden, dtype);
  return {grad_hidden, grad_weight, grad_bias, index};
}

// Calls hstree::path_log_prob through the dispatcher, so it runs on any device and is differentiable.
std::tuple<Tensor, Tensor> forward(const Tensor& input, const Tensor& weight,
                                   const std::optional<Tensor>& bias, const Tensor& target,
                                   const Tensor& path_offset, const Tensor& path, const Tensor& leaf_position,
                                   const std::optional<Tensor>& feature_index, int64_t max_depth) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  StableIValue stack[9] = {from(input),         from(weight),        from(bias),
                           from(target),        from(path_offset),   from(path),
                           from(leaf_position), from(feature_index), from(max_depth)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("hstree::path_log_prob", "", stack, TORCH_ABI_VERSION));
  const Tensor log_prob = to<Tensor>(stack[0]), score = to<Tensor>(stack[1]);
  to<Tensor>(stack[2]), to<Tensor>(stack[3]);  // order and plan, released
  return {log_prob, score};
}

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "forward(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor path_offset, Tensor path, "
      "Tensor leaf_position, Tensor? feature_index, int max_depth) -> (Tensor log_prob, Tensor score)");
  // order: the rows of the batch in the order of their leaves, [T, N]. plan: on CUDA, of the nodes that they visit.
  m.def(
      "path_log_prob(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor path_offset, Tensor "
      "path, Tensor leaf_position, Tensor? feature_index, int max_depth) "
      "-> (Tensor log_prob, Tensor score, Tensor order, Tensor plan)");
  // output_mask: whether the gradients of hidden, weight and bias are wanted.
  m.def(
      "path_log_prob_backward(Tensor grad_log_prob, Tensor hidden, Tensor weight, Tensor target, "
      "Tensor path_offset, Tensor path, Tensor leaf_position, Tensor? feature_index, Tensor score, Tensor "
      "order, Tensor plan, bool[3] output_mask, bool sparse) -> (Tensor grad_hidden, Tensor grad_weight, "
      "Tensor grad_bias, Tensor index)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CompositeImplicitAutograd, m) {
  m.impl("forward", TORCH_BOX(&forward));
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("path_log_prob", HSTREE_CPU_BOX(&path_forward<path_log_prob_cpu>));
  m.impl("path_log_prob_backward", HSTREE_CPU_BOX(&path_backward<path_log_prob_backward_cpu>));
}
#endif

#ifdef HSTREE_CUDA
// The call sequence that kernels/path_log_prob.h describes.

// Elements of the plan: length, shared, row_length, count, tree_valid.
int64_t plan_size(const PathArguments& a) {
  return 4 * a.trees() * a.rows() + 1 + a.trees();
}

// The tables on the device. plan: as above.
Tables tables_of(const PathArguments& a, const Tensor& plan) {
  return {const_data<int64_t>(a.target),
          const_data<int64_t>(a.path_offset),
          const_data<int32_t>(a.path),
          const_data<int32_t>(a.leaf_position),
          const_data<int32_t>(a.feature_index),
          const_data<int32_t>(plan) + 4 * a.trees() * a.rows() + 1,
          a.rows(),
          a.classes(),
          a.path.size(0),
          a.weight_rows(),
          a.in_features(),
          a.features(),
          static_cast<int>(a.trees()),
          static_cast<int>(a.max_depth)};
}

LeafOrder leaf_order_of(const PathArguments& a, const Tensor& order, const Tensor& plan) {
  const int32_t* const length = const_data<int32_t>(plan);
  const int64_t places = a.trees() * a.rows();
  return {const_data<int64_t>(order), length, length + places, length + 2 * places};
}

bool nothing_to_do(const PathArguments& a) {
  return a.rows() == 0 || a.trees() == 0;
}

PathResult path_log_prob_cuda(const PathArguments& a) {
  const Dtype sums = accumulate_dtype(a.hidden);
  const Tensor log_prob = empty(a.hidden, {a.rows(), a.trees()}, sums);
  const Tensor score = empty(a.hidden, {a.rows(), a.trees(), a.max_depth}, sums);
  const Tensor plan = empty(a.hidden, {plan_size(a)}, Dtype::Int);
  if (nothing_to_do(a)) return {log_prob, score, empty(a.hidden, {a.trees(), a.rows()}, Dtype::Long), plan};
  const CudaCall call(a.hidden);
  const cudaStream_t stream = call.stream();
  const Tables tables = tables_of(a, plan);
  const Tensor key = empty(a.hidden, {a.trees(), a.rows()}, Dtype::Int);
  leaf_key(tables, data<int32_t>(key), stream);
  const Tensor order = stable_argsort(key);
  const int64_t places = a.trees() * a.rows();
  int32_t *const length = data<int32_t>(plan), *const shared = length + places;
  int32_t *const row_length = shared + places, *const count = row_length + places;
  int32_t* const tree_valid = count + places + 1;
  check_features(tables, tree_valid, stream);
  check_paths(tables, tree_valid, stream);
  leaf_plan(tables, const_data<int64_t>(order), length, shared, row_length, count, stream);
  const PathForward tensors = {a.hidden.const_data_ptr(), a.weight.const_data_ptr(), const_data<void>(a.bias),
                               log_prob.mutable_data_ptr(), score.mutable_data_ptr()};
  path_log_prob(a.type, tables, leaf_order_of(a, order, plan), tensors, stream);
  return {log_prob, score, order, plan};
}

PathGradientResult path_log_prob_backward_cuda(const PathArguments& a, const PathGradient& g) {
  check_dim(a.op, "plan", g.plan, 1, "[4 T N + 1 + T]");
  check_size(a.op, "plan", g.plan, 0, plan_size(a), "4 T N + 1 + T");
  check_dtype(a.op, "plan", g.plan, Dtype::Int);
  check_device(a.op, "plan", g.plan, a.hidden);
  const Dtype dtype = a.hidden.scalar_type();
  const auto nothing = [&] { return empty(a.hidden, {0}, dtype); };  // results may not share memory
  Tensor grad_hidden = nothing(), grad_weight = nothing(), grad_bias = nothing();
  Tensor index = empty(a.hidden, {2, 0}, Dtype::Long);
  const bool of_parameters = g.of_weight || g.of_bias;
  const auto make_parameters = [&](int64_t nnz) {
    // The kernel writes both, so that the weight's is made also where only the bias's is wanted.
    grad_weight = g.sparse ? empty(a.weight, {nnz, a.features()}, dtype)
                           : zeros(a.weight, {a.trees(), a.weight_rows(), a.features()}, dtype);
    if (!g.of_bias) return;
    grad_bias =
        g.sparse ? empty(a.weight, {nnz}, dtype) : zeros(a.weight, {a.trees(), a.weight_rows()}, dtype);
  };
  const auto result = [&]() -> PathGradientResult {
    return {grad_hidden, g.of_weight ? grad_weight : nothing(), grad_bias, index};
  };
  if (nothing_to_do(a)) {
    if (g.of_hidden) grad_hidden = zeros(a.hidden, {a.rows(), a.in_features()}, dtype);
    if (of_parameters) make_parameters(0);
    return result();
  }
  const CudaCall call(a.hidden);
  const cudaStream_t stream = call.stream();
  const Tables tables = tables_of(a, g.plan);
  const LeafOrder leaf_order = leaf_order_of(a, g.order, g.plan);
  Tensor slot;  // [T N + 1] first row of the row-sparse gradient that each place adds, and their number
  int64_t nnz = 0;
  if (g.sparse) {
    const int64_t places = a.trees() * a.rows();
    Tensor plan = g.plan;
    slot = cumulative_sum(torch::stable::narrow(plan, 0, 3 * places, places + 1));
    nnz = last_value(slot);  // synchronizes here, before more work is queued
  }
  const PathBackward tensors = {g.grad_log_prob.const_data_ptr(), g.score.const_data_ptr(),
                                a.hidden.const_data_ptr(), a.weight.const_data_ptr()};
  const Tensor workspace = empty(a.hidden, {backward_workspace_bytes(a.type, tables)}, Dtype::Byte);
  if (g.of_hidden) {
    grad_hidden = empty(a.hidden, {a.rows(), a.in_features()}, dtype);
    path_log_prob_backward_hidden(a.type, tables, leaf_order, tensors, workspace.mutable_data_ptr(),
                                  grad_hidden.mutable_data_ptr(), stream);
  }
  if (g.sparse) {
    index = empty(a.hidden, {2, nnz}, Dtype::Long);
    slot_index(tables, leaf_order, const_data<int64_t>(slot), nnz, data<int64_t>(index), stream);
  }
  if (!of_parameters) return result();
  make_parameters(nnz);
  path_log_prob_backward_weight(a.type, tables, leaf_order, g.sparse ? const_data<int64_t>(slot) : nullptr,
                                tensors, workspace.mutable_data_ptr(), grad_weight.mutable_data_ptr(),
                                g.of_bias ? grad_bias.mutable_data_ptr() : nullptr, stream);
  return result();
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("path_log_prob", TORCH_BOX(&path_forward<path_log_prob_cuda>));
  m.impl("path_log_prob_backward", TORCH_BOX(&path_backward<path_log_prob_backward_cuda>));
}
#endif

}  // namespace
}  // namespace hstree
