// Body of the kernels of the leaf op, under the rules of vector_impl.h.
#include "cpu/vector_impl.h"
#include "cpu/wide_log_prob_kernels_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {
namespace leaf {

// Rows of the batch whose sums are held in registers at a time.
constexpr int row_tile = 4;

// Calls tile.run<rows>() with the largest tile that fits.
template <int R, typename Tile>
static inline void run_rows(const Tile& tile, int64_t rows) {
  if constexpr (R > 1) {
    if (rows < R) return run_rows<R - 1>(tile, rows);
  }
  tile.template run<R>();
}

template <typename T>
static void widen(const T* hidden, int64_t count, accumulate_t<T>* x) {
  constexpr int64_t W = VectorOf<accumulate_t<T>>::width;
  int64_t s = 0;
  for (; s + W <= count; s += W) store(x + s, load(hidden + s));
  if (s < count) store_first(x + s, count - s, load_first(hidden + s, count - s));
}

// A row of weight in A: itself, or a copy in scratch.
static inline const float* widened(const float* row, int64_t, float*) {
  return row;
}
static inline const double* widened(const double* row, int64_t, double*) {
  return row;
}
template <typename T>
static inline const float* widened(const T* row, int64_t count, float* scratch) {
  widen(row, count, scratch);
  return scratch;
}

// z[row] = dot(x_row, w)
template <typename A>
struct Dots {
  static constexpr int64_t W = VectorOf<A>::width;

  const int32_t* row;
  const A* x;
  const A* w;
  int64_t features;
  A* z;
  int64_t z_stride;

  template <int R>
  void run() const {
    Vector<A> sum[R] = {};
    const A* xs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) xs[r] = x + row[r] * features;
    int64_t s = 0;
    for (; s + W <= features; s += W) {
      const Vector<A> ws = load(w + s);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r] += load(xs[r] + s) * ws;
    }
    if (s < features) {
      const Vector<A> ws = load_first(w + s, features - s);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r] += load_first(xs[r] + s, features - s) * ws;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) z[row[r] * z_stride] = sum_of<A>(sum[r]);
  }
};

template <typename T>
static void scores(const LeafBatch<T>& batch, int64_t begin, int64_t end, accumulate_t<T>* scratch) {
  using A = accumulate_t<T>;
  for (int64_t n = begin; n < end; ++n) {
    const A* w = widened(batch.weight + batch.visited[n] * batch.features, batch.features, scratch);
    for (int64_t v = batch.first_visit[n]; v < batch.first_visit[n + 1]; ++v) {
      const LeafRun& run = batch.run[batch.visit[v].run];
      A* z = batch.score + run.column + batch.visit[v].child;
      for (int64_t r = 0; r < run.rows; r += row_tile) {
        const Dots<A> tile = {run.row + r, batch.x, w, batch.features, z, batch.score_stride};
        run_rows<row_tile>(tile, run.rows - r);
      }
    }
  }
}

template <typename T>
static void normalize(const LeafBatch<T>& batch, const LeafRun& run, accumulate_t<T>* scratch) {
  using A = accumulate_t<T>;
  const A* bias = nullptr;
  if (batch.bias) {
    const T* of_tree = batch.bias + run.tree * batch.classes;
    for (int64_t c = 0; c < run.width; ++c) scratch[c] = load_first(of_tree + run.leaf_class[c], 1)[0];
    bias = scratch;
  }
  for (int64_t r = 0; r < run.rows; ++r) {
    wide::log_softmax(bias, run.width, batch.score + run.row[r] * batch.score_stride + run.column);
  }
}

template <typename T>
static void slopes(const LeafBatch<T>& batch, const LeafRun& run, const accumulate_t<T>* grad_log_prob,
                   accumulate_t<T>* slope, T* grad_bias, bool sparse, accumulate_t<T>* scratch) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  for (int64_t c = 0; c < run.width; c += W) store(scratch + c, Vector<A>{});
  for (int64_t r = 0; r < run.rows; ++r) {
    const int64_t row = run.row[r];
    wide::score_gradient(batch.score + row * batch.score_stride + run.column, run.width, run.chosen[r],
                         grad_log_prob[row * batch.trees + run.tree], slope + run.entry + r * run.slope_width,
                         scratch);
  }
  if (!grad_bias) return;
  if (sparse) {
    for (int64_t c = 0; c < run.width; c += W) {
      wide::store_up_to(grad_bias + run.slot + c, run.width - c, load(scratch + c));
    }
  } else {
    T* of_tree = grad_bias + run.tree * batch.classes;
    for (int64_t c = 0; c < run.width; ++c) store_first(of_tree + run.leaf_class[c], 1, splat(scratch[c]));
  }
}

// For R rows: d += sum_r z_r x_r, and g_r += z_r w, unless null.
template <typename A>
struct Gradients {
  static constexpr int64_t W = VectorOf<A>::width;

  const int32_t* row;
  const A* x;
  A* g;
  const A* w;
  A* d;
  const A* z;
  int64_t z_stride;
  int64_t features, size;

  template <int R>
  void run() const {
    if (!g) return sums<false, true, R>();
    if (!d) return sums<true, false, R>();
    sums<true, true, R>();
  }

  template <bool of_hidden, bool of_weight, int R>
  void sums() const {
    Vector<A> zs[R];
    const A* xs[R];
    A* gs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      zs[r] = splat(z[r * z_stride]);
      xs[r] = x + row[r] * features;
      if constexpr (of_hidden) gs[r] = g + row[r] * features;
    }
    int64_t s = 0;
    for (; s + W <= size; s += W) {
      const Vector<A> ws = load(w + s);
      Vector<A> sum = of_weight ? load(d + s) : Vector<A>{};
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if constexpr (of_weight) sum += zs[r] * load(xs[r] + s);
        if constexpr (of_hidden) store(gs[r] + s, load(gs[r] + s) + zs[r] * ws);
      }
      if constexpr (of_weight) store(d + s, sum);
    }
    if (s == size) return;
    const int64_t left = size - s;
    const Vector<A> ws = load_first(w + s, left);
    Vector<A> sum = of_weight ? load(d + s) : Vector<A>{};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if constexpr (of_weight) sum += zs[r] * load_first(xs[r] + s, left);
      if constexpr (of_hidden) store_first(gs[r] + s, left, load_first(gs[r] + s, left) + zs[r] * ws);
    }
    if constexpr (of_weight) store(d + s, sum);
  }
};

template <typename T>
static void gradients(const LeafBatch<T>& batch, const accumulate_t<T>* slope, int64_t begin, int64_t end,
                      accumulate_t<T>* grad_hidden, T* grad_weight, bool sparse, accumulate_t<T>* scratch) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  const int64_t size = end - begin;
  A *d = scratch, *copy = scratch + size + 32;
  for (int64_t n = 0; n < batch.n_visited; ++n) {
    if (n % 16 == 0) poll();
    const int64_t c = batch.visited[n];
    const A* w = widened(batch.weight + c * batch.features + begin, size, copy);
    for (int64_t s = 0; s < size; s += W) store(d + s, Vector<A>{});
    for (int64_t v = batch.first_visit[n]; v < batch.first_visit[n + 1]; ++v) {
      const LeafRun& run = batch.run[batch.visit[v].run];
      const A* z = slope + run.entry + batch.visit[v].child;
      for (int64_t r = 0; r < run.rows; r += row_tile) {
        const Gradients<A> tile = {run.row + r,
                                   batch.x + begin,
                                   grad_hidden ? grad_hidden + begin : nullptr,
                                   w,
                                   grad_weight ? d : nullptr,
                                   z + r * run.slope_width,
                                   run.slope_width,
                                   batch.features,
                                   size};
        run_rows<row_tile>(tile, run.rows - r);
      }
    }
    if (grad_weight) stream_row(d, size, grad_weight + (sparse ? n : c) * batch.features + begin);
  }
  end_of_streams();
}

template <typename T>
static const LeafKernels<T>* table() {
  static constexpr LeafKernels<T> kernels = {widen<T>, scores<T>, normalize<T>, slopes<T>, gradients<T>};
  return &kernels;
}

}  // namespace leaf
}  // namespace HSTREE_CAPABILITY

#define HSTREE_TABLE(T)                                                   \
  template <>                                                             \
  const LeafKernels<T>* HSTREE_JOIN(leaf_kernels_, HSTREE_CAPABILITY)() { \
    return HSTREE_CAPABILITY::leaf::table<T>();                           \
  }
HSTREE_TABLE(float)
HSTREE_TABLE(double)
HSTREE_TABLE(BFloat16)
HSTREE_TABLE(Half)
#undef HSTREE_TABLE

}  // namespace hstree::cpu
