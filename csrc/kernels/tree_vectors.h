// A mixture of trees with its vectors, for kernels that score only the nodes that they visit.
#pragma once

#include <cstdint>

#include "tree_nodes.h"

namespace hstree {

// N rows, D features, T trees, M binary nodes of a tree, S features of a tree, V classes. Arrays are of the type of
// hidden, or of its sums: float32, or float64 for float64. The scores of a node's children are dot(w, x) + b, divided
// by the temperature; a binary node has one score, z for the left child and -z for the right. A group of classes
// reads dot(class_weight[class], hidden) + class_bias[t, class].
struct TreeVectors {
  const void* hidden;        // [N, D]
  const void* weight;        // [T, M, S] of the binary nodes
  const void* bias;          // [T, M] or null
  int64_t weight_rows;       // M
  bool groups;               // whether there are any
  const void* class_weight;  // [V, D] of the classes in groups
  const void* class_bias;    // [T, V] or null
  const void* root;  // [T, N, root_width] sums: log-probabilities of the children of a wide root, or null
  int64_t root_width;
  const void* log_gate;          // [N, T] sums
  const int32_t* feature_index;  // [T, S] or null: all features
  const TreeNode* node;          // [T, nodes]
  const TreeEdge* edge;          // [T, edges]
  const int32_t* leaf_edge;      // [T, V]
  int64_t rows, in_features, trees, features, nodes, edges, classes;
  double sharpness;  // 1 / temperature, a factor on the scores
};

}  // namespace hstree
