// Launchers of the leaf op: the wide op on trees that share the rows of one weight.
//
// The binding calls the sequence described in wide_log_prob.h, with leaf_class in the tables, weight [V, D] and
// bias [T, V] by class, and leaf_log_prob_backward_weight in place of wide_log_prob_backward_weight. Step 3
// includes check_classes. For row-sparse gradients, step 6 takes leaf_count in place of the plan's count, and
// leaf_index in place of slot_index: slot[V] classes and slot[V + T V] - slot[V] biases are visited.
#pragma once

#include "wide_log_prob.h"

namespace hstree {

// count [1 + V + T V], zero-filled: count[1 + y] = 1 if a row of the batch visits class y in any tree, and
// count[1 + V + t V + y] = 1 if in tree t.
void leaf_count(const Tables& tables, const LeafOrder& leaf_order, int32_t* count, cudaStream_t stream);

// index [nnz]: the visited classes; bias_index [2, biases]: tree and class of each bias; in increasing order.
void leaf_index(const Tables& tables, const int64_t* slot, int64_t nnz, int64_t biases, int64_t* index,
                int64_t* bias_index, cudaStream_t stream);

// slot: [1 + V + T V] for row-sparse gradients, null for dense ones. sum: [V or nnz, D] accumulation dtype, content
// arbitrary; grad_weight itself if their dtypes are equal, null with one tree. grad_weight: [V or nnz, D], every
// element written. grad_bias: [biases], or [T, V] zero-filled, or null. workspace: leaf_workspace_bytes, aligned
// to 16 bytes, content arbitrary.
void leaf_log_prob_backward_weight(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                                   const int64_t* slot, const WideBackward& tensors, void* workspace,
                                   void* sum, void* grad_weight, void* grad_bias, cudaStream_t stream);

int64_t leaf_workspace_bytes(const Tables& tables);

}  // namespace hstree
