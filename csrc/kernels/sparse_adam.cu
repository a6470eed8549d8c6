#include "common.cuh"
#include "sparse_adam.h"

namespace hstree {
namespace {

constexpr int threads = 256;

template <typename T, int Vector>
struct alignas(Vector * sizeof(T)) Pack {
  T element[Vector];
};

// m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2,
// w <- decay w - step_size m / (sqrt(v) + eps)
// Tensors as in SparseAdam, their rows aligned to packs of Vector elements. Rows out of range are skipped.
// Computation in Sum<T>, w rounded once. Work O(nnz S); reads 4 and writes 3 elements for each element of g.
// No atomics; rows are independent: deterministic. threadIdx.x loops over the packs of a row, threadIdx.y
// over the rows. Kingma and Ba (ICLR 2015), algorithm 1; Loshchilov and Hutter (ICLR 2019).
template <typename T, int Vector>
__global__ void __launch_bounds__(threads) sparse_adam_kernel(SparseAdam a) {
  using S = Sum<T>;
  const int64_t i = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (i >= a.visited) return;
  const int64_t outer = a.outer == nullptr ? 0 : a.outer[i], inner = a.inner[i];
  if (outer < 0 || outer >= a.outer_size || inner < 0 || inner >= a.inner_size) return;
  const int64_t row = outer * a.inner_size + inner, packs = a.features / Vector;
  const auto* values = static_cast<const Pack<T, Vector>*>(a.values) + i * packs;
  auto* weight = static_cast<Pack<T, Vector>*>(a.weight) + row * packs;
  auto* exp_avg = static_cast<Pack<S, Vector>*>(a.exp_avg) + row * packs;
  auto* exp_avg_sq = static_cast<Pack<S, Vector>*>(a.exp_avg_sq) + row * packs;
  const S sign = a.rule.maximize ? -1 : 1;
  const S beta1 = static_cast<S>(a.rule.beta1), rate1 = static_cast<S>(1 - a.rule.beta1);
  const S beta2 = static_cast<S>(a.rule.beta2), rate2 = static_cast<S>(1 - a.rule.beta2);
  const S decay = static_cast<S>(a.rule.decay), eps = static_cast<S>(a.rule.eps);
  const S step_size = static_cast<S>(a.rule.step_size);
  for (int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
    const Pack<T, Vector> g = values[p];
    Pack<T, Vector> w = weight[p];
    Pack<S, Vector> m = exp_avg[p], v = exp_avg_sq[p];
#pragma unroll
    for (int k = 0; k < Vector; ++k) {
      const S gradient = sign * to_sum(g.element[k]);
      m.element[k] = beta1 * m.element[k] + rate1 * gradient;
      v.element[k] = beta2 * v.element[k] + rate2 * (gradient * gradient);
      const S change = step_size * (m.element[k] / (sqrt(v.element[k]) + eps));
      store(&w.element[k], decay * to_sum(w.element[k]) - change);
    }
    weight[p] = w;
    exp_avg[p] = m;
    exp_avg_sq[p] = v;
  }
}

template <typename T, int Vector>
void launch_packs(const SparseAdam& a, cudaStream_t stream) {
  int lanes = 1;
  while (lanes < threads && lanes < a.features / Vector) lanes *= 2;
  const dim3 block(lanes, threads / lanes);
  launch(sparse_adam_kernel<T, Vector>, grid_size(divide_up(a.visited, block.y)), block, 0, stream, a);
}

}  // namespace

void sparse_adam(ScalarType type, const SparseAdam& a, cudaStream_t stream) {
  if (a.visited == 0 || a.features == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int vector = 16 / sizeof(Sum<T>);
    const bool vectors = aligned<T>(a.values, a.features, vector * sizeof(T)) &&
                         aligned<T>(a.weight, a.features, vector * sizeof(T)) &&
                         aligned<Sum<T>>(a.exp_avg, a.features, 16) &&
                         aligned<Sum<T>>(a.exp_avg_sq, a.features, 16);
    if (vectors) {
      launch_packs<T, vector>(a, stream);
    } else {
      launch_packs<T, 1>(a, stream);
    }
  });
}

}  // namespace hstree
