#include "cpu/group_log_prob.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "cpu/capability.h"
#include "cpu/tree_batch.h"

namespace hstree::cpu {
namespace {

// The plan of tree t. The rows are sorted by their clusters, and stay in order within one.
GroupPlan group_plan(const GroupBatch& batch, int64_t t) {
  const int32_t* const cluster = batch.cluster + t * batch.cluster_stride;
  const int32_t* const order = batch.order + t * batch.classes;
  const int32_t* const begin = batch.begin + t * (batch.clusters + 1);
  std::vector<int64_t> place(batch.clusters + 1);  // of the next row of each cluster
  for (int64_t i = 0; i < batch.rows; ++i) {
    const int64_t y = batch.target[i];
    if (y < 0) continue;
    if (y >= batch.classes) {
      fail(batch.op, ": target[", i, "]: expected less than ", batch.classes,
           " (the number of classes), got ", y);
    }
    const int32_t c = cluster[y];
    if (c < 0 || c >= batch.clusters) {
      fail(batch.op, ": cluster[", t, ", ", y, "]: expected a cluster in [0, ", batch.clusters, "), got ", c);
    }
    if (begin[c] < 0 || begin[c + 1] <= begin[c] || begin[c + 1] > batch.classes ||
        begin[c + 1] - begin[c] > batch.max_width) {
      fail(batch.op, ": begin[", t, ", ", c, "]: expected the places in order of cluster ", c, ", at most ",
           batch.max_width, " (max_width) of ", batch.classes, ", got [", begin[c], ", ", begin[c + 1], ")");
    }
    place[c + 1] += begin[c + 1] - begin[c] > 1;
  }
  GroupPlan plan;
  for (int64_t c = 0; c < batch.clusters; ++c) {
    if (place[c + 1]) {
      const int64_t width = begin[c + 1] - begin[c], rows = place[c + 1];
      plan.run.push_back({place[c], place[c] + rows, begin[c], width, plan.visited, plan.scores, width});
      plan.visited += width;
      plan.scores += rows * width;
    }
    place[c + 1] += place[c];
  }
  plan.row.resize(place[batch.clusters]);
  plan.child.resize(plan.row.size());
  for (int64_t i = 0; i < batch.rows; ++i) {
    const int64_t y = batch.target[i];
    if (y < 0) continue;
    const int32_t c = cluster[y];
    if (begin[c + 1] - begin[c] > 1) plan.row[place[c]++] = static_cast<int32_t>(i);
  }
  int32_t* const child_of = scratch<int32_t, 1>(batch.classes);  // set for the classes of one group
  for (const GroupRun& run : plan.run) {
    for (int64_t k = 0; k < run.width; ++k) {
      const int32_t v = order[run.first + k];
      if (v < 0 || v >= batch.classes) {
        fail(batch.op, ": order[", t, ", ", run.first + k, "]: expected a class in [0, ", batch.classes,
             "), got ", v);
      }
      child_of[v] = static_cast<int32_t>(k);
    }
    for (int64_t j = run.begin; j < run.end; ++j) {
      const int64_t y = batch.target[plan.row[j]], k = child_of[y];
      if (k < 0 || k >= run.width || order[run.first + k] != y) {
        fail(batch.op, ": order[", t, "]: expected class ", y, " among those of its cluster ", cluster[y],
             ", at places ", run.first, " to ", run.first + run.width - 1, ", got others");
      }
      plan.child[j] = static_cast<int32_t>(k);
    }
  }
  return plan;
}

int64_t visited(const std::vector<GroupPlan>& plans) {
  int64_t total = 0;
  for (const GroupPlan& plan : plans) total += plan.visited;
  return total;
}

// weight, bias: of all trees.
template <typename T>
GroupTree<T> group_tree(const GroupBatch& batch, const GroupPlan& plan, int64_t t, const T* hidden,
                        const T* weight, const T* bias) {
  const int32_t* const order = batch.order + t * batch.classes;
  return {plan.row.data(),
          plan.child.data(),
          order,
          order,
          nullptr,
          hidden,
          batch.features,
          weight,
          bias ? bias + t * batch.classes : nullptr,
          workspace_stride(batch.features)};
}

// Features of each thread where threads divide them, of which one has at least `least`.
int64_t interval_width(int64_t features, int64_t least) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t shares = std::max<int64_t>(1, std::min(threads, features / least));
  return std::max<int64_t>(16, ((features + shares - 1) / shares + 15) / 16 * 16);
}

// The gradients of the visited biases of a tree in the order of their classes. place: memory for V numbers.
template <typename T>
void sort_biases(const GroupBatch& batch, const GroupPlan& plan, int64_t t, T* grad_bias, int32_t* place) {
  const std::vector<int64_t> classes = visited_classes(batch, &plan, t, 1);
  for (size_t n = 0; n < classes.size(); ++n) place[classes[n]] = static_cast<int32_t>(n);
  const std::vector<T> by_slot(grad_bias, grad_bias + plan.visited);
  const int32_t* const order = batch.order + t * batch.classes;
  for (const GroupRun& run : plan.run) {
    for (int64_t c = 0; c < run.width; ++c) grad_bias[place[order[run.first + c]]] = by_slot[run.slot + c];
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

// The classes of all runs by panels of consecutive ones, whose rows of E and of its gradient stay in the caches while
// one tree after another reads them. Those of one run are a piece.
struct GroupPieces {
  struct Piece {
    int32_t tree, run;
    int64_t end;  // of its classes, which begin at the end of the piece before
  };

  int shift = 11;                    // a panel has 2^shift classes
  std::vector<int32_t> row_class;    // each class
  std::vector<int32_t> row_child;    // its place in its group
  std::vector<Piece> piece;          // by panel, then by tree, then by group
  std::vector<int64_t> first_piece;  // [panels + 1]

  GroupRun run(const std::vector<GroupPlan>& plans, int64_t p) const {
    GroupRun run = plans[piece[p].tree].run[piece[p].run];
    run.first = p ? piece[p - 1].end : 0;
    run.width = piece[p].end - run.first;
    return run;
  }
};

// The panels do not depend on the rows of the batch, because they determine the order of the sums of a row.
GroupPieces group_pieces(const GroupBatch& batch, const std::vector<GroupPlan>& plans) {
  GroupPieces all;
  while (batch.classes >> all.shift > 64) ++all.shift;
  const int64_t panels = (batch.classes >> all.shift) + 1;
  std::vector<int64_t> next_class(panels + 1), next_piece(panels + 1);
  // Calls f(t, r, c, the class, its panel, whether it begins a piece) for class c of each run r.
  const auto each_class = [&](const auto& f) {
    std::vector<const GroupRun*> last(panels);
    for (size_t t = 0; t < plans.size(); ++t) {
      for (size_t r = 0; r < plans[t].run.size(); ++r) {
        const GroupRun& run = plans[t].run[r];
        const int32_t* const order = batch.order + t * batch.classes + run.first;
        for (int64_t c = 0; c < run.width; ++c) {
          const int64_t panel = order[c] >> all.shift;
          f(t, r, c, order[c], panel, std::exchange(last[panel], &run) != &run);
        }
      }
    }
  };
  each_class([&](size_t, size_t, int64_t, int32_t, int64_t panel, bool begins) {
    ++next_class[panel + 1];
    next_piece[panel + 1] += begins;
  });
  std::partial_sum(next_class.begin(), next_class.end(), next_class.begin());
  std::partial_sum(next_piece.begin(), next_piece.end(), next_piece.begin());
  all.first_piece = next_piece;
  all.row_class.resize(visited(plans));
  all.row_child.resize(visited(plans));
  all.piece.resize(next_piece.back());
  each_class([&](size_t t, size_t r, int64_t c, int32_t v, int64_t panel, bool begins) {
    const int64_t place = next_class[panel]++;
    all.row_class[place] = v;
    all.row_child[place] = static_cast<int32_t>(c);
    all.piece[(next_piece[panel] += begins) - 1] = {static_cast<int32_t>(t), static_cast<int32_t>(r),
                                                    place + 1};
  });
  return all;
}

}  // namespace

std::vector<GroupPlan> group_plans(const GroupBatch& batch) {
  std::vector<GroupPlan> plans(batch.trees);
  parallel(batch.trees, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) plans[t] = group_plan(batch, t);
  });
  return plans;
}

std::vector<int64_t> visited_classes(const GroupBatch& batch, const GroupPlan* plans, int64_t first_tree,
                                     int64_t trees) {
  std::vector<uint64_t> seen((batch.classes + 63) / 64);  // a bit for each class
  for (int64_t t = 0; t < trees; ++t) {
    const int32_t* const order = batch.order + (first_tree + t) * batch.classes;
    for (const GroupRun& run : plans[t].run) {
      for (int64_t k = run.first; k < run.first + run.width; ++k) {
        seen[order[k] / 64] |= uint64_t{1} << order[k] % 64;
      }
    }
  }
  std::vector<int64_t> classes;
  for (size_t w = 0; w < seen.size(); ++w) {
    for (uint64_t rest = seen[w]; rest; rest &= rest - 1) classes.push_back(w * 64 + __builtin_ctzll(rest));
  }
  return classes;
}

void visited_biases(const GroupBatch& batch, const std::vector<GroupPlan>& plans, int64_t* index) {
  int64_t* place = index + visited(plans);
  for (size_t t = 0; t < plans.size(); ++t) {
    const std::vector<int64_t> classes = visited_classes(batch, &plans[t], t, 1);
    index = std::fill_n(index, classes.size(), static_cast<int64_t>(t));
    place = std::copy(classes.begin(), classes.end(), place);
  }
}

template <typename T>
void group_log_prob(const GroupBatch& batch, const std::vector<GroupPlan>& plans,
                    const GroupForward<T>& tensors) {
  using A = accumulate_t<T>;
  const GroupKernels<T>& kernels = chosen_kernels<GroupKernels<T>>();
  const int64_t grain = 1 + (1 << 20) / (batch.features + 1);  // a million products
  A* score = tensors.score;
  for (int64_t t = 0; t < batch.trees; ++t) {
    const GroupPlan& plan = plans[t];
    const GroupTree<T> tree = group_tree(batch, plan, t, tensors.hidden, tensors.weight, tensors.bias);
    // A thread processes the rows whose scores begin in its part.
    parallel(plan.scores, grain, [&](int64_t begin, int64_t end) {
      A* scratch = cpu::scratch<A, 0>(group_scores_scratch(batch.features, batch.max_width));
      const auto after =
          std::upper_bound(plan.run.begin(), plan.run.end(), begin,
                           [](int64_t entry, const GroupRun& run) { return entry < run.entry; });
      for (size_t r = after - plan.run.begin() - 1; r < plan.run.size() && plan.run[r].entry < end; ++r) {
        const GroupRun& run = plan.run[r];
        const auto place = [&](int64_t entry) {
          const int64_t rows = (std::max<int64_t>(0, entry - run.entry) + run.width - 1) / run.width;
          return std::min(run.begin + rows, run.end);
        };
        const GroupRun* const next = r + 1 < plan.run.size() ? &plan.run[r + 1] : nullptr;
        kernels.scores(tree, run, next, place(begin), place(end), score, scratch);
      }
    });
    for (const GroupRun& run : plan.run) {
      const A* of_row = score + run.entry;
      for (int64_t j = run.begin; j < run.end; ++j, of_row += run.width) {
        tensors.log_prob[plan.row[j] * batch.trees + t] = of_row[plan.child[j]];
      }
    }
    score += plan.scores;
  }
}

template <typename T>
void group_log_prob_backward(const GroupBatch& batch, const std::vector<GroupPlan>& plans,
                             const std::vector<int64_t>& visited, const GroupBackward<T>& tensors) {
  using A = accumulate_t<T>;
  const GroupKernels<T>& kernels = chosen_kernels<GroupKernels<T>>();
  const GroupPieces all = group_pieces(batch, plans);
  const int64_t features = batch.features, width = interval_width(features, 32);
  int32_t* const sum_row = scratch<int32_t, 0>(batch.classes);  // set for the visited classes alone
  int64_t scores = 0, first_slot = 0;
  for (const GroupPlan& plan : plans) scores += plan.scores;
  const Workspace<A> slope(scores);
  scores = 0;
  std::vector<GroupTree<T>> trees;
  std::vector<GroupGradients<T>> gradients;
  for (int64_t t = 0; t < batch.trees; ++t) {
    trees.push_back(group_tree<T>(batch, plans[t], t, tensors.hidden, tensors.weight, nullptr));
    trees[t].row_class = all.row_class.data();
    trees[t].row_child = all.row_child.data();
    gradients.push_back({});
    GroupGradients<T>& g = gradients[t];
    g.grad_log_prob = tensors.grad_log_prob + t;
    g.trees = batch.trees;
    g.score = tensors.score + scores;
    g.grad_hidden = tensors.grad_hidden;
    g.slope = slope.data() + scores;
    g.sum_stride = width;
    g.sum_row = sum_row;
    g.sparse = tensors.sparse;
    if (tensors.grad_bias)
      g.grad_bias = tensors.grad_bias + (tensors.sparse ? first_slot : t * batch.classes);
    parallel(static_cast<int64_t>(plans[t].run.size()), 16, [&](int64_t r, int64_t end) {
      for (; r < end; ++r) {
        const GroupRun& run = plans[t].run[r];
        kernels.slopes(trees[t], run, g, cpu::scratch<A, 0>(run.width + 16));
      }
    });
    if (tensors.grad_bias && tensors.sparse) sort_biases(batch, plans[t], t, g.grad_bias, sum_row);
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
    A* scratch = cpu::scratch<A, 0>(group_gradients_scratch(features));
    for (; part < last; ++part) {
      const int64_t begin = part * width, end = std::min(begin + width, features);
      A* const sum = numbers ? sums.data() + part * numbers : nullptr;
      std::vector<GroupGradients<T>> mine(gradients);
      for (GroupGradients<T>& g : mine) g.sum = sum;
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t first = first_place[panel], rows = first_place[panel + 1] - first;
        if (sum) std::fill_n(sum, rows * width, A{0});
        for (int64_t p = all.first_piece[panel]; p < all.first_piece[panel + 1]; ++p) {
          const GroupRun run = all.run(plans, p);
          const GroupRun next = p + 1 < pieces ? all.run(plans, p + 1) : GroupRun{};
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

#define HSTREE_GROUP(T)                                                                                      \
  template void group_log_prob<T>(const GroupBatch&, const std::vector<GroupPlan>&, const GroupForward<T>&); \
  template void group_log_prob_backward<T>(const GroupBatch&, const std::vector<GroupPlan>&,                 \
                                           const std::vector<int64_t>&, const GroupBackward<T>&);
HSTREE_GROUP(float)
HSTREE_GROUP(double)
HSTREE_GROUP(BFloat16)
HSTREE_GROUP(Half)
#undef HSTREE_GROUP

}  // namespace hstree::cpu
