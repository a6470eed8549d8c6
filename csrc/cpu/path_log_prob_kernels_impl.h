// Body of the kernels of the path op, under the rules of vector_impl.h.
#pragma once

#include "cpu/vector_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {

static int64_t copy_paths(const PathCopies& copies) {
  constexpr int64_t W = VectorOf<float>::width, ahead = 16;
  const uint32_t limit = static_cast<uint32_t>(copies.weight_rows);
  int64_t last_count = 0;
  for (int64_t j = 0; j < copies.rows; ++j) {
    if (j + ahead < copies.rows) {  // prefetch: paths are scattered over the table
      __builtin_prefetch(copies.path + copies.span[j + ahead].begin);
      __builtin_prefetch(copies.path + copies.span[j + ahead].end);
    }
    const int32_t* const from = copies.path + copies.span[j].begin;
    int32_t* const to = copies.entry + copies.offset[j];
    const int32_t* const last = copies.path + copies.span[j ? j - 1 : 0].begin;
    const int64_t count = copies.offset[j + 1] - copies.offset[j];
    int64_t shared = count < last_count ? count : last_count;
    for (int64_t l = 0; l < count; l += W) {
      const int64_t some = count - l < W ? count - l : W;
      const I32 now = load_first(from + l, some);
      store_first(to + l, some, now);
      const int64_t invalid = first_lane(bits_as<U32>(now) >> 1 >= limit);
      if (invalid < some) return copies.span[j].begin + l + invalid;
      if (shared <= l) continue;
      const int64_t compared = shared - l < W ? shared - l : W;
      const I32 before = load_first(last + l, compared);
      const int64_t differs = first_lane(bits_as<U32>(now ^ before) >> 1 != 0);
      if (differs < compared) shared = l + differs;
    }
    copies.shared[j] = static_cast<int32_t>(shared);
    last_count = count;
  }
  return -1;
}

constexpr int64_t ahead = 5;  // rows between the prefetch of memory and its use

// The features of row i, which is not ignored, for tree t.
template <typename A>
static inline A* gathered_row(const GatheredRows<A>& gathered, int64_t i, int64_t t) {
  return gathered.x + (t * gathered.rows + gathered.place[i * gathered.trees + t]) * gathered.stride;
}

template <typename A>
static inline bool is_ignored(const GatheredRows<A>& gathered, int64_t i) {
  return gathered.place[i * gathered.trees] < 0;
}

// Prefetches all that will be gathered or scattered a few rows later.
template <typename A>
__attribute__((always_inline)) static inline void prefetch_gathered(const GatheredRows<A>& gathered,
                                                                    int64_t i, int64_t end) {
  i += ahead;
  if (i >= end || is_ignored(gathered, i)) return;
  for (int64_t t = 0; t < gathered.trees; ++t) prefetch_row(gathered_row(gathered, i, t), gathered.features);
}

template <typename A>
static inline void scatter_row(const GatheredRows<A>& gathered, int64_t i, A* row) {
  for (int64_t t = 0; t < gathered.trees; ++t) {
    scatter_add(gathered.subset[t], 0, gathered.features, gathered_row(gathered, i, t), row);
  }
}

#if HSTREE_VECTOR_BYTES == 64
// The same for K trees from `first` on, 16 columns at a time.
template <int K, typename T>
static inline void gather_trees(const GatheredRows<float>& gathered, int64_t i, int64_t first, const T* row) {
  const FeatureSubset* const subset = gathered.subset + first;
  float* x[K];
#pragma GCC unroll 4
  for (int k = 0; k < K; ++k) x[k] = gathered_row(gathered, i, first + k);
  for (int64_t c = 0; c < gathered.in_features; c += 16) {
    const int64_t left = gathered.in_features - c;
    const __m512 some = bits_as<__m512>(left < 16 ? load_first(row + c, left) : load(row + c));
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      const uint16_t lanes = subset[k].lanes[c / 16];
      _mm512_storeu_ps(x[k], _mm512_maskz_compress_ps(lanes, some));
      x[k] += __builtin_popcount(lanes);
    }
  }
}

template <int K>
static inline void scatter_trees(const GatheredRows<float>& gathered, int64_t i, int64_t first, float* row) {
  const FeatureSubset* const subset = gathered.subset + first;
  const float* x[K];
#pragma GCC unroll 4
  for (int k = 0; k < K; ++k) x[k] = gathered_row(gathered, i, first + k);
  for (int64_t c = 0; c < gathered.in_features; c += 16) {
    const int64_t left = gathered.in_features - c;
    Vector<float> sum = left < 16 ? load_first(row + c, left) : load(row + c);
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      const uint16_t lanes = subset[k].lanes[c / 16];
      sum += bits_as<Vector<float>>(_mm512_maskz_expand_ps(lanes, _mm512_loadu_ps(x[k])));
      x[k] += __builtin_popcount(lanes);
    }
    if (left < 16) {
      store_first(row + c, left, sum);
    } else {
      store(row + c, sum);
    }
  }
}

template <int K>
struct Trees {
  static constexpr int count = K;
};

// Calls work(Trees<K>, t) for trees t to t + K - 1: four at once, then two and one.
template <typename Work>
static inline void each_trees(int64_t trees, const Work& work) {
  int64_t t = 0;
  for (; t + 4 <= trees; t += 4) work(Trees<4>{}, t);
  for (; t + 2 <= trees; t += 2) work(Trees<2>{}, t);
  if (t < trees) work(Trees<1>{}, t);
}

static inline void scatter_row(const GatheredRows<float>& gathered, int64_t i, float* row) {
  each_trees(gathered.trees,
             [&](auto some, int64_t t) { scatter_trees<decltype(some)::count>(gathered, i, t, row); });
}
#endif

template <typename T>
static inline void gather_row(const GatheredRows<accumulate_t<T>>& gathered, int64_t i, const T* row) {
#if HSTREE_VECTOR_BYTES == 64
  if constexpr (sizeof(T) < 8) {
    return each_trees(gathered.trees, [&](auto some, int64_t t) {
      gather_trees<decltype(some)::count>(gathered, i, t, row);
    });
  }
#endif
  for (int64_t t = 0; t < gathered.trees; ++t) {
    gather(gathered.subset[t], 0, gathered.features, row, gathered_row(gathered, i, t));
  }
}

template <typename T>
static void gather_rows(const GatheredRows<accumulate_t<T>>& gathered, int64_t begin, int64_t end,
                        const T* hidden) {
  for (int64_t i = begin; i < end; ++i) {
    prefetch_gathered(gathered, i, end);
    if (!is_ignored(gathered, i)) gather_row(gathered, i, hidden + i * gathered.in_features);
  }
}

template <typename A>
static void scatter_rows(const GatheredRows<A>& gathered, int64_t begin, int64_t end, bool add,
                         A* grad_hidden) {
  for (int64_t i = begin; i < end; ++i) {
    prefetch_gathered(gathered, i, end);
    A* const row = grad_hidden + i * gathered.in_features;
    if (!add) {
      for (int64_t s = 0; s < gathered.in_features; ++s) row[s] = 0;
    }
    if (!is_ignored(gathered, i)) scatter_row(gathered, i, row);
  }
}

// Levels at which all rows of a tile visit the same weight row.
template <typename T>
static inline int64_t common_prefix(const PathRows<T>& tree, int64_t j, int rows) {
  int64_t common = tree.offset[j + 1] - tree.offset[j];
  for (int r = 1; r < rows; ++r) common = tree.shared[j + r] < common ? tree.shared[j + r] : common;
  return common;
}

// The offset of the row of place j in x, or in hidden, and in its gradient.
template <typename T>
static inline int64_t x_offset(const PathRows<T>& tree, int64_t j) {
  return (tree.x ? j : tree.row[j]) * tree.x_stride;
}

// Prefetches the features begin <= s < end of the weight rows that the row at place j visits first, for trees
// that read a subset. For one tree over all features it does not pay.
template <typename T>
__attribute__((always_inline)) static inline void prefetch_weights(const PathRows<T>& tree, int64_t j,
                                                                   int64_t begin, int64_t end) {
  if (j >= tree.rows || !tree.x) return;
  for (int64_t e = tree.offset[j] + tree.shared[j]; e < tree.offset[j + 1]; ++e) {
    prefetch_row(tree.weight + (tree.entry[e] >> 1) * tree.features + begin, end - begin);
  }
}

// Prefetches the row at place j, unless it was gathered.
template <typename T>
__attribute__((always_inline)) static inline void prefetch_input(const PathRows<T>& tree, int64_t j) {
  if (j < tree.rows && !tree.x) prefetch_row(tree.hidden + x_offset(tree, j), tree.features);
}

// The features begin <= s < end of the row at place j: in place, or for 16-bit elements converted in `copy`.
template <typename T>
static inline const accumulate_t<T>* x_row(const PathRows<T>& tree, int64_t j, int64_t begin, int64_t end,
                                           accumulate_t<T>* copy) {
  const int64_t at = x_offset(tree, j) + begin;
  if (tree.x) return tree.x + at;
  if constexpr (sizeof(T) == sizeof(accumulate_t<T>)) {
    return tree.hidden + at;
  } else {
    gather({nullptr, nullptr}, 0, end - begin, tree.hidden + at, copy);
    return copy;
  }
}

template <bool whole, int R, int L, typename T>
static inline void add_products(const accumulate_t<T>* const* x, const T* const* w, int64_t s, int64_t size,
                                Vector<accumulate_t<T>> (*sum)[L]) {
  using A = accumulate_t<T>;
  Vector<A> xs[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) xs[r] = load_some<whole>(x[r] + s, size - s);
#pragma GCC unroll 8
  for (int l = 0; l < L; ++l) {
    const Vector<A> ws = load_some<whole>(w[l] + s, size - s);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r][l] = add_product(sum[r][l], xs[r], ws);
  }
}

// out[r][l] = dot(x[r], w[l]) for R rows and L weight rows, with the same bits for any R.
template <int R, int L, typename T>
static inline void dots(const accumulate_t<T>* const* x, const T* const* w, int64_t size,
                        accumulate_t<T>* const* out, int64_t level) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  constexpr int K = 2;  // partial sums of each product, to hide the latency of additions
  Vector<A> sum[K][R][L] = {};
  int64_t s = 0;
  for (; s + K * W <= size; s += K * W) {
#pragma GCC unroll 2
    for (int k = 0; k < K; ++k) add_products<true, R, L, T>(x, w, s + k * W, size, sum[k]);
  }
  for (; s + W <= size; s += W) add_products<true, R, L, T>(x, w, s, size, sum[0]);
  if (s < size) add_products<false, R, L, T>(x, w, s, size, sum[K - 1]);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int l = 0; l < L; ++l) {
      out[r][level + l] = sum_of<A>(sum[0][r][l] + sum[1][r][l]);
    }
  }
}

// Scores of R rows at the levels begin <= l < end of their paths, where they visit the same weight rows w.
template <int R, typename T>
static inline void level_scores(const accumulate_t<T>* const* x, const T* const* w, int64_t begin,
                                int64_t end, int64_t size, accumulate_t<T>* const* out) {
  // As many sums as the registers hold, in two parts.
  constexpr int block = R == 1 ? 4 : HSTREE_VECTOR_BYTES == 64 ? 2 : 1;
  int64_t l = begin;
  for (; l + block <= end; l += block) dots<R, block>(x, w + l, size, out, l);
  if constexpr (block == 4) {
    if (end - l == 3) return dots<R, 3>(x, w + l, size, out, l);
    if (end - l == 2) return dots<R, 2>(x, w + l, size, out, l);
  }
  if (end - l == 1) dots<R, 1>(x, w + l, size, out, l);
}

// Sign bits of a vector of entries, set where the path goes right. Lanes from count on are arbitrary.
static inline U32 right_signs(const int32_t* entry, int64_t count) {
  return ~bits_as<U32>(load_first(entry, count)) << 31;
}

// Sum over the nodes of a row of log sigmoid(+-score).
static inline float log_sigmoid_sum(const float* score, const int32_t* entry, int64_t count) {
  constexpr int64_t W = VectorOf<float>::width;
  Vector<float> total = {};
  for (int64_t l = 0; l < count; l += W) {
    const int64_t some = count - l < W ? count - l : W;
    const Vector<float> z = load_first(score + l, some);
    const Vector<float> u = bits_as<Vector<float>>(bits_as<U32>(z) ^ right_signs(entry + l, some));
    const Vector<float> value = (u > 0.0f ? Vector<float>{} : u) - log1p_unit(exponential(-magnitude(u)));
    total += first_lanes_of(value, some);
  }
  return sum_of<float>(total);
}

static inline double log_sigmoid_sum(const double* score, const int32_t* entry, int64_t count) {
  double total = 0;
  for (int64_t l = 0; l < count; ++l) {
    const double u = entry[l] & 1 ? score[l] : -score[l];
    total += (u > 0 ? 0 : u) - __builtin_log1p(__builtin_exp(-__builtin_fabs(u)));
  }
  return total;
}

// grad_score = grad * d log sigmoid(+-score) / d score, for the nodes of a row.
static inline void log_sigmoid_grad(const float* score, const int32_t* entry, int64_t count, float grad,
                                    float* grad_score) {
  constexpr int64_t W = VectorOf<float>::width;
  const Vector<float> one = splat(1.0f);
  for (int64_t l = 0; l < count; l += W) {
    const int64_t some = count - l < W ? count - l : W;
    const U32 right = right_signs(entry + l, some);
    const Vector<float> u = bits_as<Vector<float>>(bits_as<U32>(load_first(score + l, some)) ^ right);
    const Vector<float> e = exponential(-magnitude(u));
    const Vector<float> g = grad * ((u > 0.0f ? e : one) / (one + e));
    store_first(grad_score + l, some, bits_as<Vector<float>>(bits_as<U32>(g) ^ right));
  }
}

static inline void log_sigmoid_grad(const double* score, const int32_t* entry, int64_t count, double grad,
                                    double* grad_score) {
  for (int64_t l = 0; l < count; ++l) {
    const double u = entry[l] & 1 ? score[l] : -score[l];
    const double e = __builtin_exp(-__builtin_fabs(u));
    const double g = grad * ((u > 0 ? e : 1) / (1 + e));
    grad_score[l] = entry[l] & 1 ? g : -g;
  }
}

template <int R, typename T>
static inline void tile_scores(const PathRows<T>& tree, int64_t j, accumulate_t<T>* score,
                               int64_t score_stride, accumulate_t<T>* scratch, const T** w) {
  using A = accumulate_t<T>;
  const int64_t size = tree.features;
  const A* x[R];
  A* z[R];
  for (int r = 0; r < R; ++r) {
    x[r] = x_row(tree, j + r, 0, size, scratch + r * tree.sum_stride);
    z[r] = score + tree.row[j + r] * score_stride;
  }
  const int64_t common = R > 1 ? common_prefix(tree, j, R) : 0;
  for (int r = 0; r < R; ++r) {
    prefetch_input(tree, j + r + ahead);
    prefetch_weights(tree, j + r + ahead, 0, size);
    const int32_t* entry = tree.entry + tree.offset[j + r];
    const int64_t count = tree.offset[j + r + 1] - tree.offset[j + r];
    for (int64_t l = r ? common : 0; l < count; ++l) w[l] = tree.weight + (entry[l] >> 1) * size;
    if (r == 0) level_scores<R>(x, w, 0, common, size, z);
    level_scores<1>(x + r, w, common, count, size, z + r);
    if (tree.bias) {
      for (int64_t l = 0; l < count; ++l) z[r][l] += element(tree.bias + (entry[l] >> 1));
    }
  }
}

template <typename T>
static void scores(const PathRows<T>& tree, int64_t begin, int64_t end, accumulate_t<T>* log_prob,
                   int64_t trees, accumulate_t<T>* score, int64_t score_stride, accumulate_t<T>* scratch,
                   const T** w) {
  constexpr int64_t block = 16 * tile_rows;  // whose scores stay in the cache
  for (int64_t first = begin; first < end; first += block) {
    const int64_t last = first + block < end ? first + block : end;
    int64_t j = first;
    for (; j + tile_rows <= last; j += tile_rows) {
      tile_scores<tile_rows>(tree, j, score, score_stride, scratch, w);
    }
    for (; j < last; ++j) tile_scores<1>(tree, j, score, score_stride, scratch, w);
    for (j = first; j < last; ++j) {
      log_prob[tree.row[j] * trees] =
          log_sigmoid_sum(score + tree.row[j] * score_stride, tree.entry + tree.offset[j],
                          tree.offset[j + 1] - tree.offset[j]);
    }
  }
}

template <typename T>
static void score_gradients(const PathRows<T>& tree, int64_t begin, int64_t end,
                            const accumulate_t<T>* grad_log_prob, int64_t trees, const accumulate_t<T>* score,
                            int64_t score_stride, accumulate_t<T>* grad_score) {
  constexpr int ahead = 8;
  for (int64_t j = begin; j < end; ++j) {
    if (j + ahead < end) {
      const accumulate_t<T>* later = score + tree.row[j + ahead] * score_stride;
      __builtin_prefetch(later);
      __builtin_prefetch(later + 64 / sizeof(*later));
      __builtin_prefetch(grad_log_prob + tree.row[j + ahead] * trees);
    }
    log_sigmoid_grad(score + tree.row[j] * score_stride, tree.entry + tree.offset[j],
                     tree.offset[j + 1] - tree.offset[j], grad_log_prob[tree.row[j] * trees],
                     grad_score + tree.offset[j]);
  }
}

// R rows in the backward pass, restricted to an interval of features.
template <typename T, int R>
struct GradientTile {
  using A = accumulate_t<T>;
  int64_t opened;         // levels [0, opened) were begun by an earlier row
  int64_t stay;           // levels [0, stay) continue in the next row
  const A* grad[R];       // [levels] gradient of the scores
  const A* x[R];          // hidden
  const A* grad_from[R];  // the value that its gradient is added to, or null
  A* grad_to[R];          // the destination of that sum
  const T* const* w;      // [levels] weight rows
  T* const* target;       // [levels] destinations of their gradients
  A* sums;                // [levels, stride] gradients of the open weight rows
  int64_t stride;
};

// Levels begin <= l < end at U vectors of columns from column c on, with `rest` columns in the last unless
// whole. The gradient of a weight row continues from an earlier row if `opened`, and into the next if
// `stays`. Otherwise it is stored, or left to stream_row if the target is not aligned.
template <int R, int U, bool whole, bool opened, bool stays, typename T, typename V>
static inline void gradient_levels(const GradientTile<T, R>& tile, int64_t begin, int64_t end, int64_t c,
                                   int64_t rest, const V (&x)[R][U], V (&grad_x)[R][U]) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  for (int64_t l = begin; l < end; ++l) {
    A* const sum = tile.sums + l * tile.stride + c;
    const T* const w = tile.w[l] + c;
    V g[R], d[U];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) g[r] = splat(tile.grad[r][l]);
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      const V ws = whole || u < U - 1 ? load(w + u * W) : load_first(w + u * W, rest);
      d[u] = opened ? add_product(load(sum + u * W), g[0], x[0][u]) : g[0] * x[0][u];
      grad_x[0][u] = add_product(grad_x[0][u], g[0], ws);
#pragma GCC unroll 8
      for (int r = 1; r < R; ++r) {
        grad_x[r][u] = add_product(grad_x[r][u], g[r], ws);
        d[u] = add_product(d[u], g[r], x[r][u]);
      }
      if (stays) store(sum + u * W, d[u]);
    }
    if constexpr (!stays) {
      T* const target = tile.target[l] + c;
      if (is_aligned(target)) {
#pragma GCC unroll 8
        for (int u = 0; u < U - !whole; ++u) stream(target + u * W, d[u]);
        if (!whole) store_first(target + (U - 1) * W, rest, d[U - 1]);
      } else {
#pragma GCC unroll 8
        for (int u = 0; u < U; ++u) store(sum + u * W, d[u]);
      }
    }
  }
}

// Levels begin <= l < end at `vectors` <= U vectors of columns from column c on.
template <int R, int U, bool whole, typename T>
static inline void gradient_columns(const GradientTile<T, R>& tile, int64_t begin, int64_t end, int64_t c,
                                    int64_t vectors, int64_t rest) {
  using V = Vector<accumulate_t<T>>;
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width;
  if constexpr (U > 1) {
    if (vectors < U) return gradient_columns<R, U - 1, whole>(tile, begin, end, c, vectors, rest);
  }
  V x[R][U], grad_x[R][U];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const accumulate_t<T>* from = tile.grad_from[r];
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      const int64_t s = c + u * W;
      const bool all = whole || u < U - 1;
      x[r][u] = all ? load(tile.x[r] + s) : load_first(tile.x[r] + s, rest);
      grad_x[r][u] = !from ? V{} : all ? load(from + s) : load_first(from + s, rest);
    }
  }
  const auto within = [&](int64_t l) { return l < begin ? begin : l > end ? end : l; };
  const int64_t opened = within(tile.opened), stay = within(tile.stay);
  const int64_t both = opened < stay ? opened : stay, either = opened < stay ? stay : opened;
  gradient_levels<R, U, whole, true, true>(tile, begin, both, c, rest, x, grad_x);
  gradient_levels<R, U, whole, true, false>(tile, both, opened, c, rest, x, grad_x);
  gradient_levels<R, U, whole, false, true>(tile, both, stay, c, rest, x, grad_x);
  gradient_levels<R, U, whole, false, false>(tile, either, end, c, rest, x, grad_x);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    accumulate_t<T>* to = tile.grad_to[r] + c;
#pragma GCC unroll 8
    for (int u = 0; u < U - !whole; ++u) store(to + u * W, grad_x[r][u]);
    if (!whole) store_first(to + (U - 1) * W, rest, grad_x[r][U - 1]);
  }
}

// All columns, in pieces of about equal size, at most U vectors.
template <int U, int R, typename T>
static inline void gradient_range(const GradientTile<T, R>& tile, int64_t begin, int64_t end, int64_t size) {
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width;
  const int64_t vectors = (size + W - 1) / W, pieces = (vectors + U - 1) / U;
  for (int64_t p = 0; p < pieces; ++p) {
    const int64_t v = vectors * p / pieces, next = vectors * (p + 1) / pieces;
    if (next * W <= size) {
      gradient_columns<R, U, true>(tile, begin, end, v * W, next - v, 0);
    } else {
      gradient_columns<R, U, false>(tile, begin, end, v * W, next - v, size % W);
    }
  }
}

// Gradients of R rows from place j on. target: [longest] destinations of the gradients of the open weight
// rows.
template <int R, typename T>
static inline void tile_gradients(const PathRows<T>& tree, int64_t j, int64_t begin, int64_t end,
                                  const accumulate_t<T>* grad_score, accumulate_t<T>* grad_x, bool add,
                                  T* grad_weight, bool sparse, accumulate_t<T>* sums, const T** w,
                                  T** target) {
  using A = accumulate_t<T>;
  const int64_t size = end - begin, stride = tree.sum_stride;
  A* const partial = sums + tree.longest * stride;  // of grad_x, which may share its memory with x
  A* const copy = partial + tile_rows * stride;
  // Finds the weight rows of the row at place i from level `first` on, and the targets of those that it
  // opens.
  const auto open = [&](int64_t i, int64_t first, int64_t last) {
    const int32_t* entry = tree.entry + tree.offset[i];
    const int64_t opened = tree.shared[i];
    for (int64_t l = first; l < last; ++l) {
      const int64_t weight_row = entry[l] >> 1;
      w[l] = tree.weight + weight_row * tree.features + begin;
      if (l < opened) continue;
      target[l] = grad_weight + (sparse ? tree.slot[i] + l - opened : weight_row) * tree.features + begin;
    }
  };
  // Stores the sums of the weight rows whose last visitor is the row at place i.
  const auto close = [&](int64_t i, int64_t first, int64_t last) {
    for (int64_t l = tree.shared[i + 1] < first ? first : tree.shared[i + 1]; l < last; ++l) {
      if (!is_aligned(target[l])) stream_row(sums + l * stride, size, target[l]);
    }
  };
  const int64_t common = R > 1 ? common_prefix(tree, j, R) : 0;
  GradientTile<T, R> tile = {tree.shared[j], tree.shared[j + R], {}, {}, {}, {}, w, target, sums, stride};
  for (int r = 0; r < R; ++r) {
    const int64_t at = x_offset(tree, j + r) + begin;
    tile.grad[r] = grad_score + tree.offset[j + r];
    tile.x[r] = x_row(tree, j + r, begin, end, copy + r * stride);
    tile.grad_from[r] = add ? grad_x + at : nullptr;
    tile.grad_to[r] = tree.x ? partial + r * stride : grad_x + at;
  }
  if (R > 1) {
    open(j, 0, common);
    gradient_range<HSTREE_VECTOR_BYTES == 64 ? 2 : 1>(tile, 0, common, size);
    close(j + R - 1, 0, common);
  }
  for (int r = 0; r < R; ++r) {
    const int64_t i = j + r, count = tree.offset[i + 1] - tree.offset[i];
    prefetch_weights(tree, i + ahead, begin, end);
    open(i, common, count);
    const GradientTile<T, 1> row = {tree.shared[i],
                                    tree.shared[i + 1],
                                    {tile.grad[r]},
                                    {tile.x[r]},
                                    {R > 1 ? tile.grad_to[r] : tile.grad_from[r]},
                                    {grad_x + x_offset(tree, i) + begin},
                                    w,
                                    target,
                                    sums,
                                    stride};
    gradient_range<HSTREE_VECTOR_BYTES == 64 ? 8 : 2>(row, common, count, size);
    close(i, common, count);
  }
}

template <typename T>
static void gradients(const PathRows<T>& tree, int64_t begin, int64_t end, const accumulate_t<T>* grad_score,
                      accumulate_t<T>* grad_x, bool add, T* grad_weight, bool sparse,
                      accumulate_t<T>* scratch, const T** w, T** target) {
  int64_t j = 0;
  for (; j + tile_rows <= tree.rows; j += tile_rows) {
    tile_gradients<tile_rows>(tree, j, begin, end, grad_score, grad_x, add, grad_weight, sparse, scratch, w,
                              target);
  }
  for (; j < tree.rows; ++j) {
    tile_gradients<1>(tree, j, begin, end, grad_score, grad_x, add, grad_weight, sparse, scratch, w, target);
  }
  end_of_streams();
}

// Of one row, at U vectors of columns from column c on, with `rest` columns in the last unless whole.
template <int U, bool whole, typename T>
static inline void hidden_columns(const T* const* w, const accumulate_t<T>* grad, int64_t levels, int64_t c,
                                  int64_t rest, bool add, accumulate_t<T>* grad_x) {
  using V = Vector<accumulate_t<T>>;
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width;
  V sum[U];
#pragma GCC unroll 8
  for (int u = 0; u < U; ++u) {
    accumulate_t<T>* const from = grad_x + c + u * W;
    sum[u] = !add ? V{} : whole || u < U - 1 ? load(from) : load_first(from, rest);
  }
  for (int64_t l = 0; l < levels; ++l) {
    const V g = splat(grad[l]);
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      const T* const from = w[l] + c + u * W;
      sum[u] += g * (whole || u < U - 1 ? load(from) : load_first(from, rest));
    }
  }
#pragma GCC unroll 8
  for (int u = 0; u < U - !whole; ++u) store(grad_x + c + u * W, sum[u]);
  if (!whole) store_first(grad_x + c + (U - 1) * W, rest, sum[U - 1]);
}

template <typename T>
static void hidden_gradients(const PathRows<T>& tree, int64_t begin, int64_t end,
                             const accumulate_t<T>* grad_score, accumulate_t<T>* grad_x, bool add,
                             const T** w) {
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width;
  constexpr int U = 4;
  for (int64_t j = begin; j < end; ++j) {
    prefetch_weights(tree, j + ahead, 0, tree.features);
    const int64_t first = tree.offset[j], levels = tree.offset[j + 1] - first;
    for (int64_t l = 0; l < levels; ++l) {
      w[l] = tree.weight + (tree.entry[first + l] >> 1) * tree.features;
    }
    accumulate_t<T>* const row = grad_x + x_offset(tree, j);
    const accumulate_t<T>* const grad = grad_score + first;
    int64_t c = 0;
    for (; c + U * W <= tree.features; c += U * W) hidden_columns<U, true>(w, grad, levels, c, 0, add, row);
    for (; c + W <= tree.features; c += W) hidden_columns<1, true>(w, grad, levels, c, 0, add, row);
    if (c < tree.features) hidden_columns<1, false>(w, grad, levels, c, tree.features - c, add, row);
  }
}

template <typename T>
static void bias_gradients(const PathRows<T>& tree, const accumulate_t<T>* grad_score, T* grad_bias,
                           bool sparse, accumulate_t<T>* sums, T** target) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  for (int64_t j = 0; j < tree.rows; ++j) {
    const A* const grad = grad_score + tree.offset[j];
    const int32_t* const entry = tree.entry + tree.offset[j];
    const int64_t opened = tree.shared[j], stay = tree.shared[j + 1];
    const int64_t count = tree.offset[j + 1] - tree.offset[j];
    for (int64_t l = 0; l < count; l += W) {
      const int64_t some = count - l < W ? count - l : W;
      const int64_t before = opened < l ? 0 : opened - l < W ? opened - l : W;
      store(sums + l, load_first(grad + l, some) + load_first(sums + l, before));
    }
    for (int64_t l = opened; l < count; ++l) {
      target[l] = grad_bias + (sparse ? tree.slot[j] + l - opened : entry[l] >> 1);
    }
    for (int64_t l = stay; l < count; ++l) store_first(target[l], 1, splat(sums[l]));
  }
}

template <typename T>
static constexpr PathKernels<T> path_table = {
    copy_paths,         gather_rows<T>, scatter_rows<accumulate_t<T>>, scores<T>,
    score_gradients<T>, gradients<T>,   hidden_gradients<T>,           bias_gradients<T>};

}  // namespace HSTREE_CAPABILITY

HSTREE_KERNELS_OF_ELEMENTS(PathKernels, path_table)

}  // namespace hstree::cpu
