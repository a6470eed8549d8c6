#include "logit_function.cuh"
#include "target_log_softmax.h"

namespace hstree {
namespace {

constexpr int max_threads = 256;
constexpr int64_t ignored_row = -1;
// Threads of a block for a long row: those of a multiprocessor in backward, limited by registers.
template <typename S>
constexpr int wide_threads = 4096 / sizeof(S);

// ---- rows of classes, divided among threads in groups of 16 bytes. In both classes below, V fixes which
// thread has which class, and the order of every sum.
//
// each(step) calls step(begin, values) with the groups of this thread, bias added; values beyond V are -inf. rewrite(step)
// also writes what step leaves in values, rounded to Out, and fill(value) writes value to the whole row. max and sum
// reduce one value of each thread and return the result to all.

template <typename S>
__device__ __forceinline__ void add_bias(const S* bias, int64_t begin, int64_t classes,
                                         S (&value)[group_size<S>]) {
  if (bias == nullptr) return;
  S of_class[group_size<S>];
  load_group<S>(bias, begin, classes, aligned_to_16(bias), S(0), of_class);
#pragma unroll
  for (int k = 0; k < group_size<S>; ++k) value[k] += of_class[k];
}

// A row for one warp or for a whole block of Threads, read from memory in each pass.
template <typename S, int RowThreads, int Threads, typename Out = S, bool TargetBias = false>
class MemoryRow {
  static_assert(RowThreads == 32 || RowThreads == Threads);

 public:
  using Result = Out;
  static constexpr int threads = Threads;
  static constexpr int rows = Threads / RowThreads;  // of a block
  struct Scratch {
    S max[RowThreads / 32];
    double sum[RowThreads / 32];
  };

  // bias: may be null. chosen: the logit of the target, with its own bias; target -1: none. out: may be x, in 16
  // bits too, where it takes the first half of the memory of the row.
  __device__ MemoryRow(const S* x, const S* bias, int64_t target, S chosen, Out* out, int64_t classes,
                       Scratch* scratch)
      : x_(x),
        bias_(bias),
        target_(target),
        chosen_(chosen),
        out_(out),
        classes_(classes),
        aligned_(aligned_to_16(x)),
        out_aligned_(aligned_to_16(out)),
        scratch_(scratch) {}
  __device__ MemoryRow(const S* x, int64_t classes, Scratch* scratch)
      : MemoryRow(x, nullptr, -1, S(0), nullptr, classes, scratch) {}
  static __device__ __forceinline__ int64_t first() {
    return int64_t(blockIdx.x) * rows + threadIdx.x / RowThreads;
  }
  static __device__ __forceinline__ int thread() { return threadIdx.x % RowThreads; }
  template <typename Step>
  __device__ __forceinline__ void each(const Step& step) const {
    pass<false>(step);
  }
  template <typename Step>
  __device__ __forceinline__ void rewrite(const Step& step) const {
    pass<true>(step);
  }
  __device__ __forceinline__ void fill(S constant) const {
    S value[group];
#pragma unroll
    for (int k = 0; k < group; ++k) value[k] = constant;
    for (int64_t begin = thread() * group; begin < classes_; begin += RowThreads * group) write(begin, value);
  }
  __device__ __forceinline__ S max(S value) const {
    if constexpr (RowThreads == 32) {
      return warp_max(value);
    } else {
      return block_max<Threads>(value, scratch_->max);
    }
  }
  __device__ __forceinline__ double sum(double value) const {
    if constexpr (RowThreads == 32) {
      return warp_sum(value);
    } else {
      return block_sum<Threads>(value, scratch_->sum);
    }
  }

 private:
  static constexpr int group = group_size<S>;
  // Every thread reads the group after the one that it has. In 16 bits the results of step i take the memory of
  // logits that were read in step i / 2: after a wait in step i, when those of step i + 1 are read, the results of
  // the steps up to 2 i + 3 may be written. So all wait in the steps 0, 4, 12, 28, ...
  template <bool Writes, typename Step>
  __device__ __forceinline__ void pass(const Step& step) const {
    constexpr int64_t width = RowThreads * group;
    S next[group];
    int64_t begin = thread() * group;
    load(begin, next);
    for (; begin < classes_ + thread() * group; begin += width) {
      S value[group];
#pragma unroll
      for (int k = 0; k < group; ++k) value[k] = next[k];
      load(begin + width, next);
      add_bias(bias_, begin, classes_, value);
      if (TargetBias && begin <= target_ && target_ < begin + group) {
#pragma unroll
        for (int k = 0; k < group; ++k) value[k] = begin + k == target_ ? chosen_ : value[k];
      }
      step(begin, value);
      if constexpr (Writes) {
        const int64_t i = begin / width;
        if (i == 0 || (sizeof(Out) < sizeof(S) && ((i + 4) & (i + 3)) == 0)) wait();
        write(begin, value);
      }
    }
  }
  // A wide row leaves the L1 cache to the bias, which all rows read.
  __device__ __forceinline__ void load(int64_t begin, S (&value)[group]) const {
    if (RowThreads == wide_threads<S> && aligned_ && begin + group <= classes_) {
      unpack_group<S>(__ldcg(reinterpret_cast<const uint4*>(x_ + begin)), value);
    } else {
      load_group<S>(x_, begin, classes_, aligned_, S(-INFINITY), value);
    }
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (RowThreads == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  __device__ __forceinline__ void write(int64_t begin, const S (&value)[group_size<S>]) const {
    Out rounded[group];
#pragma unroll
    for (int k = 0; k < group; ++k) store(rounded + k, value[k]);
    if (out_aligned_ && begin + group <= classes_) {
      store_pack(out_ + begin, rounded);
    } else {
#pragma unroll
      for (int k = 0; k < group; ++k)
        if (begin + k < classes_) out_[begin + k] = rounded[k];
    }
  }
  const S* x_;
  const S* bias_;
  int64_t target_;
  S chosen_;
  Out* out_;
  int64_t classes_;
  bool aligned_, out_aligned_;
  Scratch* scratch_;
};

// A row of at most most_classes for one warp, read once into its registers.
template <typename S>
class RegisterRow {
  static constexpr int group = group_size<S>;
  static constexpr int run = 32 * group;
  static constexpr int accesses = 8;  // of 16 bytes, of each lane

 public:
  static constexpr int threads = 128;
  static constexpr int rows = threads / 32;
  static constexpr int64_t most_classes = accesses * run;
  struct Scratch {};

  __device__ RegisterRow(const S* x, int64_t classes, Scratch*) : classes_(static_cast<int>(classes)) {
    const bool aligned = aligned_to_16(x);
#pragma unroll
    for (int a = 0; a < accesses; ++a) {
      if (a * run < classes_) load_group<S>(x, begin_of(a), classes_, aligned, S(-INFINITY), value_[a]);
    }
  }
  static __device__ __forceinline__ int64_t first() { return int64_t(blockIdx.x) * rows + threadIdx.x / 32; }
  static __device__ __forceinline__ int thread() { return threadIdx.x % 32; }
  template <typename Step>
  __device__ __forceinline__ void each(const Step& step) const {
#pragma unroll
    for (int a = 0; a < accesses; ++a) {
      if (a * run < classes_) step(begin_of(a), value_[a]);
    }
  }
  __device__ __forceinline__ S max(S value) const { return warp_max(value); }
  __device__ __forceinline__ double sum(double value) const { return warp_sum(value); }

 private:
  static __device__ __forceinline__ int begin_of(int access) { return access * run + thread() * group; }
  int classes_;
  S value_[accesses][group];
};

// log sum_v exp f(x_v) of a row as two terms: shift = f(max x) and the log of sum.
template <typename S>
struct ExpSum {
  S shift;
  double sum;
};

// A thread's sum is relative to a value that is at most so far below the largest that it has seen.
constexpr int most_lag = 8;

// In one pass. Returns the same to all threads of the row, after all of them have read it. A logit of -inf adds 0,
// whatever f is there. NaN in x, all of x -inf, +inf or an overflow of f: shift or sum is not finite.
template <typename S, typename F, typename Row>
__device__ __forceinline__ ExpSum<S> exp_sum(const F& function, const Row& row) {
  constexpr int group = group_size<S>;
  // sum: of all but the largest, whose term in the result is then exactly 1. rest: what rounding took from sum,
  // which is much for millions of classes.
  S largest = -INFINITY, shift = -INFINITY, sum = 0, rest = 0;
  row.each([&](int64_t, const S(&value)[group]) {
    S lower[group];
#pragma unroll
    for (int k = 0; k < group; ++k) {
      const S y = value[k] == -INFINITY ? value[k] : function.value(function.at(value[k]));
      lower[k] = y > largest ? largest : y;
      largest = y > largest ? y : largest;
    }
    if (largest > shift + most_lag) {
      const S factor = exponential(shift - largest);
      sum *= factor;
      rest *= factor;
      shift = largest;
    }
    S part = 0;
#pragma unroll
    for (int k = 0; k < group; ++k) {
      if (lower[k] != -INFINITY) part += exponential(lower[k] - shift);
    }
    const S before = sum;
    sum += part;
    rest += part - (sum - before);
  });
  const S most = row.max(largest);
  const double others = static_cast<double>(sum) + static_cast<double>(rest);
  return {most, row.sum(exponential(largest - most) + others * exponential(shift - most))};
}

template <typename S, typename F>
__device__ __forceinline__ S log_prob_of(const F& function, S logit, const ExpSum<S>& all, double log_sum) {
  const S value = logit == -INFINITY ? logit : function.value(function.at(logit));
  return static_cast<S>((double(value) - double(all.shift)) - log_sum);
}

// log_normalizer[r] = log sum_v exp f(x[r, v]);  log_prob[r] = f(x[r, target[r]]) - log_normalizer[r]
// logits x [R, V], log_prob, log_normalizer [R] of one type S, float32 or float64; target [R] int64;
//   contiguous. F: the function f, increasing.
// Target -1: log_prob and log_normalizer are 0; other targets outside [0, V): NaN. R = 0: not launched.
// f(x) - f(max x), its exp and the compensated sum of a thread are in S, the rest in float64. log_prob is
//   (f(x) - f(max x)) - log sum, accurate to rounding for large logits too. A logit of -inf has probability
//   0. All logits -inf, a NaN, +inf or an overflow of f give NaN.
// Work O(R V): f and exp once for each logit. Bytes: logits once. Keeps log_normalizer for backward. No atomics; the order of every sum is fixed by V:
//   deterministic.
// One warp or one block for each row (see Row); its threads stride over the row's groups of 16 bytes.
template <typename S, typename F, typename Row>
__global__ void __launch_bounds__(Row::threads)
    target_log_softmax_kernel(F function, MonotoneSizes sizes, const S* logits, const int64_t* targets,
                              S* log_prob, S* log_normalizer) {
  __shared__ typename Row::Scratch scratch;
  const int64_t r = Row::first();
  if (r >= sizes.rows) return;
  const int64_t target = targets[r];
  if (target < 0 || target >= sizes.classes) {
    if (Row::thread() == 0) log_prob[r] = log_normalizer[r] = target == ignored_row ? S(0) : S(NAN);
    return;
  }
  const S* x = logits + r * sizes.stride;
  const S chosen = x[target];
  const Row row(x, sizes.classes, &scratch);
  const ExpSum<S> all = exp_sum<S>(function, row);
  if (Row::thread() != 0) return;
  const double log_sum = log(all.sum);
  log_prob[r] = log_prob_of(function, chosen, all, log_sum);
  log_normalizer[r] = static_cast<S>(double(all.shift) + log_sum);
}

// largest = max |grad_log_prob[r]| over the rows r with a target, as bits of float64; NaN if there is one
// grad_log_prob [R] of type S, float32 or float64; target [R] int64, rows with targets outside [0, V) are
//   skipped; contiguous. largest must be 0 before. R = 0: not launched.
// One atomicMax on an integer for each block: the same in any order, deterministic.
// The threads of the grid stride over the rows.
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

// The class that sums the gradient of the function's table, for blocks of Threads. Empty if f has no table.
template <typename S, typename F, int Threads>
struct TableSums {
  struct Scratch {};
  __device__ TableSums(const SumWorkspace&, const Window&, double) {}
  __device__ void add(const typename F::Point&, S) {}
  __device__ void add_nan() {}
  __device__ void finish(int, Scratch*) {}
};
template <typename S, int Width, int Threads>
struct TableSums<S, Piecewise<S, Width>, Threads> : IntervalSums<S, Width, Threads> {
  using IntervalSums<S, Width, Threads>::IntervalSums;
  struct Scratch {
    double sum[Threads / 32];
  };
  __device__ void finish(int block, Scratch* scratch) {
    IntervalSums<S, Width, Threads>::finish(block, scratch->sum);
  }
};

// A function whose table needs no gradient.
template <typename F>
struct Fixed : F {
  explicit Fixed(const F& f) : F(f) {}
};

// Whether TableSums of f has sums.
template <typename F>
constexpr bool sums_table = false;
template <typename S, int Width>
constexpr bool sums_table<Piecewise<S, Width>> = true;

// Threads of a block for a row: those of a wide one with sums of a table, since its window grows with them.
template <typename S, typename F>
constexpr int row_threads = sums_table<F> ? wide_threads<S> : 256;

constexpr double large_normalizer = 64;

// out[r, v] = g f'(x[r, v]), g = grad_log_prob[r] ([v = target[r]] - p),
//   p = exp(f(x[r, v]) - log_normalizer[r])
// sums[j, m] = sum of g * w_m over the logits of interval j, w_m as at piecewise_backward_kernel, if f has a table
// logits x [R, V], to which bias [V] is added, or target_bias [V] to that of the target, unless null, grad_log_prob, log_normalizer [R] of one type S,
//   float32 or float64; target [R] int64; table [K, Width] S; contiguous; out [R, V] of Row::Result, which is S or
//   has 16 bits: other rows of contiguous numbers, or the memory of the logits, row by row. F: the function f.
//   workspace: zero except for largest, which largest_row_grad_kernel wrote; ignored without a table.
// log_normalizer null: it is computed, and log_prob [R] is written, as by target_log_softmax_kernel.
// Target -1: zeros, nothing added to the sums. A log_normalizer that is not finite, or another target outside
//   [0, V): NaN, also in row 0 of the sums. Otherwise a logit of -inf has gradient 0 and adds nothing. R = 0:
//   not launched.
// Computed in S. If |log_normalizer| is above large_normalizer, rounding it would cost accuracy in p: it is
//   summed again; a computed one is kept as two terms. Sums in 64-bit integers inside [-R, R] of the table, in float64
//   outside.
// Work O(R V): f and exp once for each logit, twice with a computed log_normalizer. Bytes: logits read once, and once
//   more from cache for it, and written once; with a table one interval of it and Width integers for each logit.
// Integer atomics, only for the sums, in shared memory for the window. Deterministic on every device.
// Warps or blocks (see Row) stride over the rows; the threads of each stride over the row's groups of 16
//   bytes. SigSoftmax: Kanai et al., "Sigsoftmax: reanalysis of the softmax bottleneck" (NeurIPS 2018).
template <typename S, typename F, typename Row>
__global__ void __launch_bounds__(Row::threads, wide_threads<S> / Row::threads)
    target_log_softmax_backward_kernel(F function, MonotoneSizes sizes, MonotoneBackward tensors,
                                       const S* logits, const S* bias, const S* target_bias,
                                       typename Row::Result* out, int64_t out_stride, SumWorkspace workspace,
                                       Window window) {
  constexpr int group = group_size<S>;
  using Sums = TableSums<S, F, Row::threads>;
  __shared__ typename Row::Scratch scratch;
  __shared__ typename Sums::Scratch sum_scratch;
  Sums sums(workspace, window, 2.0 * static_cast<double>(sizes.rows));
  for (int64_t r = Row::first(); r < sizes.rows; r += int64_t(gridDim.x) * Row::rows) {
    const int64_t target = tensors.target[r];
    const S grad = static_cast<const S*>(tensors.grad_log_prob)[r];
    const bool known = tensors.log_normalizer != nullptr, is_class = target >= 0 && target < sizes.classes;
    const S* x = logits + r * sizes.stride;
    const S chosen = is_class ? x[target] + (target_bias == nullptr ? S(0) : target_bias[target]) : S(0);
    Row row(x, bias, target, chosen, out + r * out_stride, sizes.classes, &scratch);
    S shift = known ? static_cast<const S*>(tensors.log_normalizer)[r] : S(0), rest = 0;
    S normalizer = is_class ? shift : S(NAN), log_prob = target == ignored_row ? S(0) : S(NAN);
    if (is_class && (!known || shift > large_normalizer || shift < -large_normalizer) && shift - shift == 0) {
      const ExpSum<S> all = exp_sum<S>(function, row);
      shift = all.shift;
      rest = logarithm(static_cast<S>(all.sum));
      normalizer = shift + rest;
      if (Row::thread() == 0) log_prob = log_prob_of(function, chosen, all, log(all.sum));
    }
    if (!known && Row::thread() == 0) static_cast<S*>(tensors.log_prob)[r] = log_prob;
    if (normalizer - normalizer != 0) {
      if (target != ignored_row && Row::thread() == 0) sums.add_nan();
      row.fill(target == ignored_row ? S(0) : S(NAN));
      continue;
    }
    row.rewrite([&](int64_t begin, S(&value)[group]) {
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
    });
  }
  sums.finish(blockIdx.x, &sum_scratch);
}

template <typename Run>
void dispatch_wide(ScalarType type, Run run) {
  if (type == ScalarType::float32) return run(TypeTag<float>());
  if (type == ScalarType::float64) return run(TypeTag<double>());
  throw std::runtime_error("hstree: target_log_softmax supports float32 and float64 only");
}

// Calls run(F(function)) with the class of the function.
template <typename S, typename Run>
void with_function(const LogitFunction& function, Run run) {
  if (function.table != nullptr) return with_table<S>(function, run);
  if (function.identity()) return run(Identity<S>(function));
  run(GeneralizedSigSoftmax<S>(function));
}

// Calls run(TypeTag<Row>()): Warp for rows of few classes, Block, or Wide for many. A row of up to 4 KiB fits into
// the registers of a warp; a block would leave most of its threads idle. From 64 KiB on a multiprocessor has one row
// at a time, so that the second pass over the rows of all of them finds them in the L2 cache.
template <typename S, typename Warp, typename Block, typename Wide, typename Run>
void with_row(const MonotoneSizes& sizes, Run run) {
  if (sizes.classes <= RegisterRow<S>::most_classes) return run(TypeTag<Warp>());
  if (sizes.classes <= 16 * RegisterRow<S>::most_classes) return run(TypeTag<Block>());
  run(TypeTag<Wide>());
}

}  // namespace

void target_log_softmax(ScalarType type, const LogitFunction& function, const MonotoneSizes& sizes,
                        const void* logits, const int64_t* target, void* log_prob, void* log_normalizer,
                        cudaStream_t stream) {
  if (sizes.rows == 0) return;
  dispatch_wide(type, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using Block = MemoryRow<S, 512, 512>;
    with_row<S, RegisterRow<S>, Block, Block>(sizes, [&](auto row) {
      using Row = typename decltype(row)::type;
      with_function<S>(function, [&](auto f) {
        launch(target_log_softmax_kernel<S, decltype(f), Row>, grid_size(divide_up(sizes.rows, Row::rows)),
               Row::threads, 0, stream, f, sizes, static_cast<const S*>(logits), target,
               static_cast<S*>(log_prob), static_cast<S*>(log_normalizer));
      });
    });
  });
}

int64_t monotone_workspace_bytes(const LogitFunction& function) {
  return function.table == nullptr ? 0 : interval_sums_bytes(function);
}

void target_log_softmax_backward(ScalarType type, const LogitFunction& function, const MonotoneSizes& sizes,
                                 const MonotoneBackward& tensors, void* logits, const void* bias,
                                 const void* target_bias, const LowRows& low, void* workspace,
                                 double* grad_table, cudaStream_t stream) {
  if (sizes.rows == 0) return;
  dispatch_wide(type, [&](auto tag) {
    using S = typename decltype(tag)::type;
    const bool sum_table = function.table != nullptr && grad_table != nullptr;
    SumWorkspace sums;
    if (sum_table) {
      sums = SumWorkspace(function, workspace);
      const int64_t max_blocks = divide_up(sizes.rows, max_threads);
      launch(largest_row_grad_kernel<S>, grid_size(max_blocks < 64 ? max_blocks : 64), max_threads, 0, stream,
             sizes, tensors, sums.largest);
    }
    const auto run_into = [&](auto f, auto* out, int64_t out_stride) {
      using F = decltype(f);
      using Out = std::remove_pointer_t<decltype(out)>;
      constexpr int some = row_threads<S, F>, many = wide_threads<S>;
      constexpr bool own = !sums_table<F>;  // with sums no register is left for the bias of the target
      using Block = MemoryRow<S, some, some, Out, own>;
      with_row<S, MemoryRow<S, 32, 256, Out, own>, Block, MemoryRow<S, many, many, Out, own>>(
          sizes, [&](auto row) {
            using Row = typename decltype(row)::type;
            int64_t blocks = divide_up(sizes.rows, Row::rows);
            Window window;
            if constexpr (sums_table<F>) {
              blocks = std::min<int64_t>(blocks, most_sum_blocks);
              window = Window(function, sizes.rows * sizes.classes, blocks, Row::threads);
            }
            launch(target_log_softmax_backward_kernel<S, F, Row>, grid_size(blocks), Row::threads,
                   window.bytes(function), stream, f, sizes, tensors, static_cast<const S*>(logits),
                   static_cast<const S*>(bias), static_cast<const S*>(target_bias), out, out_stride, sums,
                   window);
          });
    };
    const auto run = [&](auto f) {
      if (low.rows == nullptr) return run_into(f, static_cast<S*>(logits), sizes.stride);
      if constexpr (std::is_same_v<S, float>) {
        if (low.type == ScalarType::bfloat16)
          return run_into(f, static_cast<__nv_bfloat16*>(low.rows), low.stride);
        if (low.type == ScalarType::float16) return run_into(f, static_cast<__half*>(low.rows), low.stride);
      }
      throw std::runtime_error("hstree: target_log_softmax rounds gradients of float32 to 16 bits only");
    };
    if (function.table == nullptr || sum_table) {
      with_function<S>(function, run);
    } else {
      with_table<S>(function, [&](auto f) { run(Fixed<decltype(f)>(f)); });
    }
    if (sum_table)
      write_interval_sums(function, sums, FurtherSums(), 2.0 * static_cast<double>(sizes.rows), grad_table,
                          stream);
  });
}

}  // namespace hstree
