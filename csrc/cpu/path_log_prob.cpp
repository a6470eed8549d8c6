#include "cpu/path_log_prob.h"

#include <algorithm>

#include "cpu/capability.h"
#include "cpu/path_log_prob_kernels.h"

namespace hstree::cpu {
namespace {

struct KeyedRow {
  uint32_t key;
  int32_t row;
};

// Stable least-significant-digit radix sort; keys below 2^bits.
void sort_by_key(std::vector<KeyedRow>& rows, int bits) {
  constexpr int digit = 11;
  if (rows.size() < 128) {  // the counts would take longer
    std::stable_sort(rows.begin(), rows.end(), [](KeyedRow a, KeyedRow b) { return a.key < b.key; });
    return;
  }
  std::vector<KeyedRow> other(rows.size());
  for (int shift = 0; shift < bits; shift += digit) {
    uint32_t count[(1 << digit) + 1] = {};
    for (const KeyedRow& r : rows) ++count[((r.key >> shift) & ((1 << digit) - 1)) + 1];
    for (int d = 0; d < 1 << digit; ++d) count[d + 1] += count[d];
    for (const KeyedRow& r : rows) other[count[(r.key >> shift) & ((1 << digit) - 1)]++] = r;
    rows.swap(other);
  }
}

void check_target(const char* op, int64_t classes, int64_t row, int64_t target) {
  if (target >= classes) {
    fail(op, ": target[", row, "]: expected less than ", classes, " (the number of classes), got ", target);
  }
}

// A stable sort of the rows by the leaves of their targets, into order [N]. Rows with a negative target come last.
void sort_by_leaf(const char* op, const int32_t* leaf_position, int64_t classes, const int64_t* target,
                  int64_t rows, int64_t* order) {
  std::vector<KeyedRow> sorted;
  sorted.reserve(rows);
  uint32_t largest = 0;
  int64_t last = rows;
  for (int64_t i = rows - 1; i >= 0; --i) {
    if (target[i] < 0) order[--last] = i;
  }
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t y = target[i];
    if (y < 0) continue;
    check_target(op, classes, i, y);
    const uint32_t key = static_cast<uint32_t>(leaf_position[y]);
    largest = std::max(largest, key);
    sorted.push_back({key, static_cast<int32_t>(i)});
  }
  int bits = 0;
  while (bits < 32 && largest >> bits) ++bits;
  sort_by_key(sorted, bits);
  for (size_t j = 0; j < sorted.size(); ++j) order[j] = sorted[j].row;
}

PathPlan path_plan(const TreeBatch& batch, int64_t t) {
  const char* const op = batch.op;
  const int64_t* const order = batch.order + t * batch.rows;
  const int64_t* const path_offset = batch.path_offset + t * (batch.classes + 1);
  PathPlan plan;
  plan.row.reserve(batch.rows);
  for (int64_t j = 0; j < batch.rows; ++j) {
    const int64_t i = order[j];
    if (i < 0 || i >= batch.rows) fail(op, ": order: expected rows in [0, ", batch.rows, "), got ", i);
    if (batch.target[i] < 0) continue;
    check_target(op, batch.classes, i, batch.target[i]);
    plan.row.push_back(static_cast<int32_t>(i));
  }
  const int64_t n = plan.rows();
  std::vector<PathSpan> spans(n);
  plan.offset.resize(n + 1);
  plan.shared.resize(n + 1);
  plan.slot.resize(n + 1);
  for (int64_t j = 0; j < n; ++j) {
    const int64_t y = batch.target[plan.row[j]];
    const PathSpan span = {path_offset[y], path_offset[y + 1]};
    if (span.begin < 0 || span.end < span.begin || span.end > batch.path_size) {
      fail(op, ": path_offset of class ", y, ": expected an interval within [0, ", batch.path_size,
           "], got [", span.begin, ", ", span.end, ")");
    }
    const int64_t length = span.end - span.begin;
    if (length > batch.max_depth) {
      fail(op, ": max_depth: the path of class ", y, " has ", length,
           " nodes, got max_depth = ", batch.max_depth);
    }
    spans[j] = span;
    plan.longest = std::max(plan.longest, length);
    plan.offset[j + 1] = plan.offset[j] + length;
  }
  plan.entry.resize(plan.offset[n]);
  const int64_t invalid = chosen_kernels<PathKernels<float>>().copy_paths(
      {batch.path, spans.data(), n, batch.weight_rows, plan.offset.data(), plan.entry.data(),
       plan.shared.data()});
  if (invalid >= 0) {
    fail(op, ": path[", invalid, "]: expected a node in [0, ", batch.weight_rows, "), got ",
         batch.path[invalid] >> 1);
  }
  for (int64_t j = 0; j < n; ++j) {
    plan.slot[j + 1] = plan.slot[j] + plan.offset[j + 1] - plan.offset[j] - plan.shared[j];
  }
  plan.visited = plan.slot[n];
  return plan;
}

// Trees are processed in groups. If they read subsets of the features, the rows are first gathered in leaf
// order for all trees of a group: each row is read once for all of them, from the cache.
template <typename T>
class Groups {
 public:
  using A = accumulate_t<T>;

  Groups(const TreeBatch& batch, const std::vector<PathPlan>& plans)
      : batch_(batch),
        plans_(plans),
        subsets_(batch.features_of_trees()),
        gathered_(batch.feature_index),
        stride_(gathered_ ? workspace_stride(batch.features) : batch.in_features),
        size_(group_size()),
        place_(gathered_ ? batch.rows * size_ : 0),
        x_(gathered_ ? batch.rows * size_ * stride_ : 0) {}

  bool are_gathered() const { return gathered_; }
  int64_t size() const { return size_; }  // largest number of trees in a group

  // Calls work(first, last) for the trees first <= t < last of each group.
  template <typename Work>
  void each(const T* hidden, const Work& work) {
    for (int64_t first = 0; first < batch_.trees; first += size_) {
      const int64_t last = std::min(first + size_, batch_.trees);
      if (gathered_) gather(first, last, hidden);
      work(first, last);
    }
  }

  // Adds the gradients of the gathered features, which replaced them, to grad_hidden, or stores them if not
  // `add`.
  void scatter(int64_t first, int64_t last, bool add, A* grad_hidden) const {
    const GatheredRows<A> rows = gathered_rows(first, last);
    parallel(batch_.rows, 16, [&](int64_t begin, int64_t end) {
      chosen_kernels<PathKernels<T>>().scatter(rows, begin, end, add, grad_hidden);
    });
  }

  // The rows of tree t, in the group that begins with tree `first`; null if nothing is gathered.
  A* gathered(int64_t first, int64_t t) const {
    return gathered_ ? x_.data() + (t - first) * batch_.rows * stride_ : nullptr;
  }

 private:
  // Groups of about equal size whose gathered rows take at most 5 MiB (the fastest measured), or of one tree.
  int64_t group_size() const {
    if (!gathered_) return 1;
    const int64_t bytes = 1 + batch_.rows * stride_ * static_cast<int64_t>(sizeof(A));
    const int64_t most = std::max<int64_t>(1, std::min((int64_t{5} << 20) / bytes, batch_.trees));
    const int64_t groups = (batch_.trees + most - 1) / most;
    return groups ? (batch_.trees + groups - 1) / groups : 1;
  }

  GatheredRows<A> gathered_rows(int64_t first, int64_t last) const {
    return {subset_.data(),     place_.data(),   last - first, batch_.rows,
            batch_.in_features, batch_.features, x_.data(),    stride_};
  }

  void gather(int64_t first, int64_t last, const T* hidden) {
    const int64_t trees = last - first;
    subset_.clear();
    std::fill(place_.begin(), place_.end(), -1);
    for (int64_t t = first; t < last; ++t) {
      subset_.push_back(subsets_[t]);
      for (int64_t j = 0; j < plans_[t].rows(); ++j) {
        place_[plans_[t].row[j] * trees + t - first] = static_cast<int32_t>(j);
      }
    }
    const GatheredRows<A> rows = gathered_rows(first, last);
    parallel(batch_.rows, 16, [&](int64_t begin, int64_t end) {
      chosen_kernels<PathKernels<T>>().gather(rows, begin, end, hidden);
    });
  }

  const TreeBatch& batch_;
  const std::vector<PathPlan>& plans_;
  const FeatureSubsets subsets_;
  const bool gathered_;
  const int64_t stride_;
  const int64_t size_;
  std::vector<FeatureSubset> subset_;  // of the group's trees
  std::vector<int32_t> place_;         // [N, trees of the group]
  const Workspace<A> x_;               // [trees of the group, N, stride]
};

// The rows of a tree. x: the features gathered from hidden, or null.
template <typename T>
PathRows<T> path_rows(const TreeBatch& batch, const PathPlan& plan, int64_t t, const T* weight, const T* bias,
                      const T* hidden, const accumulate_t<T>* x) {
  return {plan.row.data(),
          plan.offset.data(),
          plan.entry.data(),
          plan.shared.data(),
          plan.slot.data(),
          plan.rows(),
          plan.longest,
          batch.features,
          weight + t * batch.weight_rows * batch.features,
          bias ? bias + t * batch.weight_rows : nullptr,
          hidden,
          x,
          x ? workspace_stride(batch.features) : batch.in_features,
          workspace_stride(batch.features)};
}

// Runs f(t, begin, end) in parallel on intervals of rows of the trees first <= t < last. Intervals begin at a
// tile.
template <typename F>
void parallel_rows(const std::vector<PathPlan>& plans, int64_t first, int64_t last, const F& f) {
  std::vector<int64_t> tiles = {0};  // of earlier trees
  for (int64_t t = first; t < last; ++t) {
    tiles.push_back(tiles.back() + (plans[t].rows() + tile_rows - 1) / tile_rows);
  }
  parallel(tiles.back(), 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t before = tiles[t - first];
      const int64_t from = std::max(begin, before) - before,
                    to = std::min(end, tiles[t - first + 1]) - before;
      if (from < to) f(t, from * tile_rows, std::min(to * tile_rows, plans[t].rows()));
    }
  });
}

}  // namespace

void leaf_order(const TreeBatch& batch, int64_t* order) {
  parallel(batch.trees, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      sort_by_leaf(batch.op, batch.leaf_position + t * batch.classes, batch.classes, batch.target, batch.rows,
                   order + t * batch.rows);
    }
  });
}

std::vector<PathPlan> path_plans(const TreeBatch& batch) {
  check_feature_index(batch.op, batch.features_of_trees());
  std::vector<PathPlan> plans(batch.trees);
  parallel(batch.trees, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) plans[t] = path_plan(batch, t);
  });
  return plans;
}

int64_t visited(const std::vector<PathPlan>& plans) {
  int64_t total = 0;
  for (const PathPlan& plan : plans) total += plan.visited;
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
void path_log_prob(const TreeBatch& batch, const Forward<T>& tensors) {
  const std::vector<PathPlan> plans = path_plans(batch);
  const int64_t stride = batch.trees * batch.max_depth;
  Groups<T> groups(batch, plans);
  groups.each(tensors.hidden, [&](int64_t first, int64_t last) {
    parallel_rows(plans, first, last, [&](int64_t t, int64_t begin, int64_t end) {
      const PathPlan& plan = plans[t];
      const PathRows<T> rows = path_rows<T>(batch, plan, t, tensors.weight, tensors.bias, tensors.hidden,
                                            groups.gathered(first, t));
      chosen_kernels<PathKernels<T>>().scores(
          rows, begin, end, tensors.log_prob + t, batch.trees, tensors.score + t * batch.max_depth, stride,
          scratch<accumulate_t<T>, 0>(tile_rows * rows.sum_stride), scratch<const T*, 1>(plan.longest));
    });
  });
}

template <typename T>
void path_log_prob_backward(const TreeBatch& batch, const std::vector<PathPlan>& plans,
                            const Backward<T>& tensors) {
  using A = accumulate_t<T>;
  const PathKernels<T>& kernels = chosen_kernels<PathKernels<T>>();
  const int64_t threads = torch::stable::get_num_threads();
  Groups<T> groups(batch, plans);
  // Threads divide the trees of a group, and also the features if there are fewer trees than threads.
  const int64_t parts =
      std::max<int64_t>(1, std::min((threads + groups.size() - 1) / groups.size(), batch.features / 64));
  const int64_t width = std::max<int64_t>(16, ((batch.features + parts - 1) / parts + 15) / 16 * 16);
  const int64_t intervals = std::max<int64_t>(1, (batch.features + width - 1) / width);
  // The gradient of a weight is made with that of hidden, for which there must be memory.
  const bool needs_memory = !tensors.grad_hidden && !groups.are_gathered();
  const Workspace<A> unwanted(needs_memory ? batch.rows * batch.in_features : 0);
  A* const grad_hidden = tensors.grad_hidden ? tensors.grad_hidden : unwanted.data();
  if (grad_hidden && (!groups.are_gathered() || batch.trees == 0)) {
    // Zeros, unless the first tree stores.
    for (int64_t i = 0; i < batch.rows; ++i) {
      if (batch.trees > 0 && batch.target[i] >= 0) continue;
      std::fill_n(grad_hidden + i * batch.in_features, batch.in_features, A{0});
    }
  }
  std::vector<int64_t> first_slot = {0}, first_entry = {0};  // of earlier trees
  for (const PathPlan& plan : plans) {
    first_slot.push_back(first_slot.back() + plan.visited);
    first_entry.push_back(first_entry.back() + static_cast<int64_t>(plan.entry.size()));
  }
  groups.each(tensors.hidden, [&](int64_t first, int64_t last) {
    A* const grad_scores = scratch<A, 2>(first_entry[last] - first_entry[first]);
    const auto rows_of = [&](int64_t t) {
      return path_rows<T>(batch, plans[t], t, tensors.weight, nullptr, tensors.hidden,
                          groups.gathered(first, t));
    };
    parallel_rows(plans, first, last, [&](int64_t t, int64_t begin, int64_t end) {
      kernels.score_gradients(rows_of(t), begin, end, tensors.grad_log_prob + t, batch.trees,
                              tensors.score + t * batch.max_depth, batch.trees * batch.max_depth,
                              grad_scores + first_entry[t] - first_entry[first]);
    });
    const auto grad_x = [&](int64_t t) {
      return groups.are_gathered() ? groups.gathered(first, t) : grad_hidden;
    };
    if (!tensors.grad_weight && tensors.grad_hidden) {
      parallel_rows(plans, first, last, [&](int64_t t, int64_t begin, int64_t end) {
        kernels.hidden_gradients(rows_of(t), begin, end, grad_scores + first_entry[t] - first_entry[first],
                                 grad_x(t), t > 0 && !groups.are_gathered(),
                                 scratch<const T*, 1>(plans[t].longest));
      });
    }
    parallel((last - first) * intervals, 1, [&](int64_t task, int64_t end_of_tasks) {
      for (; task < end_of_tasks; ++task) {
        const int64_t t = first + task / intervals, begin = task % intervals * width;
        const int64_t longest = plans[t].longest;
        const A* grad_score = grad_scores + first_entry[t] - first_entry[first];
        const int64_t grad_row = tensors.sparse ? first_slot[t] : t * batch.weight_rows;
        A* sums = scratch<A, 0>(gradients_scratch(longest, batch.features));
        T** targets = scratch<T*, 3>(longest);
        if (tensors.grad_weight) {
          kernels.gradients(rows_of(t), begin, std::min(begin + width, batch.features), grad_score, grad_x(t),
                            t > 0 && !groups.are_gathered(), tensors.grad_weight + grad_row * batch.features,
                            tensors.sparse, sums, scratch<const T*, 1>(longest), targets);
        }
        if (begin > 0 || !tensors.grad_bias) continue;
        kernels.bias_gradients(rows_of(t), grad_score, tensors.grad_bias + grad_row, tensors.sparse, sums,
                               targets);
      }
    });
    if (groups.are_gathered() && tensors.grad_hidden) {
      groups.scatter(first, last, first > 0, tensors.grad_hidden);
    }
  });
}

#define HSTREE_PATH(T)                                                 \
  template void path_log_prob<T>(const TreeBatch&, const Forward<T>&); \
  template void path_log_prob_backward<T>(const TreeBatch&, const std::vector<PathPlan>&, const Backward<T>&);
HSTREE_PATH(float)
HSTREE_PATH(double)
HSTREE_PATH(BFloat16)
HSTREE_PATH(Half)
#undef HSTREE_PATH

}  // namespace hstree::cpu
