// Body of the forest kernels, under the rules of vector_impl.h. Scores have a class in each row of memory: a vector
// holds one class of several rows, so that an index of a cluster serves all lanes, and sums need no gathers.
#include "cpu/vector_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {

// Within it, a term below the smallest that exponential() gives is below 1e-9 of its tree's normalizer for up to 10
// million classes.
static inline float widest(float) {
  return 50;
}
static inline double widest(double) {
  return 650;
}

// N vectors of neighboring rows; part: only the first `count` rows of one vector exist.
template <int N, bool part, typename A>
struct RowLanes {
  static constexpr int64_t W = VectorOf<A>::width, stride = N * W;
  int64_t count;

  Vector<A> get(const A* p, int n) const { return part ? load_first(p, count) : load(p + n * W); }
  void put(A* p, int n, Vector<A> v) const {
    if (part) return store_first(p, count, v);
    store(p + n * W, v);
  }
};

template <int N, bool part, typename A>
static void forest_survey_of(const ForestRows<A>& f, const ForestPanel<A>& panel) {
  using L = RowLanes<N, part, A>;
  const L lanes{panel.count};
  for (int64_t i = 0; i < panel.count; ++i) panel.wide[i] = 0;
  for (int64_t t = 0; t < f.trees; ++t) {
    const A* r = f.cluster_score + t * f.clusters * f.rows + panel.begin;
    Vector<A> most[N], least[N], sum[N];
    for (int n = 0; n < N; ++n) most[n] = least[n] = sum[n] = lanes.get(r, n);
    for (int64_t c = 1; c < f.clusters; ++c) {
      r += f.rows;
      for (int n = 0; n < N; ++n) {
        const Vector<A> some = lanes.get(r, n);
        most[n] = some > most[n] ? some : most[n];
        least[n] = some < least[n] ? some : least[n];
        sum[n] += some;  // NaN if one is
      }
    }
    A* const top = panel.top + t * L::stride;
    for (int n = 0; n < N; ++n) store(top + n * L::W, most[n]);
    for (int64_t i = 0; i < panel.count; ++i) {
      const int64_t n = i / L::W, lane = i % L::W;
      panel.wide[i] |= !(top[i] - least[n][lane] <= widest(A{})) || sum[n][lane] != sum[n][lane];
    }
  }
}

// Largest score of each row, ignoring NaN.
template <int N, bool part, typename A>
[[gnu::noinline]] static void forest_max(const ForestRows<A>& f, const RowLanes<N, part, A>& lanes,
                                         const A* x, Vector<A>* most) {
  for (int n = 0; n < N; ++n) most[n] = splat(-static_cast<A>(__builtin_inf()));
  for (int64_t v = 0; v < f.classes; ++v, x += f.rows) {
    for (int n = 0; n < N; ++n) {
      const Vector<A> some = lanes.get(x, n);
      most[n] = some > most[n] ? some : most[n];
    }
  }
}

template <int N, bool part, typename A>
[[gnu::noinline]] static void forest_exp(const ForestRows<A>& f, const RowLanes<N, part, A>& lanes, A* x,
                                         const Vector<A>* most, A* sums) {
  constexpr int64_t W = VectorOf<A>::width, S = N * W;
  // Classes that are summed one after the other. A million equal ones have probabilities that sum to 1 within 2e-6 by
  // the smaller number, and 2e-5 by the larger one, which suffices for a loss.
  const int64_t block = f.log_softmax ? 1 << 11 : 1 << 14;
  const int64_t V = f.classes, T = f.trees, of_tree = f.clusters * S, numbers = T * of_tree;
  const bool stored = f.grad_log_prob;
  const int32_t* cluster = f.cluster;
  A* const of_block = V > block ? sums + numbers : sums;
  for (int64_t i = 0; i < numbers; i += W) store(sums + i, Vector<A>{});
  for (int64_t begin = 0; begin < V; begin += block) {
    const int64_t end = V < begin + block ? V : begin + block;
    if (of_block != sums) {
      for (int64_t i = 0; i < numbers; i += W) store(of_block + i, Vector<A>{});
    }
    for (int64_t v = begin; v < end; ++v, cluster += T, x += f.rows) {
      Vector<A> e[N];
      for (int n = 0; n < N; ++n) {
        e[n] = exponential(lanes.get(x, n) - most[n]);
        if (stored) lanes.put(x, n, e[n]);
      }
      for (int64_t t = 0; t < T; ++t) {
        A* const sum = of_block + t * of_tree + cluster[t] * S;
        for (int n = 0; n < N; ++n) store(sum + n * W, load(sum + n * W) + e[n]);
      }
    }
    if (of_block != sums) {
      for (int64_t i = 0; i < numbers; i += W) store(sums + i, load(sums + i) + load(of_block + i));
    }
  }
}

template <int N, bool part, typename A>
static void forest_begin_of(const ForestRows<A>& f, const ForestPanel<A>& panel) {
  using L = RowLanes<N, part, A>;
  constexpr int64_t W = L::W, S = L::stride;
  const L lanes{panel.count};
  const int64_t R = f.rows, T = f.trees, C = f.clusters;
  A* const x = f.score + panel.begin;
  const int64_t* const target = f.target + panel.begin;
  Vector<A> most[N];
  forest_max(f, lanes, x, most);
  for (int n = 0; n < N; ++n) store(panel.most + n * W, most[n]);
  double at_target[S];
  for (int64_t i = 0; i < panel.count; ++i) {
    at_target[i] = target[i] < 0 ? 0 : static_cast<double>(x[target[i] * R + i]) - most[i / W][i % W];
  }
  forest_exp(f, lanes, x, most, panel.sums);
  for (int64_t t = 0; t < T; ++t) {
    A* r = f.cluster_score + t * C * R + panel.begin;
    const A* const top = panel.top + t * S;
    const A* sum = panel.sums + t * C * S;
    double of_cluster[S];
    for (int64_t i = 0; i < panel.count; ++i) {
      of_cluster[i] = target[i] < 0 ? 0 : r[f.cluster[target[i] * T + t] * R + i];
    }
    Vector<A> total[N] = {};
    for (int64_t c = 0; c < C; ++c, r += R, sum += S) {
      for (int n = 0; n < N; ++n) {
        const Vector<A> e = exponential(lanes.get(r, n) - load(top + n * W));
        if (f.grad_log_prob) lanes.put(r, n, e);
        total[n] += e * load(sum + n * W);
      }
    }
    for (int64_t i = 0; i < panel.count; ++i) {
      const double normalizer = total[i / W][i % W];
      panel.normalizers[t * S + i] = normalizer;
      panel.shares[t * S + i] = f.log_prior[t * R + panel.begin + i] + at_target[i] +
                                (of_cluster[i] - top[i] - __builtin_log(normalizer));
    }
  }
}

// x_v <- -x_v sum_t weight_t of the cluster of v
template <int N, bool part, typename A>
[[gnu::noinline]] static void forest_weigh(const ForestRows<A>& f, const RowLanes<N, part, A>& lanes, A* x,
                                           const A* weights) {
  constexpr int64_t W = VectorOf<A>::width, S = N * W;
  const int64_t T = f.trees, of_tree = f.clusters * S;
  const int32_t* cluster = f.cluster;
  for (int64_t v = 0; v < f.classes; ++v, cluster += T, x += f.rows) {
    Vector<A> weight[N] = {};
    for (int64_t t = 0; t < T; ++t) {
      const A* const some = weights + t * of_tree + cluster[t] * S;
      for (int n = 0; n < N; ++n) weight[n] -= load(some + n * W);
    }
    for (int n = 0; n < N; ++n) lanes.put(x, n, lanes.get(x, n) * weight[n]);
  }
}

template <int N, bool part, typename A>
static void forest_finish_of(const ForestRows<A>& f, const ForestPanel<A>& panel) {
  using L = RowLanes<N, part, A>;
  constexpr int64_t W = L::W, S = L::stride;
  const L lanes{panel.count};
  const int64_t R = f.rows, T = f.trees, C = f.clusters;
  A* const x = f.score + panel.begin;
  const int64_t* const target = f.target + panel.begin;
  A* sum = panel.sums;
  for (int64_t t = 0; t < T; ++t) {
    const double* const shares = panel.shares + t * S;
    Vector<A> factor[N] = {};
    for (int64_t i = 0; i < panel.count; ++i) {
      factor[i / W][i % W] = static_cast<A>(shares[i] / panel.normalizers[t * S + i]);
    }
    A* const of_tree = f.cluster_score + t * C * R + panel.begin;
    A* r = of_tree;
    for (int64_t c = 0; c < C; ++c, r += R, sum += S) {
      for (int n = 0; n < N; ++n) {
        const Vector<A> weight = lanes.get(r, n) * factor[n];
        lanes.put(r, n, -(weight * load(sum + n * W)));
        store(sum + n * W, weight);
      }
    }
    for (int64_t i = 0; i < panel.count; ++i) {
      if (target[i] < 0) continue;
      of_tree[f.cluster[target[i] * T + t] * R + i] += static_cast<A>(shares[i]);
    }
  }
  forest_weigh(f, lanes, x, panel.sums);
  for (int64_t i = 0; i < panel.count; ++i) {
    if (target[i] < 0) continue;
    double of_all = 0;
    for (int64_t t = 0; t < T; ++t) of_all += panel.shares[t * S + i];
    x[target[i] * R + i] += static_cast<A>(of_all);
  }
}

// log P_v = s_v - most + d + log sum_t w_t[c_t(v)], where w_t[c] = exp(share_t + r_tc - d) and d is the largest
// share_t + top_t, so that for each class some w is at least exp(-widest).
template <int N, bool part, typename A>
static void forest_every_of(const ForestRows<A>& f, const ForestPanel<A>& panel) {
  using L = RowLanes<N, part, A>;
  constexpr int64_t W = L::W, S = L::stride;
  const L lanes{panel.count};
  const int64_t R = f.rows, T = f.trees, C = f.clusters, V = f.classes;
  double base[S];
  Vector<A> shift[N] = {};
  for (int64_t i = 0; i < panel.count; ++i) {
    double largest = panel.shares[i] + panel.top[i];
    for (int64_t t = 1; t < T; ++t) {
      const double share = panel.shares[t * S + i] + panel.top[t * S + i];
      largest = largest >= share ? largest : share;
    }
    base[i] = largest == -__builtin_inf() ? 0 : largest;
    shift[i / W][i % W] = static_cast<A>(largest - panel.most[i]);
  }
  A* weights = panel.sums;
  const A* r = f.cluster_score + panel.begin;
  for (int64_t t = 0; t < T; ++t) {
    const A* const top = panel.top + t * S;
    Vector<A> share[N] = {};
    for (int64_t i = 0; i < panel.count; ++i) {
      share[i / W][i % W] = static_cast<A>(panel.shares[t * S + i] + top[i] - base[i]);
    }
    for (int64_t c = 0; c < C; ++c, r += R, weights += S) {
      for (int n = 0; n < N; ++n) {
        store(weights + n * W, exponential(share[n] + (lanes.get(r, n) - load(top + n * W))));
      }
    }
  }
  const A* const x = f.score + panel.begin;
  A* const out = f.log_softmax + panel.begin * V;
  for (int64_t v = 0; v < V; v += W) {
    const int64_t count = V - v < W ? V - v : W;
    for (int n = 0; n < N; ++n) {
      Vector<A> tile[W] = {};
      for (int64_t i = 0; i < count; ++i) {
        const int32_t* const cluster = f.cluster + (v + i) * T;
        Vector<A> weight = {};
        for (int64_t t = 0; t < T; ++t) weight += load(panel.sums + (t * C + cluster[t]) * S + n * W);
        tile[i] = (lanes.get(x + (v + i) * R, n) + shift[n]) + log_of_sum(weight);
      }
      transpose<A>(tile);
      const int64_t rows = part ? panel.count : W;
      for (int64_t i = 0; i < rows; ++i) {
        A* const row = out + (n * W + i) * V + v;
        if (count == W) {
          store(row, tile[i]);
        } else {
          store_first(row, count, tile[i]);
        }
      }
    }
  }
}

#define HSTREE_FOREST(name)                                                        \
  template <typename A>                                                            \
  static void forest_##name(const ForestRows<A>& f, const ForestPanel<A>& panel) { \
    constexpr int64_t W = VectorOf<A>::width;                                      \
    if (panel.count == 8 * W) return forest_##name##_of<8, false>(f, panel);       \
    if (panel.count == 4 * W) return forest_##name##_of<4, false>(f, panel);       \
    if (panel.count == 2 * W) return forest_##name##_of<2, false>(f, panel);       \
    if (panel.count == W) return forest_##name##_of<1, false>(f, panel);           \
    forest_##name##_of<1, true>(f, panel);                                         \
  }
HSTREE_FOREST(survey)
HSTREE_FOREST(begin)
HSTREE_FOREST(finish)
HSTREE_FOREST(every)
#undef HSTREE_FOREST

template <typename A>
static constexpr ForestKernels<A> forest_table = {VectorOf<A>::width, forest_survey<A>, forest_begin<A>,
                                                  forest_finish<A>, forest_every<A>};

}  // namespace HSTREE_CAPABILITY

HSTREE_KERNELS_OF_SUMS(ForestKernels, forest_table)

}  // namespace hstree::cpu
