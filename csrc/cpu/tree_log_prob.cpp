#include "cpu/tree_log_prob.h"

#include <algorithm>
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
        row_is_used_(m_.trees * score_rows()) {
    parallel(m_.trees, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) follow(t);
    });
  }

  Walk walk() const {
    return {nodes_.data(), *std::max_element(open_.begin(), open_.end()),
            *std::max_element(widest_.begin(), widest_.end())};
  }

  int64_t score_rows() const { return m_.block_begin[3]; }
  bool is_used(int64_t t, int64_t row) const { return row_is_used_[t * score_rows() + row]; }

 private:
  struct Open {
    int32_t edge;  // above the node; -1 at the root
    int32_t node;
    int32_t depth;
  };

  // Each node and each class must be reached once, nodes in preorder and by the edge that they name.
  void follow(int64_t t) {
    open_[t] = 1;
    if (m_.classes == 1) return;
    // Local copies: the compiler must assume that a write through a byte pointer changes the originals.
    const TreeMixture<A> m = m_;
    const TreeEdge* const edges = m.edge + t * m.edges;
    uint8_t* const is_used = row_is_used_.data() + t * score_rows();
    std::vector<uint8_t> reached(m.nodes + m.classes);
    uint8_t* const is_reached[2] = {reached.data(), reached.data() + m.nodes};
    const int64_t count[2] = {m.nodes, m.classes};  // number of nodes and of leaves that an edge may lead to
    std::vector<Open> stack(m.nodes + 1);
    Open* const open = stack.data();
    int64_t visited = 0, found[2] = {}, last = 1, most = 1, widest = 0;
    open[0] = {-1, 0, 1};
    is_reached[0][0] = 1;
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
      use_rows(m, t, visited, n, is_used);
      if (n.block != binary_node) widest = std::max<int64_t>(widest, n.width);
      for (int64_t e = n.first_edge + int64_t{n.width} - 1; e >= n.first_edge; --e) {
        const TreeEdge edge = edges[e];
        const bool is_leaf = edge.below < 0;
        const int64_t place = edge.below ^ (edge.below >> 31);  // ~below of a leaf
        if (edge.above != visited || place >= count[is_leaf] || is_reached[is_leaf][place]) {
          fail(m.op, ": edge[", t, ", ", e, "]: expected node ", visited, " above, and below it one of ",
               m.nodes, " nodes or ~class of one of ", m.classes, " classes not met before, got ", edge.above,
               ", ", edge.below);
        }
        is_reached[is_leaf][place] = 1;
        ++found[is_leaf];
        open[last] = {static_cast<int32_t>(e), edge.below, at.depth + 1};
        last += !is_leaf;
      }
    }
    if (found[1] < m.classes) {
      fail(m.op, ": edge: expected every class below the root of tree ", t, ", found ", found[1], " of ",
           m.classes);
    }
    nodes_[t] = visited;
    open_[t] = most;
    widest_[t] = widest;
  }

  static void check_node(const TreeMixture<A>& m, int64_t t, const Open& at, const TreeNode& n) {
    const bool is_wide = n.block == wide_node || n.block == wide_root;
    const bool is_node = is_wide || (n.block == binary_node && n.width == 2);
    const bool has_edges = n.first_edge >= 0 && n.width >= 2 && n.width <= m.edges - n.first_edge;
    const bool has_rows =
        is_node && n.row >= 0 && rows_of(n) <= m.block_begin[n.block + 1] - m.block_begin[n.block] - n.row;
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

  static int64_t rows_of(const TreeNode& n) { return n.block == binary_node ? 1 : n.width; }

  const TreeMixture<A>& m_;
  std::vector<int64_t> nodes_, open_, widest_;  // [T]
  std::vector<uint8_t> row_is_used_;            // [T, R]
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

}  // namespace

template <typename A>
void tree_log_prob(const TreeMixture<A>& mixture, A* log_prob) {
  const CheckedWalk<A> checked(mixture);
  const Walk walk = checked.walk();
  const TreeLogProbKernels<A>& kernels = *HSTREE_BY_CAPABILITY(tree_log_prob_kernels, A);
  each_vector(mixture, kernels.lanes, forward_vectors(walk, mixture.classes),
              [&](int64_t begin, int64_t count, A* workspace) {
                kernels.forward(mixture, walk, begin, count, log_prob, workspace);
              });
}

template <typename A>
void tree_log_prob_backward(const TreeMixture<A>& mixture, const A* grad, const A* log_prob, A* grad_score,
                            A* grad_log_gate) {
  const CheckedWalk<A> checked(mixture);
  const Walk walk = checked.walk();
  for (int64_t t = 0; t < mixture.trees; ++t) {
    for (int64_t row = 0; row < checked.score_rows(); ++row) {
      if (checked.is_used(t, row)) continue;
      std::fill_n(grad_score + (t * checked.score_rows() + row) * mixture.rows, mixture.rows, A{0});
    }
  }
  const TreeLogProbKernels<A>& kernels = *HSTREE_BY_CAPABILITY(tree_log_prob_kernels, A);
  each_vector(mixture, kernels.lanes, backward_vectors(walk, mixture.classes),
              [&](int64_t begin, int64_t count, A* workspace) {
                kernels.backward(mixture, walk, begin, count, grad, log_prob, grad_score, grad_log_gate,
                                 workspace);
              });
}

template void tree_log_prob<float>(const TreeMixture<float>&, float*);
template void tree_log_prob<double>(const TreeMixture<double>&, double*);
template void tree_log_prob_backward<float>(const TreeMixture<float>&, const float*, const float*, float*,
                                            float*);
template void tree_log_prob_backward<double>(const TreeMixture<double>&, const double*, const double*,
                                             double*, double*);

}  // namespace hstree::cpu
