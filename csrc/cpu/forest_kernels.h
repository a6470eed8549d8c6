// The vectorized part of forest_log_prob, for a panel of neighboring rows; one table of functions for each instruction
// set, chosen once at run time.
#pragma once

#include <cstdint>

namespace hstree::cpu {

// A: float or double. Tensors as in forest_log_prob.h.
template <typename A>
struct ForestRows {
  A* score;
  A* cluster_score;
  const A* log_prior;
  const int32_t* cluster;
  const int64_t* target;
  const A* grad_log_prob;  // null: nothing is overwritten
  A* log_softmax;          // [R, V], not null: in place of the results below, and every row is ignored
  A* log_prob;
  A* grad_log_prior;
  int64_t rows, classes, trees, clusters;
};

constexpr int64_t most_panel_vectors = 8;

// The rows begin to begin + count - 1, and memory that the functions share. count: 1, 2, 4 or 8 vectors, or less than
// one. A row in this memory has `stride` numbers, the rows of the panel rounded up to whole vectors.
template <typename A>
struct ForestPanel {
  int64_t begin, count;
  A* sums;              // [2 T C, stride], aligned to 64 bytes
  A* top;               // [T, stride]: largest cluster score
  uint8_t* wide;        // [count]
  double* normalizers;  // [T, stride]
  double* shares;       // [T, stride]
  A* most;              // [stride]: largest score
};

template <typename A>
struct ForestKernels {
  int64_t width;  // rows in a vector

  // Writes top, and wide: 1 for a row whose cluster scores are not finite, or differ so much within a tree that
  // exp(score - largest score) may vanish in a cluster that matters.
  void (*survey)(const ForestRows<A>& rows, const ForestPanel<A>& panel);

  // Writes shares: log_prior + log P_t(target), undefined for rows that are wide or ignored. With gradients score
  // becomes exp(score - its largest), and cluster_score likewise. Keeps sums and normalizers for `finish`.
  void (*begin)(const ForestRows<A>& rows, const ForestPanel<A>& panel);

  // After `begin`: the gradients of score and cluster_score, for shares that are the gradients of log P_t(target).
  void (*finish)(const ForestRows<A>& rows, const ForestPanel<A>& panel);

  // After `begin`: log_softmax, undefined for rows that are wide.
  void (*every)(const ForestRows<A>& rows, const ForestPanel<A>& panel);
};

}  // namespace hstree::cpu
