// Launchers of the wide op: log-softmax of the chosen child at every wide node on the path of a class. The leaf
// op shares its kernels: leaf_log_prob.h.
//
// The binding calls the sequence described in path_log_prob.h, with offset = wide_offset, path = wide_path
// [P, 3], entries = P, weight_rows = R, stride = max_width, wide = true, and wide_log_prob,
// wide_log_prob_backward_hidden, wide_log_prob_backward_weight in place of path_log_prob_*. Before step 6 it
// allocates sum = zeros [N, D] in the accumulation dtype, which is also grad_hidden if the dtypes are equal.
// The host checks 0 <= max_width. Rows of weight take the place of nodes: a node of width w that is first
// visited at some place fills w consecutive rows of the row-sparse gradient, and slot_index lists them.
#pragma once

#include "leaf_order.h"

namespace hstree {

struct WideForward {
  const void* hidden;  // [N, D]
  const void* weight;  // [T, R, S], or [V, D] with leaf_class
  const void* bias;    // [T, R], or null
  void* log_prob;      // [N, T] accumulation dtype, every element written
  void* score;         // [N, T, max_width] accumulation dtype, every element written
};

struct WideBackward {
  const void* grad_log_prob;  // [N, T] accumulation dtype
  const void* score;          // [N, T, max_width] accumulation dtype, from wide_log_prob
  const void* hidden;         // [N, D]; read by wide_log_prob_backward_weight only
  const void* weight;         // as in WideForward; read by wide_log_prob_backward_hidden only
};

// type: of hidden, weight, bias and of all gradients.
void wide_log_prob(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                   const WideForward& tensors, cudaStream_t stream);

// sum: [N, D] accumulation dtype, zero-filled. grad_hidden: [N, D]; sum itself if their dtypes are equal.
void wide_log_prob_backward_hidden(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                                   const WideBackward& tensors, void* sum, void* grad_hidden,
                                   cudaStream_t stream);

// slot: [T * N + 1] for row-sparse gradients, null for dense ones. grad_weight: [T, R, S] zero-filled, or
// [nnz, S]. grad_bias: [T, R] zero-filled, or [nnz], or null. workspace: backward_workspace_bytes.
void wide_log_prob_backward_weight(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                                   const int64_t* slot, const WideBackward& tensors, void* workspace,
                                   void* grad_weight, void* grad_bias, cudaStream_t stream);

}  // namespace hstree
