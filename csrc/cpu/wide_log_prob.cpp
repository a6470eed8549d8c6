#include "cpu/wide_log_prob.h"

#include <algorithm>
#include <type_traits>

#include "cpu/capability.h"

namespace hstree::cpu {
namespace {

struct WideNode {
  int64_t first_row, width, child;
};

const char* path_name(const TreeTable& table) {
  return table.leaf_class ? "group" : "wide_path";
}

void check_classes(const char* op, const TreeTable& table, const WideNode& node) {
  for (int64_t r = node.first_row; r < node.first_row + node.width; ++r) {
    if (table.leaf_class[r] < 0 || table.leaf_class[r] >= table.classes) {
      fail(op, ": leaf_class: expected a class in [0, ", table.classes, "), got ", table.leaf_class[r],
           " at leaf ", r);
    }
  }
}

// The wide nodes on the path of class y, root first.
void read_path(const char* op, const TreeTable& table, PathSpan span, int64_t y,
               std::vector<WideNode>& nodes) {
  nodes.clear();
  int64_t total = 0;
  for (int64_t e = span.begin; e < span.end; ++e) {
    const WideNode node = {table.path[3 * e], table.path[3 * e + 1], table.path[3 * e + 2]};
    if (node.first_row < 0 || node.width < 1 || node.first_row + node.width > table.weight_rows ||
        node.child < 0 || node.child >= node.width) {
      fail(op, ": ", path_name(table), "[", e, "]: expected a child of a block of rows in [0, ",
           table.weight_rows, "), got (first_row ", node.first_row, ", width ", node.width, ", child ",
           node.child, ")");
    }
    if (table.leaf_class) check_classes(op, table, node);
    total += node.width;
    if (total > table.longest) {
      fail(op, ": max_width: the wide nodes on the path of class ", y, " have at least ", total,
           " children, got max_width = ", table.longest);
    }
    nodes.push_back(node);
  }
}

WidePlan wide_plan(const char* op, const TreeTable& table, const int64_t* target, int64_t batch_rows) {
  WidePlan plan;
  plan.leaf_class = table.leaf_class;
  plan.row = rows_in_leaf_order(op, table, target, batch_rows);
  const std::vector<PathSpan> spans =
      path_spans(op, table.leaf_class ? "group_offset" : "wide_offset", table, target, plan.row);
  const int64_t rows = static_cast<int64_t>(plan.row.size());
  plan.first_child.reserve(rows + 1);
  plan.first_child.push_back(0);
  std::vector<WideNode> nodes;
  std::vector<size_t> open;  // runs of the nodes of the previous row
  int64_t before = -1;       // its class
  for (int64_t j = 0; j < rows; ++j) {
    if (j + 8 < rows) __builtin_prefetch(table.path + 3 * spans[j + 8].begin);
    const int64_t y = target[plan.row[j]];
    if (y != before) read_path(op, table, spans[j], y, nodes);
    before = y;
    size_t depth = 0;
    while (depth < nodes.size() && depth < open.size() &&
           plan.run[open[depth]].first_row == nodes[depth].first_row &&
           plan.run[open[depth]].width == nodes[depth].width) {
      plan.run[open[depth++]].end = j + 1;
    }
    open.resize(depth);
    for (; depth < nodes.size(); ++depth) {
      const WideNode& node = nodes[depth];
      const int64_t place = depth ? plan.run[open[depth - 1]].place + plan.run[open[depth - 1]].width : 0;
      open.push_back(plan.run.size());
      plan.run.push_back(
          {j, j + 1, node.first_row, node.width, place, static_cast<int64_t>(depth), plan.visited, 0});
      plan.visited += node.width;
    }
    for (const WideNode& node : nodes) plan.child.push_back(static_cast<int32_t>(node.child));
    plan.first_child.push_back(static_cast<int64_t>(plan.child.size()));
  }
  for (WideRun& run : plan.run) {
    run.entry = plan.scores;
    plan.scores += (run.end - run.begin) * run.width;
  }
  return plan;
}

// weight, bias: of all trees.
template <typename T>
WideTree<T> wide_tree(const TreeBatch& batch, const WidePlan& plan, const FeatureSubsets& subsets, int64_t t,
                      const T* hidden, const T* weight, const T* bias) {
  return {plan.row.data(),
          plan.first_child.data(),
          plan.child.data(),
          plan.leaf_class,
          hidden,
          subsets[t],
          batch.in_features,
          batch.features,
          weight + (plan.leaf_class ? 0 : t * batch.weight_rows * batch.features),
          bias ? bias + t * batch.weight_rows : nullptr,
          batch.trees * batch.longest,
          workspace_stride(batch.features)};
}

const WideRun* next_of(const WidePlan& plan, size_t r) {
  return r + 1 < plan.run.size() ? &plan.run[r + 1] : nullptr;
}

// What the wide op and the leaf op have in common, for tree t.
template <typename T>
WideGradients<T> wide_gradients(const TreeBatch& batch, const Backward<T>& tensors, int64_t t) {
  WideGradients<T> g = {};
  g.grad_log_prob = tensors.grad_log_prob + t;
  g.trees = batch.trees;
  g.score = tensors.score + t * batch.longest;
  g.grad_hidden = tensors.grad_hidden;
  g.sparse = tensors.sparse;
  return g;
}

// The gradients of a tree for the features from <= s < to.
template <typename T>
void tree_gradients(const WidePlan& plan, const WideTree<T>& tree, const WideGradients<T>& g, int64_t from,
                    int64_t to) {
  using A = accumulate_t<T>;
  const WideKernels<T>& kernels = chosen_kernels<WideKernels<T>>();
  const int64_t threads = torch::stable::get_num_threads(), features = to - from;
  // Threads divide the runs if there are many, otherwise the features. Nested runs belong to the outermost one.
  const int64_t outermost =
      std::count_if(plan.run.begin(), plan.run.end(), [](const WideRun& run) { return run.depth == 0; });
  const bool by_run = outermost >= 16 * threads;
  const int64_t shares = by_run ? 1 : std::max<int64_t>(1, std::min(threads, features / 64));
  const int64_t width = std::max<int64_t>(16, ((features + shares - 1) / shares + 15) / 16 * 16);
  const int64_t intervals = std::max<int64_t>(1, (features + width - 1) / width);
  const int64_t pieces = by_run ? threads : 1;
  parallel(pieces * intervals, 1, [&](int64_t part, int64_t last) {
    A* scratch = cpu::scratch<A, 0>(wide_gradients_scratch(tree.features));
    for (; part < last; ++part) {
      const int64_t piece = part / intervals, begin = from + part % intervals * width;
      bool mine = false;
      for (size_t r = 0; r < plan.run.size(); ++r) {
        const WideRun& run = plan.run[r];
        if (run.depth == 0) mine = run.entry * pieces / plan.scores == piece;
        if (!mine) continue;
        kernels.gradients(tree, run, next_of(plan, r), begin, std::min(begin + width, to), g, scratch);
      }
    }
  });
}

template <typename T>
void fill_zeros(T* data, int64_t rows, int64_t features) {
  parallel(rows, 64, [&](int64_t begin, int64_t end) {
    std::fill(data + begin * features, data + end * features, T{});
  });
}

// Zeros in the rows of the classes that are not visited.
template <typename T>
void fill_others(T* data, const std::vector<int64_t>& visited, int64_t classes, int64_t features) {
  const int64_t count = static_cast<int64_t>(visited.size());
  parallel(count + 1, 64, [&](int64_t n, int64_t last) {
    for (; n < last; ++n) {
      const int64_t begin = n ? visited[n - 1] + 1 : 0, end = n < count ? visited[n] : classes;
      std::fill(data + begin * features, data + end * features, T{});
    }
  });
}

// The row of sums of each child of the runs of each tree: its class, or the place of that in `visited`.
std::vector<std::vector<int32_t>> sum_rows(const TreeBatch& batch, const std::vector<WidePlan>& plans,
                                           const std::vector<int64_t>& visited, bool by_class) {
  int32_t* const place = scratch<int32_t, 0>(batch.classes);  // set for the visited classes alone
  for (size_t n = 0; n < visited.size(); ++n) {
    place[visited[n]] = static_cast<int32_t>(by_class ? visited[n] : n);
  }
  std::vector<std::vector<int32_t>> rows(plans.size());
  for (size_t t = 0; t < plans.size(); ++t) {
    rows[t].reserve(plans[t].visited);
    for (const WideRun& run : plans[t].run) {
      const int32_t* const leaf_class = plans[t].leaf_class + run.first_row;
      for (int64_t c = 0; c < run.width; ++c) rows[t].push_back(place[leaf_class[c]]);
    }
  }
  return rows;
}

}  // namespace

std::vector<WidePlan> wide_plans(const TreeBatch& batch) {
  return plans_of_trees(
      batch, [&](const TreeTable& table) { return wide_plan(batch.op, table, batch.target, batch.rows); });
}

void visited_index(const std::vector<WidePlan>& plans, int64_t* index) {
  int64_t* row_index = index + visited(plans);
  for (size_t t = 0; t < plans.size(); ++t) {
    const int32_t* const leaf_class = plans[t].leaf_class;
    for (const WideRun& run : plans[t].run) {
      for (int64_t r = run.first_row; r < run.first_row + run.width; ++r) {
        *index++ = static_cast<int64_t>(t);
        *row_index++ = leaf_class ? leaf_class[r] : r;
      }
    }
  }
}

std::vector<int64_t> visited_classes(const TreeBatch& batch, const std::vector<WidePlan>& plans) {
  std::vector<uint64_t> seen((batch.classes + 63) / 64);  // a bit for each class
  for (const WidePlan& plan : plans) {
    for (const WideRun& run : plan.run) {
      for (int64_t r = run.first_row; r < run.first_row + run.width; ++r) {
        seen[plan.leaf_class[r] / 64] |= uint64_t{1} << plan.leaf_class[r] % 64;
      }
    }
  }
  std::vector<int64_t> classes;
  for (size_t w = 0; w < seen.size(); ++w) {
    for (uint64_t rest = seen[w]; rest; rest &= rest - 1) classes.push_back(w * 64 + __builtin_ctzll(rest));
  }
  return classes;
}

template <typename T>
void wide_log_prob(const TreeBatch& batch, const Forward<T>& tensors) {
  using A = accumulate_t<T>;
  const WideKernels<T>& kernels = chosen_kernels<WideKernels<T>>();
  const std::vector<WidePlan> plans = wide_plans(batch);
  const FeatureSubsets subsets(batch);
  const int64_t grain = 1 + (1 << 20) / (batch.features + 1);  // a million products
  for (int64_t t = 0; t < batch.trees; ++t) {
    const WidePlan& plan = plans[t];
    const WideTree<T> tree = wide_tree(batch, plan, subsets, t, tensors.hidden, tensors.weight, tensors.bias);
    A* score = tensors.score + t * batch.longest;
    // A thread processes the rows whose scores begin in its part.
    parallel(plan.scores, grain, [&](int64_t begin, int64_t end) {
      A* scratch = cpu::scratch<A, 0>(wide_scores_scratch(batch.features, batch.longest));
      const auto after =
          std::upper_bound(plan.run.begin(), plan.run.end(), begin,
                           [](int64_t entry, const WideRun& run) { return entry < run.entry; });
      for (size_t r = after - plan.run.begin() - 1; r < plan.run.size() && plan.run[r].entry < end; ++r) {
        const WideRun& run = plan.run[r];
        const auto place = [&](int64_t entry) {
          const int64_t rows = (std::max<int64_t>(0, entry - run.entry) + run.width - 1) / run.width;
          return std::min(run.begin + rows, run.end);
        };
        kernels.scores(tree, run, next_of(plan, r), place(begin), place(end), score, scratch);
      }
    });
    for (const WideRun& run : plan.run) {
      for (int64_t j = run.begin; j < run.end; ++j) {
        const int64_t i = plan.row[j];
        const int64_t child = plan.child[plan.first_child[j] + run.depth];
        tensors.log_prob[i * batch.trees + t] += score[i * tree.score_stride + run.place + child];
      }
    }
  }
}

template <typename T>
void wide_log_prob_backward(const TreeBatch& batch, const std::vector<WidePlan>& plans,
                            const Backward<T>& tensors) {
  const FeatureSubsets subsets(batch);
  if (tensors.grad_hidden) {
    std::fill_n(tensors.grad_hidden, batch.rows * batch.in_features, accumulate_t<T>{0});
  }
  int64_t first_slot = 0;
  for (int64_t t = 0; t < batch.trees; ++t) {
    const int64_t first = tensors.sparse ? first_slot : t * batch.weight_rows;
    WideGradients<T> g = wide_gradients(batch, tensors, t);
    if (tensors.grad_weight) g.grad_weight = tensors.grad_weight + first * batch.features;
    if (tensors.grad_bias) g.grad_bias = tensors.grad_bias + first;
    tree_gradients(plans[t],
                   wide_tree<T>(batch, plans[t], subsets, t, tensors.hidden, tensors.weight, nullptr), g, 0,
                   batch.features);
    first_slot += plans[t].visited;
  }
}

template <typename T>
void leaf_log_prob_backward(const TreeBatch& batch, const std::vector<WidePlan>& plans,
                            const std::vector<int64_t>& visited, const Backward<T>& tensors) {
  using A = accumulate_t<T>;
  constexpr bool in_place = std::is_same_v<T, A>;
  constexpr int64_t workspace_bytes = int64_t{64} << 20;
  const FeatureSubsets subsets(batch);
  const int64_t rows = static_cast<int64_t>(visited.size()), features = batch.features;
  const bool of_weight = tensors.grad_weight;
  std::vector<std::vector<int32_t>> sum_row;
  if (of_weight) sum_row = sum_rows(batch, plans, visited, in_place && !tensors.sparse);
  if (tensors.grad_hidden) std::fill_n(tensors.grad_hidden, batch.rows * features, A{0});
  if (of_weight && in_place) {
    fill_zeros(tensors.grad_weight, tensors.sparse ? rows : batch.classes, features);
  } else if (of_weight && !tensors.sparse) {
    fill_others(tensors.grad_weight, visited, batch.classes, features);
  }
  const int64_t fit = workspace_bytes / (1 + rows * static_cast<int64_t>(sizeof(A))) / 16 * 16;
  const bool by_workspace = of_weight && !in_place;
  const int64_t width = !by_workspace ? features : std::min(features, std::max<int64_t>(64, fit));
  const int64_t numbers = rows * width + 16;  // a vector more, which store_sums may read
  const Workspace<A> workspace(by_workspace ? numbers : 0);
  int64_t begin = 0;
  do {
    const int64_t end = std::min(begin + width, features);
    if (by_workspace) fill_zeros(workspace.data(), rows, width);
    int64_t first_slot = 0;
    for (int64_t t = 0; t < batch.trees; ++t) {
      WideGradients<T> g = wide_gradients(batch, tensors, t);
      if constexpr (in_place) {
        g.sum = tensors.grad_weight;
      } else {
        g.sum = workspace.data();
      }
      g.sum_stride = width;
      g.sum_begin = begin;
      if (of_weight) g.sum_row = sum_row[t].data();
      if (tensors.grad_bias) {
        g.grad_bias = tensors.grad_bias + (tensors.sparse ? first_slot : t * batch.weight_rows);
      }
      tree_gradients(plans[t],
                     wide_tree<T>(batch, plans[t], subsets, t, tensors.hidden, tensors.weight, nullptr), g,
                     begin, end);
      first_slot += plans[t].visited;
    }
    if (by_workspace) {
      parallel(rows, 16, [&](int64_t n, int64_t last) {
        for (; n < last; ++n) {
          T* const row = tensors.grad_weight + (tensors.sparse ? n : visited[n]) * features;
          chosen_kernels<WideKernels<T>>().store_sums(workspace.data() + n * width, end - begin, row + begin);
        }
      });
    }
    begin = end;
  } while (begin < features);
}

#define HSTREE_WIDE(T)                                                                    \
  template void wide_log_prob<T>(const TreeBatch&, const Forward<T>&);                    \
  template void wide_log_prob_backward<T>(const TreeBatch&, const std::vector<WidePlan>&, \
                                          const Backward<T>&);                            \
  template void leaf_log_prob_backward<T>(const TreeBatch&, const std::vector<WidePlan>&, \
                                          const std::vector<int64_t>&, const Backward<T>&);
HSTREE_WIDE(float)
HSTREE_WIDE(double)
HSTREE_WIDE(BFloat16)
HSTREE_WIDE(Half)

}  // namespace hstree::cpu
