// CPU kernels of tree_log_softmax and its backward: the log-probabilities of all classes of a mixture of trees,
// from the scores of all nodes.
//
//     log P_t(y) = sum over the edges from the root of tree t to y of log P(edge)
//     log P(y) = log sum_t exp(log_gate[t] + log P_t(y))
//
// Edges of a binary node with score z: log sigmoid(z) to the left, log sigmoid(-z) to the right; of a wide root or a
// group of classes: log-softmax of its children's scores. With G_t(y) = grad(y) exp(log_gate[t] + log P_t(y) - log P(y)), and G of a
// node the sum over the classes below it:
//
//     grad_score = sigmoid(-z) G(left) - sigmoid(z) G(right), or G(child) - softmax(child) G(node)
//     grad_log_gate[t] = G(root of t)
//
// score [T, R, N], rows of a tree in blocks: binary nodes, children of a wide root; in the backward pass of trees
// with groups their classes in between. log_gate [N, T]; log_prob, grad [N, V]; nodes in preorder. All of float32 or all of float64, contiguous.
// V = 1 has no nodes. NaN and infinities propagate within their row; where log_gate[t] + log P_t(y) = -inf,
// tree t has no gradient from y. Rows of score that belong to no node have the gradient 0.
//
// Work O(T V N) in each pass. A vector holds one number of each of a group of rows, one row a lane, so that one
// pass over the tables serves the whole group; a single row has vectors over classes. The forward pass holds up
// to T V vectors for each group in progress, V where all classes are in groups; threads divide its groups,
// trees and classes. The backward pass walks down again: only log_prob is kept. There threads divide the groups,
// and each holds 3 V vectors and the open nodes of a tree. No atomics; bitwise identical on every run and for
// every number of threads, and the result of a row does not depend on the others.
#pragma once

#include <cstdint>

#include "kernels/tree_nodes.h"

namespace hstree::cpu {

// N rows, T trees, R rows of score in a tree, V classes.
template <typename A>
struct TreeMixture {
  const char* op;          // for messages
  const A* score;          // [T, R, N]
  const A* log_gate;       // [N, T]
  const TreeNode* node;    // [T, nodes]
  const TreeEdge* edge;    // [T, edges]
  int64_t block_begin[4];  // first row of score of each NodeBlock, and R
  int64_t rows, trees, nodes, edges, classes;
  const A* class_score;  // [N, V] scores of the classes in groups, which all trees share
  const A* class_bias;   // [T, V] added to them; null: no groups, or in the backward pass rows of score
};

// Sizes that the tables of the trees determine.
struct Walk {
  const int64_t* nodes;  // [T] of each tree
  int64_t open;          // largest number of nodes that are reached but not yet visited
  int64_t widest;        // largest number of children of a node
  // With groups:
  const int32_t* slot;    // [T, stride] number of each class's group, or ~ its number among the other classes
  const int32_t* member;  // [T, stride] classes of the groups
  int64_t stride;         // V, padded with zeros to vectors
  int64_t groups;         // largest number of groups of a tree
  int64_t others;         // largest number of classes of a tree outside of groups
  const int64_t* groups_of;  // [T] of each tree
  const int64_t* others_of;  // [T]
};

// All throw std::runtime_error for tables that are not those of trees. log_prob [N, V].
template <typename A>
void tree_log_softmax(const TreeMixture<A>& mixture, A* log_prob);

// The k most probable classes, most probable first and then by number, of trees with groups: log_prob, index [N, k].
// NaN and -1 for a row in which they, or a group, are too improbable for numbers of A. Threads divide the rows.
template <typename A>
void group_topk(const TreeMixture<A>& mixture, int64_t k, A* log_prob, int64_t* index);

// grad, log_prob [N, V]; grad_score [T, R, N]; grad_log_gate [N, T]. The classes of groups have rows of score.
template <typename A>
void tree_log_softmax_backward(const TreeMixture<A>& mixture, const A* grad, const A* log_prob, A* grad_score,
                               A* grad_log_gate);

constexpr int64_t leaves_at_once = 128;

// Vectors of the workspaces of `terms` and `backward`.
inline int64_t terms_vectors(const Walk& walk) {
  return walk.open + 2 * walk.widest + leaves_at_once;
}
inline int64_t backward_vectors(const Walk& walk, int64_t classes) {
  return 3 * classes + walk.open + 2 * walk.widest + leaves_at_once;
}

// For the rows begin to begin + count - 1 of a batch, count <= `lanes`. Workspaces are aligned to a vector.
template <typename A>
struct TreeLogSoftmaxKernels {
  int64_t lanes;
  // Writes the rows of grad_score that belong to a node.
  void (*backward)(const TreeMixture<A>& mixture, const Walk& walk, int64_t begin, int64_t count,
                   const A* grad, const A* log_prob, A* grad_score, A* grad_log_gate, A* workspace);
};

// Up to a vector of rows of a batch, and the terms of their log-probabilities. With groups
//     P(y) = exp(unit) sum_t factor[t, y] value[slot] exp(class_score[y] - most)
// with factor = exp(class_bias - its largest of the tree): one exponential and one logarithm a class for all trees.
// A class outside of the groups of a tree, which has a slot of its own there, has value[slot] alone.
// Where such numbers could leave the range of A, and without groups, `factor` is null and
//     log_gate[t] + log P_t(y) = value[slot] + (class_score + class_bias - shift[slot]), or value[slot].
template <typename A>
struct RowGroup {
  int64_t begin, count;
  int64_t
      lanes;  // of the vectors of shift and value, one for each row; 1: a single row, its vectors are over classes
  A* share;  // [V] vectors of exp(class_score - most)
  A* shift;  // [T, groups] vectors: the largest score of the group
  A* value;  // [T, others + groups] vectors: of the other classes, the last one first, then of the groups
  A* most;   // [lanes] largest class_score of each row
  A* unit;   // [lanes] largest logarithm of a value; NaN for a row out of range
  const A* factor;  // [T, stride]
};

// A class of row begin + row of a group, with its probability in units of exp(unit) 2^-headroom.
template <typename A>
struct FoundClass {
  A value;
  int32_t row, index;
};

// Sums below it, in shares of the largest, could lose digits to terms that are 0 in float32.
constexpr double least_sum = 1e-25;
constexpr int headroom = 58;  // powers of two between the largest value and 1
// Of a value times a share that `exponential` rounds to 0: more than 2^headroom times the largest such share.
constexpr double lost_float = 0x1p58 * 2.4e-38, lost_double = 0x1p58 * 4.5e-308;

template <typename A>
struct TreeMixKernels {
  int64_t lanes;
  // factor[t, y] for all classes; returns whether they are in range.
  bool (*factors)(const TreeMixture<A>& mixture, const Walk& walk, A* factor);
  // Fills rows.most.
  void (*most)(const TreeMixture<A>& mixture, const RowGroup<A>& rows);
  // Fills rows.share from class `begin` to `end`.
  void (*shares)(const TreeMixture<A>& mixture, const RowGroup<A>& rows, int64_t begin, int64_t end);
  // Fills shift and value of tree t; the latter with logarithms.
  void (*terms)(const TreeMixture<A>& mixture, const Walk& walk, const RowGroup<A>& rows, int64_t t,
                A* workspace);
  // Fills rows.unit, and replaces the logarithms in `value`.
  void (*weigh)(const TreeMixture<A>& mixture, const Walk& walk, const RowGroup<A>& rows);
  // Finds the classes from `begin` to `end` with more than least[lanes]; `found` takes as many as there are
  // classes, for each row. Returns their number. Needs factors.
  int64_t (*probable)(const TreeMixture<A>& mixture, const Walk& walk, const RowGroup<A>& rows, int64_t begin,
                      int64_t end, const A* least, FoundClass<A>* found);
  // Writes log_prob from class `begin` to `end`; the workspace holds T vectors.
  void (*mix)(const TreeMixture<A>& mixture, const Walk& walk, const RowGroup<A>& rows, int64_t begin,
              int64_t end, A* log_prob, A* workspace);
};

}  // namespace hstree::cpu
