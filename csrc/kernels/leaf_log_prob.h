// Launchers of the leaf op: the wide op on trees that share the rows of one weight.
//
// The binding calls the sequence described in wide_log_prob.h, with leaf_class in the tables, weight [V, D] and bias
// [T, V] by class, and leaf_log_prob_backward_weight in place of wide_log_prob_backward_weight. For row-sparse
// gradients it calls leaf_count after step 4, with count zero-filled. Its inclusive sum is slot: slot[V] classes
// and slot[V + T V] - slot[V] biases are visited, and leaf_index lists them.
#pragma once

#include "wide_log_prob.h"

namespace hstree {

// count [1 + V + T V]: count[1 + y] = 1 if a row of the batch visits class y in any tree, and
// count[1 + V + t V + y] = 1 if in tree t. Elements of classes that are not visited are left.
void leaf_count(const Tables& tables, const LeafOrder& leaf_order, int32_t* count, cudaStream_t stream);

// index [nnz]: the visited classes; bias_index [2, biases]: tree and class of each bias. Both in increasing order.
void leaf_index(const Tables& tables, const int64_t* slot, int64_t nnz, int64_t biases, int64_t* index,
                int64_t* bias_index, cudaStream_t stream);

// slot: for row-sparse gradients, null for dense ones. rows: V, or nnz. sum: [rows, D] accumulation dtype,
// zero-filled. grad_weight: [rows, D]; sum itself if their dtypes are equal. grad_bias: [T, V] zero-filled, or
// [biases], or null. workspace: backward_workspace_bytes.
void leaf_log_prob_backward_weight(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                                   const int64_t* slot, const WideBackward& tensors, void* workspace,
                                   int64_t rows, void* sum, void* grad_weight, void* grad_bias,
                                   cudaStream_t stream);

}  // namespace hstree
