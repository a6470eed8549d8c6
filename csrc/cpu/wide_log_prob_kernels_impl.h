// Body of the kernels of the wide op, under the rules of vector_impl.h.
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

// Weight rows that will be read next, prefetched during the sums over other rows' columns.
template <typename T>
struct Ahead {
  const T* weight;  // first of them
  int64_t rows;
  int64_t stride;

  void fetch(int64_t column) const {
    for (int64_t i = 0; i < rows; ++i) __builtin_prefetch(weight + i * stride + column, 0, 2);
  }
};

// The share of the next run's weights to prefetch with the children c to c + k - 1 of `width`.
template <typename T>
static inline Ahead<T> share(const WideTree<T>& tree, const WideRun* next, int64_t begin, int64_t c,
                             int64_t k, int64_t width) {
  if (!next) return {nullptr, 0, 0};
  const int64_t first = c * next->width / width, last = (c + k) * next->width / width;
  return {tree.weight + (next->first_row + first) * tree.features + begin, last - first, tree.features};
}

// z_r[k] = dot(x_r, w_k) for R rows and K children.
template <typename T>
struct ScoreTile {
  using A = accumulate_t<T>;
  static constexpr int64_t W = VectorOf<A>::width;

  const A* x;
  int64_t x_stride;
  const T* weight;
  int64_t features;
  Ahead<T> ahead;
  A* const* z;
  int64_t child;

  template <bool whole, int R, int K>
  static inline void step(const A* x, int64_t x_stride, const T* w, int64_t features, int64_t s,
                          Vector<A> (&sum)[R][K]) {
    Vector<A> xs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) xs[r] = load(x + r * x_stride + s);
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      const Vector<A> ws = load_some<whole>(w + k * features + s, features - s);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][k] += xs[r] * ws;
    }
  }

  template <int R, int K>
  void run() const {
    Vector<A> sum[R][K] = {};
    int64_t s = 0;
    for (; s + W <= features; s += W) {
      ahead.fetch(s);
      step<true>(x, x_stride, weight, features, s, sum);
    }
    if (s < features) step<false>(x, x_stride, weight, features, s, sum);
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
  Vector<A> sum = {};
  for (int64_t c = 0; c < width; c += W) sum += exponential(load_or_impossible(z + c, width - c) - largest);
  const A log_sum = log_of(sum_of<A>(sum));
  for (int64_t c = 0; c < width; c += W) {
    store_up_to(z + c, width - c, (load_or_impossible(z + c, width - c) - largest) - log_sum);
  }
}

template <typename T>
static void scores(const WideTree<T>& tree, const WideRun& run, const WideRun* next, int64_t begin,
                   int64_t end, accumulate_t<T>* score, accumulate_t<T>* x) {
  using A = accumulate_t<T>;
  const int64_t stride = tree.workspace_stride;
  const T* weight = tree.weight + run.first_row * tree.features;
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
        const ScoreTile<T> tile = {x + r * stride,
                                   stride,
                                   weight + c * tree.features,
                                   tree.features,
                                   share(tree, fetch ? next : nullptr, 0, c, children, run.width),
                                   z + r,
                                   c};
        run_tile<row_tile, child_tile>(tile, rows - r, children);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      log_softmax(tree.bias ? tree.bias + run.first_row : nullptr, run.width, z[r]);
    }
  }
}

// For R rows and K children and every feature: grad_x_r += sum_k z_rk w_k, and sum_r z_rk x_r is added to the
// gradient of w_k.
template <typename T>
struct GradientTile {
  using A = accumulate_t<T>;
  static constexpr int64_t W = VectorOf<A>::width;

  const A* z;
  const A* x;
  A* grad_x;  // or null
  int64_t stride;
  const T* weight;
  int64_t weight_stride;
  int64_t features;
  Ahead<T> ahead;
  A* sum;       // of the gradient of the weights, or null
  bool opened;  // earlier rows were summed
  T* target;    // of finished sums, if aligned for streaming, otherwise null

  template <bool of_hidden, bool of_weight, bool whole, int R, int K>
  inline void step(int64_t s, const Vector<A> (&zs)[R][K]) const {
    Vector<A> xs[R], gs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      xs[r] = load(x + r * stride + s);
      if constexpr (of_hidden) gs[r] = load(grad_x + r * stride + s);
    }
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      const Vector<A> w = load_some<whole>(weight + k * weight_stride + s, features - s);
      Vector<A> d = of_weight && opened ? load(sum + k * stride + s) : Vector<A>{};
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if constexpr (of_hidden) gs[r] += zs[r][k] * w;
        if constexpr (of_weight) d += zs[r][k] * xs[r];
      }
      if constexpr (!of_weight) continue;
      if (whole && target) {
        stream(target + k * weight_stride + s, d);
      } else {
        store(sum + k * stride + s, d);
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
      for (int k = 0; k < K; ++k) zs[r][k] = splat(z[r * wide_children + k]);
    }
    int64_t s = 0;
    for (; s + W <= features; s += W) {
      ahead.fetch(s);
      step<of_hidden, of_weight, true>(s, zs);
    }
    if (s < features) step<of_hidden, of_weight, false>(s, zs);
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
    store(z + c, g);
    store(bias_sum + c, load(bias_sum + c) + g);
  }
}

template <typename T>
static void gradients(const WideTree<T>& tree, const WideRun& run, const WideRun* next, int64_t begin,
                      int64_t end, const accumulate_t<T>* grad_log_prob, int64_t trees,
                      const accumulate_t<T>* score, accumulate_t<T>* grad_hidden, T* grad_weight,
                      T* grad_bias, int64_t grad_row, accumulate_t<T>* scratch) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  const int64_t size = end - begin, stride = tree.workspace_stride;
  A* x = scratch;
  A* grad_x = x + wide_rows * stride;
  A* sums = grad_x + wide_rows * stride;
  A* z = sums + wide_children * stride;
  A* bias_sum = z + wide_rows * wide_children;
  // Then all rows are aligned, and size and begin are whole numbers of vectors.
  const bool aligned = grad_weight && tree.features % W == 0 && is_aligned(grad_weight + begin);
  for (int64_t c0 = 0; c0 < run.width; c0 += wide_children) {
    poll();
    const int64_t children = run.width - c0 < wide_children ? run.width - c0 : wide_children;
    for (int64_t c = 0; c < children; c += W) store(bias_sum + c, Vector<A>{});
    for (int64_t first = run.begin; first < run.end; first += wide_rows) {
      const int64_t rows = run.end - first < wide_rows ? run.end - first : wide_rows;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = tree.row[first + r];
        gather(tree.subset, begin, end, tree.hidden + row * tree.in_features, x + r * stride);
        for (int64_t s = 0; s < size; s += W) store(grad_x + r * stride + s, Vector<A>{});
        score_gradient(score + row * tree.score_stride + run.place + c0, children,
                       tree.child[tree.first_child[first + r] + run.depth] - c0, grad_log_prob[row * trees],
                       z + r * wide_children, bias_sum);
      }
      const bool of_tiles = grad_hidden || grad_weight;
      for (int64_t c = 0; of_tiles && c < children; c += child_tile) {
        const int64_t some = children - c < child_tile ? children - c : child_tile;
        const T* weight = tree.weight + (run.first_row + c0 + c) * tree.features + begin;
        T* target = grad_weight + (grad_row + c0 + c) * tree.features + begin;
        for (int64_t r = 0; r < rows; r += row_tile) {
          const bool opened = r > 0 || first > run.begin, stays = first + r + row_tile < run.end;
          const GradientTile<T> tile = {z + r * wide_children + c,
                                        x + r * stride,
                                        grad_hidden ? grad_x + r * stride : nullptr,
                                        stride,
                                        weight,
                                        tree.features,
                                        size,
                                        share(tree, opened ? nullptr : next, begin, c0 + c, some, run.width),
                                        grad_weight ? sums + c * stride : nullptr,
                                        opened,
                                        aligned && !stays ? target : nullptr};
          run_tile<row_tile, child_tile>(tile, rows - r, some);
        }
        if (!grad_weight || aligned || first + rows < run.end) continue;
        for (int64_t k = 0; k < some; ++k) {
          stream_row(sums + (c + k) * stride, size, target + k * tree.features);
        }
      }
      for (int64_t r = 0; grad_hidden && r < rows; ++r) {
        scatter_add(tree.subset, begin, end, grad_x + r * stride,
                    grad_hidden + tree.row[first + r] * tree.in_features);
      }
    }
    if (!grad_bias) continue;
    for (int64_t c = 0; c < children; c += W) {
      store_up_to(grad_bias + grad_row + c0 + c, children - c, load(bias_sum + c));
    }
  }
  end_of_streams();
}

template <typename T>
static const WideKernels<T>* table() {
  static constexpr WideKernels<T> kernels = {scores<T>, gradients<T>};
  return &kernels;
}

}  // namespace wide
}  // namespace HSTREE_CAPABILITY

#define HSTREE_TABLE(T)                                                   \
  template <>                                                             \
  const WideKernels<T>* HSTREE_JOIN(wide_kernels_, HSTREE_CAPABILITY)() { \
    return HSTREE_CAPABILITY::wide::table<T>();                           \
  }
HSTREE_TABLE(float)
HSTREE_TABLE(double)
HSTREE_TABLE(BFloat16)
HSTREE_TABLE(Half)
#undef HSTREE_TABLE

}  // namespace hstree::cpu
