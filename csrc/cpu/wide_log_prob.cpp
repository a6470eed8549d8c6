#include "cpu/wide_log_prob.h"

#include <algorithm>

#include "cpu/capability.h"

namespace hstree::cpu {
namespace {

template <typename T>
const WideKernels<T>& wide_kernels() {
  return *HSTREE_BY_CAPABILITY(wide_kernels, T);
}

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

template <typename T>
WideTree<T> wide_tree(const TreeBatch& batch, const WidePlan& plan, const FeatureSubsets& subsets, int64_t t,
                      const T* hidden, const T* weight, const T* bias) {
  return {plan.row.data(),
          plan.first_child.data(),
          plan.child.data(),
          hidden,
          subsets[t],
          batch.in_features,
          batch.features,
          weight + t * batch.weight_rows * batch.features,
          bias ? bias + t * batch.weight_rows : nullptr,
          batch.trees * batch.longest,
          workspace_stride(batch.features)};
}

const WideRun* next_of(const WidePlan& plan, size_t r) {
  return r + 1 < plan.run.size() ? &plan.run[r + 1] : nullptr;
}

}  // namespace

std::vector<WidePlan> wide_plans(const TreeBatch& batch) {
  return plans_of_trees(
      batch, [&](const TreeTable& table) { return wide_plan(batch.op, table, batch.target, batch.rows); });
}

void visited_index(const std::vector<WidePlan>& plans, int64_t* index) {
  int64_t* row_index = index + visited(plans);
  for (size_t t = 0; t < plans.size(); ++t) {
    for (const WideRun& run : plans[t].run) {
      for (int64_t c = 0; c < run.width; ++c) {
        *index++ = static_cast<int64_t>(t);
        *row_index++ = run.first_row + c;
      }
    }
  }
}

template <typename T>
void wide_log_prob(const TreeBatch& batch, const Forward<T>& tensors) {
  using A = accumulate_t<T>;
  const WideKernels<T>& kernels = wide_kernels<T>();
  const std::vector<WidePlan> plans = wide_plans(batch);
  const FeatureSubsets subsets(batch);
  const int64_t grain = 1 + (1 << 20) / (batch.features + 1);  // a million products
  for (int64_t t = 0; t < batch.trees; ++t) {
    const WidePlan& plan = plans[t];
    const WideTree<T> tree = wide_tree(batch, plan, subsets, t, tensors.hidden, tensors.weight, tensors.bias);
    A* score = tensors.score + t * batch.longest;
    // A thread processes the rows whose scores begin in its part.
    parallel(plan.scores, grain, [&](int64_t begin, int64_t end) {
      A* scratch = cpu::scratch<A, 0>(wide_scores_scratch(batch.features));
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
  using A = accumulate_t<T>;
  const WideKernels<T>& kernels = wide_kernels<T>();
  const FeatureSubsets subsets(batch);
  const int64_t threads = torch::stable::get_num_threads();
  if (tensors.grad_hidden) std::fill_n(tensors.grad_hidden, batch.rows * batch.in_features, A{0});
  int64_t first_slot = 0;
  for (int64_t t = 0; t < batch.trees; ++t) {
    const WidePlan& plan = plans[t];
    const WideTree<T> tree = wide_tree<T>(batch, plan, subsets, t, tensors.hidden, tensors.weight, nullptr);
    const int64_t first = tensors.sparse ? first_slot : t * batch.weight_rows;
    T* grad_weight = tensors.grad_weight ? tensors.grad_weight + first * batch.features : nullptr;
    // Threads divide the runs if there are many, otherwise the features. Nested runs belong to the outermost
    // one.
    const int64_t outermost =
        std::count_if(plan.run.begin(), plan.run.end(), [](const WideRun& run) { return run.depth == 0; });
    const bool by_run = outermost >= 16 * threads;
    const int64_t shares = by_run ? 1 : std::max<int64_t>(1, std::min(threads, batch.features / 64));
    const int64_t width = std::max<int64_t>(16, ((batch.features + shares - 1) / shares + 15) / 16 * 16);
    const int64_t intervals = std::max<int64_t>(1, (batch.features + width - 1) / width);
    const int64_t pieces = by_run ? threads : 1;
    parallel(pieces * intervals, 1, [&](int64_t part, int64_t last) {
      A* scratch = cpu::scratch<A, 0>(wide_gradients_scratch(batch.features));
      for (; part < last; ++part) {
        const int64_t piece = part / intervals, begin = part % intervals * width;
        const int64_t end = std::min(begin + width, batch.features);
        T* grad_bias = begin == 0 && tensors.grad_bias ? tensors.grad_bias + first : nullptr;
        bool mine = false;
        for (size_t r = 0; r < plan.run.size(); ++r) {
          const WideRun& run = plan.run[r];
          if (run.depth == 0) mine = run.entry * pieces / plan.scores == piece;
          if (!mine) continue;
          kernels.gradients(tree, run, next_of(plan, r), begin, end, tensors.grad_log_prob + t, batch.trees,
                            tensors.score + t * batch.longest, tensors.grad_hidden, grad_weight, grad_bias,
                            tensors.sparse ? run.slot : run.first_row, scratch);
        }
      }
    });
    first_slot += plan.visited;
  }
}

#define HSTREE_WIDE(T)                                                 \
  template void wide_log_prob<T>(const TreeBatch&, const Forward<T>&); \
  template void wide_log_prob_backward<T>(const TreeBatch&, const std::vector<WidePlan>&, const Backward<T>&);
HSTREE_WIDE(float)
HSTREE_WIDE(double)
HSTREE_WIDE(BFloat16)
HSTREE_WIDE(Half)

}  // namespace hstree::cpu
