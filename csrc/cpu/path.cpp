#include "cpu/path.h"

#include <algorithm>

#include "cpu/capability.h"
#include "cpu/path_kernels.h"

namespace hstree::cpu {
namespace {

template <typename T>
const PathKernels<T>& path_kernels() {
  return *HSTREE_BY_CAPABILITY(path_kernels, T);
}

// Appends the path of class y to `entry`.
void append_path(const char* op, const TreeTable& table, int64_t y, std::vector<int32_t>& entry) {
  const int64_t begin = table.offset[y], end = table.offset[y + 1];
  if (begin < 0 || end < begin || end > table.path_size) {
    fail(op, ": path_offset of class ", y, ": expected an interval within [0, ", table.path_size, "], got [",
         begin, ", ", end, ")");
  }
  if (end - begin > table.longest) {
    fail(op, ": max_depth: the path of class ", y, " has ", end - begin, " nodes, got max_depth ",
         table.longest);
  }
  for (int64_t e = begin; e < end; ++e) {
    const int32_t node = table.path[e] >> 1;
    if (node < 0 || node >= table.weight_rows) {
      fail(op, ": path[", e, "]: expected a node in [0, ", table.weight_rows, "), got ", node);
    }
  }
  entry.insert(entry.end(), table.path + begin, table.path + end);
}

PathPlan path_plan(const char* op, const TreeTable& table, const int64_t* target, int64_t batch_rows) {
  PathPlan plan;
  plan.row = rows_in_leaf_order(op, table, target, batch_rows);
  const int64_t n = plan.rows();
  plan.offset.resize(n + 1);
  plan.shared.resize(n + 1);
  plan.slot.resize(n + 1);
  plan.entry.reserve(n * 16);
  int64_t before = -1;  // class of the row before
  for (int64_t j = 0; j < n; ++j) {
    // The tables of V classes are read at random: what later rows need is fetched early, first the offset of
    // a path and then the path.
    if (j + 16 < n) __builtin_prefetch(table.offset + target[plan.row[j + 16]]);
    if (j + 8 < n) {
      const int64_t first = table.offset[target[plan.row[j + 8]]];
      if (first >= 0 && first < table.path_size) __builtin_prefetch(table.path + first);
    }
    const int64_t y = target[plan.row[j]];
    const int64_t begin = plan.offset[j];
    int64_t length, shared = 0;
    if (y == before) {
      length = shared = begin - plan.offset[j - 1];
      plan.entry.resize(begin + length);
      std::copy_n(plan.entry.data() + begin - length, length, plan.entry.data() + begin);
    } else {
      append_path(op, table, y, plan.entry);
      length = static_cast<int64_t>(plan.entry.size()) - begin;
      if (j > 0) {
        const int32_t* now = plan.entry.data() + begin;
        const int32_t* last = plan.entry.data() + plan.offset[j - 1];
        const int64_t most = std::min(length, begin - plan.offset[j - 1]);
        while (shared < most && (now[shared] >> 1) == (last[shared] >> 1)) ++shared;
      }
      before = y;
    }
    plan.offset[j + 1] = begin + length;
    plan.longest = std::max(plan.longest, length);
    plan.shared[j] = static_cast<int32_t>(shared);
    plan.slot[j + 1] = plan.slot[j] + length - shared;
  }
  return plan;
}

// feature_index of tree t as bits, 16 features each; a thread's workspace.
const uint16_t* feature_lanes(const TreeBatch& batch, int64_t t) {
  const int64_t blocks = (batch.in_features + 15) / 16;
  uint16_t* lanes = scratch<uint16_t, 4>(blocks);
  std::fill(lanes, lanes + blocks, uint16_t{0});
  for (int64_t s = 0; s < batch.features; ++s) {
    const int32_t feature = batch.feature_index[t * batch.features + s];
    lanes[feature / 16] |= static_cast<uint16_t>(1 << feature % 16);
  }
  return lanes;
}

template <typename T>
PathRows<T> path_rows(const TreeBatch& batch, const PathPlan& plan, int64_t t, const T* input,
                      const T* weight, const T* bias) {
  return {plan.row.data(),
          plan.offset.data(),
          plan.entry.data(),
          plan.shared.data(),
          plan.slot.data(),
          plan.rows(),
          plan.longest,
          input,
          batch.feature_index ? batch.feature_index + t * batch.features : nullptr,
          batch.feature_index ? feature_lanes(batch, t) : nullptr,
          batch.in_features,
          batch.features,
          weight + t * batch.weight_rows * batch.features,
          bias ? bias + t * batch.weight_rows : nullptr};
}

// Zeros where the first tree does not store: everywhere if it reads a subset of the features, else in ignored
// rows.
template <typename A>
void clear_grad_input(const TreeBatch& batch, A* grad_input) {
  for (int64_t i = 0; i < batch.rows; ++i) {
    if (batch.trees > 0 && !batch.feature_index && batch.target[i] >= 0) continue;
    std::fill_n(grad_input + i * batch.in_features, batch.in_features, A{0});
  }
}

}  // namespace

std::vector<PathPlan> path_plans(const TreeBatch& batch) {
  check_feature_index(batch);
  std::vector<PathPlan> plans(batch.trees);
  parallel(batch.trees, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      plans[t] = path_plan(batch.op, tree_table(batch, t), batch.target, batch.rows);
    }
  });
  return plans;
}

int64_t visited(const std::vector<PathPlan>& plans) {
  int64_t total = 0;
  for (const PathPlan& plan : plans) total += plan.slot.back();
  return total;
}

void visited_index(const std::vector<PathPlan>& plans, int64_t* index) {
  int64_t* node = index + visited(plans);
  for (size_t t = 0; t < plans.size(); ++t) {
    const PathPlan& plan = plans[t];
    for (int64_t j = 0; j < plan.rows(); ++j) {
      for (int64_t e = plan.offset[j] + plan.shared[j]; e < plan.offset[j + 1]; ++e) {
        *index++ = static_cast<int64_t>(t);
        *node++ = plan.entry[e] >> 1;
      }
    }
  }
}

template <typename T>
void path_forward(const TreeBatch& batch, const Forward<T>& tensors) {
  using A = accumulate_t<T>;
  const PathKernels<T>& kernels = path_kernels<T>();
  const std::vector<PathPlan> plans = path_plans(batch);
  const int64_t stride = batch.trees * batch.longest;
  for (int64_t t = 0; t < batch.trees; ++t) {
    const PathPlan& plan = plans[t];
    const PathRows<T> rows = path_rows(batch, plan, t, tensors.input, tensors.weight, tensors.bias);
    A* score = tensors.score + t * batch.longest;
    parallel((plan.rows() + tile_rows - 1) / tile_rows, 16, [&](int64_t first, int64_t last) {
      const int64_t begin = first * tile_rows, end = std::min(last * tile_rows, plan.rows());
      kernels.scores(rows, begin, end, score, stride, scratch<A, 0>(scores_scratch(batch.features)),
                     scratch<const T*, 1>(plan.longest));
      for (int64_t j = begin; j < end; ++j) {
        const int64_t i = plan.row[j];
        tensors.log_prob[i * batch.trees + t] = kernels.log_sigmoid_sum(
            score + i * stride, plan.entry.data() + plan.offset[j], plan.offset[j + 1] - plan.offset[j]);
      }
    });
  }
}

template <typename T>
void path_backward(const TreeBatch& batch, const std::vector<PathPlan>& plans, const Backward<T>& tensors) {
  using A = accumulate_t<T>;
  const PathKernels<T>& kernels = path_kernels<T>();
  const int64_t stride = batch.trees * batch.longest;
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t parts = std::max<int64_t>(1, std::min(threads, batch.features / 64));
  const int64_t width = std::max<int64_t>(16, ((batch.features + parts - 1) / parts + 15) / 16 * 16);
  clear_grad_input(batch, tensors.grad_input);
  int64_t first_slot = 0;
  for (int64_t t = 0; t < batch.trees; ++t) {
    const PathPlan& plan = plans[t];
    const A* score = tensors.score + t * batch.longest;
    A* grad_score = scratch<A, 2>(static_cast<int64_t>(plan.entry.size()));
    parallel(plan.rows(), 256, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        const int64_t i = plan.row[j];
        kernels.log_sigmoid_grad(score + i * stride, plan.entry.data() + plan.offset[j],
                                 plan.offset[j + 1] - plan.offset[j],
                                 tensors.grad_log_prob[i * batch.trees + t], grad_score + plan.offset[j]);
      }
    });
    const PathRows<T> rows = path_rows<T>(batch, plan, t, tensors.input, tensors.weight, nullptr);
    const int64_t first = tensors.sparse ? first_slot : t * batch.weight_rows;
    const bool add = t > 0 || batch.feature_index;
    T* grad_weight = tensors.grad_weight + first * batch.features;
    parallel((batch.features + width - 1) / width, 1, [&](int64_t part, int64_t end) {
      for (; part < end; ++part) {
        const int64_t begin = part * width;
        A* sums = scratch<A, 0>(gradients_scratch(plan.longest, width));
        const T** pointers = scratch<const T*, 1>(tile_rows * plan.longest);
        T** targets = scratch<T*, 3>((tile_rows + 1) * plan.longest);
        kernels.gradients(rows, begin, std::min(begin + width, batch.features), grad_score,
                          tensors.grad_input, add, grad_weight, tensors.sparse, sums, pointers, targets);
      }
    });
    kernels.bias_gradients(rows, grad_score, tensors.grad_bias + first, tensors.sparse,
                           scratch<A, 0>(plan.longest + 1), scratch<T*, 3>(plan.longest + 1));
    first_slot += plan.slot.back();
  }
}

#define HSTREE_PATH(T)                                                \
  template void path_forward<T>(const TreeBatch&, const Forward<T>&); \
  template void path_backward<T>(const TreeBatch&, const std::vector<PathPlan>&, const Backward<T>&);
HSTREE_PATH(float)
HSTREE_PATH(double)
HSTREE_PATH(BFloat16)
HSTREE_PATH(Half)
#undef HSTREE_PATH

}  // namespace hstree::cpu
