// CPU kernel of forest_log_prob for a chunk of rows whose scores are known:
//   Z_t = sum_c e^r_tc M_t[c],  M_t[c] = sum over the classes v of cluster c of e^s_v;
//   log_prob = log sum_t pi_t P_t(y),  P_t(v) = e^(s_v + r_t[c_t(v)]) / Z_t, for the target y;
//   rho_t = grad pi_t P_t(y) / exp(log_prob): the gradient of log_prior, log pi_t;
//   gradient of s_v: 1[v = y] grad - e^s_v sum_t w_t[c_t(v)],  w_t[c] = rho_t e^r_tc / Z_t;
//   gradient of r_tc: 1[c = c_t(y)] rho_t - w_t[c] M_t[c].
// With log_softmax, instead: log sum_t pi_t P_t(v) of all classes v; work R (2 V exponentials and logarithms), one more
//   read of score and one write.
// Tensors: score s [V, R], cluster_score r [T, C, R], log_prior [T, R], log_prob, grad_log_prob [R],
//   grad_log_prior [T, R], log_softmax [R, V], all float32 or all float64; cluster c_t(v) [V, T] int32 in [0, C); target [R] int64. All
//   contiguous, V, T and C at least 1.
// Target -1: ignored; its log_prob and gradients are 0. Other targets outside [0, V), and clusters outside [0, C),
//   throw std::runtime_error.
// A class whose score is -inf has probability 0; as a target it has log_prob -inf and no gradient. NaN, inf, or -inf
//   for all classes make the row and its gradients NaN.
// Computed in the dtype of score, with e^(s - largest s); a row whose cluster scores differ by more than 50 within a
//   tree (650 in float64) term by term in float64 logarithms, so that a cluster far below the largest score counts
//   when its r is large. Sums over up to 2^14 classes, then over those sums.
// Work R (V exponentials, 2 T V additions, T C exponentials). Reads score three times and writes it twice, by vectors
//   of neighboring rows.
// No atomics: deterministic for any number of threads. Threads over groups of rows.
#pragma once

#include "cpu/forest_kernels.h"

namespace hstree::cpu {

template <typename A>
void forest_log_prob(const char* op, const ForestRows<A>& rows);

}  // namespace hstree::cpu
