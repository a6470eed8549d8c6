// Recipes for binary trees. A seed gives the same tree on every machine: integer random numbers, no
// transcendental functions, sums in a fixed order, sorts by a total order (compile with -ffp-contract=off).
#pragma once

#include <cstdint>

#include "tree.h"

namespace hstree::host {

// The arrays of a binary tree, whose nodes are added in preorder and whose order the caller fills.
struct BinaryTree {
  explicit BinaryTree(int64_t n_classes)
      : arrays{Array<int32_t>(n_classes), Array<int64_t>(n_classes), Array<int32_t>(3 * (n_classes - 1))} {
    for (int64_t m = 0; m < n_classes; ++m) arrays.node_offset[m] = 3 * m;
  }
  void add_node(int64_t begin, int64_t middle, int64_t end) {
    for (const int64_t b : {begin, middle, end}) arrays.boundary[used++] = static_cast<int32_t>(b);
  }

  TreeArrays arrays;
  int64_t used = 0;
};

// A balanced tree over a uniform permutation of the classes; the left child takes the odd leaf.
TreeArrays random_tree(int64_t n_classes, uint64_t seed);

// Huffman's tree of the frequencies [V], each raised to at least 2^-32 of their sum.
TreeArrays huffman_tree(const double* frequencies, int64_t n_classes, uint64_t seed);

struct ClusterOptions {
  double noise;        // standard deviation over the root mean square of all entries
  int64_t iterations;  // largest number of 2-means iterations at each node
  int64_t max_depth;   // largest number of inner nodes on a path; 2^max_depth >= V
};

// Splits vectors [V, F] recursively in two by balanced 2-means. `frequencies` [V], or null for equal ones.
TreeArrays cluster_tree(const float* vectors, int64_t n_classes, int64_t n_features,
                        const double* frequencies, uint64_t seed, const ClusterOptions& options);

}  // namespace hstree::host
