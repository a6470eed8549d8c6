// Body of the kernel of sparse_adam_, under the rules of vector_impl.h.
#include "cpu/vector_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {

static inline Vector<float> square_root(Vector<float> x) {
#if HSTREE_VECTOR_BYTES == 64
  return bits_as<Vector<float>>(_mm512_maskz_sqrt_ps(0xffff, bits_as<__m512>(x)));
#elif HSTREE_VECTOR_BYTES == 32
  return bits_as<Vector<float>>(_mm256_sqrt_ps(bits_as<__m256>(x)));
#elif defined(__aarch64__)
  return bits_as<Vector<float>>(vsqrtq_f32(bits_as<float32x4_t>(x)));
#else
  for (int i = 0; i < VectorOf<float>::width; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}
static inline Vector<double> square_root(Vector<double> x) {
#if HSTREE_VECTOR_BYTES == 64
  return bits_as<Vector<double>>(_mm512_maskz_sqrt_pd(0xff, bits_as<__m512d>(x)));
#elif HSTREE_VECTOR_BYTES == 32
  return bits_as<Vector<double>>(_mm256_sqrt_pd(bits_as<__m256d>(x)));
#elif defined(__aarch64__)
  return bits_as<Vector<double>>(vsqrtq_f64(bits_as<float64x2_t>(x)));
#else
  for (int i = 0; i < VectorOf<double>::width; ++i) x[i] = __builtin_sqrt(x[i]);
  return x;
#endif
}

// A product that is never fused with an addition: bitwise identical with and without FMA instructions.
template <typename V>
static inline V product(V a, V b) {
  V result = a * b;
#if defined(__x86_64__)
  __asm__("" : "+x"(result));
#elif defined(__aarch64__)
  __asm__("" : "+w"(result));
#endif
  return result;
}

// The update of one element, with constants in all lanes.
template <typename A>
struct AdamStep {
  Vector<A> sign, decay, beta1, beta2, rate1, rate2, eps, step_size;

  explicit AdamStep(const AdamRule& rule)
      : sign(splat<A>(rule.maximize ? -1 : 1)),
        decay(splat(static_cast<A>(rule.decay))),
        beta1(splat(static_cast<A>(rule.beta1))),
        beta2(splat(static_cast<A>(rule.beta2))),
        rate1(splat(static_cast<A>(1 - rule.beta1))),
        rate2(splat(static_cast<A>(1 - rule.beta2))),
        eps(splat(static_cast<A>(rule.eps))),
        step_size(splat(static_cast<A>(rule.step_size))) {}

  void operator()(Vector<A> g, Vector<A>& w, Vector<A>& m, Vector<A>& v) const {
    g = g * sign;
    m = product(m, beta1) + product(g, rate1);
    v = product(v, beta2) + product(product(g, g), rate2);
    w = product(w, decay) - product(m / (square_root(v) + eps), step_size);
  }
};

static inline int64_t visited_row(const SparseAdam& tensors, int64_t i) {
  return (tensors.outer ? tensors.outer[i] * tensors.inner_size : 0) + tensors.inner[i];
}

// Short rows that are consecutive in memory are updated as one. Meanwhile the next row is prefetched, a few
// lines at a time, because more would stall.
template <typename T>
static void sparse_adam(const SparseAdam& tensors, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  constexpr int64_t width = VectorOf<A>::width;
  constexpr int64_t longest = 64;  // largest number of elements in rows that are updated as one
  const int64_t features = tensors.features;
  const AdamStep<A> step(tensors.rule);
  const T* const values = static_cast<const T*>(tensors.values);
  T* const weights = static_cast<T*>(tensors.weight);
  A *const means = static_cast<A*>(tensors.exp_avg), *const squares = static_cast<A*>(tensors.exp_avg_sq);
  for (int64_t i = begin; i < end;) {
    const int64_t row = visited_row(tensors, i);
    int64_t rows = 1;
    while (i + rows < end && (rows + 1) * features <= longest &&
           visited_row(tensors, i + rows) == row + rows) {
      ++rows;
    }
    const int64_t count = rows * features, place = row * features;
    const int64_t ahead = i + rows < end ? visited_row(tensors, i + rows) * features : place;
    const T* g = values + i * features;
    T* w = weights + place;
    A *m = means + place, *v = squares + place;
    int64_t s = 0;
    for (; s + width <= count; s += width) {
      __builtin_prefetch(weights + ahead + s, 1);
      __builtin_prefetch(means + ahead + s, 1);
      __builtin_prefetch(squares + ahead + s, 1);
      Vector<A> weight = load(w + s), mean = load(m + s), square = load(v + s);
      step(load(g + s), weight, mean, square);
      store(w + s, weight);
      store(m + s, mean);
      store(v + s, square);
    }
    if (s < count) {
      const int64_t rest = count - s;
      Vector<A> weight = load_first(w + s, rest), mean = load_first(m + s, rest),
                square = load_first(v + s, rest);
      step(load_first(g + s, rest), weight, mean, square);
      store_first(w + s, rest, weight);
      store_first(m + s, rest, mean);
      store_first(v + s, rest, square);
    }
    i += rows;
  }
}

template <typename T>
static constexpr SparseAdamKernel<T> sparse_adam_kernel = {sparse_adam<T>};

}  // namespace HSTREE_CAPABILITY

HSTREE_KERNELS_OF_ELEMENTS(SparseAdamKernel, sparse_adam_kernel)

}  // namespace hstree::cpu
