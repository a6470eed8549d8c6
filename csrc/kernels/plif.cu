#include "logit_function.cuh"
#include "plif.h"

namespace hstree {
namespace {

constexpr int threads = 1024;
// Blocks, which copy a table or add up its sums, are as few as fill a GPU twice, whatever the device, so that
// the order of sums does not depend on it.
constexpr int most_blocks = 256;
constexpr int64_t shared_reserve = 1 << 10;  // static, and what the system takes

// output = f(input) = P_j(uc) + P_j'(uc) (u - uc), P_j(u) = sum_m table[j, m] u^m; see LogitFunction
// input, output [size] of one type T in float32, float64, bfloat16, float16; table [K, Width] Sum<T>, Width 2
//   or 4, K in [1, 2^23]; contiguous. aligned: whether input and output are, to 16 bytes. No element: not
//   launched.
// Computed in Sum<T>, rounded to T once. A knot belongs to the interval on its right; beyond [-R, R] f goes
//   on straight. NaN gives NaN; +-inf gives the infinity of the slope's sign, NaN where the slope is 0.
// Work and bytes O(size): input once, output once, one interval of the table for each element, in 16 bytes at
//   most: from shared memory where is_staged, since a warp reads 32 places. Keeps nothing for backward. No
//   atomics; deterministic.
// One thread for each 16 bytes of input, at a stride of the grid. Width 2: PLIF, Ganea, Gelly, Becigneul and
//   Severyn, "Breaking the softmax bottleneck via learnable monotonic pointwise non-linearities" (ICML 2019).
template <typename T, int Width>
__global__ void __launch_bounds__(threads)
    plif_kernel(Piecewise<Sum<T>, Width> function, int64_t intervals, bool is_staged, int64_t size,
                bool aligned, const T* input, T* output) {
  constexpr int group = group_size<T>;
  if (is_staged) {
    auto* copy = reinterpret_cast<Sum<T>*>(HSTREE_SHARED_MEMORY);
    for (int64_t i = threadIdx.x; i < intervals * Width; i += threads) copy[i] = __ldg(function.table + i);
    __syncthreads();
    function.table = copy;
  }
  const int64_t stride = int64_t(gridDim.x) * threads * group;
  for (int64_t begin = (int64_t(blockIdx.x) * threads + threadIdx.x) * group; begin < size; begin += stride) {
    Sum<T> value[group];
    load_group(input, begin, size, aligned, Sum<T>(0), value);
#pragma unroll
    for (int k = 0; k < group; ++k) value[k] = function.value(function.at(value[k]));
    store_group(output, begin, size, aligned, value);
  }
}

// largest = max |grad|, as bits of float64; NaN if there is one
// grad [size] of type T in float32, float64, bfloat16, float16, contiguous; aligned: to 16 bytes. largest 0
//   before.
// Bytes: grad once. One atomicMax on an integer for each block: the same in any order, deterministic.
// One thread for each 16 bytes of grad, at a stride of the grid.
template <typename T>
__global__ void __launch_bounds__(threads)
    largest_grad_kernel(int64_t size, bool aligned, const T* grad, unsigned long long* largest) {
  using Bits = decltype(magnitude_bits(Sum<T>()));
  constexpr int group = group_size<T>;
  __shared__ Bits scratch[threads / 32];
  const int64_t stride = int64_t(gridDim.x) * threads * group;
  Bits bits = 0;
  for (int64_t begin = (int64_t(blockIdx.x) * threads + threadIdx.x) * group; begin < size; begin += stride) {
    Sum<T> value[group];
    load_group(grad, begin, size, aligned, Sum<T>(0), value);
#pragma unroll
    for (int k = 0; k < group; ++k) {
      const Bits other = magnitude_bits(value[k]);
      bits = other > bits ? other : bits;
    }
  }
  bits = block_max<threads>(bits, scratch);
  if (threadIdx.x == 0) atomicMax(largest, widen_bits(bits));
}

// grad_input = grad * f'(input), f'(x) = P_j'(uc) rate
// sums[j, m] = sum of grad * w_m over the elements of interval j, w_m = uc^m + m uc^(m-1) (u - uc)
// grad, input, grad_input [size] of one type T in float32, float64, bfloat16, float16; table [K, Width]
//   Sum<T>; contiguous. aligned: whether grad, input and grad_input are, to 16 bytes. workspace: zero but for
//   largest = max |grad|. No element: not launched.
// grad_input in Sum<T>, rounded to T once; NaN at a NaN input, which makes row 0 of the sums NaN. w_m in
//   Sum<T>; sums in 64-bit integers inside [-R, R], in float64 outside. An infinite input adds infinity to
//   the sums of its end, but for w_0, and for w_2 and w_3 of interval 0. grad infinite or NaN: all sums NaN.
// Work and bytes O(size): grad, input, grad_input once, one interval of the table and Width integers for each
//   element.
// Integer atomics, in shared memory where is_private; deterministic, whatever the device.
// One thread for each 16 bytes of input, at a stride of the grid.
template <typename T, int Width>
__global__ void __launch_bounds__(threads)
    plif_backward_kernel(Piecewise<Sum<T>, Width> function, int64_t size, bool aligned, bool is_private,
                         const T* grad, const T* input, SumWorkspace workspace, T* grad_input) {
  using S = Sum<T>;
  constexpr int group = group_size<T>;
  const int64_t stride = int64_t(gridDim.x) * threads * group;
  IntervalSums<S, Width, threads> sums(workspace, static_cast<double>(size), is_private);
  for (int64_t begin = (int64_t(blockIdx.x) * threads + threadIdx.x) * group; begin < size; begin += stride) {
    S x[group], g[group];
    load_group(input, begin, size, aligned, S(0), x);
    load_group(grad, begin, size, aligned, S(0), g);
#pragma unroll
    for (int k = 0; k < group; ++k) {
      const auto point = function.at(x[k]);
      sums.add(point, g[k]);
      x[k] = g[k] * function.derivative(point);
    }
    store_group(grad_input, begin, size, aligned, x);
  }
  __shared__ double scratch[threads / 32];
  sums.finish(blockIdx.x, scratch);
}

int64_t blocks_of(int64_t elements, int group) {
  const int64_t blocks = divide_up(elements, threads * group);
  return blocks < most_blocks ? blocks : most_blocks;
}

static_assert(most_blocks <= most_sum_blocks);

// Dynamic shared memory that a block of these kernels may have.
int64_t shared_bytes() {
  return shared_memory_limit() - shared_reserve;
}

}  // namespace

void plif(ScalarType type, const LogitFunction& function, int64_t elements, const void* input, void* output,
          cudaStream_t stream) {
  if (elements == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool aligned = aligned_to_16(input) && aligned_to_16(output);
    const auto grid = static_cast<unsigned>(blocks_of(elements, group_size<T>));
    const int64_t entries = function.intervals * function.width;
    const int64_t table_bytes = entries * static_cast<int64_t>(sizeof(Sum<T>));
    const bool is_staged = table_bytes <= shared_bytes() / 2 && entries * grid <= elements;
    with_table<Sum<T>>(function, [&](auto f) {
      launch(plif_kernel<T, f.width>, grid, threads, is_staged ? table_bytes : 0, stream, f,
             function.intervals, is_staged, elements, aligned, static_cast<const T*>(input),
             static_cast<T*>(output));
    });
  });
}

int64_t plif_workspace_bytes(const LogitFunction& function) {
  return interval_sums_bytes(function);
}

void plif_backward(ScalarType type, const LogitFunction& function, int64_t elements, const void* grad,
                   const void* input, void* workspace, void* grad_input, void* grad_table,
                   cudaStream_t stream) {
  if (elements == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool aligned = aligned_to_16(grad) && aligned_to_16(input) && aligned_to_16(grad_input);
    const int64_t blocks = blocks_of(elements, group_size<T>);
    const auto grid = static_cast<unsigned>(blocks);
    const size_t bytes = private_bytes(function, elements, blocks, shared_bytes());
    const SumWorkspace sums(function, workspace);
    launch(largest_grad_kernel<T>, grid, threads, 0, stream, elements, aligned_to_16(grad),
           static_cast<const T*>(grad), sums.largest);
    with_table<Sum<T>>(function, [&](auto f) {
      launch(plif_backward_kernel<T, f.width>, grid, threads, bytes, stream, f, elements, aligned, bytes > 0,
             static_cast<const T*>(grad), static_cast<const T*>(input), sums, static_cast<T*>(grad_input));
    });
    write_interval_sums(function, sums, static_cast<double>(elements), static_cast<Sum<T>*>(grad_table),
                        stream);
  });
}

}  // namespace hstree
