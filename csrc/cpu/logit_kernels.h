// The vectorised parts of piecewise and target_log_softmax: one table of functions for each instruction set, chosen
// once at run time.
#pragma once

#include <cstdint>

#include "cpu/elements.h"
#include "kernels/logit_function.h"

namespace hstree::cpu {

// A LogitFunction, in the accumulation dtype.
template <typename A>
struct Function {
  explicit Function(const LogitFunction& f)
      : table(static_cast<const A*>(f.table)),
        width(f.table ? f.width : 0),
        identity(f.identity()),
        last(static_cast<A>(f.intervals - 1)),
        half(static_cast<A>(f.intervals) / 2),
        rate(f.table ? static_cast<A>(f.rate()) : A(0)),
        c(static_cast<A>(f.c)),
        k(static_cast<A>(f.k)),
        k_1(static_cast<A>(f.k - 1)) {}

  const A* table;
  int width;  // 0: no table
  bool identity;
  A last;  // K - 1
  A half;  // K / 2
  A rate;
  A c, k, k_1;
};

// The sums for the gradient of a table: 64-bit integers within the radius, float64 beyond it.
struct TableSums {
  uint64_t* fixed;  // [K, width], two's complement; null: nothing is summed
  double scale;     // quanta in 1.0
  bool shared;      // by several threads, with atomic additions
  double* beyond;   // [2, width]: left and right of the table
};

template <typename T>
struct PiecewiseKernels {
  using A = accumulate_t<T>;

  // output[i] = f(input[i])
  void (*forward)(const Function<A>& f, const T* input, int64_t count, T* output);

  // grad_input[i] = grad[i] f'(input[i]); the gradient of the table is added to sums.
  void (*backward)(const Function<A>& f, const T* grad, const T* input, int64_t count, T* grad_input,
                   const TableSums& sums);

  // Largest |x|; not finite if any is infinite or NaN.
  A (*largest)(const T* x, int64_t count);
};

// log sum_v exp f(x_v) = shift + log total.
struct ExpSum {
  double total;
  double shift;
};

constexpr int64_t gradient_block = 256;

template <typename A>
int64_t gradient_scratch_bytes(int64_t count) {
  return (count + gradient_block - 1) / gradient_block * gradient_block * 3 * static_cast<int64_t>(sizeof(A));
}

// Rows of logits x. A: float or double.
template <typename A>
struct MonotoneKernels {
  // Largest x, ignoring NaN.
  A (*max)(const A* x, int64_t count);

  // Smallest x, ignoring NaN.
  A (*min)(const A* x, int64_t count);

  A (*value)(const Function<A>& f, A x);

  // sum_v exp(f(x_v) - largest); largest = f(max), max = max_v x_v.
  double (*exp_sum)(const Function<A>& f, const A* x, int64_t count, A max, A largest);

  // x_v <- -grad p_v f'(x_v), plus grad f'(x_target) at `target`; p_v = exp(f(x_v) - shift - rest).
  // The gradient of the table is added to sums.
  void (*backward)(const Function<A>& f, A* x, int64_t count, int64_t target, A grad, A shift, A rest,
                   const TableSums& sums);

  // The same in two steps, for a row whose sum is not known yet: x_v <- e_v f'(x_v), e_v = exp(f(x_v) -
  // shift), and the sum of e_v. With a table, all x must be within its radius. scratch:
  // gradient_scratch_bytes<A>(count) if there is a table, aligned to 64.
  ExpSum (*begin_gradient)(const Function<A>& f, A* x, int64_t count, A max, A largest, void* scratch);

  // x_v <- -grad x_v / total; the gradient of the table is added to sums.
  void (*end_gradient)(const Function<A>& f, A* x, int64_t count, A grad, double total, const void* scratch,
                       const TableSums& sums);

  // grad f'(x) for the logit x of the target; the gradient of the table is added to sums.
  A (*target_gradient)(const Function<A>& f, A x, A grad, const TableSums& sums);
};

}  // namespace hstree::cpu
