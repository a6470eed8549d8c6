#include "cpu/tree_topk.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/capability.h"
#include "cpu/path_log_prob_kernels.h"
#include "cpu/tree_batch.h"

namespace hstree::cpu {
namespace {

template <typename A>
struct OpenEdge {
  A log_prob;
  int32_t edge;
};

template <typename A>
struct Found {
  A log_prob;
  int32_t index;
};

// Orders values with NaN as the largest.
template <typename A>
A rank(A value) {
  return std::isnan(value) ? std::numeric_limits<A>::infinity() : value;
}

template <typename A>
bool less_probable(const OpenEdge<A>& a, const OpenEdge<A>& b) {
  const A x = rank(a.log_prob), y = rank(b.log_prob);
  return x < y || (x == y && a.edge > b.edge);
}

template <typename A>
bool more_probable(const Found<A>& a, const Found<A>& b) {
  const A x = rank(a.log_prob), y = rank(b.log_prob);
  return x > y || (x == y && a.index < b.index);
}

// z[0], z[1] = log sigmoid(z), log sigmoid(-z) of the score z in z[0].
template <typename A>
void log_sigmoids(A* z) {
  const A score = z[0], either = std::log1p(std::exp(-std::abs(score)));
  z[0] = std::min(score, A{0}) - either;
  z[1] = std::min(-score, A{0}) - either;
}

// Log-softmax in place.
template <typename A>
void log_softmax(A* z, int64_t width) {
  A largest = -std::numeric_limits<A>::infinity(), sum = 0;
  for (int64_t c = 0; c < width; ++c) largest = std::max(largest, z[c]);
  for (int64_t c = 0; c < width; ++c) sum += std::exp(z[c] - largest);
  const A log_sum = std::log(sum);
  for (int64_t c = 0; c < width; ++c) z[c] = (z[c] - largest) - log_sum;
}

// Tagged with the row of its search, so that it counts as absent for other rows and nothing needs clearing.
struct Stamp {
  uint64_t search = 0;
  int64_t place = 0;
};

// dot(leaf_weight[class], hidden) of the row of a search.
template <typename A>
struct ClassProduct {
  uint64_t search = 0;
  A value = 0;
};

uint64_t next_search() {
  static thread_local uint64_t searches = 0;
  return ++searches;
}

// Searches rows, one after another, on one thread.
template <typename T>
class Search {
 public:
  using A = accumulate_t<T>;

  Search(const TreeTopk<T>& arguments, const FeatureSubsets& subsets)
      : a_(arguments),
        subsets_(subsets),
        kernels_(*HSTREE_BY_CAPABILITY(path_kernels, T)),
        stride_(workspace_stride(a_.features)),
        x_(a_.trees * stride_),
        hidden_(a_.leaf_weight ? workspace_stride(a_.in_features) : 0),
        open_(a_.trees),
        opened_(scratch<Stamp, 0>(a_.trees * a_.nodes)),
        seen_(scratch<uint64_t, 0>(a_.classes)),
        product_(scratch<ClassProduct<A>, 0>(a_.leaf_weight ? a_.classes : 0)),
        at_most_(a_.trees),
        terms_(a_.trees) {}

  void run(int64_t row) {
    search_ = next_search();
    row_ = row;
    log_probs_.clear();
    found_.clear();
    if (a_.leaf_weight) {
      kernels_.features({}, a_.in_features, a_.hidden + row * a_.in_features, hidden_.data());
    }
    for (int64_t t = 0; t < a_.trees; ++t) {
      kernels_.features(subsets_[t], a_.features, a_.hidden + row * a_.in_features, x_.data() + t * stride_);
      open_[t].clear();
      if (a_.nodes > 0) push_children(t, 0);
    }
    if (a_.nodes == 0) {
      std::fill(at_most_.begin(), at_most_.end(), A{0});
      found_.push_back({gated(at_most_.data()), 0});
    }
    for (int64_t t = best_tree(); t >= 0 && !is_finished(t); t = best_tree()) pop(t);
    if (static_cast<int64_t>(found_.size()) < a_.k) {
      fail(a_.op, ": edge: expected every class below the root of a tree, found ", found_.size(), " of ",
           a_.classes);
    }
    std::sort(found_.begin(), found_.end(), more_probable<A>);
    for (int64_t i = 0; i < a_.k; ++i) {
      a_.log_prob[row * a_.k + i] = found_[i].log_prob;
      a_.index[row * a_.k + i] = found_[i].index;
    }
  }

 private:
  A gate(int64_t t) const { return a_.log_gate[row_ * a_.trees + t]; }

  // log sum_t exp(log_gate[t] + log_prob[t]).
  A gated(const A* log_prob) {
    A largest = -std::numeric_limits<A>::infinity(), sum = 0;
    for (int64_t t = 0; t < a_.trees; ++t) {
      terms_[t] = gate(t) + log_prob[t];
      if (std::isnan(terms_[t])) return terms_[t];
      largest = std::max(largest, terms_[t]);
    }
    if (a_.trees == 1 || std::isinf(largest)) return largest;
    for (int64_t t = 0; t < a_.trees; ++t) sum += std::exp(terms_[t] - largest);
    return largest + std::log(sum);
  }

  // Upper bound of the log-probability in tree t of a leaf that was not reached yet: its best open edge.
  A best_open(int64_t t) const {
    return open_[t].empty() ? -std::numeric_limits<A>::infinity() : open_[t].front().log_prob;
  }

  // The tree whose best open edge contributes most to the bound, or -1 if no edge is open.
  int64_t best_tree() const {
    int64_t best = -1;
    for (int64_t t = 0; t < a_.trees; ++t) {
      if (open_[t].empty()) continue;
      if (best < 0 || rank(gate(t) + best_open(t)) > rank(gate(best) + best_open(best))) best = t;
    }
    return best;
  }

  bool is_full() const { return static_cast<int64_t>(found_.size()) == a_.k; }

  bool is_finished(int64_t best) {
    if (!is_full()) return false;
    const A worst = rank(found_.front().log_prob);
    if (worst < rank(gate(best) + best_open(best))) return false;
    for (int64_t t = 0; t < a_.trees; ++t) at_most_[t] = best_open(t);
    return worst >= rank(gated(at_most_.data()));
  }

  // Pops the best open edge of tree t: opens the node below, or adds the class.
  void pop(int64_t t) {
    std::vector<OpenEdge<A>>& open = open_[t];
    std::pop_heap(open.begin(), open.end(), less_probable<A>);
    const OpenEdge<A> best = open.back();
    open.pop_back();
    const int32_t below = edge(t, best.edge).below;
    if (below >= 0) return push_children(t, below);
    const int64_t index = ~static_cast<int64_t>(below);
    if (index >= a_.classes) {
      fail(a_.op, ": edge[", t, ", ", best.edge, "]: expected a class below ", a_.classes, ", got ", index);
    }
    if (seen_[index] == search_) return;
    seen_[index] = search_;
    // Looks it up in one tree after another while it may be among the best k.
    for (int64_t other = 0; other < a_.trees; ++other) at_most_[other] = best_open(other);
    at_most_[t] = best.log_prob;
    Found<A> found = {0, static_cast<int32_t>(index)};
    for (int64_t other = 0; other < a_.trees; ++other) {
      if (other == t) continue;
      if (is_full() && rank(gated(at_most_.data())) < rank(found_.front().log_prob)) return;
      at_most_[other] = edge_log_prob(other, a_.leaf_edge[other * a_.classes + index]);
    }
    found.log_prob = gated(at_most_.data());
    if (is_full()) {
      if (!more_probable(found, found_.front())) return;
      std::pop_heap(found_.begin(), found_.end(), more_probable<A>);
      found_.pop_back();
    }
    found_.push_back(found);
    std::push_heap(found_.begin(), found_.end(), more_probable<A>);
  }

  void push_children(int64_t t, int32_t index) {
    open(t, index);
    const TreeNode& n = node(t, index);
    const A* const log_prob = log_probs_.data() + opened(t, index).place;
    std::vector<OpenEdge<A>>& open = open_[t];
    const bool first = open.empty();
    for (int32_t c = 0; c < n.width; ++c) {
      open.push_back({log_prob[c], n.first_edge + c});
      if (!first) std::push_heap(open.begin(), open.end(), less_probable<A>);
    }
    if (first) std::make_heap(open.begin(), open.end(), less_probable<A>);
    const int32_t next = edge(t, open.front().edge).below;
    if (next >= 0 && next < a_.nodes) prefetch(t, next);
  }

  // Prefetches what opening a node will read.
  void prefetch(int64_t t, int32_t index) const {
    const TreeNode& n = node(t, index);
    if (n.block != binary_node || !a_.weight[0]) return;
    const int64_t row = t * a_.weight_rows[0] + n.row, bytes = a_.features * static_cast<int64_t>(sizeof(T));
    const char* const weight = reinterpret_cast<const char*>(a_.weight[0]) + row * bytes;
    for (int64_t b = 0; b < std::min<int64_t>(bytes, 512); b += 64) __builtin_prefetch(weight + b);
    if (a_.bias[0]) __builtin_prefetch(a_.bias[0] + row);
  }

  Stamp& opened(int64_t t, int64_t node) const { return opened_[t * a_.nodes + node]; }

  // The log-probability of the path from the root through an edge of tree t.
  A edge_log_prob(int64_t t, int32_t index) {
    check_index("leaf_edge", index, a_.edges);
    const int32_t above = edge(t, index).above;
    check_index("edge", above, a_.nodes);
    open(t, above);
    return child_log_prob(t, above, index);
  }

  // The same if the node above is open.
  A child_log_prob(int64_t t, int32_t above, int32_t index) const {
    const TreeNode& n = node(t, above);
    check_index("edge", index - n.first_edge, n.width);
    return log_probs_[opened(t, above).place + index - n.first_edge];
  }

  // Computes the log-probabilities of the children of a node, after those of all nodes above it.
  void open(int64_t t, int32_t index) {
    check_index("edge", index, a_.nodes);
    path_.clear();
    while (opened(t, index).search != search_) {
      path_.push_back(index);
      prefetch(t, index);
      if (index == 0) break;
      const int32_t above = node(t, index).above;
      check_index("node", above, a_.edges);
      check_index("edge", edge(t, above).above, index);  // preorder excludes cycles
      index = edge(t, above).above;
    }
    for (; !path_.empty(); path_.pop_back()) compute(t, path_.back());
  }

  void compute(int64_t t, int32_t index) {
    const TreeNode& n = node(t, index);
    check_node(t, index);
    const A base = index == 0 ? A{0} : child_log_prob(t, edge(t, n.above).above, n.above);
    const int64_t place = static_cast<int64_t>(log_probs_.size());
    log_probs_.resize(place + n.width);
    A* const log_prob = log_probs_.data() + place;
    if (n.block == wide_root) {
      std::copy_n(a_.root + (t * a_.rows + row_) * a_.root_width, n.width, log_prob);
    } else if (is_leaf_group(n)) {
      leaf_scores(t, n, log_prob);
      log_softmax(log_prob, n.width);
    } else {
      const T* const bias = a_.bias[n.block];
      const int64_t first = t * a_.weight_rows[n.block] + n.row;
      kernels_.products(x_.data() + t * stride_, a_.weight[n.block] + first * a_.features,
                        bias ? bias + first : nullptr, scores(n), a_.features, log_prob);
      if (n.block == binary_node) {
        log_sigmoids(log_prob);
      } else {
        log_softmax(log_prob, n.width);
      }
    }
    for (int32_t c = 0; c < n.width; ++c) log_prob[c] += base;
    opened(t, index) = {search_, place};
  }

  void leaf_scores(int64_t t, const TreeNode& n, A* z) {
    const T* const bias = a_.leaf_bias ? a_.leaf_bias + t * a_.classes : nullptr;
    for (int32_t c = 0; c < n.width; ++c) {
      const int32_t below = edge(t, n.first_edge + c).below;
      if (below >= 0) {
        fail(a_.op, ": edge[", t, ", ", n.first_edge + c, "]: expected a class below a leaf group, got node ",
             below);
      }
      const int64_t index = ~static_cast<int64_t>(below);
      check_index("class of edge", index, a_.classes);
      ClassProduct<A>& product = product_[index];
      if (product.search != search_) {
        product.search = search_;
        kernels_.products(hidden_.data(), a_.leaf_weight + index * a_.in_features, nullptr, 1, a_.in_features,
                          &product.value);
      }
      z[c] = 0;
      if (bias)
        kernels_.products(hidden_.data(), a_.leaf_weight, bias + index, 1, 0, z + c);  // of no features
      z[c] += product.value;
    }
  }

  bool is_leaf_group(const TreeNode& n) const {
    return a_.leaf_weight && n.block == wide_node && n.row >= a_.weight_rows[wide_node];
  }

  static int32_t scores(const TreeNode& n) { return n.block == binary_node ? 1 : n.width; }

  const TreeNode& node(int64_t t, int64_t index) const { return a_.node[t * a_.nodes + index]; }
  const TreeEdge& edge(int64_t t, int64_t index) const { return a_.edge[t * a_.edges + index]; }

  void check_index(const char* name, int64_t index, int64_t end) const {
    if (index < 0 || index >= end) {
      fail(a_.op, ": ", name, ": expected the tables of a tree, with a number in [0, ", end, "), got ",
           index);
    }
  }

  void check_node(int64_t t, int32_t index) const {
    const TreeNode& n = node(t, index);
    const bool has_edges = n.first_edge >= 0 && n.width >= 2 && n.width <= a_.edges - n.first_edge;
    bool has_rows = false;
    if (n.block == wide_root) {
      has_rows = a_.root && index == 0 && n.width == a_.root_width;
    } else if (is_leaf_group(n)) {
      has_rows = n.width <= a_.weight_rows[wide_node] + a_.classes - n.row;
    } else if (n.block == wide_node || (n.block == binary_node && n.width == 2)) {
      has_rows = n.row >= 0 && scores(n) <= a_.weight_rows[n.block] - n.row;
    }
    if (has_edges && has_rows) return;
    fail(a_.op, ": node[", t, ", ", index,
         "]: expected a block, its first row, first edge and width within the ", "tables, got ", n.block,
         ", ", n.row, ", ", n.first_edge, ", ", n.width);
  }

  const TreeTopk<T>& a_;
  const FeatureSubsets& subsets_;
  const PathKernels<T>& kernels_;
  const int64_t stride_;
  std::vector<A> x_;                            // [T, stride] the row's features
  std::vector<A> hidden_;                       // [stride] all features of the row, with leaf groups
  std::vector<std::vector<OpenEdge<A>>> open_;  // [T] heaps
  Stamp* const opened_;                         // [T, nodes] index of the children's log-probabilities
  uint64_t* const seen_;                        // [V]
  ClassProduct<A>* const product_;              // [V] with leaf groups
  std::vector<A> at_most_;                      // [T] log-probabilities, or upper bounds of them
  std::vector<A> terms_;                        // [T]
  std::vector<A> log_probs_;                    // of the edges below opened nodes, from the root
  std::vector<Found<A>> found_;                 // heap, least probable first
  std::vector<int32_t> path_;
  uint64_t search_ = 0;
  int64_t row_ = 0;
};

}  // namespace

template <typename T>
void tree_topk(const TreeTopk<T>& arguments) {
  TreeBatch batch{};
  batch.op = arguments.op;
  batch.feature_index = arguments.feature_index;
  batch.trees = arguments.trees;
  batch.features = arguments.features;
  batch.in_features = arguments.in_features;
  check_feature_index(batch);
  const FeatureSubsets subsets(batch);
  parallel(arguments.rows, 1, [&](int64_t begin, int64_t end) {
    Search<T> search(arguments, subsets);
    for (int64_t row = begin; row < end; ++row) search.run(row);
  });
}

template void tree_topk<float>(const TreeTopk<float>&);
template void tree_topk<double>(const TreeTopk<double>&);
template void tree_topk<BFloat16>(const TreeTopk<BFloat16>&);
template void tree_topk<Half>(const TreeTopk<Half>&);

}  // namespace hstree::cpu
