// Sums over elements into a table [K, width], bitwise identical for any number of threads: in 64-bit integers
// of quantum 2^-e for elements within the radius, and in float64, one partial sum for each block of elements,
// for those beyond it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/logit_kernels.h"
#include "cpu/tree_batch.h"

namespace hstree::cpu {

class TableGradient {
 public:
  // blocks: number of fixed sets of elements, each summed by one thread. count * largest bounds the sum of
  // magnitudes; if it is not finite, every sum is NaN.
  TableGradient(const LogitFunction& f, int64_t blocks, double count, double largest);

  // Runs body(begin, end, sums) in parallel. It sums the blocks begin to end - 1, and must set sums.beyond to
  // beyond(block) before each.
  template <typename F>
  void run(const F& body);

  double* beyond(int64_t block) { return beyond_.data() + 2 * block * width_; }

  // grad_table [K, width]. G: float or double.
  template <typename G>
  void store(G* grad_table) const;

 private:
  struct Free {
    void operator()(void* p) const;
  };

  TableSums sums(int64_t part) const;

  int64_t intervals_;
  int width_;
  int64_t blocks_;
  int64_t parts_;   // number of threads that sum
  int64_t copies_;  // of the integers, each with its own threads
  int exponent_;
  std::unique_ptr<uint64_t, Free> fixed_;  // [copies, K, width], or null
  std::vector<double> beyond_;             // [blocks, 2, width]
};

template <typename F>
void TableGradient::run(const F& body) {
  parallel(parts_, 1, [&](int64_t part, int64_t end) {
    for (; part < end; ++part) {
      body(blocks_ * part / parts_, blocks_ * (part + 1) / parts_, sums(part));
    }
  });
}

}  // namespace hstree::cpu
