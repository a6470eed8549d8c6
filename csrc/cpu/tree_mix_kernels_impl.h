// Body of the forward kernels of log_prob, under the rules of vector_impl.h. A vector holds one number of each of
// a group of rows, or, for a single row, that of adjacent classes. Both add in the same order: the results have
// the same bits.
#include "cpu/tree_log_softmax_kernels_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {
namespace mixture {

constexpr int64_t classes_ahead = 8;  // distance in classes of the prefetch of terms

using log_prob::log_of_sum;
using log_prob::sum_of_exponentials;

// The largest score of a leaf group and the sum of exp(score - largest), for a group of rows: score [V, W]. z
// holds the group's scores.
template <typename A>
static inline void sum_of_group(const A* score, const A* bias, const int32_t* classes, int64_t width, A* z,
                                Vector<A>& most, Vector<A>& sum) {
  constexpr int64_t W = VectorOf<A>::width;
  most = splat(static_cast<A>(-__builtin_inf()));
  for (int64_t c = 0; c < width; ++c) {
    const Vector<A> some = load(score + classes[c] * W) + splat(bias[classes[c]]);
    store(z + c * W, some);
    most = some > most ? some : most;
  }
  sum = sum_of_exponentials<false>(z, width, most);
}

// The same for one row: score [V].
template <typename A>
static inline void sum_of_group(const A* score, const A* bias, const int32_t* classes, int64_t width, A* z,
                                A& most, A& sum) {
  for (int64_t c = 0; c < width; ++c) z[c] = score[classes[c]] + bias[classes[c]];
  sum = sum_of_exponentials(z, width, most);
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

template <typename A>
static void scores(const TreeMixture<A>& m, const RowGroup<A>& rows, int64_t begin, int64_t end) {
  constexpr int64_t W = VectorOf<A>::width;
  const A* const score = m.leaf_score + rows.begin * m.classes;
  for (int64_t y = begin; y < end; y += W) {
    const int64_t some = end - y < W ? end - y : W;
    A block[W * W] = {};
    for (int64_t r = 0; r < rows.count; ++r) {
      for (int64_t i = 0; i < some; ++i) block[i * W + r] = score[r * m.classes + y + i];
    }
    for (int64_t i = 0; i < some; ++i) {
      store(rows.score + (y + i) * W, load(static_cast<const A*>(block + i * W)));
    }
  }
}

template <bool whole, typename A>
static void follow(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows, int64_t t,
                   A* workspace) {
  constexpr int64_t W = VectorOf<A>::width;
  const int64_t L = rows.lanes;
  A* const open = workspace;
  A* const z = open + walk.open * W;
  A* const group_z = z + (walk.widest + leaves_at_once) * W;
  A* shift = rows.shift + t * walk.groups * L;
  A* const value = rows.value + (t * (walk.groups + walk.others) + walk.others) * L;
  A *of_group = value, *of_other = value;
  const int32_t* classes = walk.leaf + t * walk.stride;
  const A* const bias = m.leaf_bias ? m.leaf_bias + t * m.classes : nullptr;
  const int64_t leaf_begin = m.block_begin[wide_root] - m.block_begin[wide_node];
  log_prob::descend<whole>(
      m, walk, t, rows.begin, rows.count, log_prob::gate_of(m, t, rows.begin, rows.count), open, z,
      [&](const int32_t*, const A* values, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
          of_other -= L;
          if (L == W) {
            store(of_other, load(values + i * W));
          } else {
            *of_other = values[i * W];
          }
        }
      },
      [&](const TreeNode& n, Vector<A> base) {
        if (n.block != wide_node || n.row < leaf_begin) return false;
        if (L == W) {
          Vector<A> most, sum;
          sum_of_group<A>(rows.score, bias, classes, n.width, group_z, most, sum);
          store(shift, most);
          store(of_group, base - log_of_sum(sum));
        } else {
          A most, sum;
          sum_of_group<A>(m.leaf_score + rows.begin * m.classes, bias, classes, n.width, group_z, most, sum);
          *shift = most;
          *of_group = (base - log_of_sum(splat(sum)))[0];
        }
        classes += n.width;
        shift += L;
        of_group += L;
        return true;
      });
}

template <typename A>
static void terms(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows, int64_t t,
                  A* workspace) {
  if (rows.count == VectorOf<A>::width) return follow<true>(m, walk, rows, t, workspace);
  follow<false>(m, walk, rows, t, workspace);
}

template <typename A>
static void mix_rows(const TreeMixture<A>& m, const Walk& walk, const RowGroup<A>& rows, int64_t begin,
                     int64_t end, A* log_prob, A* term) {
  constexpr int64_t W = VectorOf<A>::width;
  for (int64_t y = begin; y < end; y += W) {
    const int64_t some = end - y < W ? end - y : W;
    A block[W * W];
    for (int64_t i = 0; i < some; ++i) {
      for (int64_t t = 0; t < m.trees; ++t) {
        const int32_t* const slots = walk.slot + t * walk.stride;
        const A* const values = rows.value + (t * (walk.groups + walk.others) + walk.others) * W;
        if (y + i + classes_ahead < end)
          __builtin_prefetch(values + slots[y + i + classes_ahead] * int64_t{W});
        const int64_t slot = slots[y + i];
        const A* const value = values + slot * W;
        Vector<A> log_share = load(value);
        if (slot >= 0) {
          const A* const shift = rows.shift + (t * walk.groups + slot) * W;
          const Vector<A> score = load(static_cast<const A*>(rows.score + (y + i) * W));
          log_share += (score + splat(m.leaf_bias[t * m.classes + y + i])) - load(shift);
        }
        store(term + t * W, log_share);
      }
      store(block + i * W, log_sum_exp<A>(term, m.trees));
    }
    for (int64_t r = 0; r < rows.count; ++r) {
      A* const row = log_prob + (rows.begin + r) * m.classes + y;
      for (int64_t i = 0; i < some; ++i) row[i] = block[i * W + r];
    }
  }
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
      if (m.leaf_bias) {
        const Vector<A> score = load_first(m.leaf_score + rows.begin * m.classes + y, some);
        store(z, score + load_first(m.leaf_bias + t * m.classes + y, some));
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
  if (rows.lanes == VectorOf<A>::width) return mix_rows(m, walk, rows, begin, end, log_prob, workspace);
  mix_row(m, walk, rows, begin, end, log_prob, workspace);
}

template <typename A>
static constexpr TreeMixKernels<A> table = {VectorOf<A>::width, scores<A>, terms<A>, mix<A>};

}  // namespace mixture
}  // namespace HSTREE_CAPABILITY

HSTREE_KERNELS_OF_SUMS(TreeMixKernels, mixture::table)

}  // namespace hstree::cpu
