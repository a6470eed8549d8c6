// Body of the kernels of the wide op and the leaf op, under the rules of vector_impl.h.
#pragma once

#include "cpu/vector_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {
namespace wide {

// Rows and children whose sums are held in registers at a time.
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

// K rows of a matrix. Where the compiler knows that they are consecutive, their addresses take fewer registers.
template <typename E>
struct ConsecutiveRows {
  E* first;
  int64_t stride;

  E* operator[](int k) const { return first + k * stride; }
};
template <typename E, int K>
struct ListedRows {
  E* row[K];

  E* operator[](int k) const { return row[k]; }
};

// The weights of a tree's own rows, or those of the classes of a piece, from column `begin` on.
template <typename T>
struct OwnRows {
  static constexpr bool are_shared = false;
  const T* weight;
  int64_t features;

  OwnRows(const WideTree<T>& tree, int64_t begin) : weight(tree.weight + begin), features(tree.features) {}
  const T* operator()(int64_t row) const { return weight + row * features; }
  int64_t slope(int64_t, int64_t, int64_t r, int64_t k) const { return r * wide_children + k; }
  template <int K>
  ConsecutiveRows<const T> weights(int64_t row) const {
    return {(*this)(row), features};
  }
  template <int K, typename A>
  ConsecutiveRows<A> sums(int64_t, A* sum, int64_t stride, const int32_t*) const {
    return {sum, stride};
  }
};
template <typename T>
struct ClassRows {
  static constexpr bool are_shared = true;
  const T* weight;
  int64_t features;
  const int32_t *row_class, *row_child;

  ClassRows(const WideTree<T>& tree, int64_t begin)
      : weight(tree.weight + begin),
        features(tree.features),
        row_class(tree.row_class),
        row_child(tree.row_child) {}
  const T* operator()(int64_t row) const { return weight + row_class[row] * features; }
  int64_t slope(int64_t row, int64_t width, int64_t r, int64_t k) const {
    return r * width + row_child[row + k];
  }
  template <int K>
  ListedRows<const T, K> weights(int64_t row) const {
    ListedRows<const T, K> rows;
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) rows.row[k] = (*this)(row + k);
    return rows;
  }
  template <int K, typename A>
  ListedRows<A, K> sums(int64_t row, A* sum, int64_t stride, const int32_t* sum_row) const {
    ListedRows<A, K> rows;
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) rows.row[k] = sum + sum_row[row_class[row + k]] * stride;
    return rows;
  }
};

// Rows whose weights will be read next, prefetched during the sums over other rows' columns.
struct Ahead {
  int64_t begin, end;

  template <typename Rows>
  void fetch(const Rows& rows, int64_t column) const {
    for (int64_t row = begin; row < end; ++row) __builtin_prefetch(rows(row) + column, 0, 2);
  }
};

// The share of the next run's rows to prefetch with the children c to c + k - 1 of `width`.
static inline Ahead share(const WideRun* next, int64_t c, int64_t k, int64_t width) {
  if (!next) return {0, 0};
  return {next->first_row + c * next->width / width, next->first_row + (c + k) * next->width / width};
}

// z_r[k] = dot(x_r, w_k) for R rows and K children.
template <typename T, typename Rows>
struct ScoreTile {
  using A = accumulate_t<T>;
  static constexpr int64_t W = VectorOf<A>::width;

  const A* x;
  int64_t x_stride;
  Rows rows;
  int64_t row;  // of the first child
  int64_t features;
  Ahead ahead;
  A* const* z;
  int64_t child;

  template <bool whole, int R, int K, typename Weights>
  inline void step(const Weights& w, int64_t s, Vector<A> (&sum)[R][K]) const {
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
    const auto w = rows.template weights<K>(row);
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

// The bias of a node's children: in place, or a copy.
template <typename T>
static inline const accumulate_t<T>* bias_of(const WideTree<T>& tree, const WideRun& run,
                                             accumulate_t<T>* copy) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  if (!tree.bias) return nullptr;
  const T* const bias = tree.bias + run.first_row;
  if (tree.leaf_class) {
    for (int64_t c = 0; c < run.width; ++c) copy[c] = element(tree.bias + tree.leaf_class[run.first_row + c]);
    return copy;
  }
  if constexpr (sizeof(T) == sizeof(A)) return bias;
  for (int64_t c = 0; c < run.width; c += W) {
    const int64_t some = run.width - c < W ? run.width - c : W;
    store_up_to(copy + c, some, load_first(bias + c, some));
  }
  return copy;
}

template <typename T, typename Rows>
static void scores_of(const WideTree<T>& tree, const WideRun& run, const WideRun* next, int64_t begin,
                      int64_t end, accumulate_t<T>* score, accumulate_t<T>* scratch) {
  using A = accumulate_t<T>;
  const int64_t stride = tree.workspace_stride;
  const Rows tree_rows(tree, 0);
  A* const x = scratch;
  const A* const bias = bias_of(tree, run, x + wide_rows * stride);
  for (int64_t first = begin; first < end; first += wide_rows) {
    const int64_t rows = end - first < wide_rows ? end - first : wide_rows;
    A* z[wide_rows];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = tree.row[first + r];
      gather(tree.subset, 0, tree.features, tree.hidden + row * tree.in_features, x + r * stride);
      z[r] = score + row * tree.score_stride + run.place;
    }
    for (int64_t c = 0; c < run.width; c += child_tile) {
      const int64_t children = run.width - c < child_tile ? run.width - c : child_tile;
      for (int64_t r = 0; r < rows; r += row_tile) {
        const bool fetch = r == 0 && first == begin;
        const ScoreTile<T, Rows> tile = {
            x + r * stride, stride,
            tree_rows,      run.first_row + c,
            tree.features,  share(fetch ? next : nullptr, c, children, run.width),
            z + r,          c};
        run_tile<row_tile, child_tile>(tile, rows - r, children);
      }
    }
    for (int64_t r = 0; r < rows; ++r) log_softmax(bias, run.width, z[r]);
  }
}

template <typename T>
static void scores(const WideTree<T>& tree, const WideRun& run, const WideRun* next, int64_t begin,
                   int64_t end, accumulate_t<T>* score, accumulate_t<T>* scratch) {
  return tree.row_class ? scores_of<T, ClassRows<T>>(tree, run, next, begin, end, score, scratch)
                        : scores_of<T, OwnRows<T>>(tree, run, next, begin, end, score, scratch);
}

// For R rows and K children and every feature: grad_x_r += sum_k z_rk w_k, and sum_r z_rk x_r is added to the
// gradient of w_k.
template <typename T, typename Rows>
struct GradientTile {
  using A = accumulate_t<T>;
  static constexpr int64_t W = VectorOf<A>::width;

  const A* z;
  int64_t z_stride;
  const A* x;
  A* grad_x;  // or null
  int64_t stride;
  Rows rows;
  int64_t row;  // of the first child
  int64_t features;
  Ahead ahead;
  A* sum;  // of the gradient of the weights, own rows: of the first child; or null
  int64_t sum_stride;
  const int32_t* sum_row;  // of each class, or null
  bool opened;             // the sums hold earlier rows or trees
  T* target;               // of finished sums of own rows, if aligned for streaming, otherwise null

  template <bool of_hidden, bool of_weight, bool whole, int R, int K, typename Weights, typename Sums>
  inline void step(int64_t s, const Weights& w, const Sums& sums, const Vector<A> (&zs)[R][K]) const {
    Vector<A> xs[R], gs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      xs[r] = load(x + r * stride + s);
      if constexpr (of_hidden) gs[r] = load(grad_x + r * stride + s);
    }
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      const Vector<A> ws = load_some<whole>(w[k] + s, features - s);
      Vector<A> d = of_weight && opened ? load(sums[k] + s) : Vector<A>{};
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if constexpr (of_hidden) gs[r] = add_product(gs[r], zs[r][k], ws);
        if constexpr (of_weight) d = add_product(d, zs[r][k], xs[r]);
      }
      if constexpr (!of_weight) continue;
      if (!Rows::are_shared && whole && target) {
        stream(target + k * rows.features + s, d);
      } else {
        store(sums[k] + s, d);
      }
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
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) zs[r][k] = splat(z[rows.slope(row, z_stride, r, k)]);
    }
    const auto w = rows.template weights<K>(row);
    decltype(rows.template sums<K>(row, sum, sum_stride, sum_row)) sums = {};
    if constexpr (of_weight) sums = rows.template sums<K>(row, sum, sum_stride, sum_row);
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

// Stores the gradients of the bias of some children from child c on.
template <typename T>
static inline void store_bias(const WideTree<T>& tree, const WideRun& run, const WideGradients<T>& g,
                              int64_t c, int64_t children, const accumulate_t<T>* sum) {
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width;
  if (tree.leaf_class && !g.sparse) {
    const int32_t* const leaf_class = tree.leaf_class + run.first_row + c;
    for (int64_t k = 0; k < children; ++k) store_first(g.grad_bias + leaf_class[k], 1, splat(sum[k]));
    return;
  }
  T* const to = g.grad_bias + (g.sparse ? run.slot : run.first_row) + c;
  for (int64_t k = 0; k < children; k += W) store_up_to(to + k, children - k, load(sum + k));
}

template <typename T>
static void slopes(const WideTree<T>& tree, const WideRun& run, const WideGradients<T>& g,
                   accumulate_t<T>* bias_sum) {
  using A = accumulate_t<T>;
  for (int64_t c = 0; c < run.width; c += VectorOf<A>::width) store(bias_sum + c, Vector<A>{});
  A* z = g.slope + run.entry;
  for (int64_t j = run.begin; j < run.end; ++j, z += run.width) {
    const int64_t row = tree.row[j];
    score_gradient(g.score + row * tree.score_stride + run.place, run.width,
                   tree.child[tree.first_child[j] + run.depth], g.grad_log_prob[row * g.trees], z, bias_sum);
  }
  if (g.grad_bias) store_bias(tree, run, g, 0, run.width, bias_sum);
}

template <typename T, typename Rows>
static void gradients_of(const WideTree<T>& tree, const WideRun& run, const WideRun* next, int64_t begin,
                         int64_t end, const WideGradients<T>& g, accumulate_t<T>* scratch) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  constexpr bool shared = Rows::are_shared;
  const int64_t size = end - begin, stride = tree.workspace_stride;
  const Rows tree_rows(tree, begin);
  A* x = scratch;
  A* grad_x = x + wide_rows * stride;
  A* sums = grad_x + wide_rows * stride;
  A* z = sums + wide_children * stride;
  A* bias_sum = z + wide_rows * wide_children;
  const int64_t first_row = g.sparse ? run.slot : run.first_row;
  const bool of_hidden = g.grad_hidden != nullptr, of_own = g.grad_weight != nullptr;
  const bool of_weight = of_own || g.sum;
  // Then all rows are aligned, and size and begin are whole numbers of vectors.
  const bool aligned = of_own && tree.features % W == 0 && is_aligned(g.grad_weight + begin);
  for (int64_t c0 = 0; c0 < run.width; c0 += wide_children) {
    const int64_t children = run.width - c0 < wide_children ? run.width - c0 : wide_children;
    for (int64_t c = 0; !shared && c < children; c += W) store(bias_sum + c, Vector<A>{});
    for (int64_t first = run.begin; first < run.end; first += wide_rows) {
      const int64_t rows = run.end - first < wide_rows ? run.end - first : wide_rows;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = tree.row[first + r];
        gather(tree.subset, begin, end, tree.hidden + row * tree.in_features, x + r * stride);
        for (int64_t s = 0; s < size; s += W) store(grad_x + r * stride + s, Vector<A>{});
        if constexpr (shared) continue;
        score_gradient(g.score + row * tree.score_stride + run.place + c0, children,
                       tree.child[tree.first_child[first + r] + run.depth] - c0,
                       g.grad_log_prob[row * g.trees], z + r * wide_children, bias_sum);
      }
      const int64_t z_stride = shared ? run.node_width : wide_children;
      for (int64_t c = 0; (of_hidden || of_weight) && c < children; c += child_tile) {
        const int64_t some = children - c < child_tile ? children - c : child_tile;
        const A* const of_children = shared ? g.slope + run.entry + (first - run.begin) * z_stride : z + c;
        T* const target = of_own ? g.grad_weight + (first_row + c0 + c) * tree.features + begin : nullptr;
        for (int64_t r = 0; r < rows; r += row_tile) {
          const bool later = r > 0 || first > run.begin, stays = first + r + row_tile < run.end;
          const GradientTile<T, Rows> tile = {of_children + r * z_stride,
                                              z_stride,
                                              x + r * stride,
                                              of_hidden ? grad_x + r * stride : nullptr,
                                              stride,
                                              tree_rows,
                                              run.first_row + c0 + c,
                                              size,
                                              share(later ? nullptr : next, c0 + c, some, run.width),
                                              of_own ? sums + c * stride : g.sum,
                                              of_own ? stride : g.sum_stride,
                                              g.sum_row,
                                              shared || later,
                                              aligned && !stays ? target : nullptr};
          run_tile<row_tile, child_tile>(tile, rows - r, some);
        }
        if (!of_own || aligned || first + rows < run.end) continue;
        for (int64_t k = 0; k < some; ++k) {
          stream_row(sums + (c + k) * stride, size, target + k * tree.features);
        }
      }
      for (int64_t r = 0; of_hidden && r < rows; ++r) {
        scatter_add(tree.subset, begin, end, grad_x + r * stride,
                    g.grad_hidden + tree.row[first + r] * tree.in_features);
      }
    }
    if (!shared && begin == 0 && g.grad_bias) store_bias(tree, run, g, c0, children, bias_sum);
  }
  if (!shared) end_of_streams();
}

template <typename T>
static void gradients(const WideTree<T>& tree, const WideRun& run, const WideRun* next, int64_t begin,
                      int64_t end, const WideGradients<T>& g, accumulate_t<T>* scratch) {
  return tree.row_class ? gradients_of<T, ClassRows<T>>(tree, run, next, begin, end, g, scratch)
                        : gradients_of<T, OwnRows<T>>(tree, run, next, begin, end, g, scratch);
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
static constexpr WideKernels<T> table = {scores<T>, slopes<T>, gradients<T>, store_sums<T>};

}  // namespace wide
}  // namespace HSTREE_CAPABILITY

HSTREE_KERNELS_OF_ELEMENTS(WideKernels, wide::table)

}  // namespace hstree::cpu
