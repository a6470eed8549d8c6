// Launcher of tree_log_softmax: the log-probabilities of all classes of a mixture of trees, from the scores of all
// nodes.
//
// Plain C++: no CUDA and no torch include. All arrays are contiguous and on the device of the stream. Throws
// std::runtime_error when a launch fails, launches nothing when there is no element, and never synchronizes.
//
// A group of classes has no rows of score: its children read class_score and class_bias by class, where they are.
#pragma once

#include <cstdint>

#include "limits.h"
#include "tree_nodes.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

// N rows, T trees, R rows of score in a tree, V classes.
struct TreeScores {
  const void* score;     // [T, R, N] of the type
  const void* log_gate;  // [N, T] of the type
  const TreeNode* node;  // [T, nodes]
  const TreeEdge* edge;  // [T, edges]
  int64_t root_begin;    // first row of score of a wide root; the rows of binary nodes come before
  int64_t score_rows;    // R
  int64_t rows, trees, nodes, edges, classes;
  const void* class_score;  // [V, N] of the type: scores of the classes in groups, which all trees share
  const void* class_bias;   // [T, V] of the type, added to them; null: there are no groups

  // Number of leading nodes of a tree that may have a softmax.
  int64_t normalized() const {
    if (classes == 1) return 0;
    return class_bias ? nodes : score_rows > root_begin ? 1 : 0;
  }
  // Sums in the workspace: the log-probability of the path to each node, and the normalizer of each softmax.
  int64_t sums() const { return trees * (nodes + 2 * normalized()) * rows; }
};

// type: float32 or float64. place: [T, V + nodes] of 8 bytes, zero-filled. workspace: sums() numbers of the type,
// content arbitrary. log_prob [N, V] of the type. Whatever the tables hold, nothing outside the arrays is read.
void tree_log_softmax(ScalarType type, const TreeScores& scores, void* place, void* workspace, void* log_prob,
                      cudaStream_t stream);

}  // namespace hstree
