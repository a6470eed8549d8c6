#include "cpu/tree_topk.h"

#include <algorithm>
#include <limits>

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

// Searches rows, one after another, on one thread.
template <typename T>
class Search {
 public:
  using A = accumulate_t<T>;

  Search(const TreeVectors& vectors, const FeatureSubsets& subsets, const TreeTopk<T>& wanted)
      : v_(vectors),
        k_(wanted.k),
        wanted_(wanted),
        paths_(vectors, subsets),
        open_(v_.trees),
        seen_(scratch<uint64_t, 0>(v_.classes)),
        at_most_(v_.trees) {}

  void run(int64_t row) {
    search_ = paths_.begin(row);
    found_.clear();
    for (int64_t t = 0; t < v_.trees; ++t) {
      open_[t].clear();
      if (v_.nodes > 0) push_children(t, 0);
    }
    if (v_.nodes == 0) {
      std::fill(at_most_.begin(), at_most_.end(), A{0});
      found_.push_back({paths_.gated(at_most_.data()), 0});
    }
    for (int64_t t = best_tree(); t >= 0 && !is_finished(t); t = best_tree()) {
      if (wanted_.most_scored >= 0 && paths_.scored() > wanted_.most_scored) return give_up(row);
      pop(t);
    }
    if (static_cast<int64_t>(found_.size()) < k_) {
      fail(v_.op, ": edge: expected every class below the root of a tree, found ", found_.size(), " of ",
           v_.classes);
    }
    std::sort(found_.begin(), found_.end(), more_probable<A>);
    for (int64_t i = 0; i < k_; ++i) {
      wanted_.log_prob[row * k_ + i] = found_[i].log_prob;
      wanted_.index[row * k_ + i] = found_[i].index;
    }
  }

 private:
  void give_up(int64_t row) {
    std::fill_n(wanted_.log_prob + row * k_, k_, std::numeric_limits<A>::quiet_NaN());
    std::fill_n(wanted_.index + row * k_, k_, int64_t{-1});
  }

  A gate(int64_t t) const { return paths_.gate(t); }

  // Upper bound of the log-probability in tree t of a leaf that was not reached yet: its best open edge.
  A best_open(int64_t t) const {
    return open_[t].empty() ? -std::numeric_limits<A>::infinity() : open_[t].front().log_prob;
  }

  // The tree whose best open edge contributes most to the bound, or -1 if no edge is open.
  int64_t best_tree() const {
    int64_t best = -1;
    for (int64_t t = 0; t < v_.trees; ++t) {
      if (open_[t].empty()) continue;
      if (best < 0 || rank(gate(t) + best_open(t)) > rank(gate(best) + best_open(best))) best = t;
    }
    return best;
  }

  bool is_full() const { return static_cast<int64_t>(found_.size()) == k_; }

  bool is_finished(int64_t best) {
    if (!is_full()) return false;
    const A worst = rank(found_.front().log_prob);
    if (worst < rank(gate(best) + best_open(best))) return false;
    for (int64_t t = 0; t < v_.trees; ++t) at_most_[t] = best_open(t);
    return worst >= rank(paths_.gated(at_most_.data()));
  }

  // Pops the best open edge of tree t: opens the node below, or adds the class.
  void pop(int64_t t) {
    std::vector<OpenEdge<A>>& open = open_[t];
    std::pop_heap(open.begin(), open.end(), less_probable<A>);
    const OpenEdge<A> best = open.back();
    open.pop_back();
    if (paths_.edge(t, best.edge).below >= 0) return push_children(t, paths_.node_below(t, best.edge));
    const int64_t index = paths_.class_below(t, best.edge);
    if (seen_[index] == search_) return;
    seen_[index] = search_;
    // Looks it up in one tree after another while it may be among the best k.
    for (int64_t other = 0; other < v_.trees; ++other) at_most_[other] = best_open(other);
    at_most_[t] = best.log_prob;
    Found<A> found = {0, static_cast<int32_t>(index)};
    for (int64_t other = 0; other < v_.trees; ++other) {
      if (other == t) continue;
      if (is_full() && rank(paths_.gated(at_most_.data())) < rank(found_.front().log_prob)) return;
      at_most_[other] = paths_.log_prob(other, index);
    }
    found.log_prob = paths_.gated(at_most_.data());
    if (is_full()) {
      if (!more_probable(found, found_.front())) return;
      std::pop_heap(found_.begin(), found_.end(), more_probable<A>);
      found_.pop_back();
    }
    found_.push_back(found);
    std::push_heap(found_.begin(), found_.end(), more_probable<A>);
  }

  // No class below an edge of tree t that is less probable can be among the best k: its probability in the other
  // trees is at most that of their best open edges. A margin leaves out what rounding could add.
  A least_useful(int64_t t) const {
    constexpr A never = -std::numeric_limits<A>::infinity(), margin = A{1e-3};
    if (!is_full()) return never;
    const A worst = rank(found_.front().log_prob);
    A rest = 1;  // in shares of the least probable of the best
    for (int64_t other = 0; other < v_.trees; ++other) {
      if (other != t) rest -= std::exp(gate(other) + best_open(other) - worst);
    }
    return rest > margin ? worst + std::log(rest) - gate(t) - margin : never;
  }

  void push_children(int64_t t, int32_t index) {
    const A* const log_prob = paths_.children(t, index);
    const TreeNode& n = paths_.node(t, index);
    std::vector<OpenEdge<A>>& open = open_[t];
    const A least = least_useful(t);
    const bool first = open.empty();
    for (int32_t c = 0; c < n.width; ++c) {
      if (log_prob[c] < least) continue;
      open.push_back({log_prob[c], n.first_edge + c});
      if (!first) std::push_heap(open.begin(), open.end(), less_probable<A>);
    }
    if (first) std::make_heap(open.begin(), open.end(), less_probable<A>);
    if (open.empty()) return;
    const int32_t next = paths_.edge(t, open.front().edge).below;
    if (next >= 0 && next < v_.nodes) paths_.prefetch(t, next);
  }

  const TreeVectors& v_;
  const int64_t k_;
  const TreeTopk<T>& wanted_;
  MixtureRow<T> paths_;
  std::vector<std::vector<OpenEdge<A>>> open_;  // [T] heaps
  uint64_t* const seen_;                        // [V]
  std::vector<A> at_most_;                      // [T] log-probabilities, or upper bounds of them
  std::vector<Found<A>> found_;                 // heap, least probable first
  uint64_t search_ = 0;
};

}  // namespace

template <typename T>
void tree_topk(const TreeVectors& vectors, const TreeTopk<T>& wanted) {
  each_row<Search<T>>(vectors, wanted);
}

template void tree_topk<float>(const TreeVectors&, const TreeTopk<float>&);
template void tree_topk<double>(const TreeVectors&, const TreeTopk<double>&);
template void tree_topk<BFloat16>(const TreeVectors&, const TreeTopk<BFloat16>&);
template void tree_topk<Half>(const TreeVectors&, const TreeTopk<Half>&);

}  // namespace hstree::cpu
