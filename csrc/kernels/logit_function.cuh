// The function f of a logit, and sums over the elements in its intervals, for piecewise and
// target_log_softmax.
#pragma once

#include <algorithm>

#include "common.cuh"
#include "logit_function.h"

namespace hstree {

__device__ __forceinline__ float multiply_add(float a, float b, float c) {
  return fmaf(a, b, c);
}
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return fma(a, b, c);
}
__device__ __forceinline__ float round_down(float x) {
  return floorf(x);
}
__device__ __forceinline__ double round_down(double x) {
  return floor(x);
}
// low for NaN.
__device__ __forceinline__ float clamp(float x, float low, float high) {
  return fminf(fmaxf(x, low), high);
}
__device__ __forceinline__ double clamp(double x, double low, double high) {
  return fmin(fmax(x, low), high);
}
__device__ __forceinline__ float log_of_one_plus(float x) {
  return log1pf(x);
}
__device__ __forceinline__ double log_of_one_plus(double x) {
  return log1p(x);
}
__device__ __forceinline__ long long round_to_integer(float x) {
  return llrintf(x);
}
__device__ __forceinline__ long long round_to_integer(double x) {
  return llrint(x);
}

// ---- groups of elements: 16 bytes, in one access if the array is aligned, otherwise in one access for each
// element. The alignment does not change which elements form a group.

template <typename T>
constexpr int group_size = 16 / sizeof(T);

__host__ __device__ __forceinline__ bool aligned_to_16(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

template <typename T>
__device__ __forceinline__ void unpack_group(uint4 raw, Sum<T> (&values)[group_size<T>]) {
  T element[group_size<T>];
  memcpy(element, &raw, sizeof raw);
#pragma unroll
  for (int k = 0; k < group_size<T>; ++k) values[k] = to_sum(element[k]);
}

template <typename T>
__device__ __forceinline__ uint4 pack_group(const Sum<T> (&values)[group_size<T>]) {
  T element[group_size<T>];
#pragma unroll
  for (int k = 0; k < group_size<T>; ++k) store(element + k, values[k]);
  uint4 raw;
  memcpy(&raw, element, sizeof raw);
  return raw;
}

// In one access: nvcc splits a plain store of a vector that was just assembled.
__device__ __forceinline__ void store_raw(void* address, uint4 raw) {
#ifdef __CUDACC__
  __stwb(static_cast<uint4*>(address), raw);
#else
  *static_cast<uint4*>(address) = raw;
#endif
}

// A vector of 16 or 8 bytes in one access.
template <typename T, int Count>
__device__ __forceinline__ void store_pack(T* address, const T (&element)[Count]) {
  if constexpr (sizeof element == 16) {
    uint4 raw;
    memcpy(&raw, element, sizeof raw);
    store_raw(address, raw);
  } else {
    static_assert(sizeof element == 8);
    uint2 raw;
    memcpy(&raw, element, sizeof raw);
#ifdef __CUDACC__
    __stwb(reinterpret_cast<uint2*>(address), raw);
#else
    *reinterpret_cast<uint2*>(address) = raw;
#endif
  }
}

// values = array[begin ...], `fill` from size on.
template <typename T>
__device__ __forceinline__ void load_group(const T* array, int64_t begin, int64_t size, bool aligned,
                                           Sum<T> fill, Sum<T> (&values)[group_size<T>]) {
  if (aligned && begin + group_size<T> <= size) {
    unpack_group<T>(*reinterpret_cast<const uint4*>(array + begin), values);
  } else {
#pragma unroll
    for (int k = 0; k < group_size<T>; ++k) values[k] = begin + k < size ? to_sum(array[begin + k]) : fill;
  }
}

template <typename T>
__device__ __forceinline__ void store_group(T* array, int64_t begin, int64_t size, bool aligned,
                                            const Sum<T> (&values)[group_size<T>]) {
  if (aligned && begin + group_size<T> <= size) {
    store_raw(array + begin, pack_group<T>(values));
  } else {
#pragma unroll
    for (int k = 0; k < group_size<T>; ++k)
      if (begin + k < size) store(array + begin + k, values[k]);
  }
}

// ---- reductions over a block: every thread gets the result; the number of threads fixes the order.
// scratch: shared, one value for each warp.

template <int Threads, typename S>
__device__ __forceinline__ S block_sum(S value, S* scratch) {
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < Threads / 32 ? scratch[threadIdx.x % 32] : S(0));
}

template <int Threads, typename S>
__device__ __forceinline__ S block_max(S value, S* scratch) {
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_max(scratch[threadIdx.x % (Threads / 32)]);
}

// ---- functions of a logit; see LogitFunction. value and derivative accept any point, also infinities and
// NaN.

template <typename S>
struct Identity {
  struct Point {
    S x;
  };
  explicit Identity(const LogitFunction&) {}
  __device__ __forceinline__ Point at(S x) const { return {x}; }
  __device__ __forceinline__ S value(const Point& point) const { return point.x; }
  __device__ __forceinline__ S derivative(const Point&) const { return S(1); }
};

// f(x) = x + (k - 1) (min(d, 0) - log1p(exp(-|d|))), d = x - c;  f'(x) = 1 + (k - 1) sigmoid(-d)
template <typename S>
struct GeneralizedSigSoftmax {
  S c, excess;  // k - 1
  struct Point {
    S x, d, tail;  // exp(-|d|)
  };
  explicit GeneralizedSigSoftmax(const LogitFunction& function)
      : c(S(function.c)), excess(S(function.k - 1)) {}
  __device__ __forceinline__ Point at(S x) const {
    const S d = x - c;
    return {x, d, exponential(d < 0 ? d : -d)};
  }
  __device__ __forceinline__ S value(const Point& point) const {
    return point.x + excess * ((point.d < 0 ? point.d : S(0)) - log_of_one_plus(point.tail));
  }
  __device__ __forceinline__ S derivative(const Point& point) const {
    return 1 + excess * ((point.d < 0 ? S(1) : point.tail) / (1 + point.tail));
  }
};

// The table in global or shared memory, aligned to the Width elements of an interval, to at most 16 bytes:
// value and rise of a linear float32 interval are one access of 8 bytes.
template <typename S, int Width>
struct Piecewise {
  static constexpr int width = Width;
  const S* table;
  S rate, half, last;  // K / (2 R), K / 2, K - 1
  struct Point {
    S coefficient[Width];
    S u, inside;  // clamp(u, 0, 1)
    int interval;
  };
  explicit Piecewise(const LogitFunction& function)
      : table(static_cast<const S*>(function.table)),
        rate(S(function.rate())),
        half(S(function.intervals) / 2),
        last(S(function.intervals - 1)) {}
  // The point without its coefficients. NaN: interval 0.
  __device__ __forceinline__ Point locate(S x) const {
    Point point;
    const S interval = clamp(round_down(multiply_add(x, rate, half)), S(0), last);
    point.interval = static_cast<int>(interval);
    point.u = multiply_add(x, rate, half - interval);
    point.inside = clamp(point.u, S(0), S(1));
    return point;
  }
  __device__ __forceinline__ Point at(S x) const {
    Point point = locate(x);
    const S* coefficient = table + static_cast<int64_t>(point.interval) * Width;
    constexpr int group = Width * sizeof(S) > 16 ? 2 : Width;
    using Access = std::conditional_t<group * sizeof(S) == 16, uint4, uint2>;
#pragma unroll
    for (int m = 0; m < Width; m += group) {
      const Access raw = *reinterpret_cast<const Access*>(coefficient + m);
      memcpy(point.coefficient + m, &raw, sizeof raw);
    }
    return point;
  }
  __device__ __forceinline__ S value(const Point& point) const {
    const S(&a)[Width] = point.coefficient;
    if constexpr (Width == 2) {
      return multiply_add(a[1], point.u, a[0]);
    } else {
      const S u = point.inside;
      const S value = multiply_add(multiply_add(multiply_add(a[3], u, a[2]), u, a[1]), u, a[0]);
      return multiply_add(slope(point), point.u - u, value);
    }
  }
  // NaN at NaN, also where the interval's slope is constant.
  __device__ __forceinline__ S derivative(const Point& point) const {
    return point.u == point.u ? slope(point) * rate : point.u;
  }

 private:
  __device__ __forceinline__ S slope(const Point& point) const {
    const S(&a)[Width] = point.coefficient;
    if constexpr (Width == 2) {
      return a[1];
    } else {
      const S u = point.inside;
      return multiply_add(multiply_add(3 * a[3], u, 2 * a[2]), u, a[1]);
    }
  }
};

// Calls run(F(function)) with the class F above that matches the width of the table.
template <typename S, typename Run>
void with_table(const LogitFunction& function, Run run) {
  if (function.width == 2) return run(Piecewise<S, 2>(function));
  if (function.width == 4) return run(Piecewise<S, 4>(function));
  throw std::runtime_error("hstree: the table of a logit function has neither 2 nor 4 columns");
}

// ---- sums of grad * w_m over the elements of each interval, w_m the derivative of f by table[j, m].
//
// Inside [-R, R] sums are 64-bit integers of quantum 2^-e, so their order does not matter. e is the largest
// integer with count * largest * 2^e < 2^62, where largest bounds every |grad| and count * largest bounds
// their sum. |w_m| is at most 1.75 there (at an x that rounding puts into a neighboring interval), so nothing
// overflows. Outside, where w_m is unbounded, each block has four sums in float64, added in a fixed order; a
// grad of 0 adds nothing. A NaN element counts as outside and makes all of row 0 NaN. Which block has which
// element depends only on the sizes of the arrays.

// At 1024 threads each, a few for each multiprocessor. It is the same for every device, so that the order of
// sums is too.
constexpr int most_sum_blocks = 512;
constexpr int table_threads = 256;

// Views of a workspace of interval_sums_bytes, zero-filled, aligned to 8 bytes.
struct SumWorkspace {
  unsigned long long* largest;  // bits of float64
  unsigned long long* sum;      // [K, width]
  double* outside;              // [most_sum_blocks, 4]
  int64_t entries;              // K * width

  SumWorkspace() : largest(nullptr), sum(nullptr), outside(nullptr), entries(0) {}
  SumWorkspace(const LogitFunction& function, void* workspace)
      : largest(static_cast<unsigned long long*>(workspace)),
        sum(largest + 1),
        outside(reinterpret_cast<double*>(sum + function.intervals * function.width)),
        entries(function.intervals * function.width) {}
};

// More sums inside [-R, R], of another quantum: [K, width], or null.
struct FurtherSums {
  unsigned long long* largest;
  unsigned long long* sum;
};

inline int64_t interval_sums_bytes(const LogitFunction& function) {
  return 8 * (1 + function.intervals * function.width + 4 * most_sum_blocks);
}

// Bytes of dynamic shared memory that a block may have for a multiprocessor to hold 1024 threads in such blocks;
// 2 KiB less than its share, for static memory and the system.
inline int64_t most_dynamic_bytes(int threads) {
  return shared_memory_limit() * threads / 1024 - (2 << 10);
}

// The intervals in the middle of the table, where most elements lie. Each block adds up their sums in its shared
// memory, those of the others in global memory.
struct Window {
  int first = 0, intervals = 0;

  Window() = default;
  // As many as fit, and as pay: a block clears its sums and adds them to global memory, so it must have at least
  // as many elements.
  Window(const LogitFunction& function, int64_t elements, int64_t blocks, int threads) {
    int64_t most = most_dynamic_bytes(threads) / (8 * function.width);
    most = std::min({most, function.intervals, elements / (blocks * function.width)});
    first = static_cast<int>((function.intervals - most) / 2);
    intervals = static_cast<int>(most);
  }
  size_t bytes(const LogitFunction& function) const { return size_t{8} * intervals * function.width; }
};

// Bits of |x|, ordered as |x|, with NaN above all numbers.
__device__ __forceinline__ unsigned long long magnitude_bits(double x) {
  x = fabs(x);
  unsigned long long bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
__device__ __forceinline__ unsigned magnitude_bits(float x) {
  x = fabsf(x);
  unsigned bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
__device__ __forceinline__ unsigned long long widen_bits(unsigned long long bits) {
  return bits;
}
__device__ __forceinline__ unsigned long long widen_bits(unsigned bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return magnitude_bits(static_cast<double>(x));
}
__device__ __forceinline__ double from_bits(unsigned long long bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// e of the sums; any value if largest is 0 or not finite.
__device__ __forceinline__ int quantum_exponent(double count, double largest) {
  int count_exponent, largest_exponent;
  const double product = frexp(count, &count_exponent) * frexp(largest, &largest_exponent);
  return 62 - count_exponent - largest_exponent + (product < 0.5 ? 1 : 0);
}

// The sums of one block of Threads. All its threads construct it together, add to it, and call finish
// together.
template <typename S, int Width, int Threads>
class IntervalSums {
 public:
  __device__ IntervalSums(const SumWorkspace& workspace, const Window& window, double count)
      : workspace_(workspace), window_(window) {
    const int e = quantum_exponent(count, from_bits(*workspace.largest));
    first_ = S(ldexp(1.0, e / 2));
    second_ = S(ldexp(1.0, e - e / 2));
    for (int i = threadIdx.x; i < 2 * Width * window.intervals; i += Threads) halves()[i] = 0;
    __syncthreads();
  }

  using Point = typename Piecewise<S, Width>::Point;

  __device__ __forceinline__ void add(const Point& point, S grad) {
    if (is_inside(point)) {
      add_inside(point, grad);
    } else {
      add_outside(point, grad);
    }
  }

  // Not so for NaN.
  __device__ __forceinline__ bool is_inside(const Point& point) const {
    const int last = static_cast<int>(workspace_.entries / Width) - 1;
    return (point.interval != 0 || point.u >= 0) && (point.interval != last || !(point.u > 1));
  }

  __device__ __forceinline__ void add_outside(const Point& point, S grad) {
    const S u = point.u;
    if (!(u > 1)) {  // w = 1, u, 0, 0
      if (grad == 0 && u == u) return;
      outside_[0] += u == u ? grad : u;
      outside_[1] += double(grad) * double(u);
    } else {  // w_m = 1 + m (u - 1)
      if (grad == 0) return;
      outside_[2] += grad;
      outside_[3] += double(grad) * double(u - 1);
    }
  }

  // |grad|: at most largest.
  __device__ __forceinline__ void add_inside(const Point& point, S grad) {
    const S u = point.u;
    grad = grad * first_ * second_;
    unsigned long long integer[Width] = {to_integer(grad), to_integer(grad * u)};
    if constexpr (Width == 4) {
      const S inside = point.inside, rest = u - inside;
      integer[2] = to_integer(grad * (inside * (inside + 2 * rest)));
      integer[3] = to_integer(grad * (inside * inside * (inside + 3 * rest)));
    }
    const auto place = static_cast<unsigned>(point.interval - window_.first);
    if (place < static_cast<unsigned>(window_.intervals)) {
      add_private(place, integer);
    } else {
      for (int m = 0; m < Width; ++m) add_global(point.interval, m, integer[m]);
    }
  }

  // Adds a NaN element. Called by one thread.
  __device__ void add_nan() { outside_[0] = outside_[1] = NAN; }

  // block: number of this block, below most_sum_blocks. scratch: shared, one value for each warp.
  __device__ void finish(int block, double* scratch) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const double sum = block_sum<Threads>(outside_[k], scratch);
      if (threadIdx.x == 0) workspace_.outside[4 * block + k] = sum;
    }
    for (int i = threadIdx.x; i < window_.intervals; i += Threads) {
      for (int m = 0; m < Width; ++m) {
        const unsigned long long low = *half(m, 0, i), high = *half(m, 1, i);
        add_global(window_.first + i, m, high << 32 | low);
      }
    }
  }

 private:
  static __device__ __forceinline__ unsigned* halves() {
    return reinterpret_cast<unsigned*>(HSTREE_SHARED_MEMORY);
  }
  // Half of sum m of an interval of the window. Equal halves of all intervals are consecutive, so that any bank
  // has some of them.
  __device__ __forceinline__ unsigned* half(int m, int is_high, int place) const {
    return halves() + ((2 * m + is_high) * window_.intervals + place);
  }
  static __device__ __forceinline__ unsigned long long to_integer(S value) {
    return static_cast<unsigned long long>(round_to_integer(value));
  }
  __device__ __forceinline__ void add_global(int interval, int m, unsigned long long integer) {
    if (integer != 0) atomicAdd(workspace_.sum + static_cast<int64_t>(interval) * Width + m, integer);
  }
  // Shared memory has 32-bit hardware additions, not 64-bit ones: adds both halves, with the carry of the lower
  // one.
  __device__ __forceinline__ void add_private(int place, const unsigned long long (&integer)[Width]) {
    unsigned before[Width];
#pragma unroll
    for (int m = 0; m < Width; ++m)
      before[m] = atomicAdd(half(m, 0, place), static_cast<unsigned>(integer[m]));
#pragma unroll
    for (int m = 0; m < Width; ++m) {
      const auto low = static_cast<unsigned>(integer[m]);
      const unsigned high = static_cast<unsigned>(integer[m] >> 32) + (before[m] + low < low ? 1u : 0u);
      if (high != 0) atomicAdd(half(m, 1, place), high);
    }
  }

  const SumWorkspace workspace_;
  const Window window_;
  S first_, second_;  // their product is 2^e
  double outside_[4] = {};
};

// The integer sum that IntervalSums wrote.
__device__ __forceinline__ double integer_sum(unsigned long long sum, double count, double largest) {
  return ldexp(static_cast<double>(static_cast<long long>(sum)), -quantum_exponent(count, largest));
}

// grad_table[j, m] = the sums of all blocks, inside and outside, and the `further` ones; all NaN if the
//   largest (that of the further sums, if any) is not finite
// workspace: written by IntervalSums; grad_table [K, width] of type Out, float32 or float64, contiguous.
// Sums in float64, rounded to Out once. Bytes: workspace and grad_table once. No atomics; the order of every
//   sum is fixed: deterministic.
// One thread for each element of grad_table; the blocks of intervals 0 and K - 1 add the sums outside.
template <typename Out>
__global__ void __launch_bounds__(table_threads)
    interval_sums_kernel(SumWorkspace workspace, FurtherSums further, int width, double count,
                         Out* grad_table) {
  __shared__ double scratch[table_threads / 32];
  const int64_t first = int64_t(blockIdx.x) * table_threads;
  const int64_t i = first + threadIdx.x;
  double outside[4] = {};
  if (first < width || first + table_threads > workspace.entries - width) {
    for (int block = threadIdx.x; block < most_sum_blocks; block += table_threads) {
      for (int k = 0; k < 4; ++k) outside[k] += workspace.outside[4 * block + k];
    }
    for (int k = 0; k < 4; ++k) outside[k] = block_sum<table_threads>(outside[k], scratch);
  }
  if (i >= workspace.entries) return;
  double largest = from_bits(*workspace.largest);
  double value = integer_sum(workspace.sum[i], count, largest);
  if (further.sum != nullptr) {
    largest = from_bits(*further.largest);
    value += integer_sum(further.sum[i], count, largest);
  }
  const int m = static_cast<int>(i % width);
  if (i < width && (m < 2 || outside[0] != outside[0])) value += outside[m < 2 ? m : 0];
  if (i >= workspace.entries - width) value += m == 0 ? outside[2] : outside[2] + m * outside[3];
  grad_table[i] = static_cast<Out>(largest < INFINITY ? value : NAN);
}

// count: the one given to IntervalSums.
template <typename Out>
void write_interval_sums(const LogitFunction& function, const SumWorkspace& workspace,
                         const FurtherSums& further, double count, Out* grad_table, cudaStream_t stream) {
  launch(interval_sums_kernel<Out>, grid_size(divide_up(workspace.entries, table_threads)), table_threads, 0,
         stream, workspace, further, function.width, count, grad_table);
}

}  // namespace hstree
