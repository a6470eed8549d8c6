#include "ops/tree_op.h"

namespace hstree {
namespace {

constexpr const char* of_trees = "trees of leaf_position";
constexpr const char* of_classes = "classes of leaf_position";
constexpr int64_t largest_width = 1 << 20;

const char* name_of(const TreeInputs& in, const char* forward, const char* backward) {
  return in.score ? backward : forward;
}

// An index table int32 [T, size].
void check_index(const char* op, const char* name, const TreeInputs& in, const char* shape, int64_t size,
                 const char* what) {
  check_dim(op, name, *in.index, 2, shape);
  check_dtype(op, name, *in.index, Dtype::Int);
  check_device(op, name, *in.index, in.hidden);
  check_size(op, name, *in.index, 0, in.leaf_position.size(0), of_trees);
  check_size(op, name, *in.index, 1, size, what);
}

// The weight [T, M, S] of the path op and the wide op, and the features that its trees read.
void check_weight_of_trees(const char* op, const TreeInputs& in) {
  check_size(op, "weight", in.weight, 0, in.leaf_position.size(0), of_trees);
  if (in.index) {
    check_index(op, "feature_index", in, "[T, S]", in.weight.size(2), "features of weight");
  } else {
    check_size(op, "weight", in.weight, 2, in.hidden.size(1),
               "features of hidden, as there is no feature_index");
  }
}

void check_bias(const char* op, const TreeInputs& in, const char* shape, const char* of_rows) {
  if (!in.bias) return;
  check_dim(op, "bias", *in.bias, 2, shape);
  check_size(op, "bias", *in.bias, 0, in.leaf_position.size(0), of_trees);
  check_size(op, "bias", *in.bias, 1, in.weight.size(in.weight.dim() - 2), of_rows);
  check(in.bias->scalar_type() == in.weight.scalar_type(), op, ": bias: expected the dtype of weight, ",
        torch::headeronly::toString(in.weight.scalar_type()), ", got ",
        torch::headeronly::toString(in.bias->scalar_type()));
  check_device(op, "bias", *in.bias, in.hidden);
}

// `longest` of the forward op, or that of the scores. name: max_depth or max_width.
int64_t checked_longest(const char* op, const TreeInputs& in, const char* name, int64_t most) {
  const int64_t longest = in.score ? in.score->size(2) : in.longest;
  check(longest >= 0 && longest <= most, op, ": ", name, ": expected 0 to ", most, ", got ", longest);
  return longest;
}

void check_order(const char* op, const TreeInputs& in) {
  if (!in.order) return;
  check_dim(op, "order", *in.order, 2, "[T, N]");
  check_dtype(op, "order", *in.order, Dtype::Long);
  check_device(op, "order", *in.order, in.hidden);
  check_size(op, "order", *in.order, 0, in.leaf_position.size(0), of_trees);
  check_size(op, "order", *in.order, 1, in.hidden.size(0), "rows of hidden");
}

// grad_log_prob [N, T] and score [N, T, longest], of the accumulation dtype.
void check_backward(const char* op, const TreeInputs& in) {
  if (!in.score) return;
  check_dim(op, "grad_log_prob", *in.grad_log_prob, 2, "[N, T]");
  for (const auto& [name, tensor] : {std::pair("grad_log_prob", in.grad_log_prob), {"score", in.score}}) {
    check_size(op, name, *tensor, 0, in.hidden.size(0), "rows of hidden");
    check_size(op, name, *tensor, 1, in.leaf_position.size(0), of_trees);
    check_dtype(op, name, *tensor, accumulate_dtype(in.hidden));
    check_device(op, name, *tensor, in.hidden);
  }
}

// What the ops have in common. offset, path: their names.
void check_common(const char* op, const TreeInputs& in, const char* offset, const char* path) {
  check_dim(op, "hidden", in.hidden, 2, "[N, D]");
  check_dim(op, "target", in.target, 1, "[N]");
  check_dim(op, "leaf_position", in.leaf_position, 2, "[T, V]");
  check_dim(op, offset, in.offset, 2, "[T, V + 1]");
  element_type(op, "hidden", in.hidden);
  check(in.weight.scalar_type() == in.hidden.scalar_type(), op, ": weight: expected the dtype of hidden, ",
        torch::headeronly::toString(in.hidden.scalar_type()), ", got ",
        torch::headeronly::toString(in.weight.scalar_type()));
  check_dtype(op, "target", in.target, Dtype::Long);
  check_dtype(op, offset, in.offset, Dtype::Long);
  check_dtype(op, path, in.path, Dtype::Int);
  check_dtype(op, "leaf_position", in.leaf_position, Dtype::Int);
  check_device(op, "weight", in.weight, in.hidden);
  check_device(op, "target", in.target, in.hidden);
  check_device(op, offset, in.offset, in.hidden);
  check_device(op, path, in.path, in.hidden);
  check_device(op, "leaf_position", in.leaf_position, in.hidden);

  const int64_t rows = in.hidden.size(0), trees = in.leaf_position.size(0);
  check_size(op, "target", in.target, 0, rows, "rows of hidden");
  check_size(op, offset, in.offset, 0, trees, of_trees);
  check_size(op, offset, in.offset, 1, in.leaf_position.size(1) + 1, "classes of leaf_position + 1");
  check(rows < INT32_MAX, op, ": hidden: expected fewer than 2^31 - 1 rows, got ", rows);
  check(trees < INT32_MAX, op, ": leaf_position: expected fewer than 2^31 - 1 trees, got ", trees);
  const int64_t weight_rows = in.weight.size(in.weight.dim() - 2);
  check(weight_rows < (1 << 30), op, ": weight: expected fewer than 2^30 rows in a tree, got ", weight_rows);
}

TreeArguments contiguous(const char* op, const TreeInputs& in, int64_t longest) {
  const auto given = [](const std::optional<Tensor>& tensor) {
    return tensor ? std::optional(torch::stable::contiguous(*tensor)) : std::nullopt;
  };
  return {op,
          element_type(op, "hidden", in.hidden),
          torch::stable::contiguous(in.hidden),
          torch::stable::contiguous(in.weight),
          given(in.bias),
          torch::stable::contiguous(in.target),
          torch::stable::contiguous(in.offset),
          torch::stable::contiguous(in.path),
          torch::stable::contiguous(in.leaf_position),
          given(in.index),
          std::nullopt,
          given(in.order),
          longest};
}

}  // namespace

TreeArguments path_arguments(const TreeInputs& in) {
  const char* const op = name_of(in, "hstree::path_log_prob", "hstree::path_log_prob_backward");
  if (in.score) check_dim(op, "score", *in.score, 3, "[N, T, max_depth]");
  check_dim(op, "weight", in.weight, 3, "[T, M, S]");
  check_dim(op, "path", in.path, 1, "[P]");
  check_common(op, in, "path_offset", "path");
  check_weight_of_trees(op, in);
  check_bias(op, in, "[T, M]", "rows of weight in a tree");
  check_order(op, in);
  check_backward(op, in);
  return contiguous(op, in, checked_longest(op, in, "max_depth", max_depth));
}

TreeArguments wide_arguments(const TreeInputs& in) {
  const char* const op = name_of(in, "hstree::wide_log_prob", "hstree::wide_log_prob_backward");
  if (in.score) check_dim(op, "score", *in.score, 3, "[N, T, max_width]");
  check_dim(op, "weight", in.weight, 3, "[T, R, S]");
  check_dim(op, "wide_path", in.path, 2, "[P, 3]");
  check_common(op, in, "wide_offset", "wide_path");
  check_size(op, "wide_path", in.path, 1, 3, "first_row, width, child");
  check_weight_of_trees(op, in);
  check_bias(op, in, "[T, R]", "rows of weight in a tree");
  check_order(op, in);
  check_backward(op, in);
  return contiguous(op, in, checked_longest(op, in, "max_width", largest_width));
}

TreeArguments leaf_arguments(const TreeInputs& in) {
  const char* const op = name_of(in, "hstree::leaf_log_prob", "hstree::leaf_log_prob_backward");
  if (in.score) check_dim(op, "score", *in.score, 3, "[N, T, max_width]");
  check_dim(op, "weight", in.weight, 2, "[V, D]");
  check_dim(op, "group", in.path, 2, "[P, 3]");
  check_common(op, in, "group_offset", "group");
  check_size(op, "group", in.path, 1, 3, "first_row, width, child");
  check_index(op, "leaf_class", in, "[T, V]", in.leaf_position.size(1), of_classes);
  check_size(op, "weight", in.weight, 0, in.leaf_position.size(1), of_classes);
  check_size(op, "weight", in.weight, 1, in.hidden.size(1), "features of hidden");
  check_bias(op, in, "[T, V]", "rows of weight");
  check_order(op, in);
  check_backward(op, in);
  TreeArguments arguments = contiguous(op, in, checked_longest(op, in, "max_width", largest_width));
  std::swap(arguments.feature_index, arguments.leaf_class);
  return arguments;
}

}  // namespace hstree
