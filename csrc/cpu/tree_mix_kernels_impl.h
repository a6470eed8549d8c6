// Body of the forward kernels of log_prob, under the rules of vector_impl.h. A vector holds one number of each of
// a group of rows, or, for a single row, that of adjacent classes. Both add in the same order: the results have
// the same bits.
#include "cpu/mixture_row_kernels_impl.h"
#include "cpu/tree_log_softmax_kernels_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {
namespace mixture {

using log_prob::sum_of_exponentials;
using mixture_row::largest;

// The largest score of a group and the sum of exp(score - largest), for one row: score [V]. z holds the
// group's scores.
template <typename A>
static inline void sum_of_group(const A* score, const A* bias, const int32_t* classes, int64_t width, A* z,
                                A& most, A& sum) {
  for (int64_t c = 0; c < width; ++c) z[c] = score[classes[c]] + bias[classes[c]];
  sum = sum_of_exponentials(z, width, most);
}

// The sum of share times factor over a group, for a group of rows: share [V, W].
template <typename A>
static inline Vector<A> sum_of_shares(const A* share, const A* factor, const int32_t* classes,
                                      int64_t width) {
  constexpr int64_t W = VectorOf<A>::width;
  return log_prob::sum_of_parts<A>(width, [&](int64_t c, Vector<A> sum) {
    return sum + load(share + classes[c] * W) * splat(factor[classes[c]]);
  });
}

// The same for one row, with the same bits: share [V]. a and b hold what is multiplied.
template <typename A>
static inline A sum_of_shares(const A* share, const A* factor, const int32_t* classes, int64_t width, A* a,
                              A* b) {
  for (int64_t c = 0; c < width; ++c) {
    a[c] = share[classes[c]];
    b[c] = factor[classes[c]];
  }
  store(a + width, Vector<A>{});
  store(b + width, Vector<A>{});
  return log_prob::sum_of_row<A>(width, [&](int64_t c, Vector<A> sum) {
    return sum + load(static_cast<const A*>(a + c)) * load(static_cast<const A*>(b + c));
  });
}

// log sum_t exp(term_t) of the T vectors of `term`.
template <typename A>
static inline Vector<A> log_sum_exp(const A* term, int64_t trees) {
  constexpr int64_t W = VectorOf<A>::width;
  if (trees == 1) return load(term);
  const Vector<A> impossible = splat(static_cast<A>(-__builtin_inf()));
  Vector<A> most = impossible, sum = {};
  for (int64_t t = 0; t < trees; ++t) {
    const Vector<A> some = load(term + t * W);
    most = some > most ? some : most;
  }
  const Vector<A> shift = most == impossible ? Vector<A>{} : most;
  for (int64_t t = 0; t < trees; ++t) sum += exponential(load(term + t * W) - shift);
  return most + (most == impossible ? sum : log_of_sum(sum));  // NaN if a term is
}

constexpr double least_factor = 1e-12;  // least_factor times least_sum is a normal float

template <typename A>
static bool factors(const TreeMixture<A>& m, const Walk& walk, A* factor) {
  constexpr int64_t W = VectorOf<A>::width;
  Vector<A> least = splat(static_cast<A>(1));
  for (int64_t t = 0; t < m.trees; ++t, factor += walk.stride) {
    const A* const bias = m.class_bias + t * m.classes;
    const Vector<A> most = splat(largest(bias, m.classes));
    for (int64_t y = 0; y < m.classes; y += W) {
      const int64_t some = m.classes - y < W ? m.classes - y : W;
      const Vector<A> e = exponential(load_first(bias + y, some) - most);
      store(factor + y, e);
      least = lanes_below(A{}, some) && (e < least || e != e) ? e : least;  // NaN if one is
    }
  }
  for (int64_t i = 0; i < W; ++i) {
    if (!(least[i] >= static_cast<A>(least_factor))) return false;
  }
  return true;
}

template <typename A>
static void most(const TreeMixture<A>& m, const RowGroup<A>& rows) {
  for (int64_t r = 0; r < rows.lanes; ++r) {
    rows.most[r] = r < rows.count ? largest(m.class_score + (rows.begin + r) * m.classes, m.classes) : A{0};
  }
}

template <typename A>
static void shares(const TreeMixture<A>& m, const RowGroup<A>& rows, int64_t begin, int64_t end) {
  constexpr int64_t W = VectorOf<A>::width;
  const A* const score = m.class_score + rows.begin * m.classes;
  for (int64_t y = begin; y < end; y += W) {
    const int64_t some = end - y < W ? end - y : W;
    if (rows.lanes == 1) {
      store_first(rows.share + y, some, exponential(load_first(score + y, some) - splat(rows.most[0])));
      continue;
    }
    Vector<A> block[W] = {};
    for (int64_t r = 0; r < rows.count; ++r) block[r] = load_first(score + r * m.classes + y, some);
    transpose<A>(block);
    const Vector<A> most = load(static_cast<const A*>(rows.most));
    for (int64_t i = 0; i < some; ++i) store(rows.share + (y + i) * W, exponential(block[i] - most));
  }
}

// Neither is inlined: a compiler chooses in each copy which product of a sum it fuses, and the bits of a row must not
// depend on it.

// log of the sum of a group, or NaN.
template <typename A>
__attribute__((noinline)) static Vector<A> log_of_group(Vector<A> sum) {
  return sum >= static_cast<A>(least_sum) ? log_of_sum(sum) : splat(static_cast<A>(__builtin_nan("")));
}

template <typename A>
__attribute__((noinline)) static Vector<A> log_of_value(Vector<A> value) {
  return log_of_sum(value, headroom);
}

// Writes a vector of `lanes` numbers: one of each row, or that of a single row.
template <typename A>
static inline void put(A* p, int64_t lanes, Vector<A> v) {
  if (lanes > 1) return store(p, v);
  *p = v[0];
}

// The terms of a tree of a root and groups.
template <bool whole, typename A>
static void terms_of_groups(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows, int64_t t,
                            A* z) {
  const int64_t L = rows.lanes, room = walk.widest + VectorOf<A>::width;
  const TreeNode* const node = m.node + t * m.nodes;
  const Vector<A> gate = log_prob::gate_of(m, t, rows.begin, rows.count);
  A* const value = rows.value + (t * (walk.groups + walk.others) + walk.others) * L;
  if (walk.nodes[t] == 0) return put(value - L, L, gate);  // a single class
  const TreeEdge* const child = m.edge + t * m.edges + node[0].first_edge;
  const log_prob::ScoreRows<A> place(m, t, rows.begin);
  const auto of_child =
      log_prob::log_shares<whole>(m.score + place(node[0]), m.rows, node[0].width, rows.count, z);
  A* of_other = value;
  for (int64_t c = node[0].width - 1; c >= 0; --c) {
    if (child[c].below < 0) put(of_other -= L, L, gate + of_child(c));
  }
  const A* const bias = m.class_bias + t * m.classes;
  const A* const factor = rows.factor ? rows.factor + t * walk.stride : nullptr;
  const int32_t* classes = walk.member + t * walk.stride;
  for (int64_t g = 0; g < walk.groups_of[t]; ++g) {
    const TreeNode& n = node[g + 1];
    const Vector<A> base = gate + of_child(n.above - node[0].first_edge);
    Vector<A> log_sum;
    if (L > 1) {
      log_sum = log_of_group<A>(sum_of_shares<A>(rows.share, factor, classes, n.width));
    } else if (factor) {
      const A sum = sum_of_shares(rows.share, factor, classes, n.width, z + room, z + 2 * room);
      log_sum = log_of_group<A>(splat(sum));
    } else {
      A sum;
      sum_of_group<A>(m.class_score + rows.begin * m.classes, bias, classes, n.width, z + room,
                      rows.shift[t * walk.groups + g], sum);
      log_sum = log_of_sum(splat(sum));
    }
    put(value + g * L, L, base - log_sum);
    classes += n.width;
  }
}

// The terms of a tree of binary nodes.
template <bool whole, typename A>
static void terms_of_paths(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows, int64_t t,
                           A* open) {
  constexpr int64_t W = VectorOf<A>::width;
  A* value = rows.value + (t + 1) * walk.others * rows.lanes;
  log_prob::descend<whole>(m, walk, t, rows.begin, rows.count,
                           log_prob::gate_of(m, t, rows.begin, rows.count), open, open + walk.open * W,
                           [&](const int32_t*, const A* values, int64_t n) {
                             for (int64_t i = 0; i < n; ++i)
                               put(value -= rows.lanes, rows.lanes, load(values + i * W));
                           });
}

template <typename A>
static void terms(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows, int64_t t,
                  A* workspace) {
  const bool whole = rows.count == VectorOf<A>::width;
  const auto run = m.class_bias ? whole ? terms_of_groups<true, A> : terms_of_groups<false, A>
                   : whole      ? terms_of_paths<true, A>
                                : terms_of_paths<false, A>;
  run(m, walk, rows, t, workspace);
}

template <typename A>
static void weigh(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows) {
  constexpr int64_t W = VectorOf<A>::width;
  const int64_t L = rows.lanes, slots = walk.others + walk.groups;
  // To a value of another class, what is lost in all trees adds less than a unit in the last place.
  constexpr double lost = sizeof(A) == 4 ? lost_float / __FLT_EPSILON__ : lost_double / __DBL_EPSILON__;
  const A grouped = static_cast<A>(least_sum), other = static_cast<A>(lost * m.trees);
  const auto each =
      [&](const auto& f) {  // vectors of values, the numbers in them, and how small these may be
        for (int64_t t = 0; t < m.trees; ++t) {
          A* const value = rows.value + (t * slots + walk.others) * L;
          for (int64_t s = -walk.others_of[t] * L; s < 0; s += W) f(value + s, -s < W ? -s : W, other);
          const int64_t end = walk.groups_of[t] * L;
          for (int64_t s = 0; s < end; s += W) f(value + s, end - s < W ? end - s : W, grouped);
        }
      };
  Vector<A> most = splat(static_cast<A>(-__builtin_inf()));
  each([&](A* value, int64_t some, A) {
    const Vector<A> v = load_first(value, some);
    most = lanes_below(A{}, some) && v > most ? v : most;
  });
  if (L == 1) {
    A largest = most[0];
    for (int64_t i = 1; i < W; ++i) largest = most[i] > largest ? most[i] : largest;
    most = splat(largest);
  }
  const Vector<A> bad = splat(static_cast<A>(__builtin_nan("")));
  Vector<A> unit = most;
  each([&](A* value, int64_t some, A least) {
    const Vector<A> v = exponential(load_first(value, some) - most) * static_cast<A>(uint64_t{1} << headroom);
    store_first(value, some, v);
    unit = lanes_below(A{}, some) && !(v >= least) ? bad : unit;
  });
  for (int64_t i = 1; L == 1 && i < W; ++i) {
    if (unit[i] != unit[i]) unit = bad;
  }
  for (int64_t r = 0; r < L; ++r) rows.unit[r] = unit[r];
}

template <typename A>
static void mix_rows(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows, int64_t begin,
                     int64_t end, A* log_prob, A* term) {
  constexpr int64_t W = VectorOf<A>::width;
  for (int64_t y = begin; y < end; y += W) {
    const int64_t some = end - y < W ? end - y : W;
    Vector<A> block[W] = {};
    for (int64_t i = 0; i < some; ++i) {
      for (int64_t t = 0; t < m.trees; ++t) {
        const A* const values = rows.value + (t * (walk.groups + walk.others) + walk.others) * W;
        store(term + t * W, load(values + walk.slot[t * walk.stride + y + i] * int64_t{W}));
      }
      block[i] = log_sum_exp<A>(term, m.trees);
    }
    transpose<A>(block);
    for (int64_t r = 0; r < rows.count; ++r)
      store_first(log_prob + (rows.begin + r) * m.classes + y, some, block[r]);
  }
}

// Of one class and a group of rows: the sums over its groups, of value times factor, and over the trees in which
// it is in none, of value. Returns whether there are such trees.
template <typename A>
static inline bool sums_of_class(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows,
                                 int64_t y, Vector<A>& grouped, Vector<A>& other) {
  constexpr int64_t W = VectorOf<A>::width;
  bool has_other = false;
  for (int64_t t = 0; t < m.trees; ++t) {
    const int64_t slot = walk.slot[t * walk.stride + y];
    const Vector<A> value =
        load(static_cast<const A*>(rows.value + (t * (walk.groups + walk.others) + walk.others + slot) * W));
    if (slot >= 0) {
      grouped += value * splat(rows.factor[t * walk.stride + y]);
    } else {
      other += value;
      has_other = true;
    }
  }
  return has_other;
}

// The same, with the same bits, of one row and a vector of classes from y on. has_other: 1 where there are such
// trees, else 0.
template <typename A>
static inline void sums_of_classes(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows,
                                   int64_t y, Vector<A>& grouped, Vector<A>& other, Vector<A>& has_other) {
  constexpr int64_t W = VectorOf<A>::width;
  A is_other[W] = {};
  for (int64_t t = 0; t < m.trees; ++t) {
    const int32_t* const slot = walk.slot + t * walk.stride + y;
    const A* const values = rows.value + t * (walk.groups + walk.others) + walk.others;
    A value[W], of_other[W];
    for (int64_t i = 0; i < W; ++i) {
      const A v = values[slot[i]];
      value[i] = slot[i] < 0 ? 0 : v;
      of_other[i] = slot[i] < 0 ? v : 0;
      is_other[i] = slot[i] < 0 ? 1 : is_other[i];
    }
    grouped +=
        load(static_cast<const A*>(value)) * load(static_cast<const A*>(rows.factor + t * walk.stride + y));
    other += load(static_cast<const A*>(of_other));
  }
  has_other = load(static_cast<const A*>(is_other));
}

template <typename A>
static void mix_factored_rows(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows,
                              int64_t begin, int64_t end, A* log_prob) {
  constexpr int64_t W = VectorOf<A>::width;
  const Vector<A> unit = load(static_cast<const A*>(rows.unit));
  for (int64_t y = begin; y < end; y += W) {
    const int64_t some = end - y < W ? end - y : W;
    Vector<A> block[W] = {};
    A is_other[W] = {};
    for (int64_t i = 0; i < some; ++i) {
      Vector<A> grouped = {}, other = {};
      if (sums_of_class(m, walk, rows, y + i, grouped, other)) {
        grouped = other + grouped * load(static_cast<const A*>(rows.share + (y + i) * W));
        is_other[i] = 1;
      }
      block[i] = unit + log_of_value<A>(grouped);
    }
    transpose<A>(block);
    const auto has_other = load(static_cast<const A*>(is_other)) != 0;
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t place = (rows.begin + r) * m.classes + y;
      const Vector<A> score = load_first(m.class_score + place, some);
      store_first(log_prob + place, some, has_other ? block[r] : block[r] + (score - splat(rows.most[r])));
    }
  }
}

template <typename A>
static void mix_factored_row(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows,
                             int64_t begin, int64_t end, A* log_prob) {
  constexpr int64_t W = VectorOf<A>::width;
  const Vector<A> unit = splat(rows.unit[0]), most = splat(rows.most[0]);
  for (int64_t y = begin; y < end; y += W) {
    const int64_t some = end - y < W ? end - y : W;
    Vector<A> grouped = {}, other = {}, is_other = {};
    sums_of_classes(m, walk, rows, y, grouped, other, is_other);
    const auto has_other = is_other != 0;
    const Vector<A> share = load_first(static_cast<const A*>(rows.share + y), some);
    const Vector<A> out = unit + log_of_value<A>(has_other ? other + grouped * share : grouped);
    const Vector<A> score = load_first(m.class_score + rows.begin * m.classes + y, some);
    store_first(log_prob + rows.begin * m.classes + y, some, has_other ? out : out + (score - most));
  }
}

template <typename A>
static int64_t probable(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows, int64_t begin,
                        int64_t end, const A* least, FoundClass<A>* found) {
  constexpr int64_t W = VectorOf<A>::width;
  const bool is_single = rows.lanes == 1;
  const Vector<A> threshold = is_single ? splat(least[0]) : load(least);
  int64_t count = 0;
  for (int64_t y = begin; y < end; y += is_single ? W : 1) {
    Vector<A> grouped = {}, other = {}, is_other = {}, share;
    int64_t some = rows.count;
    if (is_single) {
      some = end - y < W ? end - y : W;
      sums_of_classes(m, walk, rows, y, grouped, other, is_other);
      share = load_first(static_cast<const A*>(rows.share + y), some);
    } else {
      sums_of_class(m, walk, rows, y, grouped, other);
      share = load(static_cast<const A*>(rows.share + y * W));
    }
    const Vector<A> value = other + grouped * share;
    const auto is_more = value > threshold;
    if (first_lane(bits_as<I32>(is_more)) == VectorOf<float>::width) continue;
    for (int64_t i = 0; i < some; ++i) {
      if (!is_more[i]) continue;
      const int64_t row = is_single ? 0 : i, index = is_single ? y + i : y;
      found[count++] = {value[i], static_cast<int32_t>(row), static_cast<int32_t>(index)};
    }
  }
  return count;
}

template <typename A>
static void mix_row(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows, int64_t begin,
                    int64_t end, A* log_prob, A* term) {
  constexpr int64_t W = VectorOf<A>::width;
  A* const row = log_prob + rows.begin * m.classes;
  for (int64_t y = begin; y < end; y += W) {
    const int64_t some = end - y < W ? end - y : W;
    for (int64_t t = 0; t < m.trees; ++t) {
      const int32_t* const slot = walk.slot + t * walk.stride + y;
      const A* const shift = rows.shift + t * walk.groups;
      const A* const value = rows.value + t * (walk.groups + walk.others) + walk.others;
      A z[W] = {};
      if (m.class_bias) {
        const Vector<A> score = load_first(m.class_score + rows.begin * m.classes + y, some);
        store(z, score + load_first(m.class_bias + t * m.classes + y, some));
      }
      for (int64_t i = 0; i < W; ++i) {
        const int64_t s = slot[i];
        term[t * W + i] = s < 0 ? value[s] : value[s] + (z[i] - shift[s]);
      }
    }
    store_first(row + y, some, log_sum_exp<A>(term, m.trees));
  }
}

template <typename A>
static void mix(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows, int64_t begin,
                int64_t end, A* log_prob, A* workspace) {
  const bool is_vector = rows.lanes == VectorOf<A>::width;
  if (rows.factor && is_vector) return mix_factored_rows(m, walk, rows, begin, end, log_prob);
  if (rows.factor) return mix_factored_row(m, walk, rows, begin, end, log_prob);
  if (is_vector) return mix_rows(m, walk, rows, begin, end, log_prob, workspace);
  mix_row(m, walk, rows, begin, end, log_prob, workspace);
}

template <typename A>
static constexpr TreeMixKernels<A> table = {VectorOf<A>::width, factors<A>, most<A>,     shares<A>,
                                            terms<A>,           weigh<A>,   probable<A>, mix<A>};

}  // namespace mixture
}  // namespace HSTREE_CAPABILITY

HSTREE_KERNELS_OF_SUMS(TreeMixKernels, mixture::table)

}  // namespace hstree::cpu
