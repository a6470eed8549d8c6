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
// Always exact up to rounding. Equally probable classes are sorted by number, but which of them are among the
// k is undefined. NaN counts as the largest value. Sums in float32 (float64 for float64). Work: if the k-th
// most probable class has probability p, the T trees yield at most T / p classes, each looked up on paths of
// L nodes: O(T^2 L / p) nodes are opened, at worst all. A thread keeps 16 bytes for each node and 8 for each
// class, 24 with groups.
//
// A search that has scored more than most_scored vectors and is not finished is given up: the row gets NaN and
// the classes -1, and the caller computes all classes of the row. No atomics; threads divide rows: bitwise
// identical for every number of threads.
#pragma once

#include <cstdint>

#include "cpu/mixture_row.h"

namespace hstree::cpu {

template <typename T>
struct TreeTopk {
  int64_t k;
  accumulate_t<T>* log_prob;  // [N, k]
  int64_t* index;             // [N, k]
  int64_t most_scored;        // vectors that may be scored for a row; negative: any number
};

// Throws std::runtime_error for tables that are not those of a tree.
template <typename T>
void tree_topk(const TreeVectors& vectors, const TreeTopk<T>& wanted);

}  // namespace hstree::cpu
