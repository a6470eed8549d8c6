#include "cpu/table_sums.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>

namespace hstree::cpu {
namespace {

// Up to this many bytes of integers, every thread has its own; above, threads share them and add atomically.
constexpr int64_t private_bytes = int64_t{16} << 20;

}  // namespace

void TableGradient::Free::operator()(void* p) const {
  std::free(p);
}

TableGradient::TableGradient(const LogitFunction& f, int64_t blocks, double count, double largest)
    : intervals_(f.intervals),
      width_(f.width),
      blocks_(blocks),
      parts_(std::max<int64_t>(1, std::min<int64_t>(blocks, torch::stable::get_num_threads()))),
      copies_(1),
      exponent_(0),
      beyond_(2 * blocks * f.width) {
  if (!std::isfinite(largest)) return;
  exponent_ = fixed_point_exponent(count, largest);
  const int64_t size = intervals_ * width_;
  copies_ = std::clamp<int64_t>(private_bytes / (size * sizeof(uint64_t)), 1, parts_);
  fixed_.reset(static_cast<uint64_t*>(std::calloc(copies_ * size, sizeof(uint64_t))));
  if (!fixed_) throw std::bad_alloc();
}

TableSums TableGradient::sums(int64_t part) const {
  uint64_t* fixed = fixed_ ? fixed_.get() + part % copies_ * intervals_ * width_ : nullptr;
  return {fixed, std::ldexp(1.0, exponent_), copies_ < parts_, nullptr};
}

template <typename G>
void TableGradient::store(G* grad_table) const {
  const int64_t size = intervals_ * width_;
  if (!fixed_) {
    std::fill(grad_table, grad_table + size, std::numeric_limits<G>::quiet_NaN());
    return;
  }
  std::vector<double> left(width_), right(width_);
  for (int64_t b = 0; b < blocks_; ++b) {
    const double* sum = beyond_.data() + 2 * b * width_;
    for (int m = 0; m < width_; ++m) {
      left[m] += sum[m];
      right[m] += sum[width_ + m];
    }
  }
  const double quantum = std::ldexp(1.0, -exponent_);
  parallel(size, 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint64_t sum = 0;
      for (int64_t copy = 0; copy < copies_; ++copy) sum += fixed_.get()[copy * size + i];
      double value = static_cast<double>(static_cast<int64_t>(sum)) * quantum;
      if (i < width_) value += left[i];
      if (i >= size - width_) value += right[i - (size - width_)];
      grad_table[i] = static_cast<G>(value);
    }
  });
}

template void TableGradient::store<float>(float*) const;
template void TableGradient::store<double>(double*) const;

}  // namespace hstree::cpu
