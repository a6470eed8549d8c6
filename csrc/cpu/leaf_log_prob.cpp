#include "cpu/leaf_log_prob.h"

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "cpu/capability.h"

namespace hstree::cpu {
namespace {

template <typename T>
const LeafKernels<T>& leaf_kernels() {
  return *HSTREE_BY_CAPABILITY(leaf_kernels, T);
}

// Sorts the children of all runs by class. Of the work only V / 64 words depend on V.
void sort_visits(const TreeBatch& batch, LeafPlan& plan) {
  std::vector<uint64_t> seen((batch.classes + 63) / 64);  // a bit for each class
  for (const LeafRun& run : plan.run) {
    for (int64_t c = 0; c < run.width; ++c)
      seen[run.leaf_class[c] / 64] |= uint64_t{1} << run.leaf_class[c] % 64;
  }
  int32_t* number = scratch<int32_t, 0>(batch.classes);  // place in visited, set for those classes alone
  for (size_t w = 0; w < seen.size(); ++w) {
    for (uint64_t rest = seen[w]; rest; rest &= rest - 1) {
      const int64_t c = w * 64 + __builtin_ctzll(rest);
      number[c] = static_cast<int32_t>(plan.visited.size());
      plan.visited.push_back(c);
    }
  }
  plan.first_visit.assign(plan.visited.size() + 1, 0);
  for (const LeafRun& run : plan.run) {
    for (int64_t c = 0; c < run.width; ++c) ++plan.first_visit[number[run.leaf_class[c]] + 1];
  }
  std::partial_sum(plan.first_visit.begin(), plan.first_visit.end(), plan.first_visit.begin());
  plan.visit.resize(plan.first_visit.back());
  std::vector<int64_t> next(plan.first_visit);
  for (size_t r = 0; r < plan.run.size(); ++r) {
    const LeafRun& run = plan.run[r];
    for (int64_t c = 0; c < run.width; ++c) {
      plan.visit[next[number[run.leaf_class[c]]]++] = {static_cast<int32_t>(r), static_cast<int32_t>(c)};
    }
  }
}

template <typename T>
LeafBatch<T> leaf_batch(const TreeBatch& batch, const LeafPlan& plan, const accumulate_t<T>* x,
                        const T* weight, const T* bias, accumulate_t<T>* score) {
  return {plan.run.data(),
          plan.visit.data(),
          plan.first_visit.data(),
          plan.visited.data(),
          static_cast<int64_t>(plan.visited.size()),
          x,
          weight,
          bias,
          score,
          batch.features,
          batch.classes,
          batch.trees,
          batch.trees * batch.longest};
}

// hidden in A: itself, or a copy.
template <typename T>
class Widened {
  using A = accumulate_t<T>;

 public:
  Widened(const TreeBatch& batch, const T* hidden)
      : copy_(std::is_same_v<T, A> ? 0 : batch.rows * batch.in_features) {
    if constexpr (std::is_same_v<T, A>) {
      data_ = hidden;
    } else {
      leaf_kernels<T>().widen(hidden, batch.rows * batch.in_features, copy_.data());
      data_ = copy_.data();
    }
  }
  const A* data() const { return data_; }

 private:
  Workspace<A> copy_;
  const A* data_;
};

}  // namespace

LeafPlan leaf_plan(const TreeBatch& batch) {
  LeafPlan plan;
  plan.trees = wide_plans(batch);
  int64_t rows = 0;
  for (const WidePlan& tree : plan.trees) {
    for (const WideRun& run : tree.run) rows += run.end - run.begin;
  }
  plan.chosen.reserve(rows);  // its data stays in place
  int64_t slot = 0;
  for (int64_t t = 0; t < batch.trees; ++t) {
    const WidePlan& tree = plan.trees[t];
    for (const WideRun& run : tree.run) {
      const int32_t* const chosen = plan.chosen.data() + plan.chosen.size();
      for (int64_t j = run.begin; j < run.end; ++j) {
        plan.chosen.push_back(tree.child[tree.first_child[j] + run.depth]);
      }
      const int64_t width = slope_width(run.width);
      plan.run.push_back({tree.row.data() + run.begin, chosen,
                          batch.leaf_class + t * batch.classes + run.first_row, run.end - run.begin,
                          run.width, t, t * batch.longest + run.place, plan.slopes, width, slot + run.slot});
      plan.slopes += (run.end - run.begin) * width;
    }
    slot += tree.visited;
  }
  sort_visits(batch, plan);
  return plan;
}

void visited_biases(const LeafPlan& plan, int64_t* index) {
  int64_t* class_index = index + plan.visit.size();
  for (const LeafRun& run : plan.run) {
    for (int64_t c = 0; c < run.width; ++c) {
      *index++ = run.tree;
      *class_index++ = run.leaf_class[c];
    }
  }
}

template <typename T>
void leaf_log_prob(const TreeBatch& batch, const Forward<T>& tensors) {
  using A = accumulate_t<T>;
  const LeafKernels<T>& kernels = leaf_kernels<T>();
  const LeafPlan plan = leaf_plan(batch);
  const Widened<T> x(batch, tensors.hidden);
  const LeafBatch<T> leaf = leaf_batch(batch, plan, x.data(), tensors.weight, tensors.bias, tensors.score);
  parallel(static_cast<int64_t>(plan.visited.size()), 64, [&](int64_t begin, int64_t end) {
    kernels.scores(leaf, begin, end, scratch<A, 0>(batch.features));
  });
  parallel(static_cast<int64_t>(plan.run.size()), 16, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      kernels.normalize(leaf, plan.run[begin], scratch<A, 0>(plan.run[begin].width));
    }
  });
  for (const LeafRun& run : plan.run) {
    for (int64_t r = 0; r < run.rows; ++r) {
      const int64_t row = run.row[r];
      tensors.log_prob[row * batch.trees + run.tree] +=
          tensors.score[row * leaf.score_stride + run.column + run.chosen[r]];
    }
  }
}

template <typename T>
void leaf_log_prob_backward(const TreeBatch& batch, const LeafPlan& plan, const Backward<T>& tensors) {
  using A = accumulate_t<T>;
  const LeafKernels<T>& kernels = leaf_kernels<T>();
  const Widened<T> x(batch, tensors.hidden);
  const LeafBatch<T> leaf =
      leaf_batch<T>(batch, plan, x.data(), tensors.weight, nullptr, const_cast<A*>(tensors.score));
  Workspace<A> slope(plan.slopes);
  parallel(static_cast<int64_t>(plan.run.size()), 16, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      const LeafRun& run = plan.run[begin];
      kernels.slopes(leaf, run, tensors.grad_log_prob, slope.data(), tensors.grad_bias, tensors.sparse,
                     scratch<A, 0>(run.slope_width));
    }
  });
  if (tensors.grad_hidden) std::fill_n(tensors.grad_hidden, batch.rows * batch.in_features, A{0});
  if (!tensors.grad_hidden && !tensors.grad_weight) return;
  if (!tensors.sparse && tensors.grad_weight) {
    const auto clear = [&](int64_t begin, int64_t end) {
      std::fill_n(tensors.grad_weight + begin * batch.features, (end - begin) * batch.features, T{});
    };
    int64_t next = 0;
    for (const int64_t c : plan.visited) {
      clear(next, c);
      next = c + 1;
    }
    clear(next, batch.classes);
  }
  const int64_t shares =
      std::max<int64_t>(1, std::min<int64_t>(torch::stable::get_num_threads(), batch.features / 64));
  const int64_t width = std::max<int64_t>(16, ((batch.features + shares - 1) / shares + 15) / 16 * 16);
  parallel((batch.features + width - 1) / width, 1, [&](int64_t part, int64_t last) {
    A* space = scratch<A, 0>(2 * width + 64);
    for (; part < last; ++part) {
      kernels.gradients(leaf, slope.data(), part * width, std::min((part + 1) * width, batch.features),
                        tensors.grad_hidden, tensors.grad_weight, tensors.sparse, space);
    }
  });
}

#define HSTREE_LEAF(T)                                                 \
  template void leaf_log_prob<T>(const TreeBatch&, const Forward<T>&); \
  template void leaf_log_prob_backward<T>(const TreeBatch&, const LeafPlan&, const Backward<T>&);
HSTREE_LEAF(float)
HSTREE_LEAF(double)
HSTREE_LEAF(BFloat16)
HSTREE_LEAF(Half)

}  // namespace hstree::cpu
