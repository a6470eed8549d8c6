// Body of the logit kernels, under the rules of vector_impl.h.
#include "cpu/vector_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {

// gss_n: k - 1 = n / 2, where exp(f) = exp(x) sigmoid(x - c)^(n / 2) takes one exp.
enum class Kind { identity, gss, gss_1, gss_2, gss_3, gss_4, linear, cubic };

static constexpr int half_powers(Kind kind) {
  return kind >= Kind::gss_1 && kind <= Kind::gss_4 ? static_cast<int>(kind) - static_cast<int>(Kind::gss)
                                                    : 0;
}
static constexpr bool has_table(Kind kind) {
  return kind >= Kind::linear;
}

template <Kind kind>
struct KindIs {
  static constexpr Kind value = kind;
};

// Lanes as integers of the size of A.
template <typename A>
struct IndexOf;
template <>
struct IndexOf<float> {
  typedef I32 type;
  typedef int32_t element;
};
template <>
struct IndexOf<double> {
  typedef I64 type;
  typedef int64_t element;
};
template <typename A>
using Index = typename IndexOf<A>::type;
template <typename A>
using IndexElement = typename IndexOf<A>::element;

template <typename A>
static constexpr A infinity = static_cast<A>(__builtin_inf());

// NaN stays NaN.
template <typename V>
static inline V at_least(V x, V bound) {
  return bound > x ? bound : x;
}
template <typename V>
static inline V at_most(V x, V bound) {
  return bound < x ? bound : x;
}

template <typename A>
static inline bool any(Index<A> mask) {
#if HSTREE_VECTOR_BYTES == 64
  return _mm512_movepi32_mask(bits_as<__m512i>(mask)) != 0;
#elif HSTREE_VECTOR_BYTES == 32
  return _mm256_movemask_epi8(bits_as<__m256i>(mask)) != 0;
#else
  const I64 halves = bits_as<I64>(mask);
  return (halves[0] | halves[1]) != 0;
#endif
}

template <typename T>
static inline Vector<accumulate_t<T>> load_first(const T* p, int64_t count, accumulate_t<T> fill) {
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width;
  accumulate_t<T> padded[W];
  for (int64_t i = 0; i < W; ++i) padded[i] = i < count ? element(p + i) : fill;
  return load(padded);
}

// Rows index of table [K, width], transposed.
template <int width, typename A>
static inline void lookup(const A* table, Index<A> index, Vector<A>* a) {
  constexpr int64_t W = VectorOf<A>::width;
  A columns[width][W];
  for (int64_t i = 0; i < W; ++i) {
    const A* row = table + index[i] * width;
    for (int m = 0; m < width; ++m) columns[m][i] = row[m];
  }
  for (int m = 0; m < width; ++m) a[m] = load(columns[m]);
}

#if HSTREE_VECTOR_BYTES == 64
template <>
inline void lookup<2, float>(const float* table, I32 index, Vector<float>* a) {
  const __m512i i = bits_as<__m512i>(index);
  const __m512i zero = _mm512_setzero_si512();
  __mmask8 all = 0xff;
  asm("" : "+k"(all));  // or the zeros are optimised away, and a gather waits for what its register held
  const __m512i lower =
      _mm512_mask_i32gather_epi64(zero, all, _mm512_maskz_extracti64x4_epi64(0xf, i, 0), table, 8);
  const __m512i upper =
      _mm512_mask_i32gather_epi64(zero, all, _mm512_maskz_extracti64x4_epi64(0xf, i, 1), table, 8);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  a[0] = bits_as<Vector<float>>(_mm512_permutex2var_epi32(lower, even, upper));
  a[1] = bits_as<Vector<float>>(
      _mm512_permutex2var_epi32(lower, _mm512_or_si512(even, _mm512_set1_epi32(1)), upper));
}

// 128-bit loads, then four transpositions of 4 x 4.
template <>
inline void lookup<4, float>(const float* table, I32 index, Vector<float>* a) {
  int32_t at[16];
  __builtin_memcpy(at, &index, sizeof at);
  __m512 row[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto load_row = [&](int lane) { return _mm_loadu_ps(table + 4 * static_cast<int64_t>(at[lane])); };
    row[i] = _mm512_maskz_broadcast_f32x4(0xffff, load_row(i));
    row[i] = _mm512_maskz_insertf32x4(0xffff, row[i], load_row(i + 4), 1);
    row[i] = _mm512_maskz_insertf32x4(0xffff, row[i], load_row(i + 8), 2);
    row[i] = _mm512_maskz_insertf32x4(0xffff, row[i], load_row(i + 12), 3);
  }
  const __m512d a01 = _mm512_castps_pd(_mm512_maskz_unpacklo_ps(0xffff, row[0], row[1]));
  const __m512d a23 = _mm512_castps_pd(_mm512_maskz_unpacklo_ps(0xffff, row[2], row[3]));
  const __m512d b01 = _mm512_castps_pd(_mm512_maskz_unpackhi_ps(0xffff, row[0], row[1]));
  const __m512d b23 = _mm512_castps_pd(_mm512_maskz_unpackhi_ps(0xffff, row[2], row[3]));
  a[0] = bits_as<Vector<float>>(_mm512_maskz_unpacklo_pd(0xff, a01, a23));
  a[1] = bits_as<Vector<float>>(_mm512_maskz_unpackhi_pd(0xff, a01, a23));
  a[2] = bits_as<Vector<float>>(_mm512_maskz_unpacklo_pd(0xff, b01, b23));
  a[3] = bits_as<Vector<float>>(_mm512_maskz_unpackhi_pd(0xff, b01, b23));
}
#elif HSTREE_VECTOR_BYTES == 32
template <>
inline void lookup<2, float>(const float* table, I32 index, Vector<float>* a) {
  const __m256i i = bits_as<__m256i>(index);
  const long long* pairs = reinterpret_cast<const long long*>(table);
  const __m256i zero = _mm256_setzero_si256();
  __m256i all = _mm256_set1_epi64x(-1);
  asm("" : "+x"(all));  // or the zeros are optimised away, and a gather waits for what its register held
  const __m256 lower =
      _mm256_castsi256_ps(_mm256_mask_i32gather_epi64(zero, pairs, _mm256_castsi256_si128(i), all, 8));
  const __m256 upper =
      _mm256_castsi256_ps(_mm256_mask_i32gather_epi64(zero, pairs, _mm256_extracti128_si256(i, 1), all, 8));
  const __m256 even = _mm256_shuffle_ps(lower, upper, 0x88), odd = _mm256_shuffle_ps(lower, upper, 0xdd);
  a[0] = bits_as<Vector<float>>(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xd8));
  a[1] = bits_as<Vector<float>>(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xd8));
}
#endif

template <typename A>
struct Place {
  Vector<A> t;     // x rate + K / 2
  Vector<A> u;     // in interval `index`, [0, 1] within the radius
  Index<A> index;  // 0 for NaN
};

template <typename A>
static inline Place<A> place_of(const Function<A>& f, Vector<A> x) {
  const Vector<A> t = fma(x, splat(f.rate), splat(f.half));
  const Vector<A> within = at_most(t > 0 ? t : Vector<A>{}, splat(f.last));
  const Index<A> index = __builtin_convertvector(within, Index<A>);
  const Vector<A> begin = f.half - __builtin_convertvector(index, Vector<A>);
  return {t, fma(x, splat(f.rate), begin), index};
}

template <typename A>
struct Value {
  Vector<A> f;  // gss_n: exp(f - c)
  Vector<A> slope;
  Place<A> place;  // linear and cubic
};

template <Kind kind, typename A>
static inline Value<A> value_of(const Function<A>& f, Vector<A> x) {
  Value<A> value;
  if constexpr (kind == Kind::identity) {
    value.f = x;
    value.slope = splat(A(1));
  } else if constexpr (kind == Kind::gss) {
    const Vector<A> d = x - f.c;
    const Vector<A> e = exponential(-magnitude(d));
    const Index<A> left = d < 0;
    value.f = (left ? f.k * d + f.c : x) - f.k_1 * log1p_unit(e);
    value.slope = f.k - f.k_1 * ((left ? e : splat(A(1))) / (1 + e));
  } else if constexpr (half_powers(kind) > 0) {
    const Vector<A> half = exponential(A(0.5) * (x - f.c));  // the caller keeps it from overflow
    const Vector<A> e = half * half;
    const Vector<A> root = half * inverse_sqrt(1 + e);
    const Vector<A> sigmoid = root * root;
    value.f = e * (half_powers(kind) == 1   ? root
                   : half_powers(kind) == 2 ? sigmoid
                   : half_powers(kind) == 3 ? sigmoid * root
                                            : sigmoid * sigmoid);
    value.slope = f.k - f.k_1 * sigmoid;
  } else if constexpr (kind == Kind::linear) {
    Vector<A> a[2];
    value.place = place_of(f, x);
    lookup<2>(f.table, value.place.index, a);
    value.f = fma(a[1], value.place.u, a[0]);
    value.slope = f.rate * (value.place.u == value.place.u ? a[1] : value.place.u);
  } else {
    Vector<A> a[4];
    value.place = place_of(f, x);
    lookup<4>(f.table, value.place.index, a);
    const Vector<A> u = value.place.u;
    const Vector<A> uc = at_most(at_least(u, Vector<A>{}), splat(A(1)));
    const Vector<A> slope = fma(fma(3 * a[3], uc, 2 * a[2]), uc, a[1]);
    value.f = fma(fma(fma(a[3], uc, a[2]), uc, a[1]), uc, a[0]) + slope * (u - uc);
    value.slope = f.rate * slope;
  }
  return value;
}

static inline uint64_t rounded(double quanta) {
#if defined(__x86_64__)
  return static_cast<uint64_t>(_mm_cvtsd_si64(_mm_set_sd(quanta)));
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

// Elements whose gradient waits to be added to the table.
template <typename A>
struct Waiting {
  static constexpr int64_t size = 256;
  alignas(64) IndexElement<A> index[size];
  alignas(64) A g[size];
  alignas(64) A u[size];
};

// Adds g w_m of the first elements to the sums of their intervals.
template <int width, bool shared, typename A>
static inline void add_fixed(const TableSums& sums, const Waiting<A>& waiting, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint64_t* sum = sums.fixed + static_cast<int64_t>(waiting.index[i]) * width;
    const double quanta = waiting.g[i] * sums.scale, u = waiting.u[i];
    add<shared>(sum, rounded(quanta));
    add<shared>(sum + 1, rounded(quanta * u));
    if (width == 4) {
      const double uc = u < 0 ? 0 : u > 1 ? 1 : u, beyond = u - uc;
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

// Sums of one thread: eight elements are rounded at once, two entries of the table added at once.
template <int width, typename A>
static inline void add_fixed_pairs(const TableSums& sums, const Waiting<A>& waiting, int64_t count) {
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
template <>
inline void add_fixed<2, false, float>(const TableSums& sums, const Waiting<float>& waiting, int64_t count) {
  add_fixed_pairs<2>(sums, waiting, count);
}
template <>
inline void add_fixed<4, false, float>(const TableSums& sums, const Waiting<float>& waiting, int64_t count) {
  add_fixed_pairs<4>(sums, waiting, count);
}
template <>
inline void add_fixed<2, false, double>(const TableSums& sums, const Waiting<double>& waiting,
                                        int64_t count) {
  add_fixed_pairs<2>(sums, waiting, count);
}
template <>
inline void add_fixed<4, false, double>(const TableSums& sums, const Waiting<double>& waiting,
                                        int64_t count) {
  add_fixed_pairs<4>(sums, waiting, count);
}
#endif

// Lanes beyond the radius, one after another. A gradient of 0 adds nothing, unless the input is NaN.
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

// Puts a vector of gradients g of the table among those that wait; what is beyond the radius is added now.
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

template <Kind kind, typename T>
static void piecewise_forward_of(const Function<accumulate_t<T>>& function, const T* input, int64_t count,
                                 T* output) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  const Function<A> f = function;
  int64_t i = 0;
  for (; i + W <= count; i += W) store(output + i, value_of<kind, A>(f, load(input + i)).f);
  if (i < count) {
    const Vector<A> x = load_first(input + i, count - i, A(0));
    store_first(output + i, count - i, value_of<kind, A>(f, x).f);
  }
}

template <typename T>
static void piecewise_forward(const Function<accumulate_t<T>>& f, const T* input, int64_t count, T* output) {
  if (f.width == 2) {
    piecewise_forward_of<Kind::linear>(f, input, count, output);
  } else {
    piecewise_forward_of<Kind::cubic>(f, input, count, output);
  }
}

template <Kind kind, bool shared, typename T>
static void piecewise_backward_of(const Function<accumulate_t<T>>& function, const T* grad, const T* input,
                                  int64_t count, T* grad_input, const TableSums& table_sums) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  constexpr int width = kind == Kind::linear ? 2 : 4;
  const Function<A> f = function;
  const TableSums sums = table_sums;
  Waiting<A> waiting;
  for (int64_t begin = 0; begin < count; begin += waiting.size) {
    const int64_t end = begin + waiting.size < count ? begin + waiting.size : count;
    for (int64_t i = begin; i < end; i += W) {
      const bool whole = i + W <= end;
      const Vector<A> x = whole ? load(input + i) : load_first(input + i, end - i, A(0));
      const Vector<A> g = whole ? load(grad + i) : load_first(grad + i, end - i, A(0));
      const Value<A> value = value_of<kind, A>(f, x);
      if (whole) {
        store(grad_input + i, g * value.slope);
      } else {
        store_first(grad_input + i, end - i, g * value.slope);
      }
      if (sums.fixed) enqueue<width, A>(f, sums, value.place, g, &waiting, i - begin);
    }
    if (sums.fixed) add_fixed<width, shared, A>(sums, waiting, (end - begin + W - 1) / W * W);
  }
}

template <typename T>
static void piecewise_backward(const Function<accumulate_t<T>>& f, const T* grad, const T* input,
                               int64_t count, T* grad_input, const TableSums& sums) {
  if (f.width == 2) {
    (sums.shared ? piecewise_backward_of<Kind::linear, true, T>
                 : piecewise_backward_of<Kind::linear, false, T>)(f, grad, input, count, grad_input, sums);
  } else {
    (sums.shared ? piecewise_backward_of<Kind::cubic, true, T>
                 : piecewise_backward_of<Kind::cubic, false, T>)(f, grad, input, count, grad_input, sums);
  }
}

// The largest magnitude as bits: infinity and NaN are above all numbers.
template <typename T>
static accumulate_t<T> largest(const T* x, int64_t count) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  Index<A> most[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= count; i += 4 * W) {
    for (int u = 0; u < 4; ++u) {
      most[u] = at_least(most[u], bits_as<Index<A>>(magnitude(load(x + i + u * W))));
    }
  }
  for (; i < count; i += W) {
    const Vector<A> v = i + W <= count ? load(x + i) : load_first(x + i, count - i, A(0));
    most[0] = at_least(most[0], bits_as<Index<A>>(magnitude(v)));
  }
  const Index<A> both = at_least(at_least(most[0], most[1]), at_least(most[2], most[3]));
  const Vector<A> values = bits_as<Vector<A>>(both);
  A result = 0;
  for (int64_t lane = 0; lane < W; ++lane) {
    if (!(values[lane] <= result)) result = values[lane];
    if (result != result) break;
  }
  return result;
}

template <typename A>
static A row_max(const A* x, int64_t count) {
  constexpr int64_t W = VectorOf<A>::width;
  Vector<A> most[4];
  for (int u = 0; u < 4; ++u) most[u] = splat(-infinity<A>);
  int64_t v = 0;
  for (; v + 4 * W <= count; v += 4 * W) {
    for (int u = 0; u < 4; ++u) {
      const Vector<A> some = load(x + v + u * W);
      most[u] = some > most[u] ? some : most[u];
    }
  }
  for (; v < count; v += W) {
    const Vector<A> some = v + W <= count ? load(x + v) : load_first(x + v, count - v, -infinity<A>);
    most[0] = some > most[0] ? some : most[0];
  }
  A result = -infinity<A>;
  for (int u = 0; u < 4; ++u) {
    for (int64_t i = 0; i < W; ++i) result = most[u][i] > result ? most[u][i] : result;
  }
  return result;
}

// exp(f - shift - rest), 0 where x is -inf. gss_n: rest is a factor instead, exp(c - shift).
template <Kind kind, typename A>
static inline Vector<A> exp_of(Vector<A> x, const Value<A>& value, A shift, A rest) {
  if constexpr (half_powers(kind) > 0) return value.f * rest;
  const Vector<A> e = exponential((value.f - shift) - rest);
  return has_table(kind) ? (x == -infinity<A> ? Vector<A>{} : e) : e;
}

template <Kind kind, typename A>
static double exp_sum_of(const Function<A>& function, const A* x, int64_t count, A largest) {
  constexpr int64_t W = VectorOf<A>::width;
  constexpr int64_t block = 4096;  // elements summed before a conversion to float64
  const Function<A> f = function;
  const auto term = [&](Vector<A> some) {
    const Value<A> value = value_of<kind, A>(f, some);
    if constexpr (half_powers(kind) > 0) return value.f;
    return exp_of<kind, A>(some, value, largest, A(0));
  };
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += block) {
    const int64_t end = begin + block < count ? begin + block : count;
    Vector<A> sum[4] = {};
    int64_t v = begin;
    for (; v + 4 * W <= end; v += 4 * W) {
      for (int u = 0; u < 4; ++u) sum[u] += term(load(x + v + u * W));
    }
    for (; v + W <= end; v += W) sum[0] += term(load(x + v));
    if (v < end) sum[1] += term(load_first(x + v, end - v, -infinity<A>));
    const Vector<A> all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    for (int64_t i = 0; i < W; ++i) total += all[i];
  }
  return half_powers(kind) > 0 ? total * __builtin_exp(static_cast<double>(f.c) - largest) : total;
}

template <Kind kind, bool shared, typename A>
static void monotone_backward_of(const Function<A>& function, A* x, int64_t count, int64_t target, A grad,
                                 A shift, A rest, const TableSums& table_sums) {
  constexpr int64_t W = VectorOf<A>::width;
  constexpr int width = kind == Kind::linear ? 2 : 4;
  const Function<A> f = function;
  const TableSums sums = table_sums;
  const bool sum_table = has_table(kind) && sums.fixed;
  if (half_powers(kind) > 0) rest = static_cast<A>(__builtin_exp(static_cast<double>(f.c) - shift));
  const A target_logit = x[target];
  Waiting<A> waiting;
  for (int64_t begin = 0; begin < count; begin += waiting.size) {
    const int64_t end = begin + waiting.size < count ? begin + waiting.size : count;
    for (int64_t v = begin; v < end; v += W) {
      const bool whole = v + W <= end;
      const Vector<A> some = whole ? load(x + v) : load_first(x + v, end - v, -infinity<A>);
      const Value<A> value = value_of<kind, A>(f, some);
      const Vector<A> g = -grad * exp_of<kind, A>(some, value, shift, rest);
      if (whole) {
        store(x + v, g * value.slope);
      } else {
        store_first(x + v, end - v, g * value.slope);
      }
      if (sum_table) enqueue<width, A>(f, sums, value.place, g, &waiting, v - begin);
    }
    if (sum_table) add_fixed<width, shared, A>(sums, waiting, (end - begin + W - 1) / W * W);
  }
  const Vector<A> some = splat(target_logit);
  const Value<A> value = value_of<kind, A>(f, some);
  const Vector<A> p = exp_of<kind, A>(some, value, shift, rest);
  const bool possible = target_logit != -infinity<A>;
  x[target] = possible ? grad * (1 - p[0]) * value.slope[0] : A(0);
  if (sum_table && possible) {
    Vector<A> g = {};
    g[0] = grad;
    enqueue<width, A>(f, sums, value.place, g, &waiting, 0);
    add_fixed<width, shared, A>(sums, waiting, W);
  }
}

template <typename A>
static A row_min(const A* x, int64_t count) {
  constexpr int64_t W = VectorOf<A>::width;
  Vector<A> least[4];
  for (int u = 0; u < 4; ++u) least[u] = splat(infinity<A>);
  int64_t v = 0;
  for (; v + 4 * W <= count; v += 4 * W) {
    for (int u = 0; u < 4; ++u) {
      const Vector<A> some = load(x + v + u * W);
      least[u] = some >= least[u] ? least[u] : some;  // keeps NaN
    }
  }
  A result = infinity<A>;
  for (int u = 0; u < 4; ++u) {
    for (int64_t i = 0; i < W; ++i) result = least[u][i] >= result ? result : least[u][i];
  }
  for (; v < count; ++v) result = x[v] >= result ? result : x[v];
  return result;
}

// Returns the sum of e_v = exp(f(x_v) - largest), of gss_n exp(f(x_v) - c), and leaves e_v f'(x_v) in x; with
// a table e_v, interval and u in scratch, for which all x are within the radius.
template <Kind kind, typename A>
static double begin_gradient_of(const Function<A>& function, A* x, int64_t count, A largest,
                                Waiting<A>* scratch) {
  constexpr int64_t W = VectorOf<A>::width;
  constexpr int64_t blocks = 16;  // whose sum is converted to float64
  const Function<A> f = function;
  const A inside = x[0];
  double total = 0;
  Vector<A> sum[2] = {};
  for (int64_t begin = 0, block = 0; begin < count; begin += Waiting<A>::size, ++block) {
    const int64_t end = begin + Waiting<A>::size < count ? begin + Waiting<A>::size : count;
    for (int64_t v = begin; v < end; v += W) {
      const bool whole = v + W <= end;
      const Vector<A> some = whole ? load(x + v) : load_first(x + v, end - v, inside);
      const Value<A> value = value_of<kind, A>(f, some);
      Vector<A> e = half_powers(kind) > 0 ? value.f : exp_of<kind, A>(some, value, largest, A(0));
      if (whole) {
        store(x + v, e * value.slope);
      } else {
        for (int64_t i = end - v; i < W; ++i) e[i] = 0;
        store_first(x + v, end - v, e * value.slope);
      }
      sum[v / W % 2] += e;
      if constexpr (has_table(kind)) {
        Waiting<A>& waiting = scratch[block];
        __builtin_memcpy(waiting.index + (v - begin), &value.place.index, sizeof value.place.index);
        store(waiting.g + (v - begin), e);
        store(waiting.u + (v - begin), value.place.u);
      }
    }
    if (block % blocks == blocks - 1 || end == count) {
      const Vector<A> all = sum[0] + sum[1];
      for (int64_t i = 0; i < W; ++i) total += all[i];
      sum[0] = sum[1] = Vector<A>{};
    }
  }
  return total;
}

template <int width, bool shared, typename A>
static void add_scratch(const TableSums& sums, const Waiting<A>* scratch, int64_t count, double scale) {
  constexpr int64_t W = VectorOf<A>::width;
  TableSums scaled = sums;
  scaled.scale *= scale;
  for (int64_t begin = 0; begin < count; begin += Waiting<A>::size, ++scratch) {
    const int64_t some = count - begin < Waiting<A>::size ? count - begin : Waiting<A>::size;
    add_fixed<width, shared, A>(scaled, *scratch, (some + W - 1) / W * W);
  }
}

// After begin_gradient: x_v and the gradient of the table for -grad p_v, p_v = e_v / total.
template <typename A>
static void end_gradient(const Function<A>& f, A* x, int64_t count, A grad, double total, const void* scratch,
                         const TableSums& sums) {
  constexpr int64_t W = VectorOf<A>::width;
  const double scale = -static_cast<double>(grad) / total;
  const Vector<A> factor = splat(static_cast<A>(scale));
  int64_t v = 0;
  for (; v + W <= count; v += W) store(x + v, load(x + v) * factor);
  for (; v < count; ++v) x[v] *= factor[0];
  if (!f.width || !sums.fixed) return;
  const Waiting<A>* waiting = static_cast<const Waiting<A>*>(scratch);
  if (f.width == 2) {
    (sums.shared ? add_scratch<2, true, A> : add_scratch<2, false, A>)(sums, waiting, count, scale);
  } else {
    (sums.shared ? add_scratch<4, true, A> : add_scratch<4, false, A>)(sums, waiting, count, scale);
  }
}

template <typename A>
static Kind kind_of(const Function<A>& f) {
  if (f.width == 2) return Kind::linear;
  if (f.width == 4) return Kind::cubic;
  return f.identity ? Kind::identity : Kind::gss;
}

// The kind for a row whose largest logit or log_normalizer is `size`: gss_n where its terms do not overflow,
// nor underflow if they count.
template <typename A>
static Kind kind_of(const Function<A>& f, A size) {
  const Kind kind = kind_of(f);
  const A n = 2 * f.k_1;
  if (kind != Kind::gss || !(size - f.c >= -10 && size - f.c <= 58)) return kind;
  return n == 1 ? Kind::gss_1 : n == 2 ? Kind::gss_2 : n == 3 ? Kind::gss_3 : n == 4 ? Kind::gss_4 : kind;
}

template <typename A>
static A value(const Function<A>& f, A x) {
  switch (kind_of(f)) {
    case Kind::identity:
      return x;
    case Kind::linear:
      return value_of<Kind::linear, A>(f, splat(x)).f[0];
    case Kind::cubic:
      return value_of<Kind::cubic, A>(f, splat(x)).f[0];
    default:
      return value_of<Kind::gss, A>(f, splat(x)).f[0];
  }
}

template <typename A>
static double exp_sum(const Function<A>& f, const A* x, int64_t count, A max, A largest) {
  switch (kind_of(f, max)) {
    case Kind::identity:
      return exp_sum_of<Kind::identity>(f, x, count, largest);
    case Kind::gss:
      return exp_sum_of<Kind::gss>(f, x, count, largest);
    case Kind::gss_1:
      return exp_sum_of<Kind::gss_1>(f, x, count, largest);
    case Kind::gss_2:
      return exp_sum_of<Kind::gss_2>(f, x, count, largest);
    case Kind::gss_3:
      return exp_sum_of<Kind::gss_3>(f, x, count, largest);
    case Kind::gss_4:
      return exp_sum_of<Kind::gss_4>(f, x, count, largest);
    case Kind::linear:
      return exp_sum_of<Kind::linear>(f, x, count, largest);
    case Kind::cubic:
      return exp_sum_of<Kind::cubic>(f, x, count, largest);
  }
  return 0;
}

template <typename A>
static ExpSum begin_gradient(const Function<A>& f, A* x, int64_t count, A max, A largest, void* scratch) {
  static_assert(sizeof(Waiting<A>) == Waiting<A>::size * 3 * sizeof(A), "as gradient_scratch_bytes has it");
  static_assert(Waiting<A>::size == gradient_block, "as gradient_scratch_bytes has it");
  Waiting<A>* waiting = static_cast<Waiting<A>*>(scratch);
  switch (kind_of(f, max)) {
    case Kind::identity:
      return {begin_gradient_of<Kind::identity>(f, x, count, largest, waiting), largest};
    case Kind::gss:
      return {begin_gradient_of<Kind::gss>(f, x, count, largest, waiting), largest};
    case Kind::gss_1:
      return {begin_gradient_of<Kind::gss_1>(f, x, count, largest, waiting), f.c};
    case Kind::gss_2:
      return {begin_gradient_of<Kind::gss_2>(f, x, count, largest, waiting), f.c};
    case Kind::gss_3:
      return {begin_gradient_of<Kind::gss_3>(f, x, count, largest, waiting), f.c};
    case Kind::gss_4:
      return {begin_gradient_of<Kind::gss_4>(f, x, count, largest, waiting), f.c};
    case Kind::linear:
      return {begin_gradient_of<Kind::linear>(f, x, count, largest, waiting), largest};
    case Kind::cubic:
      return {begin_gradient_of<Kind::cubic>(f, x, count, largest, waiting), largest};
  }
  return {};
}

// grad f'(x) at the target and in the sums of the table: what the target adds to -grad p_v f'(x_v).
template <typename A>
static A target_gradient(const Function<A>& f, A x, A grad, const TableSums& sums) {
  const auto of = [&](auto kind) {
    constexpr Kind k = decltype(kind)::value;
    const Value<A> value = value_of<k, A>(f, splat(x));
    if constexpr (has_table(k)) {
      if (sums.fixed) {
        constexpr int width = k == Kind::linear ? 2 : 4;
        Waiting<A> waiting;
        Vector<A> g = {};
        g[0] = grad;
        enqueue<width, A>(f, sums, value.place, g, &waiting, 0);
        if (sums.shared) {
          add_fixed<width, true, A>(sums, waiting, VectorOf<A>::width);
        } else {
          add_fixed<width, false, A>(sums, waiting, VectorOf<A>::width);
        }
      }
    }
    return grad * value.slope[0];
  };
  switch (kind_of(f)) {
    case Kind::identity:
      return of(KindIs<Kind::identity>());
    case Kind::linear:
      return of(KindIs<Kind::linear>());
    case Kind::cubic:
      return of(KindIs<Kind::cubic>());
    default:
      return of(KindIs<Kind::gss>());
  }
}

template <Kind kind, typename A>
static void monotone_backward_of(const Function<A>& f, A* x, int64_t count, int64_t target, A grad, A shift,
                                 A rest, const TableSums& sums) {
  if (has_table(kind) && sums.shared) {
    monotone_backward_of<kind, has_table(kind), A>(f, x, count, target, grad, shift, rest, sums);
  } else {
    monotone_backward_of<kind, false, A>(f, x, count, target, grad, shift, rest, sums);
  }
}

template <typename A>
static void monotone_backward(const Function<A>& f, A* x, int64_t count, int64_t target, A grad, A shift,
                              A rest, const TableSums& sums) {
  switch (rest == 0 ? kind_of(f, shift) : kind_of(f)) {
    case Kind::identity:
      return monotone_backward_of<Kind::identity>(f, x, count, target, grad, shift, rest, sums);
    case Kind::gss:
      return monotone_backward_of<Kind::gss>(f, x, count, target, grad, shift, rest, sums);
    case Kind::gss_1:
      return monotone_backward_of<Kind::gss_1>(f, x, count, target, grad, shift, rest, sums);
    case Kind::gss_2:
      return monotone_backward_of<Kind::gss_2>(f, x, count, target, grad, shift, rest, sums);
    case Kind::gss_3:
      return monotone_backward_of<Kind::gss_3>(f, x, count, target, grad, shift, rest, sums);
    case Kind::gss_4:
      return monotone_backward_of<Kind::gss_4>(f, x, count, target, grad, shift, rest, sums);
    case Kind::linear:
      return monotone_backward_of<Kind::linear>(f, x, count, target, grad, shift, rest, sums);
    case Kind::cubic:
      return monotone_backward_of<Kind::cubic>(f, x, count, target, grad, shift, rest, sums);
  }
}

template <typename T>
static const PiecewiseKernels<T>* piecewise_table() {
  static constexpr PiecewiseKernels<T> kernels = {piecewise_forward<T>, piecewise_backward<T>, largest<T>};
  return &kernels;
}

template <typename A>
static const MonotoneKernels<A>* monotone_table() {
  static constexpr MonotoneKernels<A> kernels = {row_max<A>,      row_min<A>,           value<A>,
                                                 exp_sum<A>,      monotone_backward<A>, begin_gradient<A>,
                                                 end_gradient<A>, target_gradient<A>};
  return &kernels;
}

}  // namespace HSTREE_CAPABILITY

#define HSTREE_PIECEWISE_TABLE(T)                                                   \
  template <>                                                                       \
  const PiecewiseKernels<T>* HSTREE_JOIN(piecewise_kernels_, HSTREE_CAPABILITY)() { \
    return HSTREE_CAPABILITY::piecewise_table<T>();                                 \
  }
#define HSTREE_MONOTONE_TABLE(A)                                                  \
  template <>                                                                     \
  const MonotoneKernels<A>* HSTREE_JOIN(monotone_kernels_, HSTREE_CAPABILITY)() { \
    return HSTREE_CAPABILITY::monotone_table<A>();                                \
  }
HSTREE_PIECEWISE_TABLE(float)
HSTREE_PIECEWISE_TABLE(double)
HSTREE_PIECEWISE_TABLE(BFloat16)
HSTREE_PIECEWISE_TABLE(Half)
HSTREE_MONOTONE_TABLE(float)
HSTREE_MONOTONE_TABLE(double)
#undef HSTREE_PIECEWISE_TABLE
#undef HSTREE_MONOTONE_TABLE

}  // namespace hstree::cpu
