// CPU kernels of sample and candidate_log_prob: draws from a mixture of trees, and the log-probabilities of some
// classes of each row.
//
// A draw chooses a tree by the gate, then a child at each node from the root down, and looks its class up in all
// trees: it scores the nodes on at most T paths. The nodes of a row are scored once for all its draws or
// candidates. Random numbers are uniform(seed, row n + draw, step) of philox.h, with step 0 for the tree and
// step i for the i-th node of the path. A child is chosen with a probability proportional to the exponential of
// its log-probability, in [0, 1] relative to the most probable one; children of probability 0 never. A row with
// NaN gives some class, and NaN.
//
// Sums in float32 (float64 for float64). Threads divide rows: bitwise identical for every number of threads.
#pragma once

#include <cstdint>

#include "cpu/mixture_row.h"

namespace hstree::cpu {

template <typename T>
struct Draws {
  uint64_t seed;
  int64_t n;
  int64_t* index;             // [N, n]
  accumulate_t<T>* log_prob;  // [N, n]
};

template <typename T>
struct Candidates {
  const int64_t* index;  // [N, n]; -1: log-probability 0
  int64_t n;
  accumulate_t<T>* log_prob;  // [N, n]
};

// Both throw std::runtime_error for tables that are not those of a tree, and for candidates out of range.
template <typename T>
void sample(const TreeVectors<T>& vectors, const Draws<T>& draws);
template <typename T>
void candidate_log_prob(const TreeVectors<T>& vectors, const Candidates<T>& candidates);

}  // namespace hstree::cpu
