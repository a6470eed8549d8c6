#include "common.cuh"
#include "feature_gather.h"

namespace hstree {
namespace {

constexpr int threads = 256;
constexpr int64_t most_rows_of_blocks = 1024;

// output[n, t, s] = hidden[n, feature_index[t, s]]
// hidden [N, D], output [N, T, S] of one type T; feature_index [T, S] int32 in [0, D), others give NaN;
// contiguous. No arithmetic. Bytes: output once, hidden once for each tree. Keeps nothing for backward. No
// atomics; deterministic. One thread for each (t, s) loops over the rows n.
template <typename T>
__global__ void __launch_bounds__(threads)
    feature_gather_kernel(FeatureGather sizes, const T* hidden, T* output) {
  const int64_t width = sizes.trees * sizes.features;
  const int64_t column = int64_t(blockIdx.x) * threads + threadIdx.x;
  if (column >= width) return;
  const int64_t feature = sizes.feature_index[column];
  const bool sound = feature >= 0 && feature < sizes.in_features;
  for (int64_t row = blockIdx.y; row < sizes.rows; row += gridDim.y) {
    if (sound) {
      output[row * width + column] = __ldg(hidden + row * sizes.in_features + feature);
    } else {
      store(output + row * width + column, Sum<T>(nanf("")));
    }
  }
}

// inverse[t, d] = the s with feature_index[t, s] = d, or -1, by binary search.
// feature_index [T, S] int32, each row strictly increasing (otherwise some features are missed). inverse
// [T, D] int32. O(T D log S); no atomics; deterministic. One thread for each (t, d).
__global__ void __launch_bounds__(threads) inverse_index_kernel(FeatureGather sizes, int32_t* inverse) {
  const int64_t i = int64_t(blockIdx.x) * threads + threadIdx.x;
  if (i >= sizes.trees * sizes.in_features) return;
  const int32_t* index = sizes.feature_index + i / sizes.in_features * sizes.features;
  const int64_t feature = i % sizes.in_features;
  int64_t begin = 0, end = sizes.features;
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (index[middle] < feature) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  inverse[i] = begin < sizes.features && index[begin] == feature ? static_cast<int32_t>(begin) : -1;
}

// grad_hidden[n, d] = sum over trees t that have feature d of grad[n, t, inverse[t, d]]
// grad [N, T, S], grad_hidden [N, D] of one type T; inverse [T, D] int32; contiguous. A feature of no tree
// gets 0. Sums in Sum<T>, in the order of the trees, rounded once: deterministic, no atomics. Bytes: grad and
// grad_hidden once. One thread for each d loops over the rows n.
template <typename T>
__global__ void __launch_bounds__(threads)
    feature_gather_backward_kernel(FeatureGather sizes, const T* grad, const int32_t* inverse,
                                   T* grad_hidden) {
  const int64_t feature = int64_t(blockIdx.x) * threads + threadIdx.x;
  if (feature >= sizes.in_features) return;
  for (int64_t row = blockIdx.y; row < sizes.rows; row += gridDim.y) {
    Sum<T> sum = 0;
    for (int64_t tree = 0; tree < sizes.trees; ++tree) {
      const int32_t s = inverse[tree * sizes.in_features + feature];
      if (s >= 0) sum += to_sum(__ldg(grad + (row * sizes.trees + tree) * sizes.features + s));
    }
    store(grad_hidden + row * sizes.in_features + feature, sum);
  }
}

dim3 row_grid(int64_t columns, int64_t rows) {
  return dim3(grid_size(divide_up(columns, threads)),
              static_cast<unsigned>(rows < most_rows_of_blocks ? rows : most_rows_of_blocks));
}

}  // namespace

void feature_gather(ScalarType type, const FeatureGather& sizes, const void* hidden, void* output,
                    cudaStream_t stream) {
  const int64_t width = sizes.trees * sizes.features;
  if (width == 0 || sizes.rows == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(feature_gather_kernel<T>, row_grid(width, sizes.rows), threads, 0, stream, sizes,
           static_cast<const T*>(hidden), static_cast<T*>(output));
  });
}

void feature_gather_backward(ScalarType type, const FeatureGather& sizes, const void* grad, int32_t* inverse,
                             void* grad_hidden, cudaStream_t stream) {
  if (sizes.rows == 0 || sizes.in_features == 0) return;
  const int64_t entries = sizes.trees * sizes.in_features;
  if (entries > 0) {
    launch(inverse_index_kernel, grid_size(divide_up(entries, threads)), threads, 0, stream, sizes, inverse);
  }
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(feature_gather_backward_kernel<T>, row_grid(sizes.in_features, sizes.rows), threads, 0, stream,
           sizes, static_cast<const T*>(grad), inverse, static_cast<T*>(grad_hidden));
  });
}

}  // namespace hstree
