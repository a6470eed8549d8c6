#include "cpu/target_log_softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "cpu/capability.h"
#include "cpu/table_sums.h"
#include "cpu/tree_batch.h"

namespace hstree::cpu {
namespace {

void check_target(const MonotoneRows& rows) {
  for (int64_t r = 0; r < rows.rows; ++r) {
    const int64_t y = rows.target[r];
    if (y >= -1 && y < rows.classes) continue;
    std::ostringstream message;
    message << rows.op << ": target[" << r << "]: expected -1 (ignored) or a class in [0, " << rows.classes
            << "), got " << y;
    throw std::runtime_error(message.str());
  }
}

// log sum_v exp f(x_v) as two terms: f(max x) and the rest.
template <typename A>
struct LogSum {
  A largest;
  double rest;
};

template <typename A>
LogSum<A> log_sum(const MonotoneKernels<A>& kernels, const Function<A>& f, const A* x, int64_t classes) {
  const A most = kernels.max(x, classes);
  if (!std::isfinite(most)) return {std::numeric_limits<A>::quiet_NaN(), 0};
  const A largest = kernels.value(f, most);
  return {largest, std::log(kernels.exp_sum(f, x, classes, most, largest))};
}

}  // namespace

template <typename A>
void target_log_softmax(const MonotoneRows& rows, const A* logits, A* log_prob, A* log_normalizer) {
  check_target(rows);
  const MonotoneKernels<A>& kernels = chosen_kernels<MonotoneKernels<A>>();
  const Function<A> f(rows.function);
  parallel(rows.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t y = rows.target[r];
      if (y < 0) {
        log_prob[r] = log_normalizer[r] = 0;
        continue;
      }
      const A* x = logits + r * rows.stride;
      const LogSum<A> sum = log_sum(kernels, f, x, rows.classes);
      const A at_target = x[y] == -std::numeric_limits<A>::infinity() ? x[y] : kernels.value(f, x[y]);
      log_prob[r] = static_cast<A>((static_cast<double>(at_target) - sum.largest) - sum.rest);
      log_normalizer[r] = static_cast<A>(sum.largest + sum.rest);
    }
  });
}

namespace {

// Runs row(r, sums) for all rows. It adds the row's gradient of the table to sums.
template <typename A, typename Row>
void run_rows(const MonotoneRows& rows, const A* grad_log_prob, double* grad_table, const Row& row) {
  if (!rows.function.table || !grad_table) {
    parallel(rows.rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) row(r, TableSums{});
    });
    return;
  }
  double most = 0;
  for (int64_t r = 0; r < rows.rows; ++r) {
    const double size = std::abs(static_cast<double>(grad_log_prob[r]));
    if (rows.target[r] >= 0 && !(size <= most)) most = size;
    if (std::isnan(most)) break;
  }
  const int64_t block = std::max<int64_t>(1, 4096 / rows.classes);  // rows
  const int64_t blocks = (rows.rows + block - 1) / block;
  TableGradient gradient(rows.function, blocks, 2.0 * static_cast<double>(rows.rows), most);
  gradient.run([&](int64_t begin, int64_t end, TableSums sums) {
    for (int64_t b = begin; b < end; ++b) {
      sums.beyond = gradient.beyond(b);
      for (int64_t r = b * block; r < std::min(rows.rows, (b + 1) * block); ++r) row(r, sums);
    }
  });
  gradient.store(grad_table);
}

template <typename A>
void fill_nan(const MonotoneRows& rows, A* x, const TableSums& sums) {
  std::fill(x, x + rows.classes, std::numeric_limits<A>::quiet_NaN());
  if (sums.beyond) {
    std::fill(sums.beyond, sums.beyond + rows.function.width, std::numeric_limits<double>::quiet_NaN());
  }
}

}  // namespace

template <typename A>
void target_log_softmax_backward(const MonotoneRows& rows, A* logits, const A* grad_log_prob,
                                 const A* log_normalizer, double* grad_table) {
  check_target(rows);
  const MonotoneKernels<A>& kernels = chosen_kernels<MonotoneKernels<A>>();
  const Function<A> f(rows.function);
  run_rows(rows, grad_log_prob, grad_table, [&](int64_t r, const TableSums& sums) {
    A* x = logits + r * rows.stride;
    const int64_t y = rows.target[r];
    if (y < 0) {
      std::fill(x, x + rows.classes, A(0));
      return;
    }
    A shift = log_normalizer[r], rest = 0;
    // Rounding a large log_normalizer would cost accuracy in p: recompute both terms.
    if (std::abs(shift) > 64) {
      const LogSum<A> sum = log_sum(kernels, f, x, rows.classes);
      shift = sum.largest;
      rest = static_cast<A>(sum.rest);
    }
    if (!std::isfinite(shift)) return fill_nan(rows, x, sums);
    kernels.backward(f, x, rows.classes, y, grad_log_prob[r], shift, rest, sums);
  });
}

template <typename A>
void target_log_softmax_gradient(const MonotoneRows& rows, A* logits, const A* grad_log_prob, A* log_prob,
                                 double* grad_table) {
  check_target(rows);
  const MonotoneKernels<A>& kernels = chosen_kernels<MonotoneKernels<A>>();
  const Function<A> f(rows.function);
  run_rows(rows, grad_log_prob, grad_table, [&](int64_t r, const TableSums& sums) {
    A* x = logits + r * rows.stride;
    const int64_t y = rows.target[r];
    if (y < 0) {
      log_prob[r] = 0;
      std::fill(x, x + rows.classes, A(0));
      return;
    }
    const A most = kernels.max(x, rows.classes), at_target = x[y], grad = grad_log_prob[r];
    if (!std::isfinite(most)) {
      log_prob[r] = std::numeric_limits<A>::quiet_NaN();
      return fill_nan(rows, x, sums);
    }
    const A largest = kernels.value(f, most);
    const bool possible = at_target != -std::numeric_limits<A>::infinity();
    const double value = possible ? kernels.value(f, at_target) : at_target;
    const auto within = [&](A z) { return std::abs(z * f.rate) < f.half; };
    ExpSum sum{};
    if (f.width && !(within(most) && within(kernels.min(x, rows.classes)))) {
      sum = {kernels.exp_sum(f, x, rows.classes, most, largest), largest};
      if (std::isfinite(sum.total)) {
        kernels.backward(f, x, rows.classes, y, grad, largest, static_cast<A>(std::log(sum.total)), sums);
      }
    } else {
      thread_local std::vector<char> memory;
      void* scratch = nullptr;
      if (f.width) {
        size_t space = static_cast<size_t>(gradient_scratch_bytes<A>(rows.classes)) + 64;
        const size_t bytes = space - 64;
        if (memory.size() < space) memory.resize(space);
        scratch = memory.data();
        std::align(64, bytes, scratch, space);
      }
      sum = kernels.begin_gradient(f, x, rows.classes, most, largest, scratch);
      if (std::isfinite(sum.total)) {
        kernels.end_gradient(f, x, rows.classes, grad, sum.total, scratch, sums);
        if (possible) x[y] += kernels.target_gradient(f, at_target, grad, sums);
      }
    }
    log_prob[r] = static_cast<A>((value - sum.shift) - std::log(sum.total));
    if (!std::isfinite(sum.total)) fill_nan(rows, x, sums);
  });
}

#define HSTREE_MONOTONE(A)                                                                            \
  template void target_log_softmax<A>(const MonotoneRows&, const A*, A*, A*);                         \
  template void target_log_softmax_backward<A>(const MonotoneRows&, A*, const A*, const A*, double*); \
  template void target_log_softmax_gradient<A>(const MonotoneRows&, A*, const A*, A*, double*);
HSTREE_MONOTONE(float)
HSTREE_MONOTONE(double)

}  // namespace hstree::cpu
