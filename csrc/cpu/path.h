// CPU kernels of the tree-path op.
//
//     z = dot(input[i, subset_t], weight[t, node]) + bias[t, node]
//     log_prob[i, t] = sum over the nodes of target[i]'s path of log sigmoid(goes_left ? z : -z)
//     d log_prob / d z = goes_left ? sigmoid(-z) : -sigmoid(z)
//
// Ignored rows (target < 0): log_prob and score 0, no gradient. A path of no nodes: log_prob 0. Sums in
// float32 (float64 for float64); NaN and infinities go through. Work O(N T L S) for paths of L nodes; score
// is kept for backward. No atomics; the same bits on every run and for every number of threads.
#pragma once

#include "cpu/tree_batch.h"

namespace hstree::cpu {

template <typename T>
struct PathLink {
  using A = accumulate_t<T>;
  const TreeBatch& batch;

  LeafOrder order(const TreeTable& table) const {
    return binary_leaf_order(batch.op, table, batch.target, batch.rows);
  }
  A log_prob(const LeafOrder& order, int64_t j, A* score) const {
    return row_kernels<T>().log_sigmoid_sum(score, order.entry.data() + order.offset[j],
                                            order.offset[j + 1] - order.offset[j]);
  }
  void grad(const LeafOrder& order, int64_t j, A grad, const A* score, A* grad_score) const {
    row_kernels<T>().log_sigmoid_grad(score, order.entry.data() + order.offset[j],
                                      order.offset[j + 1] - order.offset[j], grad, grad_score);
  }
};

}  // namespace hstree::cpu
