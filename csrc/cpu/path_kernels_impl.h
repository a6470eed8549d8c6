// Body of the kernels of the path op, under the rules of vector_impl.h.
#include "cpu/vector_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {

#if HSTREE_VECTOR_BYTES == 64
// Calls f(column, lanes) for each 16 columns of the input that hold some of the features begin <= s < end.
template <typename T, typename F>
static inline void each_feature_block(const PathRows<T>& tree, int64_t begin, int64_t end, const F& f) {
  if (begin == end) return;
  const int32_t first = tree.feature_index[begin], last = tree.feature_index[end - 1];
  for (int32_t block = first / 16; block <= last / 16; ++block) {
    uint32_t lanes = tree.feature_lanes[block];
    if (block == first / 16) lanes &= 0xffffu << first % 16;
    if (block == last / 16) lanes &= 0xffffu >> (15 - last % 16);
    f(16 * block, static_cast<__mmask16>(lanes));
  }
}

// A subset of a row's features; writes up to 15 elements behind them.
template <typename T>
requires(sizeof(T) < 8) static inline void gather_features(const PathRows<T>& tree, const T* input,
                                                           int64_t begin, int64_t end, float* x) {
  each_feature_block(tree, begin, end, [&](int32_t column, __mmask16 lanes) {
    const __m512 some = bits_as<__m512>(load_lanes(lanes, input + column));
    _mm512_storeu_ps(x, _mm512_maskz_compress_ps(lanes, some));
    x += __builtin_popcount(lanes);
  });
}

// out[feature] += x over the features begin <= s < end; reads up to 15 elements behind x.
template <typename T>
static inline void scatter_add(const PathRows<T>& tree, const float* x, int64_t begin, int64_t end,
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
static inline void gather_features(const PathRows<T>& tree, const T* input, int64_t begin, int64_t end,
                                   accumulate_t<T>* x) {
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width;
  int64_t s = begin;
  for (; s + W <= end; s += W, x += W) {
    T some[W];
    for (int64_t i = 0; i < W; ++i) some[i] = input[tree.feature_index[s + i]];
    store(x, load(some));
  }
  for (; s < end; ++s) *x++ = element(input + tree.feature_index[s]);
}

template <typename T, typename A>
static inline void scatter_add(const PathRows<T>& tree, const A* x, int64_t begin, int64_t end, A* out) {
  for (int64_t s = begin; s < end; ++s) out[tree.feature_index[s]] += *x++;
}

// The features begin <= s < end of a row.
template <typename T>
static inline void gather_input(const PathRows<T>& tree, int64_t row, int64_t begin, int64_t end,
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
}

// Elements between the rows of a workspace: no multiple of 1024 bytes, which would all meet in one cache set.
static inline int64_t row_stride(int64_t features) {
  const int64_t stride = (features + 31) / 16 * 16;
  return stride % 256 ? stride : stride + 16;
}

// The features begin <= s < end of the row at place j: in the input itself, or gathered or converted in `copy`.
template <typename T>
static inline const accumulate_t<T>* input_row(const PathRows<T>& tree, int64_t j, int64_t begin, int64_t end,
                                               accumulate_t<T>* copy) {
  if constexpr (sizeof(T) == sizeof(accumulate_t<T>)) {
    if (!tree.feature_index) return tree.input + tree.row[j] * tree.in_features + begin;
  }
  gather_input(tree, tree.row[j], begin, end, copy);
  return copy;
}

// Levels at which all rows of a tile visit the same weight row.
template <typename T>
static inline int64_t common_prefix(const PathRows<T>& tree, int64_t j, int rows) {
  int64_t common = tree.offset[j + 1] - tree.offset[j];
  for (int r = 1; r < rows; ++r) common = tree.shared[j + r] < common ? tree.shared[j + r] : common;
  return common;
}

// One vector, or its first count elements and zeros.
template <bool partial, typename T>
static inline Vector<accumulate_t<T>> load_some(const T* p, int64_t count) {
  if constexpr (partial) {
    return load_first(p, count);
  } else {
    return load(p);
  }
}

template <bool partial, int R, int L, typename T>
static inline void add_products(const accumulate_t<T>* const* x, const T* const* w, int64_t s, int64_t size,
                                Vector<accumulate_t<T>> (*sum)[L]) {
  using A = accumulate_t<T>;
  Vector<A> xs[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) xs[r] = load_some<partial>(x[r] + s, size - s);
#pragma GCC unroll 8
  for (int l = 0; l < L; ++l) {
    const Vector<A> ws = load_some<partial>(w[l] + s, size - s);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r][l] += xs[r] * ws;
  }
}

// out[r][l] = dot(x[r], w[l]) for R rows and L weight rows.
template <int R, int L, typename T>
static inline void dots(const accumulate_t<T>* const* x, const T* const* w, int64_t size,
                        accumulate_t<T>* const* out, int64_t level) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  constexpr int K = R == 1 ? 2 : 1;  // sums of each product, enough to hide the latency of an addition
  Vector<A> sum[K][R][L] = {};
  int64_t s = 0;
  for (; s + K * W <= size; s += K * W) {
#pragma GCC unroll 2
    for (int k = 0; k < K; ++k) add_products<false, R, L, T>(x, w, s + k * W, size, sum[k]);
  }
  for (; s + W <= size; s += W) add_products<false, R, L, T>(x, w, s, size, sum[0]);
  if (s < size) add_products<true, R, L, T>(x, w, s, size, sum[K - 1]);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int l = 0; l < L; ++l) {
      out[r][level + l] = sum_of<A>(K == 2 ? sum[0][r][l] + sum[K - 1][r][l] : sum[0][r][l]);
    }
  }
}

// Scores of R rows at the levels begin <= l < end of their paths, where they visit the same weight rows w.
template <int R, typename T>
static inline void level_scores(const accumulate_t<T>* const* x, const T* const* w, int64_t begin,
                                int64_t end, int64_t size, accumulate_t<T>* const* out) {
  constexpr int block = R == 1 || HSTREE_VECTOR_BYTES == 64 ? 4 : 2;  // as many sums as there are registers
  int64_t l = begin;
  for (; l + block <= end; l += block) dots<R, block>(x, w + l, size, out, l);
  if constexpr (block == 4) {
    if (end - l == 3) return dots<R, 3>(x, w + l, size, out, l);
    if (end - l == 2) return dots<R, 2>(x, w + l, size, out, l);
  }
  if (end - l == 1) dots<R, 1>(x, w + l, size, out, l);
}

template <int R, typename T>
static inline void tile_scores(const PathRows<T>& tree, int64_t j, accumulate_t<T>* score,
                               int64_t score_stride, accumulate_t<T>* copy, const T** w) {
  using A = accumulate_t<T>;
  const int64_t size = tree.features;
  const A* x[R];
  A* z[R];
  for (int r = 0; r < R; ++r) {
    x[r] = input_row(tree, j + r, 0, size, copy + r * row_stride(size));
    z[r] = score + tree.row[j + r] * score_stride;
  }
  const int64_t common = R > 1 ? common_prefix(tree, j, R) : 0;
  for (int r = 0; r < R; ++r) {
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
static void scores(const PathRows<T>& tree, int64_t begin, int64_t end, accumulate_t<T>* score,
                   int64_t score_stride, accumulate_t<T>* scratch, const T** w) {
  int64_t j = begin;
  for (; j + tile_rows <= end; j += tile_rows) {
    tile_scores<tile_rows>(tree, j, score, score_stride, scratch, w);
  }
  for (; j < end; ++j) tile_scores<1>(tree, j, score, score_stride, scratch, w);
}

// A tile of rows in the backward pass, cut to an interval of features.
template <typename T>
struct GradientTile {
  using A = accumulate_t<T>;
  int64_t common;             // levels at which all rows visit the same weight row
  int64_t count[tile_rows];   // levels of a row
  int64_t opened[tile_rows];  // levels below it were begun by an earlier row
  int64_t stay[tile_rows];    // levels below it go on in the next row
  const A* grad[tile_rows];   // [count] gradient of the scores
  const A* x[tile_rows];      // input
  A* grad_x[tile_rows];       // its gradient
  const T** w[tile_rows];     // [count] weight rows
  T** target[tile_rows];      // [count] where their gradients go
  A* sums;                    // [longest, stride] gradients of the weight rows that are open
  int64_t stride;
};

// Levels begin <= l < end of R rows from `row` on, at U vectors of columns from column c on: the weight row's
// gradient goes on from an earlier row if `opened`, and on to the next if `stays`.
template <int R, int U, bool partial, bool opened, bool stays, typename T, typename V>
static inline void gradient_levels(const GradientTile<T>& tile, int row, int64_t begin, int64_t end,
                                   int64_t c, int64_t rest, const V (*x)[U], V (*grad_x)[U]) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  for (int64_t l = begin; l < end; ++l) {
    A* const sum = tile.sums + l * tile.stride + c;
    const T* const w = tile.w[row][l] + c;
    V d[U], ws[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) ws[u] = load_some<partial>(w + u * W, rest);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const A g = tile.grad[row + r][l];
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) {
        grad_x[r][u] += g * ws[u];
        d[u] = r ? d[u] + g * x[r][u] : opened ? load(sum + u * W) + g * x[r][u] : g * x[r][u];
      }
    }
    if constexpr (stays) {
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) store(sum + u * W, d[u]);
    } else if constexpr (partial) {
      store_first(tile.target[row + R - 1][l] + c, rest, d[0]);
    } else {
      stream<U>(tile.target[row + R - 1][l] + c, d);
    }
  }
}

// All levels begin <= l < end of R rows at U vectors of columns, or at the last `rest` columns if `partial`.
template <int R, int U, bool partial, typename T>
static inline void gradient_columns(const GradientTile<T>& tile, int row, int64_t begin, int64_t end,
                                    int64_t c, int64_t rest, bool add) {
  using V = Vector<accumulate_t<T>>;
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width;
  V x[R][U], grad_x[R][U];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      x[r][u] = load_some<partial>(tile.x[row + r] + c + u * W, rest);
      grad_x[r][u] = add ? load_some<partial>(tile.grad_x[row + r] + c + u * W, rest) : V{};
    }
  }
  const auto within = [&](int64_t l) { return l < begin ? begin : l > end ? end : l; };
  const int64_t opened = within(tile.opened[row]), stay = within(tile.stay[row + R - 1]);
  const int64_t both = opened < stay ? opened : stay;
  gradient_levels<R, U, partial, true, true>(tile, row, begin, both, c, rest, x, grad_x);
  gradient_levels<R, U, partial, true, false>(tile, row, both, opened, c, rest, x, grad_x);
  gradient_levels<R, U, partial, false, true>(tile, row, both, stay, c, rest, x, grad_x);
  gradient_levels<R, U, partial, false, false>(tile, row, opened < stay ? stay : opened, end, c, rest, x,
                                               grad_x);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      if constexpr (partial) {
        store_first(tile.grad_x[row + r] + c, rest, grad_x[r][u]);
      } else {
        store(tile.grad_x[row + r] + c + u * W, grad_x[r][u]);
      }
    }
  }
}

template <int R, int U, typename T>
static inline void gradient_range(const GradientTile<T>& tile, int row, int64_t begin, int64_t end,
                                  int64_t size, bool add) {
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width;
  int64_t c = 0;
  for (; c + U * W <= size; c += U * W) gradient_columns<R, U, false>(tile, row, begin, end, c, 0, add);
  for (; c + W <= size; c += W) gradient_columns<R, 1, false>(tile, row, begin, end, c, 0, add);
  if (c < size) gradient_columns<R, 1, true>(tile, row, begin, end, c, size - c, add);
}

// Gradients of `rows` rows from place j on. before: [longest] targets of the row before them, and after the
// call those of the last of them.
template <typename T>
static inline void tile_gradients(const PathRows<T>& tree, int64_t j, int rows, int64_t begin, int64_t end,
                                  const accumulate_t<T>* grad_score, accumulate_t<T>* grad_input, bool add,
                                  T* grad_weight, bool sparse, accumulate_t<T>* scratch, const T** w,
                                  T** before) {
  using A = accumulate_t<T>;
  const int64_t size = end - begin, stride = row_stride(size);
  A* copy = scratch + tree.longest * stride;
  A* grad_copy = copy + tile_rows * stride;
  GradientTile<T> tile;
  tile.common = rows == tile_rows ? common_prefix(tree, j, rows) : 0;
  tile.sums = scratch;
  tile.stride = stride;
  T** last = before;
  for (int r = 0; r < rows; ++r) {
    const int64_t i = j + r;
    const int32_t* entry = tree.entry + tree.offset[i];
    tile.count[r] = tree.offset[i + 1] - tree.offset[i];
    tile.opened[r] = tree.shared[i];
    tile.stay[r] = tree.shared[i + 1];
    tile.grad[r] = grad_score + tree.offset[i];
    tile.x[r] = input_row(tree, i, begin, end, copy + r * stride);
    tile.grad_x[r] =
        tree.feature_index ? grad_copy + r * stride : grad_input + tree.row[i] * tree.in_features + begin;
    tile.w[r] = w + r * tree.longest;
    tile.target[r] = before + (r + 1) * tree.longest;
    for (int64_t l = 0; l < tile.count[r]; ++l) {
      const int64_t weight_row = entry[l] >> 1;
      const int64_t to = sparse ? tree.slot[i] + l - tile.opened[r] : weight_row;
      tile.w[r][l] = tree.weight + weight_row * tree.features + begin;
      tile.target[r][l] = l < tile.opened[r] ? last[l] : grad_weight + to * tree.features + begin;
    }
    last = tile.target[r];
  }
  const bool kept = add && !tree.feature_index;  // what is in grad_x
  if (rows == tile_rows) {
    constexpr int U = HSTREE_VECTOR_BYTES == 64 ? 2 : 1;
    gradient_range<tile_rows, U>(tile, 0, 0, tile.common, size, kept);
  }
  for (int r = 0; r < rows; ++r) {
    constexpr int U = HSTREE_VECTOR_BYTES == 64 ? 4 : 2;
    gradient_range<1, U>(tile, r, tile.common, tile.count[r], size, kept || rows == tile_rows);
    if (tree.feature_index) {
      scatter_add(tree, tile.grad_x[r], begin, end, grad_input + tree.row[j + r] * tree.in_features);
    }
  }
  for (int64_t l = 0; l < tile.count[rows - 1]; ++l) before[l] = last[l];
}

template <typename T>
static void gradients(const PathRows<T>& tree, int64_t begin, int64_t end, const accumulate_t<T>* grad_score,
                      accumulate_t<T>* grad_input, bool add, T* grad_weight, bool sparse,
                      accumulate_t<T>* scratch, const T** w, T** targets) {
  for (int64_t j = 0; j < tree.rows;) {
    const int rows = j + tile_rows <= tree.rows ? tile_rows : 1;
    tile_gradients(tree, j, rows, begin, end, grad_score, grad_input, add, grad_weight, sparse, scratch, w,
                   targets);
    j += rows;
  }
  end_of_streams();
}

template <typename T>
static void bias_gradients(const PathRows<T>& tree, const accumulate_t<T>* grad_score, T* grad_bias,
                           bool sparse, accumulate_t<T>* sums, T** target) {
  for (int64_t j = 0; j < tree.rows; ++j) {
    const int64_t opened = tree.shared[j], stay = tree.shared[j + 1];
    for (int64_t e = tree.offset[j], l = 0; e < tree.offset[j + 1]; ++e, ++l) {
      sums[l] = l < opened ? sums[l] + grad_score[e] : grad_score[e];
      if (l >= opened) target[l] = grad_bias + (sparse ? tree.slot[j] + l - opened : tree.entry[e] >> 1);
      if (l >= stay) store_first(target[l], 1, Vector<accumulate_t<T>>{sums[l]});
    }
  }
}

// Sign bits of a vector of entries: set where the path goes right. Places from count on: any.
static inline U32 right_signs(const int32_t* entry, int64_t count) {
  return ~bits_as<U32>(load_first(entry, count)) << 31;
}

static float log_sigmoid_sum(const float* score, const int32_t* entry, int64_t count) {
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

static void log_sigmoid_grad(const float* score, const int32_t* entry, int64_t count, float grad,
                             float* grad_score) {
  constexpr int64_t W = VectorOf<float>::width;
  const Vector<float> one = Vector<float>{} + 1.0f;
  for (int64_t l = 0; l < count; l += W) {
    const int64_t some = count - l < W ? count - l : W;
    const U32 right = right_signs(entry + l, some);
    const Vector<float> u = bits_as<Vector<float>>(bits_as<U32>(load_first(score + l, some)) ^ right);
    const Vector<float> e = exponential(-magnitude(u));
    const Vector<float> g = grad * ((u > 0.0f ? e : one) / (one + e));
    store_first(grad_score + l, some, bits_as<Vector<float>>(bits_as<U32>(g) ^ right));
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
static const PathKernels<T>* table() {
  static constexpr PathKernels<T> kernels = {scores<T>, gradients<T>, bias_gradients<T>, log_sigmoid_sum,
                                             log_sigmoid_grad};
  return &kernels;
}

}  // namespace HSTREE_CAPABILITY

#define HSTREE_TABLE(T)                                                   \
  template <>                                                             \
  const PathKernels<T>* HSTREE_JOIN(path_kernels_, HSTREE_CAPABILITY)() { \
    return HSTREE_CAPABILITY::table<T>();                                 \
  }
HSTREE_TABLE(float)
HSTREE_TABLE(double)
HSTREE_TABLE(BFloat16)
HSTREE_TABLE(Half)
#undef HSTREE_TABLE

}  // namespace hstree::cpu
