// CPU kernels of target_log_softmax: log-softmax of f(x) at the target, f increasing, for each row x of
//   logits.
//   log_normalizer = log sum_v exp f(x_v);  log_prob = f(x_target) - log_normalizer;
//   gradient of x_v: grad (1[v = target] - p_v) f'(x_v),  p_v = exp(f(x_v) - log_normalizer);
//   grad_table[j, m] = sum over the logits in j of grad (1[v = target] - p_v) w_m, j and w_m as in
//   piecewise.h.
// Tensors: logits [R, V], log_prob, log_normalizer, grad_log_prob [R], all float32 or all float64; target
//   [R] int64; table [K, 2] or [K, 4] of the same dtype, or none; grad_table [K, width] float64. All
//   contiguous, but for gaps between the rows of logits; V >= 1.
// R = 0 only zeroes grad_table. Target -1: ignored; log_prob, log_normalizer and the row's gradient are 0.
//   Other targets outside [0, V) throw std::runtime_error.
// Computation in the dtype of logits; sums of exp too, up to 4096 terms, then in float64. A class with logit
//   -inf has probability 0 and gradient 0. A row with a NaN or +inf, or with only -inf, has NaN in log_prob,
//   log_normalizer and all of its gradient, and makes row 0 of grad_table NaN.
// grad_table is summed as in piecewise.h, with 2 R max|grad_log_prob| 2^e < 2^62. An infinite or NaN
//   grad_log_prob of a row that is not ignored makes all of it NaN.
// Work O(R V + K). Forward reads the logits from memory once, from cache again; backward reads and writes
//   them once (a row whose |log_normalizer| is above 64 is summed again). Keeps log_normalizer for
//   backward.
// Atomics only on integers that threads share: deterministic for any number of threads.
// Threads over rows. SigSoftmax (c = 0, k = 2): Kanai, Fujiwara, Yamanaka and Adachi, "Sigsoftmax:
//   reanalysis of the softmax bottleneck" (NeurIPS 2018).
#pragma once

#include "cpu/logit_kernels.h"

namespace hstree::cpu {

struct MonotoneRows {
  const char* op;  // for messages
  LogitFunction function;
  const int64_t* target;          // [R]
  int64_t rows, classes, stride;  // stride: from a row of logits to the next
};

template <typename A>
void target_log_softmax(const MonotoneRows& rows, const A* logits, A* log_prob, A* log_normalizer);

// Overwrites logits with their gradient. Writes grad_table if there is a table and it is not null.
template <typename A>
void target_log_softmax_backward(const MonotoneRows& rows, A* logits, const A* grad_log_prob,
                                 const A* log_normalizer, double* grad_table);

// Computes log_prob and overwrites logits with its gradient, with f and exp once for each logit.
template <typename A>
void target_log_softmax_gradient(const MonotoneRows& rows, A* logits, const A* grad_log_prob, A* log_prob,
                                 double* grad_table);

}  // namespace hstree::cpu
