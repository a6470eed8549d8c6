// CPU kernels of piecewise, elementwise, with j and u as in LogitFunction:
//   f(x) = P_j(uc) + P_j'(uc) (u - uc),  P_j(u) = sum_m table[j, m] u^m;  f'(x) = P_j'(uc) rate;
//   grad_table[j, m] = sum over the elements in j of grad w_m,  w_m = uc^m + m uc^(m-1) (u - uc).
// Tensors: input, output, grad, grad_input [N], all float32, float64, bfloat16 or float16; table,
//   grad_table [K, 2] or [K, 4] of the accumulation dtype. All contiguous.
// N = 0 only zeroes grad_table. A knot belongs to the interval on its right. Beyond [-radius, radius] f
//   continues with the slope of that end.
// Computation in float32, float64 for float64. f(+-inf) is infinite with the sign of that end's slope,
//   NaN for slope 0; f(NaN) and f'(NaN) are NaN.
// grad_table: within the radius in 64-bit integers of quantum 2^-e, N max|grad| 2^e < 2^62; beyond it in
//   float64, one sum for each block of elements. An infinite or NaN grad makes all of it NaN; a NaN input
//   makes row 0 NaN, for any grad; an infinite input makes column 1 (and 2, 3 on the right) of that end's row
//   infinite or NaN, unless the grad is 0, which adds nothing.
// Work O(N + K). Reads and writes N elements forward; backward reads 3 N and writes N. Integers [K,
//   width] for each thread while all of them fit in 16 MiB, otherwise shared. Keeps nothing for backward.
// Atomics only on shared integers: deterministic for any number of threads.
// Threads over blocks of elements. PLIF: Ganea, Gelly, Becigneul and Severyn, "Breaking the softmax
//   bottleneck via learnable monotonic pointwise non-linearities" (ICML 2019).
#pragma once

#include "cpu/logit_kernels.h"

namespace hstree::cpu {

template <typename T>
void piecewise(const LogitFunction& f, const T* input, int64_t count, T* output);

template <typename T>
void piecewise_backward(const LogitFunction& f, const T* grad, const T* input, int64_t count, T* grad_input,
                        accumulate_t<T>* grad_table);

}  // namespace hstree::cpu
