// Launchers of target_log_softmax: log-softmax of f(logits) at the target of each row, and its gradient.
//
// Plain C++: no CUDA and no torch include. All arrays are contiguous, but for gaps between the rows of logits, and on the device of the stream; type is
// float32 or float64 (others throw), the type of all floating-point arrays except grad_table. function.table:
// [K, width] or null. Launchers throw std::runtime_error when a launch
// fails, launch nothing when there is no row, and never synchronize.
#pragma once

#include <cstdint>

#include "limits.h"
#include "logit_function.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

struct MonotoneSizes {
  int64_t rows;     // R
  int64_t classes;  // V, at least 1
  int64_t stride;   // from a row of logits to the next, at least V
};

// logits [R, V]; target [R]: -1 for an ignored row, others outside [0, V) give NaN; log_prob and
// log_normalizer [R].
void target_log_softmax(ScalarType type, const LogitFunction& function, const MonotoneSizes& sizes,
                        const void* logits, const int64_t* target, void* log_prob, void* log_normalizer,
                        cudaStream_t stream);

// Size of the workspace of target_log_softmax_backward: 8 bytes for each element of the table, and 16 KiB;
// 0 without a table.
int64_t monotone_workspace_bytes(const LogitFunction& function);

struct MonotoneBackward {
  const void* grad_log_prob;   // [R]
  const int64_t* target;       // [R]
  const void* log_normalizer;  // [R], from target_log_softmax; null: computed
  void* log_prob;              // [R], written if log_normalizer is null
};

// Rows of 16-bit numbers, with gaps between them; none if rows is null. Each may begin where that of the logits
// begins, and takes its memory.
struct LowRows {
  void* rows = nullptr;
  int64_t stride = 0;                      // from a row to the next
  ScalarType type = ScalarType::bfloat16;  // or float16
};

// logits [R, V], to which bias [V] is added, or target_bias [V] to that of the target, unless null, and low [R, V], for logits in float32: the gradient with respect to them is rounded to low if
// that is given, and replaces the logits otherwise. grad_table: float64, shape of the table,
// zero-filled if rows is 0, otherwise arbitrary; null if not needed. workspace: monotone_workspace_bytes,
// zero-filled, aligned to 8 bytes. Without a table or grad_table, both are ignored.
void target_log_softmax_backward(ScalarType type, const LogitFunction& function, const MonotoneSizes& sizes,
                                 const MonotoneBackward& tensors, void* logits, const void* bias,
                                 const void* target_bias, const LowRows& low, void* workspace,
                                 double* grad_table, cudaStream_t stream);

}  // namespace hstree
