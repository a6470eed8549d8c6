#include "logit_function.cuh"
#include "scale.h"

namespace hstree {
namespace {

constexpr int scale_threads = 256;
constexpr int64_t most_blocks = 4096;

// x <- factor x, rounded to T: x [count], contiguous; factor: one float32.
// Reads and writes x once, and not at all if factor is 1, as the gradient of a loss is in loss.backward().
// torch multiplies numbers of 16 bits by one of float32 at a quarter of the speed, and by 1 too.
// The threads of the grid stride over groups of 16 bytes.
template <typename T>
__global__ void __launch_bounds__(scale_threads) scale_kernel(T* x, int64_t count, const float* factor) {
  constexpr int group = group_size<T>;
  const float by = *factor;
  if (by == 1) return;
  const bool aligned = aligned_to_16(x);
  const int64_t stride = int64_t(gridDim.x) * scale_threads * group;
  for (int64_t begin = (int64_t(blockIdx.x) * scale_threads + threadIdx.x) * group; begin < count;
       begin += stride) {
    float value[group];
    load_group<T>(x, begin, count, aligned, 0.0f, value);
#pragma unroll
    for (int k = 0; k < group; ++k) value[k] *= by;
    store_group<T>(x, begin, count, aligned, value);
  }
}

template <typename T>
void run(void* x, int64_t count, const float* factor, cudaStream_t stream) {
  const int64_t blocks = divide_up(count, scale_threads * group_size<T>);
  launch(scale_kernel<T>, grid_size(blocks < most_blocks ? blocks : most_blocks), scale_threads, 0, stream,
         static_cast<T*>(x), count, factor);
}

}  // namespace

void scale(ScalarType type, void* x, int64_t count, const float* factor, cudaStream_t stream) {
  if (count == 0) return;
  if (type == ScalarType::bfloat16) return run<__nv_bfloat16>(x, count, factor, stream);
  if (type == ScalarType::float16) return run<__half>(x, count, factor, stream);
  if (type == ScalarType::float32) return run<float>(x, count, factor, stream);
  throw std::runtime_error("hstree: scale_ supports float32, bfloat16 and float16 only");
}

}  // namespace hstree
