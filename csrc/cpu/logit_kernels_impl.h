// Body of the logit kernels, under the rules of vector_impl.h.
#include "cpu/table_sums_impl.h"

namespace hstree::cpu {
namespace HSTREE_CAPABILITY {

// Loops over elements are separate functions: inlined into one function they were up to three times slower.

template <typename Kind, typename T>
[[gnu::noinline]] static void piecewise_forward_of(const Function<accumulate_t<T>>& function, const T* input,
                                                   int64_t count, T* output) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  const Function<A> f = function;
  int64_t i = 0;
  for (; i + W <= count; i += W) store(output + i, Kind::at(f, load(input + i)).f);
  if (i < count) {
    const Vector<A> x = load_first(input + i, count - i, A(0));
    store_first(output + i, count - i, Kind::at(f, x).f);
  }
}

template <typename T>
static void piecewise_forward(const Function<accumulate_t<T>>& f, const T* input, int64_t count, T* output) {
  with_table_kind(f, [&](auto kind) { piecewise_forward_of<decltype(kind)>(f, input, count, output); });
}

template <typename Kind, typename T>
[[gnu::noinline]] static void piecewise_backward_of(const Function<accumulate_t<T>>& function, const T* grad,
                                                    const T* input, int64_t count, T* grad_input,
                                                    const TableSums& table_sums) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  const Function<A> f = function;
  const TableSums sums = table_sums;
  Waiting<A> waiting;
  for (int64_t begin = 0; begin < count; begin += waiting.size) {
    const int64_t end = begin + waiting.size < count ? begin + waiting.size : count;
    for (int64_t i = begin; i < end; i += W) {
      const bool whole = i + W <= end;
      const Vector<A> x = whole ? load(input + i) : load_first(input + i, end - i, A(0));
      const Vector<A> g = whole ? load(grad + i) : load_first(grad + i, end - i, A(0));
      const Value<A> value = Kind::at(f, x);
      if (whole) {
        store(grad_input + i, g * value.slope);
      } else {
        store_first(grad_input + i, end - i, g * value.slope);
      }
      if (sums.fixed) enqueue<Kind::width>(f, sums, value.place, g, &waiting, i - begin);
    }
    if (sums.fixed) add_fixed<Kind::width>(sums, waiting, (end - begin + W - 1) / W * W);
  }
}

template <typename T>
static void piecewise_backward(const Function<accumulate_t<T>>& f, const T* grad, const T* input,
                               int64_t count, T* grad_input, const TableSums& sums) {
  with_table_kind(
      f, [&](auto kind) { piecewise_backward_of<decltype(kind)>(f, grad, input, count, grad_input, sums); });
}

// The largest magnitude, as bits: infinity and NaN are above all numbers.
template <typename T>
static accumulate_t<T> largest(const T* x, int64_t count) {
  using A = accumulate_t<T>;
  constexpr int64_t W = VectorOf<A>::width;
  Index<A> most[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= count; i += 4 * W) {
    for (int u = 0; u < 4; ++u) {
      most[u] = at_least(most[u], bits_as<Index<A>>(magnitude(load(x + i + u * W))));
    }
  }
  for (; i < count; i += W) {
    const Vector<A> v = i + W <= count ? load(x + i) : load_first(x + i, count - i, A(0));
    most[0] = at_least(most[0], bits_as<Index<A>>(magnitude(v)));
  }
  const Index<A> both = at_least(at_least(most[0], most[1]), at_least(most[2], most[3]));
  const Vector<A> values = bits_as<Vector<A>>(both);
  A result = 0;
  for (int64_t lane = 0; lane < W; ++lane) {
    if (!(values[lane] <= result)) result = values[lane];
    if (result != result) break;
  }
  return result;
}

// The reduction choose(choose(begin, x_0), x_1) ..., in any order, ignoring NaN.
template <typename A, typename Choose>
static A extreme(const A* x, int64_t count, A begin, const Choose& choose) {
  constexpr int64_t W = VectorOf<A>::width;
  Vector<A> found[4];
  for (int u = 0; u < 4; ++u) found[u] = splat(begin);
  int64_t v = 0;
  for (; v + 4 * W <= count; v += 4 * W) {
    for (int u = 0; u < 4; ++u) found[u] = choose(found[u], load(x + v + u * W));
  }
  for (; v < count; v += W) {
    found[0] = choose(found[0], v + W <= count ? load(x + v) : load_first(x + v, count - v, begin));
  }
  A result = begin;
  for (int u = 0; u < 4; ++u) {
    for (int64_t i = 0; i < W; ++i) result = choose(result, found[u][i]);
  }
  return result;
}

template <typename A>
static A row_max(const A* x, int64_t count) {
  return extreme(x, count, -infinity<A>, [](auto most, auto x) { return x > most ? x : most; });
}

template <typename A>
static A row_min(const A* x, int64_t count) {
  return extreme(x, count, infinity<A>, [](auto least, auto x) { return x < least ? x : least; });
}

// exp(f - shift - rest), 0 where x is -inf. For GssPower, rest is a factor instead: exp(c - shift).
template <typename Kind, typename A>
static inline Vector<A> exp_of(Vector<A> x, const Value<A>& value, A shift, A rest) {
  if constexpr (Kind::is_power) return value.f * rest;
  const Vector<A> e = exponential((value.f - shift) - rest);
  return Kind::width ? (x == -infinity<A> ? Vector<A>{} : e) : e;
}

template <typename Kind, typename A>
[[gnu::noinline]] static double exp_sum_of(const Function<A>& function, const A* x, int64_t count,
                                           A largest) {
  constexpr int64_t W = VectorOf<A>::width;
  constexpr int64_t block = 4096;  // elements summed before a conversion to float64
  const Function<A> f = function;
  const auto term = [&](Vector<A> some) {
    const Value<A> value = Kind::at(f, some);
    return Kind::is_power ? value.f : exp_of<Kind>(some, value, largest, A(0));
  };
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += block) {
    const int64_t end = begin + block < count ? begin + block : count;
    Vector<A> sum[4] = {};
    int64_t v = begin;
    for (; v + 4 * W <= end; v += 4 * W) {
      for (int u = 0; u < 4; ++u) sum[u] += term(load(x + v + u * W));
    }
    for (; v + W <= end; v += W) sum[0] += term(load(x + v));
    if (v < end) sum[1] += term(load_first(x + v, end - v, -infinity<A>));
    const Vector<A> all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    for (int64_t i = 0; i < W; ++i) total += all[i];
  }
  return Kind::is_power ? total * __builtin_exp(static_cast<double>(f.c) - largest) : total;
}

template <typename Kind, typename A>
[[gnu::noinline]] static void monotone_backward_of(const Function<A>& function, A* x, int64_t count,
                                                   int64_t target, A grad, A shift, A rest,
                                                   const TableSums& table_sums) {
  constexpr int64_t W = VectorOf<A>::width;
  const Function<A> f = function;
  const TableSums sums = table_sums;
  if (Kind::is_power) rest = static_cast<A>(__builtin_exp(static_cast<double>(f.c) - shift));
  const A target_logit = x[target];
  Waiting<A> waiting;
  for (int64_t begin = 0; begin < count; begin += waiting.size) {
    const int64_t end = begin + waiting.size < count ? begin + waiting.size : count;
    for (int64_t v = begin; v < end; v += W) {
      const bool whole = v + W <= end;
      const Vector<A> some = whole ? load(x + v) : load_first(x + v, end - v, -infinity<A>);
      const Value<A> value = Kind::at(f, some);
      const Vector<A> g = -grad * exp_of<Kind>(some, value, shift, rest);
      if (whole) {
        store(x + v, g * value.slope);
      } else {
        store_first(x + v, end - v, g * value.slope);
      }
      if constexpr (Kind::width > 0) {
        if (sums.fixed) enqueue<Kind::width>(f, sums, value.place, g, &waiting, v - begin);
      }
    }
    if constexpr (Kind::width > 0) {
      if (sums.fixed) add_fixed<Kind::width>(sums, waiting, (end - begin + W - 1) / W * W);
    }
  }
  const Vector<A> some = splat(target_logit);
  const Value<A> value = Kind::at(f, some);
  const Vector<A> p = exp_of<Kind>(some, value, shift, rest);
  const bool possible = target_logit != -infinity<A>;
  x[target] = possible ? grad * (1 - p[0]) * value.slope[0] : A(0);
  if (possible) add_one<Kind>(f, sums, value.place, grad);
}

// Returns the sum of e_v = exp(f(x_v) - largest), for GssPower of exp(f(x_v) - c), and writes e_v f'(x_v) to
// x. With a table, writes e_v, interval and u to scratch; all x must be within the radius.
template <typename Kind, typename A>
[[gnu::noinline]] static double begin_gradient_of(const Function<A>& function, A* x, int64_t count, A largest,
                                                  Waiting<A>* scratch) {
  constexpr int64_t W = VectorOf<A>::width;
  constexpr int64_t blocks = 16;  // summed before a conversion to float64
  const Function<A> f = function;
  const A inside = x[0];
  double total = 0;
  Vector<A> sum[2] = {};
  for (int64_t begin = 0, block = 0; begin < count; begin += Waiting<A>::size, ++block) {
    const int64_t end = begin + Waiting<A>::size < count ? begin + Waiting<A>::size : count;
    for (int64_t v = begin; v < end; v += W) {
      const bool whole = v + W <= end;
      const Vector<A> some = whole ? load(x + v) : load_first(x + v, end - v, inside);
      const Value<A> value = Kind::at(f, some);
      Vector<A> e = Kind::is_power ? value.f : exp_of<Kind>(some, value, largest, A(0));
      if (whole) {
        store(x + v, e * value.slope);
      } else {
        for (int64_t i = end - v; i < W; ++i) e[i] = 0;
        store_first(x + v, end - v, e * value.slope);
      }
      sum[v / W % 2] += e;
      if constexpr (Kind::width > 0) {
        Waiting<A>& waiting = scratch[block];
        __builtin_memcpy(waiting.index + (v - begin), &value.place.index, sizeof value.place.index);
        store(waiting.g + (v - begin), e);
        store(waiting.u + (v - begin), value.place.u);
      }
    }
    if (block % blocks == blocks - 1 || end == count) {
      const Vector<A> all = sum[0] + sum[1];
      for (int64_t i = 0; i < W; ++i) total += all[i];
      sum[0] = sum[1] = Vector<A>{};
    }
  }
  return total;
}

template <typename Kind, typename A>
[[gnu::noinline]] static void add_scratch(const TableSums& sums, const Waiting<A>* scratch, int64_t count,
                                          double scale) {
  constexpr int64_t W = VectorOf<A>::width;
  TableSums scaled = sums;
  scaled.scale *= scale;
  for (int64_t begin = 0; begin < count; begin += Waiting<A>::size, ++scratch) {
    const int64_t some = count - begin < Waiting<A>::size ? count - begin : Waiting<A>::size;
    add_fixed<Kind::width>(scaled, *scratch, (some + W - 1) / W * W);
  }
}

// After begin_gradient: x_v and the gradient of the table for -grad p_v, p_v = e_v / total.
template <typename A>
static void end_gradient(const Function<A>& f, A* x, int64_t count, A grad, double total, const void* scratch,
                         const TableSums& sums) {
  constexpr int64_t W = VectorOf<A>::width;
  const double scale = -static_cast<double>(grad) / total;
  const Vector<A> factor = splat(static_cast<A>(scale));
  int64_t v = 0;
  for (; v + W <= count; v += W) store(x + v, load(x + v) * factor);
  for (; v < count; ++v) x[v] *= factor[0];
  if (!f.width || !sums.fixed) return;
  const Waiting<A>* waiting = static_cast<const Waiting<A>*>(scratch);
  with_table_kind(f, [=](auto kind) { add_scratch<decltype(kind)>(sums, waiting, count, scale); });
}

template <typename A>
static A value(const Function<A>& f, A x) {
  return with_kind(f, [&](auto kind) -> A { return kind.at(f, splat(x)).f[0]; });
}

template <typename A>
static double exp_sum(const Function<A>& f, const A* x, int64_t count, A max, A largest) {
  return with_kind(f, max, [&](auto kind) { return exp_sum_of<decltype(kind)>(f, x, count, largest); });
}

template <typename A>
static ExpSum begin_gradient(const Function<A>& f, A* x, int64_t count, A max, A largest, void* scratch) {
  static_assert(sizeof(Waiting<A>) == Waiting<A>::size * 3 * sizeof(A), "must match gradient_scratch_bytes");
  static_assert(Waiting<A>::size == gradient_block, "must match gradient_scratch_bytes");
  return with_kind(f, max, [&](auto kind) -> ExpSum {
    using Kind = decltype(kind);
    Waiting<A>* waiting = static_cast<Waiting<A>*>(scratch);
    return {begin_gradient_of<Kind>(f, x, count, largest, waiting), Kind::is_power ? f.c : largest};
  });
}

// Adds the target's term, grad f'(x), to the gradient -grad p_v f'(x_v) and to the sums of the table.
template <typename A>
static A target_gradient(const Function<A>& f, A x, A grad, const TableSums& sums) {
  return with_kind(f, [&](auto kind) -> A {
    const Value<A> value = kind.at(f, splat(x));
    add_one<decltype(kind)>(f, sums, value.place, grad);
    return grad * value.slope[0];
  });
}

template <typename A>
static void monotone_backward(const Function<A>& f, A* x, int64_t count, int64_t target, A grad, A shift,
                              A rest, const TableSums& sums) {
  const auto body = [&](auto kind) {
    monotone_backward_of<decltype(kind)>(f, x, count, target, grad, shift, rest, sums);
  };
  if (rest == 0) {
    with_kind(f, shift, body);
  } else {
    with_kind(f, body);
  }
}

template <typename T>
static constexpr PiecewiseKernels<T> piecewise_table = {piecewise_forward<T>, piecewise_backward<T>,
                                                        largest<T>};

template <typename A>
static constexpr MonotoneKernels<A> monotone_table = {
    row_max<A>,           row_min<A>,        value<A>,        exp_sum<A>,
    monotone_backward<A>, begin_gradient<A>, end_gradient<A>, target_gradient<A>};

}  // namespace HSTREE_CAPABILITY

HSTREE_KERNELS_OF_ELEMENTS(PiecewiseKernels, piecewise_table)
HSTREE_KERNELS_OF_SUMS(MonotoneKernels, monotone_table)

}  // namespace hstree::cpu
