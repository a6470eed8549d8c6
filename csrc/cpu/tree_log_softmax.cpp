#include "cpu/tree_log_softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "cpu/capability.h"
#include "cpu/tree_batch.h"
#include "kernels/limits.h"

namespace hstree::cpu {
namespace {

// Checks the tables of all trees by walking them from the root, so that nothing outside them is read later.
template <typename A>
class CheckedWalk {
 public:
  explicit CheckedWalk(const TreeMixture<A>& mixture)
      : m_(mixture),
        nodes_(m_.trees),
        open_(m_.trees),
        widest_(m_.trees),
        groups_(m_.trees),
        others_(m_.trees),
        row_is_used_(m_.trees * score_rows()),
        stride_((m_.classes + vector_multiple - 1) / vector_multiple * vector_multiple),
        slot_(m_.trees * stride_),
        member_(m_.class_bias ? m_.trees * stride_ : 0) {
    parallel(m_.trees, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) follow(t);
    });
  }

  Walk walk() const {
    return {nodes_.data(), most(open_),   most(widest_), slot_.data(),   member_.data(),
            stride_,       most(groups_), most(others_), groups_.data(), others_.data()};
  }

  int64_t score_rows() const { return m_.block_begin[3]; }
  bool is_used(int64_t t, int64_t row) const { return row_is_used_[t * score_rows() + row]; }

 private:
  struct Open {
    int32_t edge;  // above the node; -1 at the root
    int32_t node;
    int32_t depth;
  };

  static constexpr int64_t vector_multiple = 16;
  static constexpr int32_t not_reached = std::numeric_limits<int32_t>::min();

  static int64_t most(const std::vector<int64_t>& of_trees) {
    return *std::max_element(of_trees.begin(), of_trees.end());
  }

  // Each node and each class must be reached once, nodes in preorder and by the edge that they name.
  void follow(int64_t t) {
    open_[t] = 1;
    int32_t* const slot = slot_.data() + t * stride_;
    std::fill_n(slot, m_.classes, not_reached);
    std::fill_n(slot + m_.classes, stride_ - m_.classes, 0);
    if (m_.classes == 1) {
      slot[0] = ~0;
      others_[t] = 1;
      return;
    }
    // Local copies: the compiler must assume that a write through a byte pointer changes the originals.
    const TreeMixture<A> m = m_;
    const TreeEdge* const edges = m.edge + t * m.edges;
    uint8_t* const is_used = row_is_used_.data() + t * score_rows();
    std::vector<uint8_t> reached(m.nodes);
    uint8_t* const is_reached = reached.data();
    int32_t* member = m.class_bias ? member_.data() + t * stride_ : nullptr;
    std::vector<Open> stack(m.nodes + 1);
    Open* const open = stack.data();
    int64_t visited = 0, found = 0, last = 1, most = 1, widest = 0;
    int32_t groups = 0, others = 0;
    open[0] = {-1, 0, 1};
    is_reached[0] = 1;
    for (; last > 0; ++visited) {
      most = std::max(most, last);
      const Open at = open[--last];
      if (at.node != visited) {
        fail(m.op, ": edge[", t, ", ", at.edge, "]: expected node ", visited, ", the next in preorder, got ",
             at.node);
      }
      if (at.depth > max_depth) {
        fail(m.op, ": node[", t, ", ", at.node, "]: expected at most ", max_depth,
             " nodes on a path, got more");
      }
      const TreeNode& n = m.node[t * m.nodes + visited];
      check_node(m, t, at, n);
      if (n.block != binary_node) widest = std::max<int64_t>(widest, n.width);
      const auto expect = [&](bool is_right, int64_t e) {
        if (is_right) return;
        fail(m.op, ": edge[", t, ", ", e, "]: expected node ", visited, " above, and below it one of ",
             m.nodes, " nodes or ~class of one of ", m.classes, " classes not met before, got ",
             edges[e].above, ", ", edges[e].below);
      };
      if (!of_classes(m, n)) use_rows(m, t, visited, n, is_used);
      if (n.block == class_group) {
        for (int64_t e = n.first_edge; e < n.first_edge + int64_t{n.width}; ++e) {
          const int64_t y = ~int64_t{edges[e].below};
          expect(edges[e].above == visited && y >= 0 && y < m.classes && slot[y] == not_reached, e);
          slot[y] = groups;
          if (member) *member++ = static_cast<int32_t>(y);
        }
        ++groups;
        found += n.width;
        continue;
      }
      for (int64_t e = n.first_edge + int64_t{n.width} - 1; e >= n.first_edge; --e) {
        const int32_t below = edges[e].below;
        if (below < 0) {
          expect(edges[e].above == visited && ~below < m.classes && slot[~below] == not_reached, e);
          slot[~below] = ~others++;
          ++found;
        } else {
          expect(edges[e].above == visited && below < m.nodes && !is_reached[below], e);
          is_reached[below] = 1;
          open[last++] = {static_cast<int32_t>(e), below, at.depth + 1};
        }
      }
    }
    if (found < m.classes) {
      fail(m.op, ": edge: expected every class below the root of tree ", t, ", found ", found, " of ",
           m.classes);
    }
    if (member) std::fill(member, member_.data() + (t + 1) * stride_, 0);
    nodes_[t] = visited;
    open_[t] = most;
    widest_[t] = widest;
    groups_[t] = groups;
    others_[t] = others;
  }

  // A group whose classes have no rows of score.
  static bool of_classes(const TreeMixture<A>& m, const TreeNode& n) {
    return m.class_bias && n.block == class_group;
  }

  // Below the root are groups of classes, or binary nodes.
  static void check_node(const TreeMixture<A>& m, int64_t t, const Open& at, const TreeNode& n) {
    const bool groups = m.class_bias || rows_in(m, class_group) > 0;
    const bool is_binary = !groups && n.block == binary_node && n.width == 2;
    const bool is_node = is_binary || n.block == (at.edge < 0 ? wide_root : groups ? class_group : -1);
    const bool has_edges = n.first_edge >= 0 && n.width >= 2 && n.width <= m.edges - n.first_edge;
    const bool has_rows =
        is_node && n.row >= 0 && rows_of(n) <= (of_classes(m, n) ? m.classes : rows_in(m, n.block)) - n.row;
    if (has_edges && has_rows && (at.edge < 0 ? n.above < 0 : n.above == at.edge)) return;
    fail(
        m.op, ": node[", t, ", ", at.node,
        "]: expected a block, its first row, first edge and width within the tables, and the edge above it, ",
        at.edge, ", got ", n.block, ", ", n.row, ", ", n.first_edge, ", ", n.width, ", ", n.above);
  }

  static void use_rows(const TreeMixture<A>& m, int64_t t, int64_t node, const TreeNode& n,
                       uint8_t* is_used) {
    is_used += m.block_begin[n.block] + n.row;
    for (int64_t row = 0; row < rows_of(n); ++row) {
      if (is_used[row]) {
        fail(m.op, ": node[", t, ", ", node, "]: expected rows of its own, got row ", n.row + row,
             " of block ", n.block, ", another node's");
      }
      is_used[row] = 1;
    }
  }

  static int64_t rows_in(const TreeMixture<A>& m, int32_t block) {
    return m.block_begin[block + 1] - m.block_begin[block];
  }
  static int64_t rows_of(const TreeNode& n) { return n.block == binary_node ? 1 : n.width; }

  const TreeMixture<A>& m_;
  std::vector<int64_t> nodes_, open_, widest_, groups_, others_;  // [T]
  std::vector<uint8_t> row_is_used_;                              // [T, R]
  int64_t stride_;
  Workspace<int32_t> slot_, member_;  // [T, stride]
};

// Calls f(begin, count, workspace) for all rows, in groups of as many as a vector has lanes.
template <typename A, typename F>
void each_vector(const TreeMixture<A>& mixture, int64_t lanes, int64_t vectors, const F& f) {
  parallel((mixture.rows + lanes - 1) / lanes, 1, [&](int64_t first, int64_t last) {
    const Workspace<A> workspace(vectors * lanes);
    for (int64_t begin = first * lanes; begin < std::min(last * lanes, mixture.rows); begin += lanes) {
      f(begin, std::min(lanes, mixture.rows - begin), workspace.data());
    }
  });
}

// The first multiple of a vector in memory that is one vector larger than needed.
template <typename A>
A* aligned(A* memory, int64_t lanes) {
  const uintptr_t bytes = lanes * sizeof(A);
  return reinterpret_cast<A*>((reinterpret_cast<uintptr_t>(memory) + bytes - 1) / bytes * bytes);
}

// The terms of all rows, for as many groups of rows at a time as there are threads.
template <typename A>
struct Terms {
  explicit Terms(const TreeMixture<A>& mixture)
      : m(mixture),
        checked_(m),
        walk(checked_.walk()),
        kernels(chosen_kernels<TreeMixKernels<A>>()),
        lanes(kernels.lanes),
        shares_(m.class_bias ? m.classes * lanes : 0),
        shifts_(m.trees * walk.groups * lanes),
        size_(shares_ + 2 * shifts_ + m.trees * walk.others * lanes + 2 * lanes),
        wave_(std::min<int64_t>(torch::stable::get_num_threads(), (m.rows + lanes - 1) / lanes)),
        workspace_(wave_ * size_),
        factors_(m.class_bias ? m.trees * walk.stride : 0),
        factored_(m.class_bias && kernels.factors(m, walk, factors_.data())) {}

  // Calls finish() for all rows, but with groups only for those with factors. Returns the other rows.
  template <typename Finish>
  std::vector<int64_t> each_wave(const Finish& finish) {
    std::vector<int64_t> others;
    if (m.class_bias && !factored_) {
      for (int64_t row = 0; row < m.rows; ++row) others.push_back(row);
      return others;
    }
    for (int64_t row = 0; row < m.rows;) {
      groups.clear();
      while (row < m.rows && static_cast<int64_t>(groups.size()) < wave_) {
        const int64_t count = std::min(lanes, m.rows - row);
        add(row, count, factored_ ? factors_.data() : nullptr);
        row += count;
      }
      compute();
      finish();
      if (!factored_) continue;
      for (const RowGroup<A>& rows : groups) {
        for (int64_t r = 0; r < rows.count; ++r) {
          if (std::isnan(rows.unit[r])) others.push_back(rows.begin + r);
        }
      }
    }
    return others;
  }

  // The same for these rows, without factors.
  template <typename Finish>
  void each_wave(const std::vector<int64_t>& some, const Finish& finish) {
    for (size_t next = 0; next < some.size();) {
      groups.clear();
      while (next < some.size() && static_cast<int64_t>(groups.size()) < wave_) add(some[next++], 1, nullptr);
      compute();
      finish();
    }
  }

  // Calls f(rows, part, memory of `vectors` vectors) for `parts` parts of each group of rows.
  template <typename F>
  void each(int64_t parts, int64_t vectors, const F& f) {
    parallel(groups.size() * parts, 1, [&](int64_t begin, int64_t end) {
      A* const own = aligned(scratch<A, 0>((vectors + 1) * lanes), lanes);
      for (; begin < end; ++begin) f(groups[begin / parts], begin % parts, own);
    });
  }

  void add(int64_t row, int64_t count, const A* factor) {
    A* const share = workspace_.data() + groups.size() * size_;
    A *const shift = share + shares_, *const value = shift + shifts_, *const end = share + size_;
    groups.push_back(
        {row, count, count == 1 ? 1 : lanes, share, shift, value, end - 2 * lanes, end - lanes, factor});
  }

  void compute() {
    if (factored_ && groups[0].factor) {
      each(1, 0, [&](const RowGroup<A>& rows, int64_t, A*) { kernels.most(m, rows); });
      each(blocks(), 0, [&](const RowGroup<A>& rows, int64_t part, A*) {
        kernels.shares(m, rows, part * block, end_of(part));
      });
    }
    each(m.trees, terms_vectors(walk),
         [&](const RowGroup<A>& rows, int64_t t, A* own) { kernels.terms(m, walk, rows, t, own); });
    if (factored_ && groups[0].factor) {
      each(1, 0, [&](const RowGroup<A>& rows, int64_t, A*) { kernels.weigh(m, walk, rows); });
    }
  }

  static constexpr int64_t block = 1024;  // classes of a task
  int64_t blocks() const { return (m.classes + block - 1) / block; }
  int64_t end_of(int64_t part) const { return std::min((part + 1) * block, m.classes); }
  int64_t begin_of(int64_t part) const { return part * block; }

  const TreeMixture<A>& m;
  const CheckedWalk<A> checked_;
  const Walk walk;
  const TreeMixKernels<A>& kernels;
  const int64_t lanes;
  std::vector<RowGroup<A>> groups;
  const int64_t shares_, shifts_, size_, wave_;
  const Workspace<A> workspace_, factors_;
  const bool factored_;
};

template <typename A>
bool more_probable(const FoundClass<A>& a, const FoundClass<A>& b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// The k best classes of the rows of a group.
template <typename A>
void select(const Terms<A>& terms, const RowGroup<A>& rows, int64_t k, A* log_prob, int64_t* index) {
  constexpr int64_t block = 64;  // classes whose best are added at a time
  using Found = FoundClass<A>;
  std::vector<std::vector<Found>> best(rows.count);
  std::vector<A> threshold(terms.lanes, A{-1});
  std::vector<Found> found(block * rows.lanes);
  const auto keep = [&](std::vector<Found>& some) {
    std::nth_element(some.begin(), some.begin() + (k - 1), some.end(), more_probable<A>);
    some.resize(k);
    return some[k - 1].value;
  };
  for (int64_t y = 0; y < terms.m.classes; y += block) {
    const int64_t end = std::min(y + block, terms.m.classes);
    const int64_t count =
        terms.kernels.probable(terms.m, terms.walk, rows, y, end, threshold.data(), found.data());
    for (int64_t i = 0; i < count; ++i) {
      std::vector<Found>& some = best[found[i].row];
      if (!(found[i].value > threshold[found[i].row])) continue;
      some.push_back(found[i]);
      if (static_cast<int64_t>(some.size()) >= 2 * k + block) threshold[found[i].row] = keep(some);
    }
    if (y > 0) continue;
    for (int64_t r = 0; r < rows.count; ++r) {
      if (static_cast<int64_t>(best[r].size()) >= k) threshold[r] = keep(best[r]);
    }
  }
  // A class whose share is 0 in all trees may have as much.
  const double lost = std::is_same_v<A, float> ? lost_float : lost_double;
  const double least = std::max(least_sum, lost * static_cast<double>(terms.m.trees));
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t first = (rows.begin + r) * k;
    const double unit = rows.unit[r] - headroom * std::log(2.0);
    if (std::isnan(unit) || static_cast<int64_t>(best[r].size()) < k ||
        !(keep(best[r]) >= static_cast<A>(least))) {
      std::fill_n(log_prob + first, k, std::numeric_limits<A>::quiet_NaN());
      std::fill_n(index + first, k, int64_t{-1});
      continue;
    }
    std::sort(best[r].begin(), best[r].end(), more_probable<A>);
    for (int64_t i = 0; i < k; ++i) {
      log_prob[first + i] = static_cast<A>(unit + std::log(static_cast<double>(best[r][i].value)));
      index[first + i] = best[r][i].index;
    }
  }
}

}  // namespace

// Threads divide first the trees, then the classes.
template <typename A>
void tree_log_softmax(const TreeMixture<A>& m, A* log_prob) {
  Terms<A> terms(m);
  const auto mix = [&] {
    terms.each(terms.blocks(), m.trees, [&](const RowGroup<A>& rows, int64_t part, A* own) {
      terms.kernels.mix(m, terms.walk, rows, terms.begin_of(part), terms.end_of(part), log_prob, own);
    });
  };
  terms.each_wave(terms.each_wave(mix), mix);
}

template <typename A>
void group_topk(const TreeMixture<A>& m, int64_t k, A* log_prob, int64_t* index) {
  Terms<A> terms(m);
  const std::vector<int64_t> others = terms.each_wave([&] {
    terms.each(1, 0, [&](const RowGroup<A>& rows, int64_t, A*) { select(terms, rows, k, log_prob, index); });
  });
  for (const int64_t row : others) {
    std::fill_n(log_prob + row * k, k, std::numeric_limits<A>::quiet_NaN());
    std::fill_n(index + row * k, k, int64_t{-1});
  }
}

template <typename A>
void tree_log_softmax_backward(const TreeMixture<A>& mixture, const A* grad, const A* log_prob, A* grad_score,
                               A* grad_log_gate) {
  const CheckedWalk<A> checked(mixture);
  const Walk walk = checked.walk();
  for (int64_t t = 0; t < mixture.trees; ++t) {
    for (int64_t row = 0; row < checked.score_rows(); ++row) {
      if (checked.is_used(t, row)) continue;
      std::fill_n(grad_score + (t * checked.score_rows() + row) * mixture.rows, mixture.rows, A{0});
    }
  }
  const TreeLogSoftmaxKernels<A>& kernels = chosen_kernels<TreeLogSoftmaxKernels<A>>();
  each_vector(mixture, kernels.lanes, backward_vectors(walk, mixture.classes),
              [&](int64_t begin, int64_t count, A* workspace) {
                kernels.backward(mixture, walk, begin, count, grad, log_prob, grad_score, grad_log_gate,
                                 workspace);
              });
}

template void tree_log_softmax<float>(const TreeMixture<float>&, float*);
template void tree_log_softmax<double>(const TreeMixture<double>&, double*);
template void group_topk<float>(const TreeMixture<float>&, int64_t, float*, int64_t*);
template void group_topk<double>(const TreeMixture<double>&, int64_t, double*, int64_t*);
template void tree_log_softmax_backward<float>(const TreeMixture<float>&, const float*, const float*, float*,
                                               float*);
template void tree_log_softmax_backward<double>(const TreeMixture<double>&, const double*, const double*,
                                                double*, double*);

}  // namespace hstree::cpu
