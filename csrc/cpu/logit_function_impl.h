// Body of the functions of a logit, under the rules of vector_impl.h: f and f' of vectors for each kind of f.
#include "cpu/vector_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {

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
[[gnu::always_inline]] static inline void lookup(const A* table, Index<A> index, Vector<A>* a) {
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
  asm("" : "+k"(all));  // keeps the zeros: without them a gather depends on the old value of its register
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
  asm("" : "+x"(all));  // keeps the zeros: without them a gather depends on the old value of its register
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
[[gnu::always_inline]] static inline Place<A> place_of(const Function<A>& f, Vector<A> x) {
  const Vector<A> t = fma(x, splat(f.rate), splat(f.half));
  const Vector<A> within = at_most(t > 0 ? t : Vector<A>{}, splat(f.last));
  const Index<A> index = __builtin_convertvector(within, Index<A>);
  const Vector<A> begin = f.half - __builtin_convertvector(index, Vector<A>);
  return {t, fma(x, splat(f.rate), begin), index};
}

template <typename A>
struct Value {
  Vector<A> f;  // of GssPower exp(f - c)
  Vector<A> slope;
  Place<A> place;  // where there is a table
};

// The kinds of functions, a template parameter of the kernels: f and f' at x, the width of the table (0
// without one), and whether f is represented as exp(f - c).
struct Identity {
  static constexpr int width = 0;
  static constexpr bool is_power = false;

  template <typename A>
  [[gnu::always_inline]] static inline Value<A> at(const Function<A>&, Vector<A> x) {
    Value<A> value;
    value.f = x;
    value.slope = splat(A(1));
    return value;
  }
};

struct Gss {
  static constexpr int width = 0;
  static constexpr bool is_power = false;

  template <typename A>
  [[gnu::always_inline]] static inline Value<A> at(const Function<A>& f, Vector<A> x) {
    const Vector<A> d = x - f.c;
    const Vector<A> e = exponential(-magnitude(d));
    const Index<A> left = d < 0;
    Value<A> value;
    value.f = (left ? f.k * d + f.c : x) - f.k_1 * log1p_unit(e);
    value.slope = f.k - f.k_1 * ((left ? e : splat(A(1))) / (1 + e));
    return value;
  }
};

// Gss with k - 1 = n / 2, where exp(f - c) = exp(x - c) sigmoid(x - c)^(n / 2) takes one exp, which must not
// overflow.
template <int n>
struct GssPower {
  static constexpr int width = 0;
  static constexpr bool is_power = true;

  template <typename A>
  [[gnu::always_inline]] static inline Value<A> at(const Function<A>& f, Vector<A> x) {
    const Vector<A> half = exponential(A(0.5) * (x - f.c));
    const Vector<A> e = half * half;
    const Vector<A> root = half * inverse_sqrt(1 + e);
    const Vector<A> sigmoid = root * root;
    Value<A> value;
    value.f = e * (n == 1 ? root : n == 2 ? sigmoid : n == 3 ? sigmoid * root : sigmoid * sigmoid);
    value.slope = f.k - f.k_1 * sigmoid;
    return value;
  }
};

struct Linear {
  static constexpr int width = 2;
  static constexpr bool is_power = false;

  template <typename A>
  [[gnu::always_inline]] static inline Value<A> at(const Function<A>& f, Vector<A> x) {
    Value<A> value;
    Vector<A> a[2];
    value.place = place_of(f, x);
    lookup<2>(f.table, value.place.index, a);
    value.f = fma(a[1], value.place.u, a[0]);
    value.slope = f.rate * (value.place.u == value.place.u ? a[1] : value.place.u);
    return value;
  }
};

struct Cubic {
  static constexpr int width = 4;
  static constexpr bool is_power = false;

  template <typename A>
  [[gnu::always_inline]] static inline Value<A> at(const Function<A>& f, Vector<A> x) {
    Value<A> value;
    Vector<A> a[4];
    value.place = place_of(f, x);
    lookup<4>(f.table, value.place.index, a);
    const Vector<A> u = value.place.u;
    const Vector<A> uc = at_most(at_least(u, Vector<A>{}), splat(A(1)));
    const Vector<A> slope = fma(fma(3 * a[3], uc, 2 * a[2]), uc, a[1]);
    value.f = fma(fma(fma(a[3], uc, a[2]), uc, a[1]), uc, a[0]) + slope * (u - uc);
    value.slope = f.rate * slope;
    return value;
  }
};

// Calls body with the kind of an f that has a table.
template <typename A, typename Body>
static inline auto with_table_kind(const Function<A>& f, const Body& body) {
  return f.width == Linear::width ? body(Linear()) : body(Cubic());
}

// Calls body with the kind of any f.
template <typename A, typename Body>
static inline auto with_kind(const Function<A>& f, const Body& body) {
  if (f.width) return with_table_kind(f, body);
  if (f.identity) return body(Identity());
  return body(Gss());
}

// The same for a row whose largest logit or log_normalizer is `size`: chooses GssPower if its terms do not
// overflow, and underflow only where they are negligible.
template <typename A, typename Body>
static inline auto with_kind(const Function<A>& f, A size, const Body& body) {
  if (!f.width && !f.identity && size - f.c >= -10 && size - f.c <= 58) {
    const A n = 2 * f.k_1;
    if (n == 1) return body(GssPower<1>());
    if (n == 2) return body(GssPower<2>());
    if (n == 3) return body(GssPower<3>());
    if (n == 4) return body(GssPower<4>());
  }
  return with_kind(f, body);
}

}  // namespace HSTREE_CAPABILITY
}  // namespace hstree::cpu
