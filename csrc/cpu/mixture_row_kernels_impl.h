// Body of the kernels of mixture_row_kernels.h, under the rules of vector_impl.h.
#pragma once

#include "cpu/path_log_prob_kernels_impl.h"
#include "cpu/vector_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {
namespace mixture_row {

template <typename T>
static void features(const FeatureSubset& subset, int64_t features, const T* row, accumulate_t<T>* x) {
  gather(subset, 0, features, row, x);
}

template <typename T>
static void products(const accumulate_t<T>* x, const T* weight, const T* bias, const int32_t* row,
                     int64_t rows, int64_t features, accumulate_t<T>* z) {
  constexpr int64_t block = 16, ahead = 8;
  for (int64_t first = 0; first < rows; first += block) {
    const int64_t some = rows - first < block ? rows - first : block;
    const T* w[block];
    for (int64_t l = 0; l < some; ++l) {
      const int64_t n = first + l;
      w[l] = weight + (row ? row[n] : n) * features;
      if (row && n + ahead < rows) prefetch_row(weight + row[n + ahead] * features, features);
    }
    accumulate_t<T>* const out = z + first;
    level_scores<1>(&x, w, 0, some, features, &out);
    for (int64_t l = 0; bias && l < some; ++l) out[l] += element(bias + (row ? row[first + l] : first + l));
  }
}

// The largest element; if one is NaN, NaN or another element.
template <typename A>
static inline A largest(const A* z, int64_t width) {
  constexpr int64_t W = VectorOf<A>::width;
  A most = -static_cast<A>(__builtin_inf());
  Vector<A> mosts = splat(most);
  int64_t c = 0;
  for (; c + W <= width; c += W) {
    const Vector<A> some = load(z + c);
    mosts = some > mosts ? some : mosts;
  }
  for (int64_t i = 0; i < W; ++i) most = mosts[i] > most ? mosts[i] : most;
  for (; c < width; ++c) most = z[c] > most ? z[c] : most;
  return most;
}

// out = exp(z - most); returns the sum.
template <typename A>
static inline A exponentials(const A* z, int64_t width, A most, A* out) {
  constexpr int64_t W = VectorOf<A>::width;
  const int64_t c = width - width % W;
  A total = sum_of<A>(sum_of_vectors<A>(c, [&](int64_t at, Vector<A> sum) {
    const Vector<A> e = exponential(load(z + at) - splat(most));
    if (out) store(out + at, e);
    return sum + e;
  }));
  if (c < width) {
    const Vector<A> e = exponential(load_first(z + c, width - c) - splat(most));
    if (out) store_first(out + c, width - c, e);
    for (int64_t i = 0; i < width - c; ++i) total += e[i];
  }
  return total;
}

template <typename A>
static void log_softmax(A* z, int64_t width, A sharpness, A above) {
  if (sharpness != 1) {
    for (int64_t c = 0; c < width; ++c) z[c] *= sharpness;
  }
  const A most = largest(z, width), sum = exponentials<A>(z, width, most, nullptr);
  const A log_sum = sizeof(A) == 4 ? __builtin_logf(sum) : __builtin_log(sum);
  for (int64_t c = 0; c < width; ++c) z[c] = above + ((z[c] - most) - log_sum);
}

template <typename A>
static void shares(const A* z, int64_t width, A* out) {
  exponentials<A>(z, width, largest(z, width), out);
}

template <typename T>
static constexpr MixtureRowKernels<T> table = {features<T>, products<T>, log_softmax<accumulate_t<T>>,
                                               shares<accumulate_t<T>>};

}  // namespace mixture_row
}  // namespace HSTREE_CAPABILITY

HSTREE_KERNELS_OF_ELEMENTS(MixtureRowKernels, mixture_row::table)

}  // namespace hstree::cpu
