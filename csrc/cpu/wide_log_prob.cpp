#include "cpu/wide_log_prob.h"

#include <algorithm>
#include <numeric>
#include <utility>

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
      plan.run.push_back({j, j + 1, node.first_row, node.width, place, static_cast<int64_t>(depth),
                          plan.visited, 0, node.width});
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
          plan.leaf_class,
          nullptr,
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

// Features of each thread where threads divide them, of which one has at least `least`.
int64_t interval_width(int64_t features, int64_t least) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t shares = std::max<int64_t>(1, std::min(threads, features / least));
  return std::max<int64_t>(16, ((features + shares - 1) / shares + 15) / 16 * 16);
}

// The gradients of a tree with rows of its own.
template <typename T>
void tree_gradients(const WidePlan& plan, const WideTree<T>& tree, const WideGradients<T>& g) {
  using A = accumulate_t<T>;
  const WideKernels<T>& kernels = chosen_kernels<WideKernels<T>>();
  const int64_t threads = torch::stable::get_num_threads(), features = tree.features;
  // Threads divide the runs if there are many, otherwise the features. Nested runs belong to the outermost one.
  const int64_t outermost =
      std::count_if(plan.run.begin(), plan.run.end(), [](const WideRun& run) { return run.depth == 0; });
  const bool by_run = outermost >= 16 * threads;
  const int64_t width = by_run ? std::max<int64_t>(16, features) : interval_width(features, 64);
  const int64_t intervals = std::max<int64_t>(1, (features + width - 1) / width);
  const int64_t pieces = by_run ? threads : 1;
  parallel(pieces * intervals, 1, [&](int64_t part, int64_t last) {
    A* scratch = cpu::scratch<A, 0>(wide_gradients_scratch(features));
    for (; part < last; ++part) {
      const int64_t piece = part / intervals, begin = part % intervals * width;
      bool mine = false;
      for (size_t r = 0; r < plan.run.size(); ++r) {
        const WideRun& run = plan.run[r];
        if (run.depth == 0) mine = run.entry * pieces / plan.scores == piece;
        if (!mine) continue;
        kernels.gradients(tree, run, next_of(plan, r), begin, std::min(begin + width, features), g, scratch);
      }
    }
  });
}

// The gradients of the visited biases of a tree in the order of their classes. place: memory for V numbers.
template <typename T>
void sort_biases(const TreeBatch& batch, const WidePlan& plan, T* grad_bias, int32_t* place) {
  const std::vector<int64_t> classes = visited_classes(batch, &plan, 1);
  for (size_t n = 0; n < classes.size(); ++n) place[classes[n]] = static_cast<int32_t>(n);
  const std::vector<T> by_slot(grad_bias, grad_bias + plan.visited);
  for (const WideRun& run : plan.run) {
    for (int64_t c = 0; c < run.width; ++c) {
      grad_bias[place[plan.leaf_class[run.first_row + c]]] = by_slot[run.slot + c];
    }
  }
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

// The children of all runs of the leaf op by panels of consecutive classes, whose rows of the weight and of its
// gradient stay in the caches while one tree after another reads them. Those of one run are a piece.
struct LeafPieces {
  struct Piece {
    int32_t tree, run;
    int64_t end;  // of its children, which begin at the end of the piece before
  };

  int shift = 11;                    // a panel has 2^shift classes
  std::vector<int32_t> leaf_class;   // of each child
  std::vector<int32_t> child;        // its place among the children of the node
  std::vector<Piece> piece;          // by panel, then by tree, then in leaf order
  std::vector<int64_t> first_piece;  // [panels + 1]

  WideRun run(const std::vector<WidePlan>& plans, int64_t p) const {
    WideRun run = plans[piece[p].tree].run[piece[p].run];
    run.first_row = p ? piece[p - 1].end : 0;
    run.width = piece[p].end - run.first_row;
    return run;
  }
};

// The panels do not depend on the rows of the batch, because they determine the order of the sums of a row.
LeafPieces leaf_pieces(const TreeBatch& batch, const std::vector<WidePlan>& plans) {
  LeafPieces all;
  const int64_t children = visited(plans);
  while (batch.classes >> all.shift > 64) ++all.shift;
  const int64_t panels = (batch.classes >> all.shift) + 1;
  std::vector<int64_t> next_child(panels + 1), next_piece(panels + 1);
  // Calls f(t, r, c, its class, its panel, whether it begins a piece) for child c of each run r.
  const auto each_child = [&](const auto& f) {
    std::vector<const WideRun*> last(panels);
    for (size_t t = 0; t < plans.size(); ++t) {
      for (size_t r = 0; r < plans[t].run.size(); ++r) {
        const WideRun& run = plans[t].run[r];
        const int32_t* const leaf_class = plans[t].leaf_class + run.first_row;
        for (int64_t c = 0; c < run.width; ++c) {
          const int64_t panel = leaf_class[c] >> all.shift;
          f(t, r, c, leaf_class[c], panel, std::exchange(last[panel], &run) != &run);
        }
      }
    }
  };
  each_child([&](size_t, size_t, int64_t, int32_t, int64_t panel, bool begins) {
    ++next_child[panel + 1];
    next_piece[panel + 1] += begins;
  });
  std::partial_sum(next_child.begin(), next_child.end(), next_child.begin());
  std::partial_sum(next_piece.begin(), next_piece.end(), next_piece.begin());
  all.first_piece = next_piece;
  all.leaf_class.resize(children);
  all.child.resize(children);
  all.piece.resize(next_piece.back());
  each_child([&](size_t t, size_t r, int64_t c, int32_t leaf_class, int64_t panel, bool begins) {
    const int64_t place = next_child[panel]++;
    all.leaf_class[place] = leaf_class;
    all.child[place] = static_cast<int32_t>(c);
    all.piece[(next_piece[panel] += begins) - 1] = {static_cast<int32_t>(t), static_cast<int32_t>(r),
                                                    place + 1};
  });
  return all;
}

}  // namespace

std::vector<WidePlan> wide_plans(const TreeBatch& batch) {
  return plans_of_trees(
      batch, [&](const TreeTable& table) { return wide_plan(batch.op, table, batch.target, batch.rows); });
}

void visited_index(const std::vector<WidePlan>& plans, int64_t* index) {
  int64_t* row = index + visited(plans);
  for (size_t t = 0; t < plans.size(); ++t) {
    for (const WideRun& run : plans[t].run) {
      for (int64_t r = run.first_row; r < run.first_row + run.width; ++r) *row++ = r;
    }
    index = std::fill_n(index, plans[t].visited, static_cast<int64_t>(t));
  }
}

void visited_biases(const TreeBatch& batch, const std::vector<WidePlan>& plans, int64_t* index) {
  int64_t* place = index + visited(plans);
  for (size_t t = 0; t < plans.size(); ++t) {
    const std::vector<int64_t> classes = visited_classes(batch, &plans[t], 1);
    index = std::fill_n(index, classes.size(), static_cast<int64_t>(t));
    place = std::copy(classes.begin(), classes.end(), place);
  }
}

std::vector<int64_t> visited_classes(const TreeBatch& batch, const WidePlan* plans, int64_t trees) {
  std::vector<uint64_t> seen((batch.classes + 63) / 64);  // a bit for each class
  for (int64_t t = 0; t < trees; ++t) {
    for (const WideRun& run : plans[t].run) {
      for (int64_t r = run.first_row; r < run.first_row + run.width; ++r) {
        seen[plans[t].leaf_class[r] / 64] |= uint64_t{1} << plans[t].leaf_class[r] % 64;
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
                   wide_tree<T>(batch, plans[t], subsets, t, tensors.hidden, tensors.weight, nullptr), g);
    first_slot += plans[t].visited;
  }
}

template <typename T>
void leaf_log_prob_backward(const TreeBatch& batch, const std::vector<WidePlan>& plans,
                            const std::vector<int64_t>& visited, const Backward<T>& tensors) {
  using A = accumulate_t<T>;
  const WideKernels<T>& kernels = chosen_kernels<WideKernels<T>>();
  const FeatureSubsets subsets(batch);
  const LeafPieces all = leaf_pieces(batch, plans);
  const int64_t features = batch.features, width = interval_width(features, 32);
  int32_t* const sum_row = scratch<int32_t, 0>(batch.classes);  // set for the visited classes alone
  int64_t scores = 0, first_slot = 0;
  for (const WidePlan& plan : plans) scores += plan.scores;
  const Workspace<A> slope(scores);
  scores = 0;
  std::vector<WideTree<T>> trees;
  std::vector<WideGradients<T>> gradients;
  for (int64_t t = 0; t < batch.trees; ++t) {
    trees.push_back(wide_tree<T>(batch, plans[t], subsets, t, tensors.hidden, tensors.weight, nullptr));
    gradients.push_back(wide_gradients(batch, tensors, t));
    trees[t].row_class = all.leaf_class.data();
    trees[t].row_child = all.child.data();
    gradients[t].slope = slope.data() + scores;
    gradients[t].sum_stride = width;
    gradients[t].sum_row = sum_row;
    if (tensors.grad_bias) {
      gradients[t].grad_bias = tensors.grad_bias + (tensors.sparse ? first_slot : t * batch.weight_rows);
    }
    parallel(static_cast<int64_t>(plans[t].run.size()), 16, [&](int64_t r, int64_t end) {
      for (; r < end; ++r) {
        const WideRun& run = plans[t].run[r];
        kernels.slopes(trees[t], run, gradients[t], cpu::scratch<A, 0>(run.width + 16));
      }
    });
    if (tensors.grad_bias && tensors.sparse) sort_biases(batch, plans[t], gradients[t].grad_bias, sum_row);
    scores += plans[t].scores;
    first_slot += plans[t].visited;
  }
  if (tensors.grad_hidden) std::fill_n(tensors.grad_hidden, batch.rows * features, A{0});
  if (tensors.grad_weight && !tensors.sparse) {
    fill_others(tensors.grad_weight, visited, batch.classes, features);
  }

  // The visited classes of panel p have the places first_place[p] to first_place[p + 1] - 1 in `visited`.
  const int64_t panels = static_cast<int64_t>(all.first_piece.size()) - 1, pieces = all.first_piece.back();
  std::vector<int64_t> first_place(panels + 1);
  for (const int64_t c : visited) ++first_place[(c >> all.shift) + 1];
  const int64_t most = *std::max_element(first_place.begin(), first_place.end());
  std::partial_sum(first_place.begin(), first_place.end(), first_place.begin());
  for (size_t n = 0; n < visited.size(); ++n) {
    sum_row[visited[n]] = static_cast<int32_t>(n - first_place[visited[n] >> all.shift]);
  }
  const int64_t intervals = (features + width - 1) / width;
  const int64_t numbers = tensors.grad_weight ? most * width : 0;
  const Workspace<A> sums(intervals * numbers);
  parallel(intervals, 1, [&](int64_t part, int64_t last) {
    A* scratch = cpu::scratch<A, 0>(wide_gradients_scratch(features));
    for (; part < last; ++part) {
      const int64_t begin = part * width, end = std::min(begin + width, features);
      A* const sum = numbers ? sums.data() + part * numbers : nullptr;
      std::vector<WideGradients<T>> mine(gradients);
      for (WideGradients<T>& g : mine) g.sum = sum;
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t first = first_place[panel], rows = first_place[panel + 1] - first;
        if (sum) std::fill_n(sum, rows * width, A{0});
        for (int64_t p = all.first_piece[panel]; p < all.first_piece[panel + 1]; ++p) {
          const WideRun run = all.run(plans, p);
          const WideRun next = p + 1 < pieces ? all.run(plans, p + 1) : WideRun{};
          const int32_t t = all.piece[p].tree;
          kernels.gradients(trees[t], run, p + 1 < pieces ? &next : nullptr, begin, end, mine[t], scratch);
        }
        if (!sum) continue;
        const int64_t* const row = tensors.sparse ? nullptr : visited.data() + first;
        T* const target = tensors.grad_weight + (tensors.sparse ? first * features : 0) + begin;
        kernels.store_sums(sum, width, end - begin, row, rows, target, features);
      }
    }
  });
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
