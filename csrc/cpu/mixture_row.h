// A mixture of trees with its vectors, and the log-probabilities of its paths for one row at a time: what the
// CPU kernels of tree_topk and sample share.
//
// Below the root are binary nodes or groups of classes. The scores of the classes of a group are
// dot(weight[class], hidden) + bias[t, class], and the products are computed once for all trees.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/capability.h"
#include "cpu/elements.h"
#include "cpu/mixture_row_kernels.h"
#include "cpu/tree_batch.h"
#include "kernels/tree_vectors.h"

namespace hstree::cpu {

// Tagged with the row that it was computed for, so that it counts as absent for other rows and nothing needs
// clearing.
struct OpenedNode {
  uint64_t of = 0;
  int64_t place = 0;
};

// dot(weight[class], hidden) of a row.
template <typename A>
struct ClassProduct {
  uint64_t of = 0;
  A value = 0;
};

inline uint64_t next_row() {
  static thread_local uint64_t rows = 0;
  return ++rows;
}

// Orders values with NaN as the largest.
template <typename A>
A rank(A value) {
  return std::isnan(value) ? std::numeric_limits<A>::infinity() : value;
}

// The log-probabilities of one row of hidden, on one thread. A node is scored when one of its edges is asked for,
// after the nodes above it, once for the row. Reads no entry of a table without checking it.
template <typename T>
class MixtureRow {
 public:
  using A = accumulate_t<T>;

  MixtureRow(const TreeVectors& vectors, const FeatureSubsets& subsets)
      : v(vectors),
        subsets_(subsets),
        kernels_(chosen_kernels<MixtureRowKernels<T>>()),
        stride_(workspace_stride(v.features)),
        x_((v.groups ? 1 : v.trees) * stride_),
        opened_(scratch<OpenedNode, 0>(v.trees * v.nodes)),
        product_(scratch<ClassProduct<A>, 0>(v.groups ? v.classes : 0)),
        terms_(v.trees) {}

  // Returns a number that no other row of this thread has had.
  uint64_t begin(int64_t row) {
    of_ = next_row();
    row_ = row;
    scored_ = 0;
    log_probs_.clear();
    const T* const hidden = static_cast<const T*>(v.hidden) + row * v.in_features;
    for (int64_t t = 0; t < (v.groups ? 1 : v.trees); ++t) {
      kernels_.features(subsets_[t], v.features, hidden, x_.data() + t * stride_);
    }
    return of_;
  }

  const A* gates() const { return static_cast<const A*>(v.log_gate) + row_ * v.trees; }
  A gate(int64_t t) const { return gates()[t]; }

  // Number of vectors multiplied with the row.
  int64_t scored() const { return scored_; }

  const MixtureRowKernels<T>& kernels() const { return kernels_; }

  // log sum_t exp(log_gate[t] + log_prob[t]).
  A gated(const A* log_prob) {
    A largest = -std::numeric_limits<A>::infinity(), sum = 0;
    for (int64_t t = 0; t < v.trees; ++t) {
      terms_[t] = gate(t) + log_prob[t];
      if (std::isnan(terms_[t])) return terms_[t];
      largest = std::max(largest, terms_[t]);
    }
    if (v.trees == 1 || std::isinf(largest)) return largest;
    for (int64_t t = 0; t < v.trees; ++t) sum += std::exp(terms_[t] - largest);
    return largest + std::log(sum);
  }

  const TreeNode& node(int64_t t, int64_t index) const { return v.node[t * v.nodes + index]; }
  const TreeEdge& edge(int64_t t, int64_t index) const { return v.edge[t * v.edges + index]; }

  // The log-probabilities of the paths from the root to the children of a node of tree t. The pointer is valid
  // until the next call for another node.
  const A* children(int64_t t, int32_t index) {
    check_index("edge", index, v.nodes);
    above_.clear();
    while (opened(t, index).of != of_) {
      above_.push_back(index);
      prefetch(t, index);
      if (index == 0) break;
      const int32_t above = node(t, index).above;
      check_index("node", above, v.edges);
      check_index("edge", edge(t, above).above, index);  // preorder excludes cycles
      index = edge(t, above).above;
    }
    for (; !above_.empty(); above_.pop_back()) {
      index = above_.back();
      score(t, index);
    }
    return log_probs_.data() + opened(t, index).place;
  }

  // The node below an edge of a node whose children are known.
  int32_t node_below(int64_t t, int32_t edge_index) const {
    const int32_t below = edge(t, edge_index).below;
    check_index("edge", below - edge(t, edge_index).above - 1, v.nodes - edge(t, edge_index).above - 1);
    if (node(t, below).above != edge_index) {
      fail(v.op, ": node[", t, ", ", below, "]: expected the edge that leads to it, ", edge_index,
           ", as the edge above, got ", node(t, below).above);
    }
    return below;
  }

  // The class below an edge without a node below it.
  int64_t class_below(int64_t t, int32_t edge_index) const {
    const int64_t index = ~static_cast<int64_t>(edge(t, edge_index).below);
    if (index < 0 || index >= v.classes) {
      fail(v.op, ": edge[", t, ", ", edge_index, "]: expected a class below ", v.classes, ", got ", index);
    }
    return index;
  }

  // log P_t(class), computing only the nodes on its path.
  A log_prob(int64_t t, int64_t index) {
    if (v.nodes == 0) return A{0};
    const int32_t leaf = v.leaf_edge[t * v.classes + index];
    check_index("leaf_edge", leaf, v.edges);
    if (edge(t, leaf).below != ~static_cast<int32_t>(index)) {
      fail(v.op, ": leaf_edge[", t, ", ", index, "]: expected the edge to this class, got ", leaf);
    }
    const int32_t above = edge(t, leaf).above;
    const A* const log_prob = children(t, above);
    check_index("edge", leaf - node(t, above).first_edge, node(t, above).width);
    return log_prob[leaf - node(t, above).first_edge];
  }

  // Prefetches what scoring a node will read.
  void prefetch(int64_t t, int32_t index) const {
    const TreeNode& n = node(t, index);
    if (n.block != binary_node || !v.weight) return;
    const int64_t row = t * v.weight_rows + n.row, bytes = v.features * static_cast<int64_t>(sizeof(T));
    const char* const weight = static_cast<const char*>(v.weight) + row * bytes;
    for (int64_t b = 0; b < std::min<int64_t>(bytes, 512); b += 64) __builtin_prefetch(weight + b);
    if (v.bias) __builtin_prefetch(bias_of(row));
  }

  void check_index(const char* name, int64_t index, int64_t end) const {
    if (index < 0 || index >= end) {
      fail(v.op, ": ", name, ": expected the tables of a tree, with a number in [0, ", end, "), got ", index);
    }
  }

  const TreeVectors& v;

 private:
  OpenedNode& opened(int64_t t, int64_t node) const { return opened_[t * v.nodes + node]; }

  const T* weight() const { return static_cast<const T*>(v.weight); }
  const T* bias_of(int64_t row) const { return v.bias ? static_cast<const T*>(v.bias) + row : nullptr; }

  void score(int64_t t, int32_t index) {
    const TreeNode& n = node(t, index);
    check_node(t, index);
    A base = 0;
    if (index > 0) {
      const int32_t above = edge(t, n.above).above;
      if (edge(t, n.above).below != index) {
        fail(v.op, ": edge[", t, ", ", n.above, "]: expected node ", index, " below the edge above it, got ",
             edge(t, n.above).below);
      }
      check_index("edge", n.above - node(t, above).first_edge, node(t, above).width);
      base = log_probs_[opened(t, above).place + n.above - node(t, above).first_edge];
    }
    const int64_t place = static_cast<int64_t>(log_probs_.size());
    log_probs_.resize(place + n.width);
    A* const z = log_probs_.data() + place;
    if (n.block == wide_root) {
      std::copy_n(static_cast<const A*>(v.root) + (t * v.rows + row_) * v.root_width, n.width, z);
    } else if (n.block == class_group) {
      class_scores(t, n, z);
      scored_ += static_cast<int64_t>(missing_.size());
      kernels_.log_softmax(z, n.width, static_cast<A>(v.sharpness), base);
    } else {
      const int64_t row = t * v.weight_rows + n.row;
      kernels_.products(x_.data() + t * stride_, weight() + row * v.features, bias_of(row), nullptr, 1,
                        v.features, z);
      ++scored_;
      log_sigmoids(z, base);
    }
    opened(t, index) = {of_, place};
  }

  void class_scores(int64_t t, const TreeNode& n, A* z) {
    classes_.clear();
    missing_.clear();
    for (int32_t c = 0; c < n.width; ++c) {
      const int32_t below = edge(t, n.first_edge + c).below;
      if (below >= 0) {
        fail(v.op, ": edge[", t, ", ", n.first_edge + c, "]: expected a class below a group, got node ",
             below);
      }
      const int32_t index = static_cast<int32_t>(class_below(t, n.first_edge + c));
      classes_.push_back(index);
      if (product_[index].of != of_) missing_.push_back(index);
    }
    kernels_.products(x_.data(), weight(), nullptr, missing_.data(), missing_.size(), v.features, z);
    for (size_t i = 0; i < missing_.size(); ++i) product_[missing_[i]] = {of_, z[i]};
    // Of no features: the biases.
    kernels_.products(x_.data(), weight(), bias_of(t * v.classes), classes_.data(), n.width, 0, z);
    for (int32_t c = 0; c < n.width; ++c) z[c] += product_[classes_[c]].value;
  }

  // z[0], z[1] = above + log sigmoid(z), above + log sigmoid(-z) of the score z in z[0].
  void log_sigmoids(A* z, A above) const {
    const A score = z[0] * static_cast<A>(v.sharpness), either = std::log1p(std::exp(-std::abs(score)));
    z[0] = above + (std::min(score, A{0}) - either);
    z[1] = above + (std::min(-score, A{0}) - either);
  }

  void check_node(int64_t t, int32_t index) const {
    const TreeNode& n = node(t, index);
    const bool has_edges = n.first_edge >= 0 && n.width >= 2 && n.width <= v.edges - n.first_edge;
    bool has_rows = false;
    if (n.block == wide_root) {
      has_rows = v.root && index == 0 && n.width == v.root_width;
    } else if (v.groups) {  // a group below the root
      has_rows = n.block == class_group && index > 0 && edge(t, n.above).above == 0 && n.width <= v.classes;
    } else if (n.block == binary_node) {
      has_rows = n.width == 2 && n.row >= 0 && n.row < v.weight_rows;
    }
    bool leads_on = has_edges;  // each edge belongs to one node: no walk down meets a node twice
    for (int32_t c = 0; leads_on && c < n.width; ++c) leads_on = edge(t, n.first_edge + c).above == index;
    if (leads_on && has_rows) return;
    fail(v.op, ": node[", t, ", ", index,
         "]: expected a block, its first row, and its first edge and width within the tables of a tree, got ",
         n.block, ", ", n.row, ", ", n.first_edge, ", ", n.width);
  }

  const FeatureSubsets& subsets_;
  const MixtureRowKernels<T>& kernels_;
  const int64_t stride_;
  std::vector<A> x_;                // [T, stride] the row's features in each tree; with groups once
  OpenedNode* const opened_;        // [T, nodes] place of the children's log-probabilities
  ClassProduct<A>* const product_;  // [V] with groups
  std::vector<A> terms_;            // [T]
  std::vector<A> log_probs_;        // of the edges below opened nodes, from the root
  std::vector<int32_t> above_, classes_, missing_;
  uint64_t of_ = 0;
  int64_t row_ = 0, scored_ = 0;
};

// Calls run(row) of a State for every row. Each thread makes its own.
template <typename State, typename... More>
void each_row(const TreeVectors& vectors, const More&... more) {
  const FeatureIndex features = {vectors.feature_index, vectors.trees, vectors.features, vectors.in_features};
  check_feature_index(vectors.op, features);
  const FeatureSubsets subsets(features);
  parallel(vectors.rows, 1, [&](int64_t begin, int64_t end) {
    State state(vectors, subsets, more...);
    for (int64_t row = begin; row < end; ++row) state.run(row);
  });
}

}  // namespace hstree::cpu
