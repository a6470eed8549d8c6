#include "logit_function.cuh"
#include "piecewise.h"

namespace hstree {
namespace {

constexpr int threads = 1024;
// Each block copies a table or adds up its sums, so the number of blocks is just enough to fill a GPU twice.
constexpr int most_blocks = 256;

// Number of groups of elements that a thread loads at once, limited by the registers of 1024 threads: 64 KiB
// for each block.
constexpr int forward_steps = 4;
template <typename S, int Width>
constexpr int backward_steps = sizeof(S) * Width > 16 ? 1 : 2;  // of input and of grad

// Number of places that the sample of grad is taken from, each read by one warp.
constexpr int sample_blocks = 64;
constexpr int64_t sample_places = sample_blocks * threads / 32;
// An array of at most this many elements is sampled whole.
template <typename T>
constexpr int64_t sample_size = sample_places * 32 * group_size<T>;

constexpr int most_late = 128;  // late elements that each block lists for late_sums_kernel

// The first element of this thread.
template <typename T>
__device__ __forceinline__ int64_t first_element() {
  return (int64_t(blockIdx.x) * threads + threadIdx.x) * group_size<T>;
}

// output = f(input) = P_j(uc) + P_j'(uc) (u - uc), P_j(u) = sum_m table[j, m] u^m; see LogitFunction
// input, output [size] of one type T in float32, float64, bfloat16, float16; table [K, Width] Sum<T>, Width 2
//   or 4, K in [1, 2^23]; contiguous. aligned: whether input and output are aligned to 16 bytes. Not launched
//   without elements.
// Computed in Sum<T>, rounded to T once. A knot belongs to the interval on its right; beyond [-R, R] f
//   continues linearly. NaN gives NaN; +-inf gives an infinity with the sign of f there, NaN if the slope is
//   0.
// Work and bytes O(size): input once, output once, one interval of the table for each element, at most 16
//   bytes, from shared memory if is_staged, since a warp reads 32 places. Keeps nothing for backward. No
//   atomics; deterministic.
// The threads of the grid stride over groups of 16 bytes, forward_steps of them in flight. Width 2:
//   PLIF, Ganea, Gelly, Becigneul and Severyn, "Breaking the softmax bottleneck via learnable monotonic
//   pointwise non-linearities" (ICML 2019).
template <typename T, int Width>
__global__ void __launch_bounds__(threads, 1)
    piecewise_kernel(Piecewise<Sum<T>, Width> function, int64_t intervals, bool is_staged, int64_t size,
                     bool aligned, const T* input, T* output) {
  constexpr int group = group_size<T>;
  if (is_staged) {
    auto* copy = reinterpret_cast<Sum<T>*>(HSTREE_SHARED_MEMORY);
    for (int64_t i = threadIdx.x; i < intervals * Width; i += threads) copy[i] = __ldg(function.table + i);
    __syncthreads();
    function.table = copy;
  }
  const auto apply = [&](Sum<T>(&value)[group]) {
#pragma unroll
    for (int k = 0; k < group; ++k) value[k] = function.value(function.at(value[k]));
  };
  const int64_t stride = int64_t(gridDim.x) * threads * group;
  int64_t begin = first_element<T>();
  for (; aligned && begin + (forward_steps - 1) * stride + group <= size; begin += forward_steps * stride) {
    uint4 raw[forward_steps];
#pragma unroll
    for (int s = 0; s < forward_steps; ++s)
      raw[s] = *reinterpret_cast<const uint4*>(input + begin + s * stride);
#pragma unroll
    for (int s = 0; s < forward_steps; ++s) {
      Sum<T> value[group];
      unpack_group<T>(raw[s], value);
      apply(value);
      store_raw(output + begin + s * stride, pack_group<T>(value));
    }
  }
  for (; begin < size; begin += stride) {
    Sum<T> value[group];
    load_group(input, begin, size, aligned, Sum<T>(0), value);
    apply(value);
    store_group(output, begin, size, aligned, value);
  }
}

// Number of coefficients that the slope of an interval needs.
template <int Width>
constexpr int slope_width = Width == 2 ? 1 : Width;

// What piecewise_backward keeps on the device in addition to IntervalSums, whose `largest`, the limit, is
// that of the sample. Elements inside [-R, R] with |grad| above the limit are late: they are summed in
// `further`, with the quantum of the largest |grad| of all elements, which is known at the end of the pass.
struct LateWorkspace {
  FurtherSums further;
  int64_t* count;    // [most_blocks], late elements of each block
  int64_t* element;  // [most_blocks, most_late], the first of them, in any order

  LateWorkspace(const LogitFunction& function, void* workspace) {
    further.largest = static_cast<unsigned long long*>(workspace);
    further.sum = further.largest + 1;
    count = reinterpret_cast<int64_t*>(further.sum + function.intervals * function.width);
    element = count + most_blocks;
  }
  static int64_t bytes(const LogitFunction& function) {
    return 8 * (1 + function.intervals * function.width + most_blocks * (1 + most_late));
  }
};

// Where the sample of a place begins, a multiple of a group: in the place-th of sample_places equal parts of
// grad, at an offset hashed from place, so that it misses no periodic pattern of grad.
template <typename T>
__device__ __forceinline__ int64_t sample_begin(int64_t size, int64_t place) {
  constexpr int64_t run = 32 * group_size<T>;
  if (size <= sample_size<T>) return place * run;
  const int64_t part = size / sample_places;
  unsigned hash = static_cast<unsigned>(place) * 2654435761u;
  hash ^= hash >> 15;
  const auto offset =
      static_cast<int64_t>(static_cast<double>(hash) * 0x1p-32 * static_cast<double>(part - run));
  return (place * part + offset) / group_size<T> * group_size<T>;
}

// limit = max |grad| over the sample, as bits of float64; NaN if there is one
// The sample: sample_places runs of 512 bytes; all of grad up to sample_size elements.
// grad [size] of type T in float32, float64, bfloat16, float16, contiguous; aligned: whether grad is aligned
//   to 16 bytes. limit must be 0 before.
// Bytes: 1 MiB at most. One atomicMax on an integer for each block: the same in any order, deterministic.
// One warp for each run.
template <typename T>
__global__ void __launch_bounds__(threads)
    sample_kernel(int64_t size, bool aligned, const T* grad, unsigned long long* limit) {
  using Bits = decltype(magnitude_bits(Sum<T>()));
  constexpr int group = group_size<T>;
  __shared__ Bits scratch[threads / 32];
  const int64_t place = (int64_t(blockIdx.x) * threads + threadIdx.x) / 32;
  Sum<T> value[group];
  load_group(grad, sample_begin<T>(size, place) + threadIdx.x % 32 * group, size, aligned, Sum<T>(0), value);
  Bits bits = 0;
#pragma unroll
  for (int k = 0; k < group; ++k) {
    const Bits other = magnitude_bits(value[k]);
    bits = other > bits ? other : bits;
  }
  bits = block_max<threads>(bits, scratch);
  if (threadIdx.x == 0) atomicMax(limit, widen_bits(bits));
}

// grad_input = grad * f'(input), f'(x) = P_j'(uc) rate
// sums[j, m] = sum of grad * w_m over the elements of interval j, w_m = uc^m + m uc^(m-1) (u - uc), except
//   for late elements, which are listed
// late.further.largest = max |grad|, as bits of float64; NaN if there is one
// grad, input, grad_input [size] of one type T in float32, float64, bfloat16, float16; table [K, Width]
//   Sum<T>; contiguous. aligned: whether grad, input and grad_input are aligned to 16 bytes. workspace and
//   late: zero except for the limit, from sample_kernel. Not launched without elements.
// grad_input in Sum<T>, rounded to T once; NaN at a NaN input, which makes row 0 of the sums NaN. w_m in
//   Sum<T>; sums in 64-bit integers inside [-R, R], in float64 outside. An infinite input adds infinity to
//   the sums of its end interval, except for w_0, and for w_2 and w_3 of interval 0. If a grad is infinite or
//   NaN, all sums are NaN.
// Work and bytes O(size): grad, input, grad_input once, the slope of one interval and Width integers for each
//   element.
// Integer atomics, in shared memory for the window; behind its sums are the coefficients of f' if
//   is_staged. Deterministic on every device: which elements are late depends only on grad and its size.
// The threads of the grid stride over groups of 16 bytes, backward_steps of input and of grad in flight.
template <typename T, int Width>
__global__ void __launch_bounds__(threads)
    piecewise_backward_kernel(Piecewise<Sum<T>, Width> function, int64_t size, bool aligned, Window window,
                              bool is_staged, const T* grad, const T* input, SumWorkspace workspace,
                              LateWorkspace late, T* grad_input) {
  using S = Sum<T>;
  using Bits = decltype(magnitude_bits(S()));
  constexpr int group = group_size<T>;
  __shared__ double scratch[threads / 32];
  __shared__ Bits largest_scratch[threads / 32];
  __shared__ unsigned late_count;
  if (threadIdx.x == 0) late_count = 0;
  // The slope of a linear interval is one number.
  const S* rise = function.table + 1;
  int pitch = 2;
  if (is_staged) {
    auto* copy = reinterpret_cast<S*>(HSTREE_SHARED_MEMORY + 8 * Width * window.intervals);
    constexpr int width = slope_width<Width>;
    const int64_t count = workspace.entries / Width * width;
    for (int64_t i = threadIdx.x; i < count; i += threads)
      copy[i] = __ldg(function.table + (width == 1 ? 2 * i + 1 : i));
    rise = function.table = copy;
    pitch = 1;
  }
  IntervalSums<S, Width, threads> sums(workspace, window, static_cast<double>(size));
  const Bits limit = magnitude_bits(static_cast<S>(from_bits(*workspace.largest)));
  Bits largest = 0;
  // x <- g f'(x), for the elements from `first` on.
  const auto apply = [&](int64_t first, S(&x)[group], const S(&g)[group]) {
#pragma unroll
    for (int k = 0; k < group; ++k) {
      typename Piecewise<S, Width>::Point point;
      if constexpr (Width == 2) {
        point = function.locate(x[k]);
        point.coefficient[1] = rise[static_cast<int64_t>(point.interval) * pitch];
      } else {
        point = function.at(x[k]);
      }
      const Bits bits = magnitude_bits(g[k]);
      largest = bits > largest ? bits : largest;
      if (!sums.is_inside(point)) {
        sums.add_outside(point, g[k]);
      } else if (bits <= limit) {
        sums.add_inside(point, g[k]);
      } else {
        const unsigned place = atomicAdd(&late_count, 1u);
        if (place < most_late) late.element[blockIdx.x * most_late + place] = first + k;
      }
      x[k] = g[k] * function.derivative(point);
    }
  };
  constexpr int steps = backward_steps<S, Width>;
  const int64_t stride = int64_t(gridDim.x) * threads * group;
  int64_t begin = first_element<T>();
  for (; aligned && begin + (steps - 1) * stride + group <= size; begin += steps * stride) {
    uint4 raw_input[steps], raw_grad[steps];
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      raw_input[s] = *reinterpret_cast<const uint4*>(input + begin + s * stride);
      raw_grad[s] = *reinterpret_cast<const uint4*>(grad + begin + s * stride);
    }
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      S x[group], g[group];
      unpack_group<T>(raw_input[s], x);
      unpack_group<T>(raw_grad[s], g);
      apply(begin + s * stride, x, g);
      store_raw(grad_input + begin + s * stride, pack_group<T>(x));
    }
  }
  for (; begin < size; begin += stride) {
    S x[group], g[group];
    load_group(input, begin, size, aligned, S(0), x);
    load_group(grad, begin, size, aligned, S(0), g);
    apply(begin, x, g);
    store_group(grad_input, begin, size, aligned, x);
  }
  largest = block_max<threads>(largest, largest_scratch);
  if (threadIdx.x == 0) {
    atomicMax(late.further.largest, widen_bits(largest));
    late.count[blockIdx.x] = late_count;
  }
  sums.finish(blockIdx.x, scratch);
}

// late.further.sum[j, m] = sum of grad * w_m over the late elements of interval j
// Arguments as piecewise_backward_kernel wrote them, with the same grid. Does nothing if the largest |grad|
// is not finite. Bytes: the late elements; a block with more than most_late of them reads all its grad again.
// Integer atomics in global memory: deterministic.
// One thread for each late element, or for each 16 bytes of grad, striding over the grid.
template <typename T, int Width>
__global__ void __launch_bounds__(threads)
    late_sums_kernel(Piecewise<Sum<T>, Width> function, int64_t size, bool aligned, const T* grad,
                     const T* input, SumWorkspace workspace, LateWorkspace late) {
  using S = Sum<T>;
  constexpr int group = group_size<T>;
  const int64_t count = late.count[blockIdx.x];
  if (count == 0 || !(from_bits(*late.further.largest) < INFINITY)) return;
  const auto limit = magnitude_bits(static_cast<S>(from_bits(*workspace.largest)));
  workspace.largest = late.further.largest;
  workspace.sum = late.further.sum;
  IntervalSums<S, Width, threads> sums(workspace, Window(), static_cast<double>(size));
  const auto add = [&](int64_t element) {
    const auto point = function.locate(to_sum(input[element]));
    if (sums.is_inside(point)) sums.add_inside(point, to_sum(grad[element]));
  };
  if (count <= most_late) {
    if (threadIdx.x < count) add(late.element[blockIdx.x * most_late + threadIdx.x]);
    return;
  }
  const int64_t stride = int64_t(gridDim.x) * threads * group;
  for (int64_t begin = first_element<T>(); begin < size; begin += stride) {
    S g[group];
    load_group(grad, begin, size, aligned, S(0), g);
    for (int k = 0; k < group; ++k)
      if (magnitude_bits(g[k]) > limit) add(begin + k);
  }
}

int64_t blocks_of(int64_t elements, int group) {
  const int64_t blocks = divide_up(elements, threads * group);
  return blocks < most_blocks ? blocks : most_blocks;
}

static_assert(most_blocks <= most_sum_blocks);

}  // namespace

void piecewise(ScalarType type, const LogitFunction& function, int64_t elements, const void* input,
               void* output, cudaStream_t stream) {
  if (elements == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool aligned = aligned_to_16(input) && aligned_to_16(output);
    const auto grid = static_cast<unsigned>(blocks_of(elements, group_size<T>));
    const int64_t entries = function.intervals * function.width;
    const int64_t table_bytes = entries * static_cast<int64_t>(sizeof(Sum<T>));
    const bool is_staged = table_bytes <= most_dynamic_bytes(threads) / 2 && entries * grid <= elements;
    with_table<Sum<T>>(function, [&](auto f) {
      launch(piecewise_kernel<T, f.width>, grid, threads, is_staged ? table_bytes : 0, stream, f,
             function.intervals, is_staged, elements, aligned, static_cast<const T*>(input),
             static_cast<T*>(output));
    });
  });
}

int64_t piecewise_workspace_bytes(const LogitFunction& function) {
  return interval_sums_bytes(function) + LateWorkspace::bytes(function);
}

void piecewise_backward(ScalarType type, const LogitFunction& function, int64_t elements, const void* grad,
                        const void* input, void* workspace, void* grad_input, void* grad_table,
                        cudaStream_t stream) {
  if (elements == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* grads = static_cast<const T*>(grad);
    const auto* inputs = static_cast<const T*>(input);
    const bool aligned = aligned_to_16(grad) && aligned_to_16(input) && aligned_to_16(grad_input);
    const int64_t blocks = blocks_of(elements, group_size<T>);
    const auto grid = static_cast<unsigned>(blocks);
    const auto sampled = static_cast<unsigned>(blocks < sample_blocks ? blocks : sample_blocks);
    const Window window(function, elements, blocks, threads);
    const size_t sum_bytes = window.bytes(function);
    const SumWorkspace sums(function, workspace);
    const LateWorkspace late(function,
                             static_cast<unsigned char*>(workspace) + interval_sums_bytes(function));
    launch(sample_kernel<T>, sampled, threads, 0, stream, elements, aligned_to_16(grad), grads, sums.largest);
    with_table<Sum<T>>(function, [&](auto f) {
      const int64_t slopes = function.intervals * slope_width<f.width>;
      const size_t bytes = sum_bytes + static_cast<size_t>(slopes) * sizeof(Sum<T>);
      const bool is_staged = window.intervals == function.intervals &&
                             static_cast<int64_t>(bytes) <= most_dynamic_bytes(threads);
      launch(piecewise_backward_kernel<T, f.width>, grid, threads, is_staged ? bytes : sum_bytes, stream, f,
             elements, aligned, window, is_staged, grads, inputs, sums, late, static_cast<T*>(grad_input));
      if (elements > sample_size<T>)
        launch(late_sums_kernel<T, f.width>, grid, threads, 0, stream, f, elements, aligned_to_16(grad),
               grads, inputs, sums, late);
    });
    write_interval_sums(function, sums, late.further, static_cast<double>(elements),
                        static_cast<Sum<T>*>(grad_table), stream);
  });
}

}  // namespace hstree
