#include "cpu/screened_topk.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "cpu/capability.h"
#include "cpu/mixture_row_kernels.h"
#include "cpu/parallel.h"
#include "cpu/tree_batch.h"

namespace hstree::cpu {
namespace {

constexpr int64_t lanes = 16;  // classes of a block
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

// Rounds a row to multiples of `step`; returns whether all of it is finite.
bool quantize(const float* query, int64_t features, int8_t* values, float& step, int32_t& sum) {
  float largest = 0, total = 0;
  for (int64_t i = 0; i < features; ++i) {
    largest = std::max(largest, std::abs(query[i]));
    total += query[i] - query[i];  // NaN unless finite
  }
  step = largest / 127;
  const bool finite = total == 0;
  // A row of less than 3.7e-37 changes no score: as 0.
  const float inverse = std::isfinite(127 / largest) ? 127 / largest : 0;
  sum = 0;
  for (int64_t i = 0; i < features; ++i) {
    values[i] = finite ? static_cast<int8_t>(std::nearbyint(query[i] * inverse)) : 0;
    sum += values[i];
  }
  return finite;
}

// The n-th largest of `count` values, which are permuted.
float nth_largest(float* values, int64_t count, int64_t n) {
  std::nth_element(values, values + n - 1, values + count, std::greater<float>());
  return values[n - 1];
}

// The n classes with the largest scores, of equal ones the first, by number. largest: that of each `width` classes.
void select(const float* score, const float* largest, int64_t width, int64_t classes, int64_t n,
            int32_t* best) {
  int64_t parts = (classes + width - 1) / width;
  if (n > parts) largest = score, width = 1, parts = classes;
  // The n-th largest score of groups of classes, about 3 n of them, is at most that of classes.
  const int64_t run = std::max<int64_t>(1, parts / (3 * n)), groups = (parts + run - 1) / run;
  float* const values = scratch<float, 2>(classes + 1);
  float threshold = -infinity;
  if (n <= groups) {
    for (int64_t g = 0; g < groups; ++g) {
      values[g] = *std::max_element(largest + g * run, largest + std::min(parts, (g + 1) * run));
    }
    threshold = nth_largest(values, groups, n);
  }
  int32_t* const found = scratch<int32_t, 1>(classes + 1);
  int64_t count = 0;
  for (int64_t part = 0; part < parts; ++part) {
    if (largest[part] < threshold) continue;
    for (int64_t v = part * width; v < std::min(classes, (part + 1) * width); ++v) {
      found[count] = static_cast<int32_t>(v);  // kept if it is large enough
      values[count] = score[v];
      count += score[v] >= threshold;
    }
  }
  threshold = nth_largest(values, count, n);
  int64_t equal = n;
  for (int64_t i = 0; i < count; ++i) equal -= score[found[i]] > threshold;
  for (int64_t i = 0; i < count; ++i) {
    const float s = score[found[i]];
    if (s > threshold || (s == threshold && equal-- > 0)) *best++ = found[i];
  }
}

// NaN where b is.
float log_add_exp(float a, float b) {
  const float most = a > b ? a : b, least = a > b ? b : a;
  return most == -infinity ? most : most + std::log1p(std::exp(least - most));
}

// A few rows at a time.
template <typename T>
class Screen {
 public:
  Screen(const Preview& preview, const ScreenedTopk<T>& wanted)
      : preview_(preview),
        w_(wanted),
        width_(preview.blocks * lanes),
        score_(scratch<float, 0>(most * width_)),
        largest_(scratch<float, 4>(most * width_ / previews_.width)),
        best_(scratch<int32_t, 0>(most * w_.n)),
        exact_(scratch<float, 1>(most * w_.n)),
        values_(scratch<int8_t, 0>(most * preview.features())),
        hidden_(scratch<float, 3>(most * workspace_stride(w_.in_features))) {}

  void run(int64_t begin, int64_t count) {
    count_ = count;
    int64_t queries = 1;
    while (queries < count) queries *= 2;
    std::fill_n(values_, queries * preview_.features(), int8_t{0});
    for (int64_t q = 0; q < count; ++q) {
      const int64_t row = begin + q;
      const float* const query = w_.query + row * (w_.preview_features + 1);
      shift_[q] = query[w_.preview_features];
      finite_[q] = std::isfinite(shift_[q]) &&
                   quantize(query, w_.preview_features, values_ + q * preview_.features(), step_[q], sum_[q]);
      rows_.features({}, w_.in_features, w_.hidden + row * w_.in_features, vector(q));
    }
    const PreviewQueries of_rows = {queries, values_, step_, sum_, shift_, score_, largest_};
    parallel(preview_.blocks, 64,
             [&](int64_t from, int64_t to) { previews_.scores(preview_, of_rows, from, to); });
    parallel(count, 1, [&](int64_t q, int64_t end) {
      for (; q < end; ++q) choose(q);
    });
    parallel(count * w_.n, 256, [&](int64_t from, int64_t to) { score(from, to); });
    parallel(count, 1, [&](int64_t q, int64_t end) {
      for (; q < end; ++q) finish(begin + q, q);
    });
  }

  static constexpr int64_t most = PreviewQueries::most;

 private:
  static constexpr int64_t chunk = 8;  // rows of the weight

  float* vector(int64_t q) { return hidden_ + q * workspace_stride(w_.in_features); }

  void choose(int64_t q) {
    int32_t* const best = best_ + q * w_.n;
    if (w_.n < w_.classes && finite_[q]) {
      const int64_t width = previews_.width, rest = w_.classes % width;
      const float* const score = score_ + q * width_;
      float* const largest = largest_ + q * (width_ / width);
      if (rest > 0) {  // without what fills up the last block
        largest[w_.classes / width] = *std::max_element(score + w_.classes - rest, score + w_.classes);
      }
      return select(score, largest, width, w_.classes, w_.n, best);
    }
    for (int64_t i = 0; i < w_.n; ++i) best[i] = static_cast<int32_t>(i);
  }

  // The exact scores of the places from <= i < to of best_.
  void score(int64_t from, int64_t to) {
    while (from < to) {
      const int64_t q = from / w_.n;
      const int64_t end = std::min({to, (q + 1) * w_.n, from + chunk});
      // The next rows, whole; products fetches the beginnings of the rows that follow in a chunk.
      for (int64_t i = end; i < std::min(end + chunk, w_.n * count_); ++i)
        fetch(w_.weight + best_[i] * w_.in_features);
      rows_.products(vector(q), w_.weight, w_.bias, best_ + from, end - from, w_.in_features, exact_ + from);
      from = end;
    }
  }

  void fetch(const T* row) const {
    for (int64_t s = 0; s < w_.in_features; s += 64 / static_cast<int64_t>(sizeof(T)))
      __builtin_prefetch(row + s, 0, 2);
  }

  void finish(int64_t row, int64_t q) {
    float* const score = score_ + q * width_;
    float* const exact = exact_ + q * w_.n;
    const int32_t* const best = best_ + q * w_.n;
    if (finite_[q]) {
      const float sharpness = 1 / w_.temperature;
      for (int64_t i = 0; i < w_.n; ++i) score[best[i]] = -infinity;
      w_.log_rest[row] = previews_.log_sum_exp(score, w_.classes, sharpness);
      w_.log_normalizer[row] = log_add_exp(w_.log_rest[row], previews_.log_sum_exp(exact, w_.n, sharpness));
    } else {
      w_.log_rest[row] = w_.log_normalizer[row] = nan;
      std::fill_n(exact, w_.n, nan);
      std::fill_n(score, w_.classes, nan);
    }
    if (w_.all) {
      for (int64_t i = 0; i < w_.n; ++i) score[best[i]] = exact[i];
      std::copy_n(score, w_.classes, w_.all + row * w_.classes);
    }
    // Sorts places, not classes, which are in any order.
    thread_local std::vector<int32_t> order;
    order.resize(w_.n);
    for (int64_t i = 0; i < w_.n; ++i) order[i] = static_cast<int32_t>(i);
    const auto above = [&](int32_t a, int32_t b) {
      const float x = std::isnan(exact[a]) ? infinity : exact[a],
                  y = std::isnan(exact[b]) ? infinity : exact[b];
      return x > y || (x == y && best[a] < best[b]);
    };
    std::partial_sort(order.begin(), order.begin() + w_.k, order.end(), above);
    for (int64_t i = 0; i < w_.k; ++i) {
      w_.score[row * w_.k + i] = exact[order[i]];
      w_.index[row * w_.k + i] = best[order[i]];
    }
  }

  const Preview& preview_;
  const ScreenedTopk<T>& w_;
  const PreviewKernels& previews_ = chosen_kernels<PreviewKernels>();
  const MixtureRowKernels<T>& rows_ = chosen_kernels<MixtureRowKernels<T>>();
  const int64_t width_;
  float* const score_;    // [most, width]
  float* const largest_;  // [most, width / that of a vector]
  int32_t* const best_;   // [most, n]
  float* const exact_;    // [most, n]
  int8_t* const values_;  // [most, features of the preview]
  float* const hidden_;   // [most, D and a vector of zeros]
  float step_[most] = {};
  int32_t sum_[most] = {};
  float shift_[most] = {};
  bool finite_[most];
  int64_t count_ = 0;
};

}  // namespace

template <typename T>
void screened_topk(const Preview& preview, const ScreenedTopk<T>& wanted) {
  Screen<T> screen(preview, wanted);
  for (int64_t row = 0; row < wanted.rows; row += Screen<T>::most) {
    screen.run(row, std::min(wanted.rows - row, Screen<T>::most));
  }
}

template void screened_topk<float>(const Preview&, const ScreenedTopk<float>&);
template void screened_topk<BFloat16>(const Preview&, const ScreenedTopk<BFloat16>&);
template void screened_topk<Half>(const Preview&, const ScreenedTopk<Half>&);

}  // namespace hstree::cpu
