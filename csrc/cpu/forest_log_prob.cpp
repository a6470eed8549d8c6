#include "cpu/forest_log_prob.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "cpu/capability.h"
#include "cpu/parallel.h"

namespace hstree::cpu {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

template <typename A>
void check(const char* op, const ForestRows<A>& f) {
  const auto fail = [&](const char* name, int64_t i, const char* expected, int64_t end, int64_t got) {
    std::ostringstream message;
    message << op << ": " << name << "[" << i << "]: expected " << expected << " in [0, " << end << "), got "
            << got;
    throw std::runtime_error(message.str());
  };
  for (int64_t r = 0; r < f.rows; ++r) {
    const int64_t y = f.target[r];
    if (y < -1 || y >= f.classes) fail("target", r, "-1 (ignored) or a class", f.classes, y);
  }
  uint32_t most = 0;
  for (int64_t i = 0; i < f.classes * f.trees; ++i) {
    most = std::max(most, static_cast<uint32_t>(f.cluster[i]));
  }
  if (most < f.clusters) return;
  for (int64_t i = 0; i < f.classes * f.trees; ++i) {
    const int64_t c = f.cluster[i];
    if (c < 0 || c >= f.clusters) fail("cluster", i / f.trees, "clusters", f.clusters, c);
  }
}

// -inf if all values are; NaN if one is.
double log_sum_exp(const std::vector<double>& values) {
  const double most = *std::max_element(values.begin(), values.end());
  double total = 0;
  for (const double value : values) total += value == -infinity ? 0 : std::exp(value - most);
  return total == 0 ? -infinity : most + std::log(total);
}

// shares [T], `step` apart: from log_prior + log P_t(y) to rho_t, which is grad_log_prior. Writes log_prob too.
template <typename A>
void mix(const ForestRows<A>& f, int64_t r, double* shares, int64_t step) {
  double most = -infinity, total = 0, grad = f.grad_log_prob ? f.grad_log_prob[r] : 0;
  bool never = true;  // every tree gives the target probability 0
  for (int64_t t = 0; t < f.trees; ++t) {
    most = std::max(most, shares[t * step]);
    never = never && shares[t * step] == -infinity;
  }
  for (int64_t t = 0; t < f.trees; ++t) total += std::exp(shares[t * step] - most);
  const bool ignored = f.target[r] < 0;
  f.log_prob[r] = ignored ? A(0) : static_cast<A>(never ? -infinity : most + std::log(total));
  if (!f.grad_log_prob) return;
  for (int64_t t = 0; t < f.trees; ++t) {
    double& share = shares[t * step];
    share = ignored || never ? 0 : grad * (std::exp(share - most) / total);
    f.grad_log_prior[t * f.rows + r] = static_cast<A>(share);
  }
}

// A row that is computed in logarithms, in float64.
struct WideRow {
  int64_t row;
  std::vector<double> score;          // [V]
  std::vector<double> cluster_score;  // [T C]
};

template <typename A>
WideRow wide_row(const ForestRows<A>& f, int64_t r) {
  WideRow row{r, std::vector<double>(f.classes), std::vector<double>(f.trees * f.clusters)};
  for (int64_t v = 0; v < f.classes; ++v) row.score[v] = f.score[v * f.rows + r];
  for (size_t i = 0; i < row.cluster_score.size(); ++i)
    row.cluster_score[i] = f.cluster_score[i * f.rows + r];
  return row;
}

template <typename A>
void run_wide(const ForestRows<A>& f, const WideRow& row) {
  const int64_t r = row.row, y = f.target[r], T = f.trees, C = f.clusters;
  const auto score = [&](int64_t v, int64_t t) {
    return row.score[v] + row.cluster_score[t * C + f.cluster[v * T + t]];
  };
  std::vector<double> normalizers(T), shares(T), gradient(T * C);
  for (int64_t t = 0; t < T; ++t) {
    double most = -infinity, total = 0;
    for (int64_t v = 0; v < f.classes; ++v) most = std::max(most, score(v, t));
    for (int64_t v = 0; v < f.classes; ++v) total += std::exp(score(v, t) - most);
    normalizers[t] = most + std::log(total);
    shares[t] = y < 0 ? 0 : f.log_prior[t * f.rows + r] + (score(y, t) - normalizers[t]);
  }
  if (f.log_softmax) {
    for (int64_t v = 0; v < f.classes; ++v) {
      for (int64_t t = 0; t < T; ++t) {
        shares[t] = f.log_prior[t * f.rows + r] + (score(v, t) - normalizers[t]);
      }
      f.log_softmax[r * f.classes + v] = static_cast<A>(log_sum_exp(shares));
    }
    return;
  }
  mix(f, r, shares.data(), 1);
  if (!f.grad_log_prob) return;
  for (int64_t v = 0; v < f.classes; ++v) {
    double of_class = 0;
    for (int64_t t = 0; t < T && y >= 0; ++t) {
      const double share = ((v == y) - std::exp(score(v, t) - normalizers[t])) * shares[t];
      gradient[t * C + f.cluster[v * T + t]] += share;
      of_class += share;
    }
    f.score[v * f.rows + r] = static_cast<A>(of_class);
  }
  for (int64_t i = 0; i < T * C; ++i) f.cluster_score[i * f.rows + r] = static_cast<A>(gradient[i]);
}

template <typename A>
void run(const ForestKernels<A>& kernels, const ForestRows<A>& f, const ForestPanel<A>& panel,
         int64_t stride) {
  kernels.survey(f, panel);
  std::vector<WideRow> rows;  // copied before their scores are overwritten
  for (int64_t i = 0; i < panel.count; ++i) {
    if (panel.wide[i]) rows.push_back(wide_row(f, panel.begin + i));
  }
  kernels.begin(f, panel);
  if (f.log_softmax) {
    kernels.every(f, panel);
  } else {
    for (int64_t i = 0; i < panel.count; ++i) mix(f, panel.begin + i, panel.shares + i, stride);
  }
  if (f.grad_log_prob) {
    kernels.finish(f, panel);
    for (int64_t i = 0; i < panel.count; ++i) {  // of an ignored row with NaN, which is not 0 times NaN
      if (f.target[panel.begin + i] >= 0 || std::isfinite(panel.normalizers[i])) continue;
      const auto zero = [&](A* values, int64_t count) {
        for (int64_t k = 0; k < count; ++k) values[k * f.rows + panel.begin + i] = 0;
      };
      zero(f.score, f.classes);
      zero(f.cluster_score, f.trees * f.clusters);
    }
  }
  for (const WideRow& row : rows) run_wide(f, row);
}

}  // namespace

template <typename A>
void forest_log_prob(const char* op, const ForestRows<A>& f) {
  check(op, f);
  const ForestKernels<A>& kernels = chosen_kernels<ForestKernels<A>>();
  const int64_t width = kernels.width, numbers = f.trees * f.clusters;
  const int64_t threads = torch::stable::get_num_threads();
  int64_t rows_of_panel = most_panel_vectors * width;
  while (rows_of_panel > width && rows_of_panel * threads > f.rows) rows_of_panel /= 2;
  const int64_t panels = (f.rows + rows_of_panel - 1) / rows_of_panel;
  parallel(panels, 1, [&](int64_t number, int64_t end) {
    std::vector<A> memory((2 * numbers + f.trees + 1) * rows_of_panel + 64 / sizeof(A));
    std::vector<double> shares(2 * f.trees * rows_of_panel);
    std::vector<uint8_t> wide(rows_of_panel);
    void* aligned = memory.data();
    size_t space = memory.size() * sizeof(A);
    std::align(64, space - 64, aligned, space);
    A* const sums = static_cast<A*>(aligned);
    ForestPanel<A> panel{0,
                         0,
                         sums,
                         sums + 2 * numbers * rows_of_panel,
                         wide.data(),
                         shares.data(),
                         shares.data() + f.trees * rows_of_panel,
                         sums + (2 * numbers + f.trees) * rows_of_panel};
    for (; number < end; ++number) {
      const int64_t last = std::min(f.rows, (number + 1) * rows_of_panel);
      for (panel.begin = number * rows_of_panel; panel.begin < last; panel.begin += panel.count) {
        panel.count = rows_of_panel;
        while (panel.count > width && panel.count > last - panel.begin) panel.count /= 2;
        const int64_t stride = panel.count;
        panel.count = std::min(panel.count, last - panel.begin);
        run(kernels, f, panel, stride);
      }
    }
  });
}

template void forest_log_prob<float>(const char*, const ForestRows<float>&);
template void forest_log_prob<double>(const char*, const ForestRows<double>&);

}  // namespace hstree::cpu
