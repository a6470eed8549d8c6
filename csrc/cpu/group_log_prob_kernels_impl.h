// Body of the kernels of the group op, under the rules of vector_impl.h.
#pragma once

#include "cpu/vector_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {
namespace group {

// Rows and classes whose sums are held in registers at a time.
constexpr int row_tile = HSTREE_VECTOR_BYTES == 64 ? 4 : 2;
constexpr int child_tile = 4;

// Calls tile.run<rows, children>() with the largest tile that fits.
template <int R, int K, typename Tile>
static inline void run_tile(const Tile& tile, int64_t rows, int64_t children) {
  if constexpr (K > 1) {
    if (children < K) return run_tile<R, K - 1>(tile, rows, children);
  }
  if constexpr (R > 1) {
    if (rows < R) return run_tile<R - 1, K>(tile, rows, children);
  }
  tile.template run<R, K>();
}

// The first elements, then -inf.
template <typename A>
static inline Vector<A> load_or_impossible(const A* p, int64_t count) {
  if (count >= VectorOf<A>::width) return load(p);
  return lanes_below(A{}, count) ? load_first(p, count) : splat(static_cast<A>(-__builtin_inf()));
}
template <typename T>
static inline void store_up_to(T* p, int64_t count, Vector<accumulate_t<T>> v) {
  if (count >= VectorOf<accumulate_t<T>>::width) {
    store(p, v);
  } else {
    store_first(p, count, v);
  }
}

// The rows of E of the classes of a run or a piece, from column `begin` on.
template <typename T>
struct ClassRows {
  const T* weight;
  int64_t features;
  const int32_t *row_class, *row_child;

  ClassRows(const GroupTree<T>& tree, int64_t begin)
      : weight(tree.weight + begin),
        features(tree.features),
        row_class(tree.row_class),
        row_child(tree.row_child) {}
  const T* operator()(int64_t row) const { return weight + row_class[row] * features; }
  template <int K>
  void weights(int64_t row, const T* (&rows)[K]) const {
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) rows[k] = (*this)(row + k);
  }
};

// Rows whose weights will be read next, prefetched during the sums over other rows' columns.
struct Ahead {
  int64_t begin, end;

  template <typename T>
  void fetch(const ClassRows<T>& rows, int64_t column) const {
    for (int64_t row = begin; row < end; ++row) __builtin_prefetch(rows(row) + column, 0, 2);
  }
};

// The share of the next run's rows to prefetch with the classes c to c + k - 1 of `width`.
static inline Ahead share(const GroupRun* next, int64_t c, int64_t k, int64_t width) {
  if (!next) return {0, 0};
  return {next->first + c * next->width / width, next->first + (c + k) * next->width / width};
}

// z_r[k] = dot(x_r, w_k) for R rows and K classes.
template <typename T>
struct ScoreTile {
  using A = accumulate_t<T>;
  static constexpr int64_t W = VectorOf<A>::width;

  const A* x;
  int64_t x_stride;
  ClassRows<T> rows;
  int64_t row;  // of the first class
  int64_t features;
  Ahead ahead;
  A* const* z;
  int64_t child;

  template <bool whole, int R, int K>
  inline void step(const T* const (&w)[K], int64_t s, Vector<A> (&sum)[R][K]) const {
    Vector<A> xs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) xs[r] = load(x + r * x_stride + s);
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      const Vector<A> ws = load_some<whole>(w[k] + s, features - s);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][k] = add_product(sum[r][k], xs[r], ws);
    }
  }

  template <int R, int K>
  void run() const {
    const T* w[K];
    rows.template weights<K>(row, w);
    Vector<A> sum[R][K] = {};
    int64_t s = 0;
    for (; s + W <= features; s += W) {
      ahead.fetch(rows, s);
      step<true>(w, s, sum);
    }
    if (s < features) step<false>(w, s, sum);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) z[r][child + k] = sum_of<A>(sum[r][k]);
    }
  }
};

static inline float log_of(float x) {
  return __builtin_logf(x);
}
static inline double log_of(double x) {
  return __builtin_log(x);
}

template <typename A>
static inline A largest_of(Vector<A> v) {
  A most = v[0];
  for (int64_t i = 1; i < VectorOf<A>::width; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

// z <- log_softmax(z + bias), in place.
template <typename T, typename A>
static inline void log_softmax(const T* bias, int64_t width, A* z) {
  constexpr int64_t W = VectorOf<A>::width;
  Vector<A> most = splat(static_cast<A>(-__builtin_inf()));
  for (int64_t c = 0; c < width; c += W) {
    Vector<A> some = load_or_impossible(z + c, width - c);
    if (bias) {
      some += width - c < W ? load_first(bias + c, width - c) : load(bias + c);
      store_up_to(z + c, width - c, some);
    }
    most = some > most ? some : most;
  }
  const A largest = largest_of<A>(most);
  const Vector<A> sums = sum_of_vectors<A>(width, [&](int64_t c, Vector<A> sum) {
    return sum + exponential(load_or_impossible(z + c, width - c) - largest);
  });
  const A log_sum = log_of(sum_of<A>(sums));
  for (int64_t c = 0; c < width; c += W) {
    store_up_to(z + c, width - c, (load_or_impossible(z + c, width - c) - largest) - log_sum);
  }
}

template <typename T>
static void scores(const GroupTree<T>& tree, const GroupRun& run, const GroupRun* next, int64_t begin,
                   int64_t end, accumulate_t<T>* score, accumulate_t<T>* scratch) {
  using A = accumulate_t<T>;
  const int64_t stride = tree.workspace_stride;
  const ClassRows<T> classes(tree, 0);
  A* const x = scratch;
  A* const bias = tree.bias ? x + group_rows * stride : nullptr;
  for (int64_t c = 0; bias && c < run.width; ++c) bias[c] = element(tree.bias + tree.order[run.first + c]);
  for (int64_t first = begin; first < end; first += group_rows) {
    const int64_t rows = end - first < group_rows ? end - first : group_rows;
    A* z[group_rows];
    for (int64_t r = 0; r < rows; ++r) {
      gather({}, 0, tree.features, tree.hidden + tree.row[first + r] * tree.features, x + r * stride);
      z[r] = score + run.entry + (first + r - run.begin) * run.width;
    }
    for (int64_t c = 0; c < run.width; c += child_tile) {
      const int64_t some = run.width - c < child_tile ? run.width - c : child_tile;
      for (int64_t r = 0; r < rows; r += row_tile) {
        const bool fetch = r == 0 && first == begin;
        const ScoreTile<T> tile = {x + r * stride, stride,
                                   classes,        run.first + c,
                                   tree.features,  share(fetch ? next : nullptr, c, some, run.width),
                                   z + r,          c};
        run_tile<row_tile, child_tile>(tile, rows - r, some);
      }
    }
    for (int64_t r = 0; r < rows; ++r) log_softmax(bias, run.width, z[r]);
  }
}

// For R rows and K classes and every feature: grad_x_r += sum_k z_rk w_k, and sum_r z_rk x_r is added to the
// gradient of w_k.
template <typename T>
struct GradientTile {
  using A = accumulate_t<T>;
  static constexpr int64_t W = VectorOf<A>::width;

  const A* z;
  int64_t z_stride;
  const A* x;
  A* grad_x;  // or null
  int64_t stride;
  ClassRows<T> rows;
  int64_t row;  // of the first class
  int64_t features;
  Ahead ahead;
  A* sum;  // or null
  int64_t sum_stride;
  const int32_t* sum_row;

  template <bool of_hidden, bool of_weight, bool whole, int R, int K>
  inline void step(int64_t s, const T* const (&w)[K], A* const (&sums)[K],
                   const Vector<A> (&zs)[R][K]) const {
    Vector<A> xs[R], gs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      xs[r] = load(x + r * stride + s);
      if constexpr (of_hidden) gs[r] = load(grad_x + r * stride + s);
    }
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      const Vector<A> ws = load_some<whole>(w[k] + s, features - s);
      Vector<A> d = {};
      if constexpr (of_weight) d = load(sums[k] + s);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if constexpr (of_hidden) gs[r] = add_product(gs[r], zs[r][k], ws);
        if constexpr (of_weight) d = add_product(d, zs[r][k], xs[r]);
      }
      if constexpr (of_weight) store(sums[k] + s, d);
    }
#pragma GCC unroll 4
    for (int r = 0; of_hidden && r < R; ++r) store(grad_x + r * stride + s, gs[r]);
  }

  template <int R, int K>
  void run() const {
    if (!grad_x) return steps<false, true, R, K>();
    if (!sum) return steps<true, false, R, K>();
    steps<true, true, R, K>();
  }

  template <bool of_hidden, bool of_weight, int R, int K>
  void steps() const {
    Vector<A> zs[R][K];
    const T* w[K];
    A* sums[K] = {};
    rows.template weights<K>(row, w);
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) zs[r][k] = splat(z[r * z_stride + rows.row_child[row + k]]);
      if constexpr (of_weight) sums[k] = sum + sum_row[rows.row_class[row + k]] * sum_stride;
    }
    int64_t s = 0;
    for (; s + W <= features; s += W) {
      ahead.fetch(rows, s);
      step<of_hidden, of_weight, true>(s, w, sums, zs);
    }
    if (s < features) step<of_hidden, of_weight, false>(s, w, sums, zs);
  }
};

// z[c] = grad ([c = chosen] - exp(score[c])), and bias_sum[c] += z[c].
template <typename A>
static inline void score_gradient(const A* score, int64_t count, int64_t chosen, A grad, A* z, A* bias_sum) {
  constexpr int64_t W = VectorOf<A>::width;
  for (int64_t c = 0; c < count; c += W) {
    const Vector<A> e = exponential(load_or_impossible(score + c, count - c));
    const auto is_chosen = lanes_below(A{}, chosen - c + 1) & ~lanes_below(A{}, chosen - c);
    const Vector<A> g = grad * ((is_chosen ? splat(A{1}) : Vector<A>{}) - e);
    store_up_to(z + c, count - c, g);
    store(bias_sum + c, load(bias_sum + c) + g);
  }
}

template <typename T>
static void slopes(const GroupTree<T>& tree, const GroupRun& run, const GroupGradients<T>& g,
                   accumulate_t<T>* bias_sum) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  for (int64_t c = 0; c < run.width; c += W) store(bias_sum + c, Vector<A>{});
  const A* score = g.score + run.entry;
  A* z = g.slope + run.entry;
  for (int64_t j = run.begin; j < run.end; ++j, score += run.width, z += run.width) {
    score_gradient(score, run.width, tree.child[j], g.grad_log_prob[tree.row[j] * g.trees], z, bias_sum);
  }
  if (!g.grad_bias) return;
  if (g.sparse) {
    for (int64_t c = 0; c < run.width; c += W) {
      store_up_to(g.grad_bias + run.slot + c, run.width - c, load(bias_sum + c));
    }
  } else {
    for (int64_t c = 0; c < run.width; ++c) {
      store_first(g.grad_bias + tree.order[run.first + c], 1, splat(bias_sum[c]));
    }
  }
}

template <typename T>
static void gradients(const GroupTree<T>& tree, const GroupRun& run, const GroupRun* next, int64_t begin,
                      int64_t end, const GroupGradients<T>& g, accumulate_t<T>* scratch) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  if (!g.grad_hidden && !g.sum) return;
  const int64_t size = end - begin, stride = tree.workspace_stride;
  const ClassRows<T> classes(tree, begin);
  A* const x = scratch;
  A* const grad_x = g.grad_hidden ? x + group_rows * stride : nullptr;
  for (int64_t first = run.begin; first < run.end; first += group_rows) {
    const int64_t rows = run.end - first < group_rows ? run.end - first : group_rows;
    for (int64_t r = 0; r < rows; ++r) {
      gather({}, begin, end, tree.hidden + tree.row[first + r] * tree.features, x + r * stride);
      for (int64_t s = 0; grad_x && s < size; s += W) store(grad_x + r * stride + s, Vector<A>{});
    }
    const A* const slope = g.slope + run.entry + (first - run.begin) * run.group_width;
    for (int64_t c = 0; c < run.width; c += child_tile) {
      const int64_t some = run.width - c < child_tile ? run.width - c : child_tile;
      for (int64_t r = 0; r < rows; r += row_tile) {
        const bool later = r > 0 || first > run.begin;
        const GradientTile<T> tile = {slope + r * run.group_width,
                                      run.group_width,
                                      x + r * stride,
                                      grad_x ? grad_x + r * stride : nullptr,
                                      stride,
                                      classes,
                                      run.first + c,
                                      size,
                                      share(later ? nullptr : next, c, some, run.width),
                                      g.sum,
                                      g.sum_stride,
                                      g.sum_row};
        run_tile<row_tile, child_tile>(tile, rows - r, some);
      }
    }
    for (int64_t r = 0; grad_x && r < rows; ++r) {
      scatter_add({}, begin, end, grad_x + r * stride, g.grad_hidden + tree.row[first + r] * tree.features);
    }
  }
}

template <typename T>
static void store_sums(const accumulate_t<T>* sum, int64_t sum_stride, int64_t count, const int64_t* row,
                       int64_t rows, T* target, int64_t features) {
  for (int64_t n = 0; n < rows; ++n) {
    stream_row(sum + n * sum_stride, count, target + (row ? row[n] : n) * features);
  }
  end_of_streams();
}

template <typename T>
static constexpr GroupKernels<T> table = {scores<T>, slopes<T>, gradients<T>, store_sums<T>};

}  // namespace group
}  // namespace HSTREE_CAPABILITY

HSTREE_KERNELS_OF_ELEMENTS(GroupKernels, group::table)

}  // namespace hstree::cpu
