// Rounds gradients that are summed up in the accumulation dtype.
#pragma once

#include "common.cuh"

namespace hstree {

constexpr int round_threads = 256;

// output[i] = value[i], rounded to T.  value [count] Sum<T>, output [count] T. One thread for each element.
template <typename T>
__global__ void __launch_bounds__(round_threads) round_kernel(const Sum<T>* value, T* output, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * round_threads + threadIdx.x;
  if (i < count) store(output + i, value[i]);
}

// The gradient is its sum, rounded, unless they are one buffer of `count` elements.
template <typename T>
void round_sums(const void* sum, void* gradient, int64_t count, cudaStream_t stream) {
  if (sum == gradient || count == 0) return;
  launch(round_kernel<T>, grid_size(divide_up(count, round_threads)), round_threads, 0, stream,
         static_cast<const Sum<T>*>(sum), static_cast<T*>(gradient), count);
}

}  // namespace hstree
