// A mixture of trees with its vectors, for kernels that score only the nodes that they visit, on both devices.
#pragma once

#include <cstdint>

#include "tree_nodes.h"

namespace hstree {

// N rows, D features, T trees, M binary nodes of a tree, S features of a tree, V classes. Arrays are of the type of
// hidden, or of its sums: float32, or float64 for float64. Below the roots are binary nodes or groups of classes. The
// scores of a node's children are dot(w, x) + b, divided by the temperature; a binary node has one score, z for the left
// child and -z for the right. A group of classes reads dot(weight[class], hidden) + bias[t, class].
struct TreeVectors {
  const char* op;       // for messages of the CPU kernels
  const void* hidden;   // [N, D]
  const void* weight;   // [T, M, S] of the binary nodes, or with groups [V, D] of the classes
  const void* bias;     // [T, M], or [T, V]; or null
  int64_t weight_rows;  // M
  bool groups;          // below the roots are groups of classes
  const void* root;     // [T, N, root_width] sums: log-probabilities of the children of a wide root, or null
  int64_t root_width;
  const void* log_gate;          // [N, T] sums
  const int32_t* feature_index;  // [T, S] or null: all features, as with groups
  const TreeNode* node;          // [T, nodes]
  const TreeEdge* edge;          // [T, edges]
  const int32_t* leaf_edge;      // [T, V]
  int64_t rows, in_features, trees, features, nodes, edges, classes;
  double sharpness;  // 1 / temperature, a factor on the scores
};

}  // namespace hstree
