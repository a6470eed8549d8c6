// CPU kernel of sample: draws from a mixture of trees, and their log-probabilities.
//
// A draw chooses a tree by the gate, then a child at each node from the root down, and looks its class up in all
// trees: it scores the nodes on at most T paths. The nodes of a row are scored once for all its draws. Random numbers are uniform(seed, row n + draw, step) of philox.h, with step 0 for the tree and
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

// Throws std::runtime_error for tables that are not those of a tree.
template <typename T>
void sample(const TreeVectors& vectors, const Draws<T>& draws);

}  // namespace hstree::cpu
