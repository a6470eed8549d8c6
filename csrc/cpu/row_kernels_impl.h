// Body of the row kernels, under the rules of vector_impl.h.
#include "cpu/vector_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {

#if HSTREE_VECTOR_BYTES == 64
// Calls f(column, lanes) for each 16 columns of the input that hold some of the features begin <= s < end.
template <typename T, typename F>
static inline void each_feature_block(const TreeRows<T>& tree, int64_t begin, int64_t end, const F& f) {
  if (begin == end) return;
  const int32_t first = tree.feature_index[begin], last = tree.feature_index[end - 1];
  for (int32_t block = first / 16; block <= last / 16; ++block) {
    uint32_t lanes = tree.feature_lanes[block];
    if (block == first / 16) lanes &= 0xffffu << first % 16;
    if (block == last / 16) lanes &= 0xffffu >> (15 - last % 16);
    f(16 * block, static_cast<__mmask16>(lanes));
  }
}

// A subset of a row's features and zeros after it, 16 elements or fewer beyond a whole number of vectors.
static inline void gather_features(const TreeRows<float>& tree, const float* input, int64_t begin,
                                   int64_t end, float* x) {
  each_feature_block(tree, begin, end, [&](int32_t column, __mmask16 lanes) {
    const __m512 some = _mm512_maskz_loadu_ps(lanes, input + column);
    _mm512_storeu_ps(x, _mm512_maskz_compress_ps(lanes, some));
    x += __builtin_popcount(lanes);
  });
  _mm512_storeu_ps(x, _mm512_setzero_ps());
}

// out[feature] += x over the features begin <= s < end; reads up to 15 elements behind x.
template <typename T>
static inline void scatter_add(const TreeRows<T>& tree, const float* x, int64_t begin, int64_t end,
                               float* out) {
  each_feature_block(tree, begin, end, [&](int32_t column, __mmask16 lanes) {
    const __m512 some = _mm512_maskz_expand_ps(lanes, _mm512_loadu_ps(x));
    const __m512 before = _mm512_maskz_loadu_ps(lanes, out + column);
    _mm512_mask_storeu_ps(out + column, lanes, _mm512_add_ps(before, some));
    x += __builtin_popcount(lanes);
  });
}
#endif

template <typename T>
static inline void gather_features(const TreeRows<T>& tree, const T* input, int64_t begin, int64_t end,
                                   accumulate_t<T>* x) {
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width;
  int64_t s = begin;
  for (; s + W <= end; s += W, x += W) {
    T some[W];
    for (int64_t i = 0; i < W; ++i) some[i] = input[tree.feature_index[s + i]];
    store(x, load(some));
  }
  for (; s < end; ++s) *x++ = element(input + tree.feature_index[s]);
  for (; (s - begin) % W; ++s) *x++ = 0;
}

template <typename T, typename A>
static inline void scatter_add(const TreeRows<T>& tree, const A* x, int64_t begin, int64_t end, A* out) {
  for (int64_t s = begin; s < end; ++s) out[tree.feature_index[s]] += *x++;
}

// The features begin <= s < end of a row, padded with zeros to a whole number of vectors.
template <typename T>
static inline void gather_input(const TreeRows<T>& tree, int64_t row, int64_t begin, int64_t end,
                                accumulate_t<T>* x) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  const T* input = tree.input + row * tree.in_features;
  int64_t s = begin;
  if (tree.feature_index) {
    gather_features(tree, input, begin, end, x);
    return;
  }
  for (; s + W <= end; s += W, x += W) store(x, load(input + s));
  for (; s < end; ++s) *x++ = element(input + s);
  for (; (s - begin) % W; ++s) *x++ = 0;
}

static inline void prefetch(const void* p, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(static_cast<const char*>(p) + b);
}

// Weight rows that the next row will visit first, fetched along with the sums over this row's columns: all at
// once they would wait for one another.
template <typename T>
struct Ahead {
  const T* const* w;
  int64_t count;

  void fetch(int64_t column) const {
    for (int64_t i = 0; i < count; ++i) __builtin_prefetch(w[i] + column);
  }
};

// L dot products with one x, two vectors of columns at a time.
template <int L, typename T>
static inline void dot(const accumulate_t<T>* x, const T* const* w, int64_t size, Ahead<T> ahead,
                       accumulate_t<T>* out) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  Vector<A> even[L] = {}, odd[L] = {};
  int64_t s = 0;
  for (; s + 2 * W <= size; s += 2 * W) {
    const Vector<A> x0 = load(x + s), x1 = load(x + s + W);
    ahead.fetch(s);
    ahead.fetch(s + W);
#pragma GCC unroll 8
    for (int l = 0; l < L; ++l) {
      even[l] += x0 * load(w[l] + s);
      odd[l] += x1 * load(w[l] + s + W);
    }
  }
  for (; s + W <= size; s += W) {
    const Vector<A> x0 = load(x + s);
    ahead.fetch(s);
#pragma GCC unroll 8
    for (int l = 0; l < L; ++l) even[l] += x0 * load(w[l] + s);
  }
  if (s < size) {
    const Vector<A> x0 = load(x + s);  // x is padded with zeros
#pragma GCC unroll 8
    for (int l = 0; l < L; ++l) odd[l] += x0 * load_first(w[l] + s, size - s);
  }
  for (int l = 0; l < L; ++l) out[l] = sum_of<A>(even[l] + odd[l]);
}

// Weight rows of the row at place j that no earlier row visits, from feature `begin` on; returns how many.
template <typename T>
static inline int64_t first_visits(const TreeRows<T>& tree, int64_t j, int64_t begin, const T** w) {
  const int64_t first = tree.offset[j] + tree.shared[j];
  const int64_t count = tree.offset[j + 1] - first;
  for (int64_t i = 0; i < count; ++i) {
    w[i] = tree.weight + (tree.entry[first + i] >> tree.shift) * tree.features + begin;
  }
  return count;
}

template <typename T>
static void scores(const TreeRows<T>& tree, int64_t begin, int64_t end, accumulate_t<T>* score,
                   int64_t score_stride, accumulate_t<T>* x, const T** w) {
  const int64_t size = tree.features;
  for (int64_t j = begin; j < end; ++j) {
    const int32_t* entry = tree.entry + tree.offset[j];
    const int64_t count = tree.offset[j + 1] - tree.offset[j];
    const T** next = w + tree.longest;
    const int64_t opening = j + 1 < end ? first_visits(tree, j + 1, 0, next) : 0;
    if (j + 1 < end) prefetch(tree.input + tree.row[j + 1] * tree.in_features, tree.in_features * sizeof(T));
    gather_input(tree, tree.row[j], 0, size, x);
    for (int64_t l = 0; l < count; ++l) w[l] = tree.weight + (entry[l] >> tree.shift) * size;
    accumulate_t<T>* z = score + tree.row[j] * score_stride;
    int64_t l = 0, fetched = 0;
    const auto share = [&](int64_t done) {
      const int64_t some = done < count ? opening * done / count - fetched : opening - fetched;
      fetched += some;
      return Ahead<T>{next + fetched - some, some};
    };
    for (; l + 4 <= count; l += 4) dot<4>(x, w + l, size, share(l + 4), z + l);
    switch (count - l) {
      case 3:
        dot<3>(x, w + l, size, share(count), z + l);
        break;
      case 2:
        dot<2>(x, w + l, size, share(count), z + l);
        break;
      case 1:
        dot<1>(x, w + l, size, share(count), z + l);
        break;
    }
    if (tree.bias) {
      for (l = 0; l < count; ++l) z[l] += element(tree.bias + (entry[l] >> tree.shift));
    }
  }
}

// One level of the gradient at U vectors of columns: where a weight row's sum comes from and goes to.
template <int U, bool opened, bool stays, typename T>
static inline void gradient_level(accumulate_t<T> g, const T* w, const Vector<accumulate_t<T>>* x,
                                  Vector<accumulate_t<T>>* grad_x, accumulate_t<T>* sum, T* target) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u) {
    grad_x[u] += g * load(w + u * W);
    Vector<A> d = g * x[u];
    if (opened) d += load(sum + u * W);
    if (stays) {
      store(sum + u * W, d);
    } else {
      stream(target + u * W, d);
    }
  }
}

template <int U, typename T>
static inline void gradient_columns(int64_t c, int64_t count, int64_t opened, int64_t stay,
                                    const accumulate_t<T>* g, const accumulate_t<T>* x,
                                    accumulate_t<T>* grad_x, accumulate_t<T>* sums, int64_t stride,
                                    const T* const* w, T* const* target, Ahead<T> ahead) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  Vector<A> xs[U], gs[U];
  for (int u = 0; u < U; ++u) {
    xs[u] = load(x + c + u * W);
    gs[u] = Vector<A>{};
  }
  for (int u = 0; u < U; ++u) ahead.fetch(c + u * W);
  int64_t l = 0;
  const int64_t both = opened < stay ? opened : stay;
  for (; l < both; ++l)
    gradient_level<U, true, true>(g[l], w[l] + c, xs, gs, sums + l * stride + c, target[l] + c);
  for (; l < opened; ++l)
    gradient_level<U, true, false>(g[l], w[l] + c, xs, gs, sums + l * stride + c, target[l] + c);
  for (; l < stay; ++l)
    gradient_level<U, false, true>(g[l], w[l] + c, xs, gs, sums + l * stride + c, target[l] + c);
  for (; l < count; ++l)
    gradient_level<U, false, false>(g[l], w[l] + c, xs, gs, sums + l * stride + c, target[l] + c);
  for (int u = 0; u < U; ++u) store(grad_x + c + u * W, gs[u]);
}

template <typename T>
static void gradients(const TreeRows<T>& tree, int64_t begin, int64_t end, const accumulate_t<T>* grad_score,
                      accumulate_t<T>* grad_input, bool add, T* grad_weight, bool sparse,
                      accumulate_t<T>* scratch, const T** w, T** target) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  const int64_t size = end - begin;
  const int64_t stride = (size + 15) / 16 * 16;
  A* sums = scratch;
  A* x = sums + tree.longest * stride;
  A* grad_x = x + stride;
  for (int64_t j = 0; j < tree.rows; ++j) {
    const int32_t* entry = tree.entry + tree.offset[j];
    const A* g = grad_score + tree.offset[j];
    const int64_t count = tree.offset[j + 1] - tree.offset[j];
    const int64_t opened = tree.shared[j];    // levels below it were begun by an earlier row
    const int64_t stay = tree.shared[j + 1];  // levels below it go on in the next one
    Ahead<T> ahead = {w + tree.longest, 0};
    if (j + 1 < tree.rows) {
      ahead.count = first_visits(tree, j + 1, begin, w + tree.longest);
      prefetch(tree.input + tree.row[j + 1] * tree.in_features, tree.in_features * sizeof(T));
      prefetch(grad_input + tree.row[j + 1] * tree.in_features, tree.in_features * sizeof(A));
    }
    gather_input(tree, tree.row[j], begin, end, x);
    for (int64_t l = 0; l < count; ++l) {
      const int64_t weight_row = entry[l] >> tree.shift;
      w[l] = tree.weight + weight_row * tree.features + begin;
      if (l >= opened) {
        const int64_t to = sparse ? tree.slot[j] + l - opened : weight_row;
        target[l] = grad_weight + to * tree.features + begin;
      }
    }
    int64_t c = 0;
    for (; c + 4 * W <= size; c += 4 * W) {
      gradient_columns<4>(c, count, opened, stay, g, x, grad_x, sums, stride, w, target, ahead);
    }
    for (; c + W <= size; c += W) {
      gradient_columns<1>(c, count, opened, stay, g, x, grad_x, sums, stride, w, target, ahead);
    }
    if (c < size) {  // the last columns, fewer than a vector
      const Vector<A> x0 = load(x + c);
      Vector<A> sum_x = {};
      for (int64_t l = 0; l < count; ++l) {
        sum_x += g[l] * load_first(w[l] + c, size - c);
        Vector<A> d = g[l] * x0;
        if (l < opened) d += load(sums + l * stride + c);
        if (l < stay) {
          store(sums + l * stride + c, d);
        } else {
          store_first(target[l] + c, size - c, d);
        }
      }
      store(grad_x + c, sum_x);
    }
    A* out = grad_input + tree.row[j] * tree.in_features;
    if (tree.feature_index) {
      scatter_add(tree, grad_x, begin, end, out);
    } else {
      out += begin;
      int64_t s = 0;
      for (; s + W <= size; s += W) store(out + s, add ? load(out + s) + load(grad_x + s) : load(grad_x + s));
      for (; s < size; ++s) out[s] = add ? out[s] + grad_x[s] : grad_x[s];
    }
  }
  end_of_streams();
}

template <typename T>
static void bias_gradients(const TreeRows<T>& tree, const accumulate_t<T>* grad_score, T* grad_bias,
                           bool sparse, accumulate_t<T>* sums, T** target) {
  for (int64_t j = 0; j < tree.rows; ++j) {
    const int64_t opened = tree.shared[j], stay = tree.shared[j + 1];
    for (int64_t e = tree.offset[j], l = 0; e < tree.offset[j + 1]; ++e, ++l) {
      sums[l] = l < opened ? sums[l] + grad_score[e] : grad_score[e];
      if (l >= opened)
        target[l] = grad_bias + (sparse ? tree.slot[j] + l - opened : tree.entry[e] >> tree.shift);
      if (l >= stay) store_first(target[l], 1, Vector<accumulate_t<T>>{sums[l]});
    }
  }
}

// One vector of +-score, the places beyond count filled with 0.
static inline Vector<float> signed_scores(const float* score, const int32_t* entry, int64_t count) {
  float u[VectorOf<float>::width] = {};
  for (int64_t i = 0; i < count; ++i) u[i] = entry[i] & 1 ? score[i] : -score[i];
  return load(u);
}

static float log_sigmoid_sum(const float* score, const int32_t* entry, int64_t count) {
  constexpr int64_t W = VectorOf<float>::width;
  Vector<float> total = {};
  for (int64_t l = 0; l < count; l += W) {
    const int64_t some = count - l < W ? count - l : W;
    const Vector<float> u = signed_scores(score + l, entry + l, some);
    Vector<float> value = (u > 0.0f ? Vector<float>{} : u) - log1p_unit(exponential(-magnitude(u)));
    for (int64_t i = some; i < W; ++i) value[i] = 0;
    total += value;
  }
  return sum_of<float>(total);
}

static void log_sigmoid_grad(const float* score, const int32_t* entry, int64_t count, float grad,
                             float* grad_score) {
  constexpr int64_t W = VectorOf<float>::width;
  for (int64_t l = 0; l < count; l += W) {
    const int64_t some = count - l < W ? count - l : W;
    const Vector<float> u = signed_scores(score + l, entry + l, some);
    const Vector<float> e = exponential(-magnitude(u));
    const Vector<float> one = Vector<float>{} + 1.0f;
    const Vector<float> g = grad * ((u > 0.0f ? e : one) / (one + e));
    for (int64_t i = 0; i < some; ++i) grad_score[l + i] = entry[l + i] & 1 ? g[i] : -g[i];
  }
}

static double log_sigmoid_sum(const double* score, const int32_t* entry, int64_t count) {
  double total = 0;
  for (int64_t l = 0; l < count; ++l) {
    const double u = entry[l] & 1 ? score[l] : -score[l];
    total += (u > 0 ? 0 : u) - __builtin_log1p(__builtin_exp(-__builtin_fabs(u)));
  }
  return total;
}

static void log_sigmoid_grad(const double* score, const int32_t* entry, int64_t count, double grad,
                             double* grad_score) {
  for (int64_t l = 0; l < count; ++l) {
    const double u = entry[l] & 1 ? score[l] : -score[l];
    const double e = __builtin_exp(-__builtin_fabs(u));
    const double g = grad * ((u > 0 ? e : 1) / (1 + e));
    grad_score[l] = entry[l] & 1 ? g : -g;
  }
}

template <typename T>
static const RowKernels<T>* table() {
  static constexpr RowKernels<T> kernels = {scores<T>, gradients<T>, bias_gradients<T>, log_sigmoid_sum,
                                            log_sigmoid_grad};
  return &kernels;
}

}  // namespace HSTREE_CAPABILITY

#define HSTREE_TABLE(T)                                                 \
  template <>                                                           \
  const RowKernels<T>* HSTREE_JOIN(row_kernels_, HSTREE_CAPABILITY)() { \
    return HSTREE_CAPABILITY::table<T>();                               \
  }
HSTREE_TABLE(float)
HSTREE_TABLE(double)
HSTREE_TABLE(BFloat16)
HSTREE_TABLE(Half)
#undef HSTREE_TABLE

}  // namespace hstree::cpu
