// Launcher of tree_log_softmax: the log-probabilities of all classes of a mixture of trees, from the scores of all
// nodes.
//
// Plain C++: no CUDA and no torch include. All arrays are contiguous and on the device of the stream. Throws
// std::runtime_error when a launch fails, launches nothing when there is no element, and never synchronizes.
//
// A node of wide_node beyond the rows of score is a leaf group: its children are all classes, and read leaf_score
// and leaf_bias by class, where they are.
#pragma once

#include <cstdint>

#include "limits.h"
#include "tree_nodes.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

// N rows, T trees, R rows of score in a tree, V classes.
struct TreeScores {
  const void* score;       // [T, R, N] of the type
  const void* log_gate;    // [N, T] of the type
  const TreeNode* node;    // [T, nodes]
  const TreeEdge* edge;    // [T, edges]
  int64_t block_begin[4];  // first row of score of each NodeBlock, and R
  int64_t rows, trees, nodes, edges, classes;
  const void*
      leaf_score;         // [V, N] of the type: scores of the classes that the leaf groups of all trees share
  const void* leaf_bias;  // [T, V] of the type, added to them; null: there are no leaf groups

  // Number of leading nodes of a tree that may be wide.
  int64_t wide_nodes() const {
    return classes == 1                                   ? 0
           : leaf_bias || block_begin[2] > block_begin[1] ? nodes
           : block_begin[3] > block_begin[2]              ? 1
                                                          : 0;
  }
  // Sums in the workspace: the log-probability of the path to each node, and the normalizer of each wide node.
  int64_t sums() const { return trees * (nodes + 2 * wide_nodes()) * rows; }
};

// type: float32 or float64. place: [T, V + nodes] of 8 bytes, zero-filled. workspace: sums() numbers of the type,
// content arbitrary. log_prob [N, V] of the type. Whatever the tables hold, nothing outside the arrays is read.
void tree_log_softmax(ScalarType type, const TreeScores& scores, void* place, void* workspace, void* log_prob,
                      cudaStream_t stream);

}  // namespace hstree
