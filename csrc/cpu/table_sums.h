// Sums over elements into a table [K, width], the same bits for any number of threads: in 64-bit integers of
// quantum 2^-e for elements within the radius, in float64 for those beyond it, one partial sum for each block
// of elements.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/logit_kernels.h"
#include "cpu/tree_batch.h"

namespace hstree::cpu {

class TableGradient {
 public:
  // blocks: fixed sets of elements, each summed by one thread. count * largest: a bound on the sum of
  // magnitudes. Not finite: every sum is NaN.
  TableGradient(const LogitFunction& f, int64_t blocks, double count, double largest);

  // Runs body(begin, end, sums), which sums blocks begin to end - 1, in parallel; it sets sums.beyond to
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
  int64_t parts_;   // threads that sum
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
