// CPU kernel of tree_topk: the k most probable classes of a mixture of trees, by best-first search.
//
//     log P(y) = log sum_t exp(log_gate[t] + sum over the edges from the root of tree t to y of log P(edge))
//
// The log-probability of a path decreases on the way down. So a heap of a tree's open edges yields its leaves
// in decreasing order, and the best open edges of all trees bound every class not yet seen. A class that one
// tree yields is looked up in the others. The search ends when k classes are at least as probable as the
// bound (Fagin, Lotem and Naor, "Optimal aggregation algorithms for middleware", JCSS 2003: the threshold
// algorithm).
//
// A leaf group is a node of wide_node whose rows begin at or after weight_rows[1]; all of its children are
// classes. Their scores are dot(leaf_weight[class], hidden) + leaf_bias[t, class], and the products are computed
// once for all trees.
//
// Always exact up to rounding. Equally probable classes are sorted by number, but which of them are among the
// k is undefined. NaN counts as the largest value. Sums in float32 (float64 for float64). Work: if the k-th
// most probable class has probability p, the T trees yield at most T / p classes, each looked up on paths of
// L nodes: O(T^2 L / p) nodes are opened, at worst all. A thread keeps 16 bytes for each node and 8 for each
// class, 24 with leaf groups. No atomics; threads divide rows: bitwise identical for every number of threads.
#pragma once

#include <cstdint>

#include "cpu/elements.h"
#include "kernels/tree_nodes.h"

namespace hstree::cpu {

// N rows, D features, T trees, S features of a tree, V classes.
template <typename T>
struct TreeTopk {
  using A = accumulate_t<T>;
  const char* op;      // for messages
  const T* hidden;     // [N, D]
  const T* weight[2];  // of binary and of wide nodes, [T, weight_rows, S]; null: none
  const T* bias[2];    // [T, weight_rows] or null
  int64_t weight_rows[2];
  const T* leaf_weight;  // [V, D] of the classes in leaf groups, or null
  const T* leaf_bias;    // [T, V] or null
  const A* root;         // [T, N, root_width] log-probabilities of the children of a wide root
  int64_t root_width;
  const A* log_gate;             // [N, T]
  const int32_t* feature_index;  // [T, S] or null
  const TreeNode* node;          // [T, nodes]
  const TreeEdge* edge;          // [T, edges]
  const int32_t* leaf_edge;      // [T, V]
  int64_t rows, in_features, trees, features, nodes, edges, classes, k;
  A* log_prob;     // [N, k]
  int64_t* index;  // [N, k]
};

// Throws std::runtime_error for tables that are not those of a tree.
template <typename T>
void tree_topk(const TreeTopk<T>& arguments);

}  // namespace hstree::cpu
