// Body of the sums into a table, under the rules of vector_impl.h.
#include "cpu/logit_function_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {

static inline uint64_t rounded(double quanta) {
#if defined(__x86_64__)
  return static_cast<uint64_t>(_mm_cvtsd_si64(_mm_set_sd(quanta)));
#elif defined(__aarch64__)
  return static_cast<uint64_t>(vcvtnd_s64_f64(quanta));
#else
  return static_cast<uint64_t>(__builtin_llrint(quanta));
#endif
}

template <bool shared>
static inline void add(uint64_t* sum, uint64_t quanta) {
  if (shared) {
    if (quanta) __atomic_fetch_add(sum, quanta, __ATOMIC_RELAXED);
  } else {
    *sum += quanta;
  }
}

// Elements whose gradients are pending: not yet added to the table.
template <typename A>
struct Waiting {
  static constexpr int64_t size = 256;
  alignas(64) IndexElement<A> index[size];
  alignas(64) A g[size];
  alignas(64) A u[size];
};

// Adds g w_m of the first elements to the sums of their intervals, one element at a time.
template <int width, bool shared, typename A>
static inline void add_singly(const TableSums& sums, const Waiting<A>& waiting, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint64_t* sum = sums.fixed + static_cast<int64_t>(waiting.index[i]) * width;
    const double quanta = waiting.g[i] * sums.scale, u = waiting.u[i];
    add<shared>(sum, rounded(quanta));
    add<shared>(sum + 1, rounded(quanta * u));
    if (width == 4) {
      const double uc = at_most(at_least(u, 0.0), 1.0), beyond = u - uc;
      add<shared>(sum + 2, rounded(quanta * (uc * (uc + 2 * beyond))));
      add<shared>(sum + 3, rounded(quanta * (uc * uc * (uc + 3 * beyond))));
    }
  }
}

#if HSTREE_VECTOR_BYTES == 64
static inline __m512d load_eight(const float* p) {
  return _mm512_maskz_cvtps_pd(0xff, _mm256_load_ps(p));
}
static inline __m512d load_eight(const double* p) {
  return _mm512_load_pd(p);
}
static inline __m512i rounded(__m512d quanta) {
  return _mm512_maskz_cvtpd_epi64(0xff, quanta);
}

// Unshared sums: rounds eight elements at once, adds two entries of the table at once.
template <int width, typename A>
static inline void add_in_pairs(const TableSums& sums, const Waiting<A>& waiting, int64_t count) {
  for (int64_t i = 0; i < count; i += 8) {
    const __m512d quanta = load_eight(waiting.g + i) * sums.scale, u = load_eight(waiting.u + i);
    alignas(64) __m512i pairs[width];  // even and odd elements of entries 0 and 1, then of 2 and 3
    const __m512i q0 = rounded(quanta), q1 = rounded(quanta * u);
    pairs[0] = _mm512_maskz_unpacklo_epi64(0xff, q0, q1);
    pairs[1] = _mm512_maskz_unpackhi_epi64(0xff, q0, q1);
    if (width == 4) {
      const Vector<double> v = bits_as<Vector<double>>(u);
      const __m512d uc = bits_as<__m512d>(at_most(at_least(v, Vector<double>{}), splat(1.0)));
      const __m512d beyond = u - uc;
      const __m512i q2 = rounded(quanta * (uc * (uc + 2 * beyond)));
      const __m512i q3 = rounded(quanta * (uc * uc * (uc + 3 * beyond)));
      pairs[width - 2] = _mm512_maskz_unpacklo_epi64(0xff, q2, q3);
      pairs[width - 1] = _mm512_maskz_unpackhi_epi64(0xff, q2, q3);
    }
    const __m128i* pair = reinterpret_cast<const __m128i*>(pairs);
#pragma GCC unroll 8
    for (int lane = 0; lane < 8; ++lane) {
      uint64_t* sum = sums.fixed + static_cast<int64_t>(waiting.index[i + lane]) * width;
#pragma GCC unroll 2
      for (int m = 0; m < width; m += 2) {
        __m128i* place = reinterpret_cast<__m128i*>(sum + m);
        _mm_storeu_si128(place, _mm_add_epi64(_mm_loadu_si128(place), pair[(m + lane % 2) * 4 + lane / 2]));
      }
    }
  }
}
#endif

// Adds g w_m of the first elements, a multiple of a vector's lanes, to the sums of their intervals.
template <int width, typename A>
static inline void add_fixed(const TableSums& sums, const Waiting<A>& waiting, int64_t count) {
  if (sums.shared) return add_singly<width, true>(sums, waiting, count);
#if HSTREE_VECTOR_BYTES == 64
  add_in_pairs<width>(sums, waiting, count);
#else
  add_singly<width, false>(sums, waiting, count);
#endif
}

// Lanes beyond the radius, one at a time. A gradient of 0 adds nothing, unless the input is NaN.
template <int width, typename A>
static inline void add_beyond(const TableSums& sums, Vector<A> t, Vector<A> u, Index<A> lanes, Vector<A> g) {
  for (int64_t i = 0; i < VectorOf<A>::width; ++i) {
    const double grad = g[i], place = u[i];
    const bool nan = place != place;
    if (!lanes[i] || (grad == 0 && !nan)) continue;
    const bool right = t[i] > 0;
    double* sum = sums.beyond + (right ? width : 0);
    sum[0] += nan ? place : grad;
    sum[1] += grad * place;
    if (width == 4 && (right || nan)) {
      sum[2] += grad * (1 + 2 * (place - 1));
      sum[3] += grad * (1 + 3 * (place - 1));
    }
  }
}

// Appends a vector of gradients g of the table to the pending ones. Lanes beyond the radius are added now.
template <int width, typename A>
static inline void enqueue(const Function<A>& f, const TableSums& sums, const Place<A>& place, Vector<A> g,
                           Waiting<A>* waiting, int64_t at) {
  const Index<A> inside = (place.t >= 0) & (place.t <= 2 * f.half);
  Vector<A> u = place.u;
  if (__builtin_expect(any<A>(~inside), 0)) {
    add_beyond<width, A>(sums, place.t, u, ~inside, g);
    g = inside ? g : Vector<A>{};
    u = inside ? u : Vector<A>{};
  }
  __builtin_memcpy(waiting->index + at, &place.index, sizeof place.index);
  store(waiting->g + at, g);
  store(waiting->u + at, u);
}

// Adds the gradient of one element, the first of `place`, if there is a table whose gradient is needed.
template <typename Kind, typename A>
static void add_one(const Function<A>& f, const TableSums& sums, const Place<A>& place, A grad) {
  if constexpr (Kind::width > 0) {
    if (!sums.fixed) return;
    Waiting<A> waiting;
    Vector<A> g = {};
    g[0] = grad;
    enqueue<Kind::width>(f, sums, place, g, &waiting, 0);
    add_fixed<Kind::width>(sums, waiting, VectorOf<A>::width);
  }
}

}  // namespace HSTREE_CAPABILITY
}  // namespace hstree::cpu
