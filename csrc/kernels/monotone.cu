#include "logit_function.cuh"
#include "monotone.h"

namespace hstree {
namespace {

constexpr int forward_threads = 512;
constexpr int backward_threads = 256;
constexpr int max_threads = 256;
constexpr int64_t most_private_bytes = 32 << 10;  // sums of a table, of each block
constexpr int64_t ignored_row = -1;

// log sum_v exp f(x_v) of a row as two terms: shift = f(max x) and the log of sum.
template <typename S>
struct ExpSum {
  S shift;
  double sum;
};

// The same in all threads of a block of Threads, once all of them have read x. A logit -inf adds 0, whatever
// f does there. NaN in x, or all of x -inf: sum NaN; +inf or an overflow of f: shift or sum not finite.
// max_scratch, sum_scratch: shared.
template <int Threads, typename S, typename F>
__device__ __forceinline__ ExpSum<S> exp_sum(const F& function, int64_t classes, bool aligned, const S* x,
                                             S (&max_scratch)[Threads / 32],
                                             double (&sum_scratch)[Threads / 32]) {
  constexpr int group = group_size<S>;
  S value[group];
  S largest = -INFINITY;
  for (int64_t begin = threadIdx.x * group; begin < classes; begin += Threads * group) {
    load_group(x, begin, classes, aligned, S(-INFINITY), value);
#pragma unroll
    for (int k = 0; k < group; ++k) largest = value[k] > largest ? value[k] : largest;
  }
  largest = block_max<Threads>(largest, max_scratch);
  const S shift = function.value(function.at(largest));
  S sum = largest == -INFINITY ? S(NAN) : S(0);
  for (int64_t begin = threadIdx.x * group; begin < classes; begin += Threads * group) {
    load_group(x, begin, classes, aligned, S(-INFINITY), value);
#pragma unroll
    for (int k = 0; k < group; ++k) {
      if (value[k] != -INFINITY) sum += exponential(function.value(function.at(value[k])) - shift);
    }
  }
  return {shift, block_sum<Threads>(static_cast<double>(sum), sum_scratch)};
}

// log_normalizer[r] = log sum_v exp f(x[r, v]);  log_prob[r] = f(x[r, target[r]]) - log_normalizer[r]
// logits x [R, V], log_prob, log_normalizer [R] of one type S, float32 or float64; target [R] int64;
//   contiguous. F: the function f, increasing.
// Target -1: log_prob and log_normalizer 0; another outside [0, V): NaN. R = 0: not launched.
// f(x) - f(max x), its exp and the sum of a thread in S, the rest in float64; log_prob is
//   (f(x) - f(max x)) - log sum, exact to rounding for large logits too. A logit -inf has probability 0; all
//   of them -inf, a NaN, +inf or an overflow of f: NaN.
// Work O(R V): f and exp once for each logit. Bytes: logits once from memory, once more from cache. Keeps
//   log_normalizer for backward. No atomics; the order of every sum is fixed by V: deterministic.
// One block for each row, one thread for each 16 bytes of it, at a stride of the block.
template <typename S, typename F>
__global__ void __launch_bounds__(forward_threads)
    monotone_log_prob_kernel(F function, int64_t classes, const S* logits, const int64_t* targets,
                             S* log_prob, S* log_normalizer) {
  __shared__ S max_scratch[forward_threads / 32];
  __shared__ double sum_scratch[forward_threads / 32];
  const int64_t row = blockIdx.x;
  const int64_t target = targets[row];
  if (target < 0 || target >= classes) {
    if (threadIdx.x == 0) log_prob[row] = log_normalizer[row] = target == ignored_row ? S(0) : S(NAN);
    return;
  }
  const S* x = logits + row * classes;
  const ExpSum<S> all =
      exp_sum<forward_threads>(function, classes, aligned_to_16(x), x, max_scratch, sum_scratch);
  if (threadIdx.x != 0) return;
  const double log_sum = log(all.sum);
  const S chosen = x[target];
  const S value = chosen == -INFINITY ? chosen : function.value(function.at(chosen));
  log_prob[row] = static_cast<S>((double(value) - double(all.shift)) - log_sum);
  log_normalizer[row] = static_cast<S>(double(all.shift) + log_sum);
}

// largest = max over rows r with a target of |grad_log_prob[r]|, as bits of float64; NaN if there is one
// grad_log_prob [R] of type S, float32 or float64; target [R] int64, outside [0, V): the row is left out;
//   contiguous. largest 0 before. R = 0: not launched.
// One atomicMax on an integer for each block: the same in any order, deterministic.
// One thread for each row, at a stride of the grid.
template <typename S>
__global__ void __launch_bounds__(max_threads)
    largest_row_grad_kernel(MonotoneSizes sizes, MonotoneBackward tensors, unsigned long long* largest) {
  using Bits = decltype(magnitude_bits(S()));
  __shared__ Bits scratch[max_threads / 32];
  Bits bits = 0;
  for (int64_t row = int64_t(blockIdx.x) * max_threads + threadIdx.x; row < sizes.rows;
       row += int64_t(gridDim.x) * max_threads) {
    const int64_t target = tensors.target[row];
    if (target < 0 || target >= sizes.classes) continue;
    const Bits other = magnitude_bits(static_cast<const S*>(tensors.grad_log_prob)[row]);
    bits = other > bits ? other : bits;
  }
  bits = block_max<max_threads>(bits, scratch);
  if (threadIdx.x == 0) atomicMax(largest, widen_bits(bits));
}

// What takes the sums of the table of a function: nothing where it has none.
template <typename S, typename F>
struct TableSums {
  __device__ TableSums(const SumWorkspace&, double, bool) {}
  __device__ void add(const typename F::Point&, S) {}
  __device__ void add_nan() {}
  __device__ void finish(int, double (&)[backward_threads / 32]) {}
};
template <typename S, int Width>
struct TableSums<S, Piecewise<S, Width>> : IntervalSums<S, Width, backward_threads> {
  using IntervalSums<S, Width, backward_threads>::IntervalSums;
};

// A function whose table gets no gradient.
template <typename F>
struct Fixed : F {
  explicit Fixed(const F& f) : F(f) {}
};

constexpr double large_normalizer = 64;

// x[r, v] <- g f'(x[r, v]), g = grad_log_prob[r] ([v = target[r]] - p),
//   p = exp(f(x[r, v]) - log_normalizer[r])
// sums[j, m] = sum of g * w_m over the logits of interval j, w_m as at plif_backward_kernel, if f has a table
// logits x [R, V], grad_log_prob, log_normalizer [R] of one type S, float32 or float64; target [R] int64;
//   table [K, Width] S; contiguous. F: the function f. workspace: zero but for largest, from
//   largest_row_grad_kernel; not looked at without a table.
// Target -1: zeros, nothing to the sums. A log_normalizer that is not finite, or another target outside
//   [0, V): NaN, also in row 0 of the sums. Else a logit -inf has gradient 0 and adds nothing. R = 0: not
//   launched.
// All in S. Where |log_normalizer| is above large_normalizer, so that its last bit is much in p, it is summed
//   anew and kept as two terms. Sums in 64-bit integers inside [-R, R] of the table, in float64 outside.
// Work O(R V): f and exp once for each logit. Bytes: logits read once and written once; with a table one
//   interval of it and Width integers for each logit.
// Integer atomics for the sums alone, in shared memory where is_private; deterministic, whatever the device.
// One block for each row, at a stride of the grid; one thread for each 16 bytes of it, at a stride of the
//   block. SigSoftmax: Kanai et al., "Sigsoftmax: reanalysis of the softmax bottleneck" (NeurIPS 2018).
template <typename S, typename F>
__global__ void __launch_bounds__(backward_threads, 4)
    monotone_log_prob_backward_kernel(F function, MonotoneSizes sizes, MonotoneBackward tensors, S* logits,
                                      SumWorkspace workspace, bool is_private) {
  __shared__ S max_scratch[backward_threads / 32];
  __shared__ double sum_scratch[backward_threads / 32], table_scratch[backward_threads / 32];
  constexpr int group = group_size<S>;
  TableSums<S, F> sums(workspace, 2.0 * static_cast<double>(sizes.rows), is_private);
  for (int64_t row = blockIdx.x; row < sizes.rows; row += gridDim.x) {
    S* x = logits + row * sizes.classes;
    const bool aligned = aligned_to_16(x);
    const int64_t target = tensors.target[row];
    const S grad = static_cast<const S*>(tensors.grad_log_prob)[row];
    S shift = static_cast<const S*>(tensors.log_normalizer)[row], rest = 0;
    const bool sound = target >= 0 && target < sizes.classes && shift - shift == 0;
    if (sound && (shift > large_normalizer || shift < -large_normalizer)) {
      const ExpSum<S> all =
          exp_sum<backward_threads>(function, sizes.classes, aligned, x, max_scratch, sum_scratch);
      shift = all.shift;
      rest = logarithm(static_cast<S>(all.sum));
    }
    if (!sound && target != ignored_row && threadIdx.x == 0) sums.add_nan();
    S value[group];
#pragma unroll
    for (int k = 0; k < group; ++k) value[k] = target == ignored_row ? S(0) : S(NAN);
    for (int64_t begin = threadIdx.x * group; begin < sizes.classes; begin += backward_threads * group) {
      if (sound) {
        load_group(x, begin, sizes.classes, aligned, S(-INFINITY), value);
#pragma unroll
        for (int k = 0; k < group; ++k) {
          if (value[k] == -INFINITY) {
            value[k] = 0;
            continue;
          }
          const auto point = function.at(value[k]);
          const S p = exponential((function.value(point) - shift) - rest);
          const S g = grad * ((begin + k == target ? S(1) : S(0)) - p);
          sums.add(point, g);
          value[k] = g * function.derivative(point);
        }
      }
      store_group(x, begin, sizes.classes, aligned, value);
    }
  }
  sums.finish(blockIdx.x, table_scratch);
}

template <typename Run>
void dispatch_wide(ScalarType type, Run run) {
  if (type == ScalarType::float32) return run(TypeTag<float>());
  if (type == ScalarType::float64) return run(TypeTag<double>());
  throw std::runtime_error("hstree: monotone_log_prob is for float32 and float64");
}

// Calls run(F(function)) with the class of the function.
template <typename S, typename Run>
void with_function(const LogitFunction& function, Run run) {
  if (function.table != nullptr) return with_table<S>(function, run);
  if (function.identity()) return run(Identity<S>(function));
  run(GeneralizedSigSoftmax<S>(function));
}

}  // namespace

void monotone_log_prob(ScalarType type, const LogitFunction& function, const MonotoneSizes& sizes,
                       const void* logits, const int64_t* target, void* log_prob, void* log_normalizer,
                       cudaStream_t stream) {
  if (sizes.rows == 0) return;
  dispatch_wide(type, [&](auto tag) {
    using S = typename decltype(tag)::type;
    with_function<S>(function, [&](auto f) {
      launch(monotone_log_prob_kernel<S, decltype(f)>, grid_size(sizes.rows), forward_threads, 0, stream, f,
             sizes.classes, static_cast<const S*>(logits), target, static_cast<S*>(log_prob),
             static_cast<S*>(log_normalizer));
    });
  });
}

int64_t monotone_workspace_bytes(const LogitFunction& function) {
  return function.table == nullptr ? 0 : interval_sums_bytes(function);
}

void monotone_log_prob_backward(ScalarType type, const LogitFunction& function, const MonotoneSizes& sizes,
                                const MonotoneBackward& tensors, void* logits, void* workspace,
                                double* grad_table, cudaStream_t stream) {
  if (sizes.rows == 0) return;
  dispatch_wide(type, [&](auto tag) {
    using S = typename decltype(tag)::type;
    const bool sum_table = function.table != nullptr && grad_table != nullptr;
    SumWorkspace sums;
    int64_t blocks = sizes.rows;
    size_t bytes = 0;
    if (sum_table) {
      sums = SumWorkspace(function, workspace);
      if (blocks > most_sum_blocks) blocks = most_sum_blocks;
      bytes = private_bytes(function, sizes.rows * sizes.classes, blocks, most_private_bytes);
      const int64_t max_blocks = divide_up(sizes.rows, max_threads);
      launch(largest_row_grad_kernel<S>, grid_size(max_blocks < 64 ? max_blocks : 64), max_threads, 0, stream,
             sizes, tensors, sums.largest);
    }
    const auto run = [&](auto f) {
      launch(monotone_log_prob_backward_kernel<S, decltype(f)>, grid_size(blocks), backward_threads, bytes,
             stream, f, sizes, tensors, static_cast<S*>(logits), sums, bytes > 0);
    };
    if (function.table == nullptr || sum_table) {
      with_function<S>(function, run);
    } else {
      with_table<S>(function, [&](auto f) { run(Fixed<decltype(f)>(f)); });
    }
    if (sum_table)
      write_interval_sums(function, sums, 2.0 * static_cast<double>(sizes.rows), grad_table, stream);
  });
}

}  // namespace hstree
