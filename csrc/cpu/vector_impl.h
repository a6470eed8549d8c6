// Vectors of one instruction set: loads, stores, exp and log1p, for the kernel bodies, *_impl.h. Each
// kernels_<capability>.cpp includes those once, through kernels_impl.h, between a target pragma and its end, with
// HSTREE_CAPABILITY and HSTREE_VECTOR_BYTES defined. Nothing in them may instantiate a template or inline
// function of another header: the linker would keep one copy of it for all instruction sets.
#pragma once

#define HSTREE_JOIN_(a, b) a##b
#define HSTREE_JOIN(a, b) HSTREE_JOIN_(a, b)

// Defines chosen_kernels<Kernels<T>>() of this instruction set, the constant table<T>, for each accumulation type or
// each element type.
#define HSTREE_KERNELS(Kernels, table, T)                                    \
  template <>                                                                \
  const Kernels<T>& HSTREE_JOIN(kernels_, HSTREE_CAPABILITY)<Kernels<T>>() { \
    return HSTREE_CAPABILITY::table<T>;                                      \
  }
#define HSTREE_KERNELS_OF_SUMS(Kernels, table) \
  HSTREE_KERNELS(Kernels, table, float)        \
  HSTREE_KERNELS(Kernels, table, double)
#define HSTREE_KERNELS_OF_ELEMENTS(Kernels, table) \
  HSTREE_KERNELS_OF_SUMS(Kernels, table)           \
  HSTREE_KERNELS(Kernels, table, BFloat16)         \
  HSTREE_KERNELS(Kernels, table, Half)

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(HSTREE_VECTOR_BYTES)));
  static constexpr int64_t width = HSTREE_VECTOR_BYTES / sizeof(T);
};
template <typename T>
using Vector = typename VectorOf<T>::type;

typedef uint32_t U32 __attribute__((vector_size(HSTREE_VECTOR_BYTES)));
typedef int32_t I32 __attribute__((vector_size(HSTREE_VECTOR_BYTES)));
typedef int64_t I64 __attribute__((vector_size(HSTREE_VECTOR_BYTES)));
typedef uint16_t U16 __attribute__((vector_size(HSTREE_VECTOR_BYTES / 2)));

template <typename To, typename From>
static inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}

static inline Vector<float> load(const float* p) {
  Vector<float> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

static inline Vector<double> load(const double* p) {
  Vector<double> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

static inline Vector<float> load(const BFloat16* p) {
  U16 half;
  __builtin_memcpy(&half, p, sizeof half);
  return bits_as<Vector<float>>(__builtin_convertvector(half, U32) << 16);
}

static inline Vector<float> load(const Half* p) {
#if HSTREE_VECTOR_BYTES == 64
  __m256i half;
  __builtin_memcpy(&half, p, sizeof half);
  return bits_as<Vector<float>>(_mm512_maskz_cvtph_ps(0xffff, half));
#elif HSTREE_VECTOR_BYTES == 32
  __m128i half;
  __builtin_memcpy(&half, p, sizeof half);
  return bits_as<Vector<float>>(_mm256_cvtph_ps(half));
#elif defined(__aarch64__)
  float16x4_t half;
  __builtin_memcpy(&half, p, sizeof half);
  return bits_as<Vector<float>>(vcvt_f32_f16(half));
#else
  // Exponent and mantissa moved into place and rescaled by 2^112; infinities and NaN get float's exponent.
  U16 half;
  __builtin_memcpy(&half, p, sizeof half);
  const U32 h = __builtin_convertvector(half, U32);
  const U32 magnitude = (h & 0x7fffu) << 13;
  const Vector<float> scaled = bits_as<Vector<float>>(magnitude) * 0x1p112f;
  const U32 finite = bits_as<U32>(scaled);
  const U32 special = magnitude | 0x7f800000u;
  const U32 is_special = bits_as<U32>((h & 0x7c00u) == 0x7c00u);
  return bits_as<Vector<float>>(((finite & ~is_special) | (special & is_special)) | ((h & 0x8000u) << 16));
#endif
}

static inline void store(float* p, Vector<float> v) {
  __builtin_memcpy(p, &v, sizeof v);
}
static inline void store(double* p, Vector<double> v) {
  __builtin_memcpy(p, &v, sizeof v);
}

static inline U16 rounded(BFloat16, Vector<float> v) {
  const U32 u = bits_as<U32>(v);
  const U32 nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U32 nan = bits_as<U32>(v != v);
  return __builtin_convertvector((nearest & ~nan) | (0x7fc0u & nan), U16);
}

static inline U16 rounded(Half, Vector<float> v) {
#if HSTREE_VECTOR_BYTES == 64
  return bits_as<U16>(_mm512_maskz_cvtps_ph(0xffff, bits_as<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#elif HSTREE_VECTOR_BYTES == 32
  return bits_as<U16>(_mm256_cvtps_ph(bits_as<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__aarch64__)
  return bits_as<U16>(vcvt_f16_f32(bits_as<float32x4_t>(v)));
#else
  // Round to nearest even; below 2^-14 an addition of 0.5 leaves the subnormal in the low bits.
  const U32 u = bits_as<U32>(v);
  const U32 sign = (u >> 16) & 0x8000u;
  const U32 magnitude = u & 0x7fffffffu;
  const U32 normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const U32 subnormal = bits_as<U32>(bits_as<Vector<float>>(magnitude) + 0.5f) - (126u << 23);
  const U32 small = bits_as<U32>(magnitude < (113u << 23));
  const U32 large = bits_as<U32>(magnitude >= 0x477ff000u);
  const U32 nan = bits_as<U32>(magnitude > 0x7f800000u);
  U32 h = (normal & ~small) | (subnormal & small);
  h = (h & ~large) | (0x7c00u & large);
  h = (h & ~nan) | (0x7e00u & nan);
  return __builtin_convertvector(h | sign, U16);
#endif
}

static inline void store(BFloat16* p, Vector<float> v) {
  const U16 half = rounded(BFloat16{}, v);
  __builtin_memcpy(p, &half, sizeof half);
}
static inline void store(Half* p, Vector<float> v) {
  const U16 half = rounded(Half{}, v);
  __builtin_memcpy(p, &half, sizeof half);
}

// Stores a vector that this core will not read again, to an address that `is_aligned`. Bypasses the caches if
// the instruction set allows, so that memory is not read first; but not for the half lines of 16-bit
// elements, which would be written one by one. `end_of_streams` makes the stores visible to other threads.
template <typename T>
static inline void stream(T* p, Vector<accumulate_t<T>> v) {
  if constexpr (sizeof(T) < 4) return store(p, v);
#if HSTREE_VECTOR_BYTES >= 32
  T elements[VectorOf<accumulate_t<T>>::width];
  store(elements, v);
#if HSTREE_VECTOR_BYTES == 64
  if constexpr (sizeof elements == 64) {
    __m512i bits;
    __builtin_memcpy(&bits, elements, sizeof bits);
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bits);
  }
#endif
  if constexpr (sizeof elements == 32) {
    __m256i bits;
    __builtin_memcpy(&bits, elements, sizeof bits);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bits);
  } else if constexpr (sizeof elements == 16) {
    __m128i bits;
    __builtin_memcpy(&bits, elements, sizeof bits);
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), bits);
  }
#else
  store(p, v);
#endif
}
static inline void end_of_streams() {
#if HSTREE_VECTOR_BYTES >= 32
  _mm_sfence();
#endif
}

template <typename T>
static inline Vector<accumulate_t<T>> load_first(const T* p, int64_t count) {
  T padded[VectorOf<accumulate_t<T>>::width] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
  return load(padded);
}

template <typename T>
static inline void store_first(T* p, int64_t count, Vector<accumulate_t<T>> v) {
  T padded[VectorOf<accumulate_t<T>>::width];
  store(padded, v);
  for (int64_t i = 0; i < count; ++i) p[i] = padded[i];
}

// The first `count` lanes, as a mask of the vector.
static inline I32 lanes_below(float, int64_t count) {
  static constexpr int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  I32 lanes;
  __builtin_memcpy(&lanes, lane, sizeof lanes);
  return lanes < static_cast<int32_t>(count);
}
static inline I64 lanes_below(double, int64_t count) {
  static constexpr int64_t lane[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  I64 lanes;
  __builtin_memcpy(&lanes, lane, sizeof lanes);
  return lanes < count;
}

// The first lane that is set, or the width if none is.
static inline int64_t first_lane(I32 lanes) {
  constexpr int64_t W = VectorOf<float>::width;
#if HSTREE_VECTOR_BYTES == 64
  const uint32_t set = _mm512_test_epi32_mask(bits_as<__m512i>(lanes), bits_as<__m512i>(lanes));
  return set ? __builtin_ctz(set) : W;
#elif HSTREE_VECTOR_BYTES == 32
  const int set = _mm256_movemask_ps(bits_as<__m256>(lanes));
  return set ? __builtin_ctz(set) : W;
#else
  int64_t lane = 0;
  while (lane < W && !lanes[lane]) ++lane;
  return lane;
#endif
}

template <int... lanes>
struct Lanes {};
template <int count, int... lanes>
struct LanesOf : LanesOf<count - 1, count - 1, lanes...> {};
template <int... lanes>
struct LanesOf<0, lanes...> {
  typedef Lanes<lanes...> type;
};

// Swaps the lanes of b without bit s of their number with those of a that have it, at a distance of s.
template <int s, typename A, int... lane>
static inline void swap_lanes(Vector<A>& a, Vector<A>& b, Lanes<lane...>) {
  constexpr int W = VectorOf<A>::width;
#if defined(__clang__)
  const Vector<A> first = __builtin_shufflevector(a, b, (lane & s ? W + lane - s : lane)...);
  b = __builtin_shufflevector(a, b, (lane & s ? W + lane : lane + s)...);
#else
  typedef decltype(lanes_below(A{}, 0)) Places;
  const Vector<A> first = __builtin_shuffle(a, b, Places{(lane & s ? W + lane - s : lane)...});
  b = __builtin_shuffle(a, b, Places{(lane & s ? W + lane : lane + s)...});
#endif
  a = first;
}

// Transposes the matrix of as many vectors as they have lanes.
template <typename A, int s = VectorOf<A>::width / 2>
static inline void transpose(Vector<A>* v) {
  constexpr int W = VectorOf<A>::width;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    if (!(i & s)) swap_lanes<s, A>(v[i], v[i + s], typename LanesOf<W>::type{});
  }
  if constexpr (s > 1) transpose<A, s / 2>(v);
}

// Prefetches the first lines of a row that will be read soon; the hardware continues from there. Always
// inlined, because a compiler may drop calls of a function that only prefetches.
template <typename T>
__attribute__((always_inline)) static inline void prefetch_row(const T* row, int64_t count) {
  constexpr int64_t most = 512 / sizeof(T);
  const T* const end = row + (count < most ? count : most);
  for (; row < end; row += 64 / sizeof(T)) __builtin_prefetch(row);
}

// The first `count` elements, then zeros.
static inline Vector<float> first_lanes_of(Vector<float> v, int64_t count) {
  return bits_as<Vector<float>>(bits_as<U32>(v) & bits_as<U32>(lanes_below(0.0f, count)));
}

#if HSTREE_VECTOR_BYTES == 64
// The elements of a vector whose lanes are set, zeros elsewhere.
static inline Vector<float> load_lanes(__mmask16 lanes, const float* p) {
  return bits_as<Vector<float>>(_mm512_maskz_loadu_ps(lanes, p));
}
static inline Vector<float> load_lanes(__mmask16 lanes, const BFloat16* p) {
  const __m512i wide = _mm512_maskz_cvtepu16_epi32(lanes, _mm256_maskz_loadu_epi16(lanes, p));
  return bits_as<Vector<float>>(_mm512_maskz_slli_epi32(lanes, wide, 16));
}
static inline Vector<float> load_lanes(__mmask16 lanes, const Half* p) {
  return bits_as<Vector<float>>(_mm512_maskz_cvtph_ps(lanes, _mm256_maskz_loadu_epi16(lanes, p)));
}
#endif

// Masked loads and stores of the first elements, where the instruction set has them.
#if HSTREE_VECTOR_BYTES == 64
static inline I32 load_first(const int32_t* p, int64_t count) {
  return bits_as<I32>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), p));
}
static inline Vector<float> load_first(const float* p, int64_t count) {
  return bits_as<Vector<float>>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p));
}
static inline Vector<double> load_first(const double* p, int64_t count) {
  return bits_as<Vector<double>>(_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1), p));
}
static inline void store_first(int32_t* p, int64_t count, I32 v) {
  _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << count) - 1), bits_as<__m512i>(v));
}
static inline void store_first(float* p, int64_t count, Vector<float> v) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), bits_as<__m512>(v));
}
static inline void store_first(double* p, int64_t count, Vector<double> v) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << count) - 1), bits_as<__m512d>(v));
}
static inline Vector<float> load_first(const BFloat16* p, int64_t count) {
  return load_lanes(static_cast<__mmask16>((1u << count) - 1), p);
}
static inline Vector<float> load_first(const Half* p, int64_t count) {
  return load_lanes(static_cast<__mmask16>((1u << count) - 1), p);
}
static inline void store_first(BFloat16* p, int64_t count, Vector<float> v) {
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << count) - 1),
                           bits_as<__m256i>(rounded(BFloat16{}, v)));
}
static inline void store_first(Half* p, int64_t count, Vector<float> v) {
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << count) - 1),
                           bits_as<__m256i>(rounded(Half{}, v)));
}
#elif HSTREE_VECTOR_BYTES == 32
template <typename A>
static inline __m256i first_lanes(A, int64_t count) {
  return bits_as<__m256i>(lanes_below(A{}, count));
}
static inline I32 load_first(const int32_t* p, int64_t count) {
  return bits_as<I32>(_mm256_maskload_epi32(p, first_lanes(0.0f, count)));
}
static inline Vector<float> load_first(const float* p, int64_t count) {
  return bits_as<Vector<float>>(_mm256_maskload_ps(p, first_lanes(0.0f, count)));
}
static inline Vector<double> load_first(const double* p, int64_t count) {
  return bits_as<Vector<double>>(_mm256_maskload_pd(p, first_lanes(0.0, count)));
}
static inline void store_first(int32_t* p, int64_t count, I32 v) {
  _mm256_maskstore_epi32(p, first_lanes(0.0f, count), bits_as<__m256i>(v));
}
static inline void store_first(float* p, int64_t count, Vector<float> v) {
  _mm256_maskstore_ps(p, first_lanes(0.0f, count), bits_as<__m256>(v));
}
static inline void store_first(double* p, int64_t count, Vector<double> v) {
  _mm256_maskstore_pd(p, first_lanes(0.0, count), bits_as<__m256d>(v));
}
#else
static inline I32 load_first(const int32_t* p, int64_t count) {
  int32_t padded[VectorOf<float>::width] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
  I32 v;
  __builtin_memcpy(&v, padded, sizeof v);
  return v;
}
static inline void store_first(int32_t* p, int64_t count, I32 v) {
  for (int64_t i = 0; i < count; ++i) p[i] = v[i];
}
#endif

// One vector, or its first count elements and zeros.
template <bool whole, typename T>
static inline Vector<accumulate_t<T>> load_some(const T* p, int64_t count) {
  if constexpr (whole) {
    return load(p);
  } else {
    return load_first(p, count);
  }
}
// Whether `stream` may store to p.
template <typename T>
static inline bool is_aligned(const T* p) {
  return sizeof(T) < 4 ||
         reinterpret_cast<uintptr_t>(p) % (VectorOf<accumulate_t<T>>::width * sizeof(T)) == 0;
}

// Streams a row of sums to any address. May read up to a vector beyond them.
template <typename T>
static inline void stream_row(const accumulate_t<T>* sum, int64_t count, T* target) {
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width, bytes = W * sizeof(T);
  const int64_t ahead = (bytes - reinterpret_cast<uintptr_t>(target) % bytes) % bytes / sizeof(T);
  int64_t s = ahead < count ? ahead : count;
  if (s > 0) store_first(target, s, load(sum));
  for (; s + W <= count; s += W) stream(target + s, load(sum + s));
  if (s < count) store_first(target + s, count - s, load(sum + s));
}

template <typename A>
static inline A sum_of(Vector<A> v) {
  A total = 0;
  for (int64_t i = 0; i < VectorOf<A>::width; ++i) total += v[i];
  return total;
}
#if HSTREE_VECTOR_BYTES >= 32
template <>
inline float sum_of<float>(Vector<float> v) {
#if HSTREE_VECTOR_BYTES == 64
  const __m512 both = bits_as<__m512>(v);
  const __m256 all =
      _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, both, 0), _mm512_maskz_extractf32x8_ps(0xff, both, 1));
#else
  const __m256 all = bits_as<__m256>(v);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#endif

constexpr int64_t terms_of_sum = 64;  // of a partial sum, before it is added to the total

// total + value, with what the roundings lost in `lost`. After Kahan.
template <typename V>
static inline void add_exactly(V& total, V& lost, V value) {
  const V rest = value - lost, sum = total + rest;
  lost = (sum - total) - rest;
  total = sum;
}

// The sum of vectors of terms: add(c, sum) adds those from c on, for c = 0, W, ... < count. As accurate for millions of
// terms as for few.
template <typename A, typename Add>
static inline Vector<A> sum_of_vectors(int64_t count, const Add& add) {
  constexpr int64_t W = VectorOf<A>::width;
  Vector<A> total = {}, lost = {};
  for (int64_t c = 0; c < count;) {
    const int64_t end = c + terms_of_sum * W < count ? c + terms_of_sum * W : count;
    Vector<A> some = {};
    for (; c < end; c += W) some = add(c, some);
    add_exactly(total, lost, some);
  }
  return total;
}

template <typename T>
static inline accumulate_t<T> element(const T* p) {
  return load_first(p, 1)[0];
}
template <>
inline float element<float>(const float* p) {
  return *p;
}
template <>
inline double element<double>(const double* p) {
  return *p;
}
template <typename A>
static inline Vector<A> splat(A value) {
  return Vector<A>{} + value;
}

#if HSTREE_VECTOR_BYTES == 64
// Calls f(column, lanes) for each 16 columns that hold some of the features begin <= s < end of a subset.
template <typename F>
static inline void each_feature_block(const FeatureSubset& subset, int64_t begin, int64_t end, const F& f) {
  if (begin == end) return;
  const int32_t first = subset.index[begin], last = subset.index[end - 1];
  for (int32_t block = first / 16; block <= last / 16; ++block) {
    uint32_t lanes = subset.lanes[block];
    if (block == first / 16) lanes &= 0xffffu << first % 16;
    if (block == last / 16) lanes &= 0xffffu >> (15 - last % 16);
    f(16 * block, static_cast<__mmask16>(lanes));
  }
}

static inline void scatter_add_subset(const FeatureSubset& subset, int64_t begin, int64_t end, const float* x,
                                      float* row) {
  each_feature_block(subset, begin, end, [&](int32_t column, __mmask16 lanes) {
    const __m512 some = _mm512_maskz_expand_ps(lanes, _mm512_loadu_ps(x));
    const __m512 before = _mm512_maskz_loadu_ps(lanes, row + column);
    _mm512_mask_storeu_ps(row + column, lanes, _mm512_add_ps(before, some));
    x += __builtin_popcount(lanes);
  });
}
#endif

template <typename T>
static inline accumulate_t<T>* gather_subset(const FeatureSubset& subset, int64_t begin, int64_t end,
                                             const T* row, accumulate_t<T>* x) {
#if HSTREE_VECTOR_BYTES == 64
  if constexpr (sizeof(T) < 8) {
    each_feature_block(subset, begin, end, [&](int32_t column, __mmask16 lanes) {
      const __m512 some = bits_as<__m512>(load_lanes(lanes, row + column));
      _mm512_storeu_ps(x, _mm512_maskz_compress_ps(lanes, some));
      x += __builtin_popcount(lanes);
    });
    return x;
  }
#endif
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width;
  int64_t s = begin;
  for (; s + W <= end; s += W, x += W) {
    T some[W];
    for (int64_t i = 0; i < W; ++i) some[i] = row[subset.index[s + i]];
    store(x, load(some));
  }
  for (; s < end; ++s) *x++ = element(row + subset.index[s]);
  return x;
}

template <typename A>
static inline void scatter_add_subset(const FeatureSubset& subset, int64_t begin, int64_t end, const A* x,
                                      A* row) {
  for (int64_t s = begin; s < end; ++s) row[subset.index[s]] += *x++;
}

// x = the features begin <= s < end of a row of hidden, followed by a vector of zeros.
template <typename T>
static inline void gather(const FeatureSubset& subset, int64_t begin, int64_t end, const T* row,
                          accumulate_t<T>* x) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  if (subset.index) {
    x = gather_subset(subset, begin, end, row, x);
  } else {
    int64_t s = begin;
    for (; s + W <= end; s += W, x += W) store(x, load(row + s));
    if (s < end) store(x, load_first(row + s, end - s));
    x += end - s;
  }
  store(x, Vector<A>{});
}

// row[feature] += x over the features begin <= s < end. May read a vector beyond x.
template <typename A>
static inline void scatter_add(const FeatureSubset& subset, int64_t begin, int64_t end, const A* x, A* row) {
  constexpr int64_t W = VectorOf<A>::width;
  if (subset.index) return scatter_add_subset(subset, begin, end, x, row);
  int64_t s = begin;
  for (; s + W <= end; s += W, x += W) store(row + s, load(row + s) + load(x));
  if (s < end) store_first(row + s, end - s, load_first(row + s, end - s) + load(x));
}

// a b + c, rounded once (float32 without FMA instructions: once to float64, once to float32).
static inline Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) {
#if HSTREE_VECTOR_BYTES == 64
  return bits_as<Vector<float>>(_mm512_fmadd_ps(bits_as<__m512>(a), bits_as<__m512>(b), bits_as<__m512>(c)));
#elif HSTREE_VECTOR_BYTES == 32
  return bits_as<Vector<float>>(_mm256_fmadd_ps(bits_as<__m256>(a), bits_as<__m256>(b), bits_as<__m256>(c)));
#elif defined(__aarch64__)
  return bits_as<Vector<float>>(
      vfmaq_f32(bits_as<float32x4_t>(c), bits_as<float32x4_t>(a), bits_as<float32x4_t>(b)));
#else
  Vector<float> result;
  for (int i = 0; i < VectorOf<float>::width; ++i) {
    result[i] = static_cast<float>(static_cast<double>(a[i]) * b[i] + c[i]);
  }
  return result;
#endif
}

static inline Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) {
#if HSTREE_VECTOR_BYTES == 64
  return bits_as<Vector<double>>(
      _mm512_fmadd_pd(bits_as<__m512d>(a), bits_as<__m512d>(b), bits_as<__m512d>(c)));
#elif HSTREE_VECTOR_BYTES == 32
  return bits_as<Vector<double>>(
      _mm256_fmadd_pd(bits_as<__m256d>(a), bits_as<__m256d>(b), bits_as<__m256d>(c)));
#elif defined(__aarch64__)
  return bits_as<Vector<double>>(
      vfmaq_f64(bits_as<float64x2_t>(c), bits_as<float64x2_t>(a), bits_as<float64x2_t>(b)));
#else
  Vector<double> result;
  for (int i = 0; i < VectorOf<double>::width; ++i) result[i] = __builtin_fma(a[i], b[i], c[i]);
  return result;
#endif
}

// c + a b, rounded once wherever the instruction set has FMA: a compiler that chooses would give other bits where other
// rows or gradients are in the loop.
template <typename V>
static inline V add_product(V c, V a, V b) {
#if HSTREE_VECTOR_BYTES >= 32 || defined(__aarch64__)
  return fma(a, b, c);
#else
  return c + a * b;
#endif
}

// 1 / sqrt(x), 2 ulp.
static inline Vector<float> inverse_sqrt(Vector<float> x) {
#if HSTREE_VECTOR_BYTES == 64
  const Vector<float> y = bits_as<Vector<float>>(_mm512_maskz_rsqrt14_ps(0xffff, bits_as<__m512>(x)));
  return y + y * (0.5f - 0.5f * (x * y) * y);
#elif HSTREE_VECTOR_BYTES == 32
  return 1 / bits_as<Vector<float>>(_mm256_sqrt_ps(bits_as<__m256>(x)));
#elif defined(__aarch64__)
  return 1 / bits_as<Vector<float>>(vsqrtq_f32(bits_as<float32x4_t>(x)));
#else
  for (int i = 0; i < VectorOf<float>::width; ++i) x[i] = 1 / __builtin_sqrtf(x[i]);
  return x;
#endif
}
static inline Vector<double> inverse_sqrt(Vector<double> x) {
  for (int i = 0; i < VectorOf<double>::width; ++i) x[i] = 1 / __builtin_sqrt(x[i]);
  return x;
}

// exp(x) for x <= 87, 1 ulp, 0 below -87; NaN stays NaN. After Cephes.
static inline Vector<float> exponential(Vector<float> x) {
#if HSTREE_VECTOR_BYTES == 64
  const __mmask16 normal = _mm512_cmp_ps_mask(bits_as<__m512>(x), _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
#else
  const I32 tiny = x < -87.0f;
  x = tiny ? splat(-87.0f) : x;
#endif
  const Vector<float> n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const Vector<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#if HSTREE_VECTOR_BYTES == 64
  return bits_as<Vector<float>>(_mm512_maskz_scalef_ps(normal, bits_as<__m512>(p), bits_as<__m512>(n)));
#else
  const I32 exponent = (__builtin_convertvector(n, I32) + 127) << 23;
  const Vector<float> value = p * bits_as<Vector<float>>(exponent);
  return tiny ? Vector<float>{} : value;
#endif
}

// The same for float64, x <= 708, 0 below -708: 2^n and the series of exp up to r^13 for |r| <= log(2) / 2.
static inline Vector<double> exponential(Vector<double> x) {
  const I64 tiny = x < -708.0;
  x = tiny ? splat(-708.0) : x;
  const Vector<double> shifted = x * 1.44269504088896338700 + 0x1.8p52;
  const Vector<double> n = shifted - 0x1.8p52;
  const Vector<double> r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  Vector<double> p = r * (1.0 / 6227020800) + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r * r + r + 1.0;
  const I64 exponent = (bits_as<I64>(shifted) + 1023) << 52;  // n is in the low bits of shifted
  const Vector<double> value = p * bits_as<Vector<double>>(exponent);
  return tiny ? Vector<double>{} : value;
}

// log(1 + e) for 0 <= e <= 1, relative error below 2e-7. After Cephes' logf, without rounding 1 + e.
static inline Vector<float> log1p_unit(Vector<float> e) {
  const I32 upper = e > 0.41421356f;
  const Vector<float> f = upper ? 0.5f * (e - 1.0f) : e;
  const Vector<float> ff = f * f;
  Vector<float> p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  Vector<float> y = p * f * ff - 0.5f * ff + f;
  return upper ? y + 0.69314718056f : y;
}

// The same for float64: log(1 + f) = 2 atanh(f / (2 + f)), its series up to s^21 for |s| <= 0.172.
static inline Vector<double> log1p_unit(Vector<double> e) {
  const I64 upper = e > 0.41421356;
  const Vector<double> f = upper ? 0.5 * (e - 1.0) : e;
  const Vector<double> s = f / (2.0 + f);
  const Vector<double> ss = s * s;
  Vector<double> p = ss * (1.0 / 21) + 1.0 / 19;
  p = p * ss + 1.0 / 17;
  p = p * ss + 1.0 / 15;
  p = p * ss + 1.0 / 13;
  p = p * ss + 1.0 / 11;
  p = p * ss + 1.0 / 9;
  p = p * ss + 1.0 / 7;
  p = p * ss + 1.0 / 5;
  p = p * ss + 1.0 / 3;
  const Vector<double> y = 2.0 * s * ss * p + 2.0 * s;
  return upper ? y + 0.69314718055994530942 : y;
}

// log(s 2^-powers) for normal s > 0, error 3e-7 relative to the larger of 1 and its magnitude; NaN and infinity
// propagate.
static inline Vector<float> log_of_sum(Vector<float> s, int powers = 0) {
  const U32 bits = bits_as<U32>(s);
  const Vector<float> exponent =
      __builtin_convertvector(bits_as<I32>(bits >> 23) - (127 + powers), Vector<float>);
  const Vector<float> mantissa = bits_as<Vector<float>>((bits & 0x7fffffu) | 0x3f800000u);
  const Vector<float> value = exponent * 0.69314718056f + log1p_unit(mantissa - 1.0f);
  return s <= __FLT_MAX__ ? value : s;
}
static inline Vector<double> log_of_sum(Vector<double> s, int powers = 0) {
  const I64 bits = bits_as<I64>(s);
  const Vector<double> exponent = __builtin_convertvector((bits >> 52) - (1023 + powers), Vector<double>);
  const Vector<double> mantissa = bits_as<Vector<double>>((bits & 0xfffffffffffff) | 0x3ff0000000000000);
  const Vector<double> value = exponent * 0.69314718055994530942 + log1p_unit(mantissa - 1.0);
  return s <= __DBL_MAX__ ? value : s;
}

static inline Vector<float> magnitude(Vector<float> x) {
  return bits_as<Vector<float>>(bits_as<U32>(x) & 0x7fffffffu);
}
static inline Vector<double> magnitude(Vector<double> x) {
  return bits_as<Vector<double>>(bits_as<I64>(x) & INT64_MAX);
}

}  // namespace HSTREE_CAPABILITY
}  // namespace hstree::cpu
