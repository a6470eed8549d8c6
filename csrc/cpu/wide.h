// CPU kernels of the wide op, for nodes that decide by a softmax over their children.
//
//     z_c = dot(input[i, subset_t], weight[t, first_row + c]) + bias[t, first_row + c], children c of a node
//     score = log_softmax(z)
//     log_prob[i, t] = sum over the wide nodes of target[i]'s path of score[child]
//     d log_prob / d z_c = [c = child] - exp(score_c)
//
// Ignored rows (target < 0): log_prob and score 0, no gradient. A path without wide nodes: log_prob 0. Sums
// in float32 (float64 for float64). Work O(N T W S) for W children on a path; score [N, T, max_width] is kept
// for backward. No atomics; the same bits on every run and for every number of threads.
#pragma once

#include <cmath>

#include "cpu/tree_batch.h"

namespace hstree::cpu {

template <typename T>
struct WideLink {
  using A = accumulate_t<T>;
  const TreeBatch& batch;

  LeafOrder order(const TreeTable& table) const {
    return wide_leaf_order(batch.op, table, batch.target, batch.rows);
  }

  // Calls f(first place among the row's scores, width, child) for each wide node of the row at place j.
  template <typename F>
  void each_node(const LeafOrder& order, int64_t j, const F& f) const {
    const int64_t y = batch.target[order.row[j]];
    int64_t place = 0;
    for (int64_t e = order.table.offset[y]; e < order.table.offset[y + 1]; ++e) {
      const int32_t* node = order.table.path + 3 * e;
      f(place, node[1], node[2]);
      place += node[1];
    }
  }

  A log_prob(const LeafOrder& order, int64_t j, A* score) const {
    A total = 0;
    each_node(order, j, [&](int64_t place, int64_t width, int64_t child) {
      A* z = score + place;
      A largest = z[0];
      for (int64_t c = 1; c < width; ++c) largest = z[c] > largest ? z[c] : largest;
      A sum = 0;
      for (int64_t c = 0; c < width; ++c) sum += std::exp(z[c] - largest);
      const A log_sum = std::log(sum);
      for (int64_t c = 0; c < width; ++c) z[c] = (z[c] - largest) - log_sum;
      total += z[child];
    });
    return total;
  }

  void grad(const LeafOrder& order, int64_t j, A grad, const A* score, A* grad_score) const {
    each_node(order, j, [&](int64_t place, int64_t width, int64_t child) {
      for (int64_t c = 0; c < width; ++c)
        grad_score[place + c] = grad * ((c == child) - std::exp(score[place + c]));
    });
  }
};

}  // namespace hstree::cpu
