// Launchers of the tree-path op: log-probability of a class as a sum of log-sigmoids along its path.
//
// Forward, in the binding:
//   1. Fill Tables: offset = path_offset, path = path, entries = P, weight_rows = M, stride = max_depth. The host
//      checks shapes, dtypes, 0 <= max_depth <= 64; it reads no table.
//   2. key = empty [T, N] int32; leaf_key; order = sort(key, stable, dim = 1).indices [T, N] int64.
//   3. tree_valid = empty [T] int32; check_features; check_paths; tables.tree_valid = tree_valid.
//   4. length, shared, row_length = empty [T, N], count = empty [T * N + 1], int32; leaf_plan.
//   5. log_prob = empty [N, T], score = empty [N, T, max_depth] in the accumulation dtype; path_log_prob.
// Backward, with the results of steps 2 to 4, or after repeating them with stride = score.size(2):
//   6. Sparse: slot = cumsum(count, 0) int64; nnz = slot[T * N], read by the host before more work is queued.
//   7. workspace = empty [backward_workspace_bytes] uint8. grad_hidden = empty [N, D];
//      path_log_prob_backward_hidden.
//   8. With the same workspace, on the same stream:
//      Dense: grad_weight = zeros [T, M, S], grad_bias = zeros [T, M]; path_log_prob_backward_weight with
//      slot = null.
//      Sparse: grad_weight = empty [nnz, S], grad_bias = empty [nnz]; path_log_prob_backward_weight with slot;
//      index = empty [2, nnz] int64; slot_index.
// With N = 0 or T = 0 nothing is launched or written: the binding allocates the empty or zero results itself.
#pragma once

#include "leaf_order.h"

namespace hstree {

struct PathForward {
  const void* hidden;  // [N, D]
  const void* weight;  // [T, M, S]
  const void* bias;    // [T, M], or null
  void* log_prob;      // [N, T] accumulation dtype, every element written
  void* score;         // [N, T, max_depth] accumulation dtype, every element written
};

struct PathBackward {
  const void* grad_log_prob;  // [N, T] accumulation dtype
  const void* score;          // [N, T, max_depth] accumulation dtype, from path_log_prob
  const void* hidden;         // [N, D]; read by path_log_prob_backward_weight only
  const void* weight;         // [T, M, S]; read by path_log_prob_backward_hidden only
};

// type: of hidden, weight, bias and of all gradients.
void path_log_prob(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                   const PathForward& tensors, cudaStream_t stream);

// workspace: backward_workspace_bytes. grad_hidden: [N, D], every element written.
void path_log_prob_backward_hidden(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                                   const PathBackward& tensors, void* workspace, void* grad_hidden,
                                   cudaStream_t stream);

// slot: [T * N + 1] for row-sparse gradients, null for dense ones. grad_weight: [T, M, S] zero-filled, or
// [nnz, S]. grad_bias: [T, M] zero-filled, or [nnz], or null. workspace: backward_workspace_bytes.
void path_log_prob_backward_weight(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                                   const int64_t* slot, const PathBackward& tensors, void* workspace,
                                   void* grad_weight, void* grad_bias, cudaStream_t stream);

}  // namespace hstree
