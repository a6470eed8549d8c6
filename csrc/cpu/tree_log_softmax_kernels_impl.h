// Body of the kernels of log_prob, under the rules of vector_impl.h. A vector holds one number of a group of
// rows, one row a lane.
#pragma once

#include "cpu/vector_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {
namespace log_prob {

constexpr int64_t nodes_ahead = 8;  // distance in nodes of the prefetch of scores

// The addresses of the rows of a node's scores, and of their gradients.
template <typename A>
struct ScoreRows {
  int64_t block[3];  // offset of each block of the tree, at the first of the vector's rows
  int64_t stride;

  ScoreRows(const TreeMixture<A>& m, int64_t t, int64_t begin) : stride(m.rows) {
    for (int b = 0; b < 3; ++b) block[b] = (t * m.block_begin[3] + m.block_begin[b]) * m.rows + begin;
  }
  int64_t operator()(const TreeNode& n) const { return block[n.block] + n.row * stride; }
};

template <typename A>
static inline void fetch(const A* row, int64_t count) {
  __builtin_prefetch(row);
  __builtin_prefetch(row + count - 1);
}

template <bool whole, typename A>
static inline void store_some(A* p, int64_t count, Vector<A> v) {
  if constexpr (whole) {
    store(p, v);
  } else {
    store_first(p, count, v);
  }
}

// Sums of the lanes by halves: 0 + 8, 1 + 9, ..., then 0 + 4, ...
template <typename A>
static inline A sum_by_halves(Vector<A> v) {
  A part[VectorOf<A>::width];
  store(part, v);
  for (int64_t half = VectorOf<A>::width / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) part[i] += part[half + i];
  }
  return part[0];
}

// The sum of `width` terms: add(c, sum) adds term c. W partial sums, as accurate for millions of terms as for few.
template <typename A, typename Add>
static inline Vector<A> sum_of_parts(int64_t width, const Add& add) {
  constexpr int64_t W = VectorOf<A>::width;
  Vector<A> parts[W] = {}, lost[W] = {};
  int64_t c = 0;
  while (c + W <= width) {
    const int64_t end = c + terms_of_sum * W < width ? c + terms_of_sum * W : width;
    Vector<A> some[W] = {};
    for (; c + W <= end; c += W) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < W; ++i) some[i] = add(c + i, some[i]);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < W; ++i) add_exactly(parts[i], lost[i], some[i]);
  }
  A part[W * W];
#pragma GCC unroll 16
  for (int64_t i = 0; i < W; ++i) store(part + i * W, parts[i]);
  const auto part_of = [&](int64_t i) { return load(static_cast<const A*>(part + i * W)); };
  for (int64_t i = 0; c + i < width; ++i) store(part + i * W, add(c + i, part_of(i)));
  for (int64_t half = W / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) store(part + i * W, part_of(i) + part_of(half + i));
  }
  return part_of(0);
}

// The same for one row, with the same bits: add(c, sum) adds a vector of terms from c on, with zeros after the last.
template <typename A, typename Add>
static inline A sum_of_row(int64_t width, const Add& add) {
  const int64_t whole = width - width % VectorOf<A>::width;
  const Vector<A> parts = sum_of_vectors<A>(whole, add);
  return sum_by_halves<A>(whole < width ? add(whole, parts) : parts);
}

// The sum of exp(z - most) over the children of a node, for a group of rows; z [width, W]. With keep_exponentials,
// writes the terms to z.
template <bool keep_exponentials, typename A>
static inline Vector<A> sum_of_exponentials(A* z, int64_t width, Vector<A> most) {
  constexpr int64_t W = VectorOf<A>::width;
  return sum_of_parts<A>(width, [&](int64_t c, Vector<A> sum) {
    const Vector<A> e = exponential(load(static_cast<const A*>(z + c * W)) - most);
    if (keep_exponentials) store(z + c * W, e);
    return sum + e;
  });
}

// The same for one row, with the same bits: z [width], and -inf after it up to a vector's end. `most` becomes the
// largest.
template <typename A>
static inline A sum_of_exponentials(A* z, int64_t width, A& most) {
  constexpr int64_t W = VectorOf<A>::width;
  const Vector<A> impossible = splat(static_cast<A>(-__builtin_inf()));
  Vector<A> largest = impossible;
  store(z + width, impossible);
  for (int64_t c = 0; c < width; c += W) {
    const Vector<A> some = load(static_cast<const A*>(z + c));
    largest = some > largest ? some : largest;
  }
  most = largest[0];
  for (int64_t i = 1; i < W; ++i) most = largest[i] > most ? largest[i] : most;
  const Vector<A> shift = splat(most);
  return sum_of_row<A>(width, [&](int64_t c, Vector<A> sum) {
    return sum + exponential(load(static_cast<const A*>(z + c)) - shift);
  });
}

// Writes the scores of a node's children to z and their largest to `most`, and returns the sum of exp(score - most).
// With keep_exponentials, writes these to z.
template <bool whole, bool keep_exponentials, typename A>
static inline Vector<A> soft_sum(const A* row, int64_t stride, int64_t width, int64_t count, A* z,
                                 Vector<A>& most) {
  constexpr int64_t W = VectorOf<A>::width;
  most = splat(static_cast<A>(-__builtin_inf()));
  for (int64_t c = 0; c < width; ++c) {
    if (c + nodes_ahead < width) fetch(row + (c + nodes_ahead) * stride, count);
    const Vector<A> some = load_some<whole>(row + c * stride, count);
    store(z + c * W, some);
    most = some > most ? some : most;
  }
  return sum_of_exponentials<keep_exponentials>(z, width, most);
}

// The log-softmax of the scores of a node's children, for a group of rows or a single one.
template <typename A>
struct LogShares {
  const A* z;  // [width, W], or [width] of a single row
  bool single;
  Vector<A> most, log_sum;

  Vector<A> operator()(int64_t c) const {
    const Vector<A> score = single ? splat(z[c]) : load(z + c * VectorOf<A>::width);
    return (score - most) - log_sum;
  }
};
template <bool whole, typename A>
static inline LogShares<A> log_shares(const A* row, int64_t stride, int64_t width, int64_t count, A* z) {
  Vector<A> most;
  if (whole || count > 1) {
    const Vector<A> sum = soft_sum<whole, false>(row, stride, width, count, z, most);
    return {z, false, most, log_of_sum(sum)};
  }
  A largest;
  for (int64_t c = 0; c < width; ++c) z[c] = row[c * stride];
  const Vector<A> log_sum = log_of_sum(splat(sum_of_exponentials(z, width, largest)));
  return {z, true, splat(largest), log_sum};
}

// log sigmoid(z) and log sigmoid(-z).
template <typename A>
static inline void log_sigmoids(Vector<A> z, Vector<A>& left, Vector<A>& right) {
  const Vector<A> either = log1p_unit(exponential(-magnitude(z)));
  left = (z < 0 ? z : Vector<A>{}) - either;
  right = (z > 0 ? -z : Vector<A>{}) - either;
}

// The same for a vector of nodes from `begin` on, in the row where `place` begins; arbitrary for nodes that
// are not binary.
template <typename A>
static inline void log_sigmoids_ahead(const A* score, const ScoreRows<A>& place, const TreeNode* begin,
                                      int64_t nodes, A* left, A* right) {
  constexpr int64_t W = VectorOf<A>::width;
  A z[W] = {};
  for (int64_t k = 0; k < W && k < nodes; ++k) {
    if (begin[k].block == binary_node) z[k] = score[place(begin[k])];
  }
  Vector<A> lefts, rights;
  log_sigmoids<A>(load(static_cast<const A*>(z)), lefts, rights);
  store(left, lefts);
  store(right, rights);
}

// Walks down from the root and calls leaves(classes, values, n) with above + log P_t(class) for a few classes
// at a time, until all are done, the children of a node from right to left. A stack visits the nodes in
// preorder. Whether a child is a leaf is unpredictable, so it selects addresses instead of a branch.
template <bool whole, typename A, typename Leaves>
static inline void descend(const TreeMixture<A>& m, const Walk& walk, int64_t t, int64_t begin, int64_t count,
                           Vector<A> above, A* open, A* z, const Leaves& leaves) {
  constexpr int64_t W = VectorOf<A>::width;
  const TreeNode* const node = m.node + t * m.nodes;
  const TreeEdge* const edge = m.edge + t * m.edges;
  const ScoreRows<A> place(m, t, begin);
  const int64_t nodes = walk.nodes[t];
  int32_t classes[leaves_at_once] = {};
  A* const values = z + walk.widest * W;
  A lefts[W], rights[W];  // of W nodes, if there is only one row
  int64_t found = 0;
  store(nodes == 0 ? values : open, above);
  if (nodes == 0) return leaves(classes, values, 1);
  A* top = open + W;
  const auto reach = [&](int32_t below, Vector<A> value) {
    const bool is_leaf = below < 0;
    store(is_leaf ? values + found * W : top, value);
    classes[found] = ~below;
    found += is_leaf;
    top += is_leaf ? 0 : W;
    if (found < leaves_at_once) return;
    leaves(classes, values, found);
    found = 0;
  };
  for (int64_t i = 0; i < nodes; ++i) {
    if (i + nodes_ahead < nodes) fetch(m.score + place(node[i + nodes_ahead]), count);
    if (!whole && count == 1 && i % W == 0) {
      log_sigmoids_ahead(m.score, place, node + i, nodes - i, lefts, rights);
    }
    const TreeNode& n = node[i];
    const TreeEdge* const child = edge + n.first_edge;
    const A* const row = m.score + place(n);
    top -= W;
    const Vector<A> base = load(static_cast<const A*>(top));
    if (n.block == binary_node) {
      Vector<A> left, right;
      if (!whole && count == 1) {
        left = splat(lefts[i % W]);
        right = splat(rights[i % W]);
      } else {
        log_sigmoids<A>(load_some<whole>(row, count), left, right);
      }
      reach(child[1].below, base + right);
      reach(child[0].below, base + left);
    } else {
      const LogShares<A> of_child = log_shares<whole>(row, m.rows, n.width, count, z);
      for (int64_t c = n.width - 1; c >= 0; --c) reach(child[c].below, base + of_child(c));
    }
  }
  leaves(classes, values, found);
}

// Computes the gradients of the scores from the leaves up, in the opposite order. G of the classes is stored
// before `leaf`, the last class first. Returns G of the root.
template <bool whole, typename A>
static inline Vector<A> ascend(const TreeMixture<A>& m, const Walk& walk, int64_t t, int64_t begin,
                               int64_t count, const A* leaf, A* grad_score, A* open, A* z) {
  constexpr int64_t W = VectorOf<A>::width;
  const TreeNode* const node = m.node + t * m.nodes;
  const TreeEdge* const edge = m.edge + t * m.edges;
  const ScoreRows<A> place(m, t, begin);
  A* const grads = z + walk.widest * W;
  A* top = open;
  const auto take = [&](int32_t below) {
    const bool is_leaf = below < 0;
    leaf -= is_leaf ? W : 0;
    top -= is_leaf ? 0 : W;
    return load(is_leaf ? leaf : static_cast<const A*>(top));
  };
  for (int64_t i = walk.nodes[t] - 1; i >= 0; --i) {
    if (i >= nodes_ahead) {
      const int64_t next = place(node[i - nodes_ahead]);
      fetch(m.score + next, count);
      fetch(grad_score + next, count);
    }
    const TreeNode& n = node[i];
    const TreeEdge* const child = edge + n.first_edge;
    const A* const row = m.score + place(n);
    A* const grad = grad_score + place(n);
    Vector<A> total;
    if (n.block == binary_node) {
      const Vector<A> left = take(child[0].below), right = take(child[1].below);
      const Vector<A> score = load_some<whole>(row, count);
      const Vector<A> e = exponential(-magnitude(score)), large = 1 / (1 + e), small = e * large;
      const auto positive = score > 0;
      store_some<whole>(grad, count, (positive ? small : large) * left - (positive ? large : small) * right);
      total = left + right;
    } else {
      total = Vector<A>{};
      for (int64_t c = 0; c < n.width; ++c) {
        const Vector<A> g = take(child[c].below);
        store(grads + c * W, g);
        total += g;
      }
      Vector<A> most;
      const Vector<A> share = total / soft_sum<whole, true>(row, m.rows, n.width, count, z, most);
      for (int64_t c = 0; c < n.width; ++c) {
        store_some<whole>(grad + c * m.rows, count, load(grads + c * W) - load(z + c * W) * share);
      }
    }
    store(top, total);
    top += W;
  }
  return walk.nodes[t] == 0 ? load(leaf - W) : load(static_cast<const A*>(open));
}

// The log_gate of one tree, for the rows of the vector.
template <typename A>
static inline Vector<A> gate_of(const TreeMixture<A>& m, int64_t t, int64_t begin, int64_t count) {
  A gate[VectorOf<A>::width] = {};
  for (int64_t r = 0; r < count; ++r) gate[r] = m.log_gate[(begin + r) * m.trees + t];
  return load(gate);
}

// Copies rows [count, classes] to the lanes of vectors [classes], with zeros in the other lanes.
template <typename A>
static inline void to_vectors(const A* rows, int64_t count, int64_t classes, A* vectors) {
  constexpr int64_t W = VectorOf<A>::width;
  for (int64_t y = 0; y < classes; y += W) {
    const int64_t some = classes - y < W ? classes - y : W;
    for (int64_t i = 0; i < some; ++i) store(vectors + (y + i) * W, Vector<A>{});
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t i = 0; i < some; ++i) vectors[(y + i) * W + r] = rows[r * classes + y + i];
    }
  }
}

template <bool whole, typename A>
static void unmix(const TreeMixture<A>& m, const Walk& walk, int64_t begin, int64_t count, const A* grad,
                  const A* log_prob, A* grad_score, A* grad_log_gate, A* workspace) {
  constexpr int64_t W = VectorOf<A>::width;
  A* const grads = workspace;
  A* const mixture = grads + m.classes * W;
  A* const below = mixture + m.classes * W;
  A* const open = below + m.classes * W;
  A* const z = open + walk.open * W;
  to_vectors(grad + begin * m.classes, count, m.classes, grads);
  to_vectors(log_prob + begin * m.classes, count, m.classes, mixture);
  const Vector<A> impossible = splat(static_cast<A>(-__builtin_inf()));
  for (int64_t t = 0; t < m.trees; ++t) {
    A* leaf = below;
    descend<whole>(m, walk, t, begin, count, gate_of(m, t, begin, count), open, z,
                   [&](const int32_t* classes, const A* values, int64_t n) {
                     for (int64_t i = 0; i < n; ++i, leaf += W) {
                       const Vector<A> value = load(values + i * W);
                       const Vector<A> log_share =
                           value - load(static_cast<const A*>(mixture + classes[i] * W));
                       const Vector<A> share = exponential(log_share > 0 ? Vector<A>{} : log_share);
                       const Vector<A> g = load(static_cast<const A*>(grads + classes[i] * W)) * share;
                       store(leaf, value == impossible ? Vector<A>{} : g);
                     }
                   });
    const Vector<A> total = ascend<whole>(m, walk, t, begin, count, leaf, grad_score, open, z);
    for (int64_t r = 0; r < count; ++r) grad_log_gate[(begin + r) * m.trees + t] = total[r];
  }
}

template <typename A>
static void backward(const TreeMixture<A>& m, const Walk& walk, int64_t begin, int64_t count, const A* grad,
                     const A* log_prob, A* grad_score, A* grad_log_gate, A* workspace) {
  if (count == VectorOf<A>::width) {
    return unmix<true>(m, walk, begin, count, grad, log_prob, grad_score, grad_log_gate, workspace);
  }
  unmix<false>(m, walk, begin, count, grad, log_prob, grad_score, grad_log_gate, workspace);
}

template <typename A>
static constexpr TreeLogSoftmaxKernels<A> table = {VectorOf<A>::width, backward<A>};

}  // namespace log_prob
}  // namespace HSTREE_CAPABILITY

HSTREE_KERNELS_OF_SUMS(TreeLogSoftmaxKernels, log_prob::table)

}  // namespace hstree::cpu
