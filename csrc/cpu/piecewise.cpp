#include "cpu/piecewise.h"

#include <algorithm>
#include <vector>

#include "cpu/capability.h"
#include "cpu/table_sums.h"
#include "cpu/tree_batch.h"

namespace hstree::cpu {
namespace {

constexpr int64_t block = 1 << 15;  // elements; the sums beyond the radius depend on it

// Runs body(begin, end, b) on each block b of elements.
template <typename F>
void for_blocks(int64_t count, int64_t first, int64_t last, const F& body) {
  for (int64_t b = first; b < last; ++b) body(b * block, std::min(count, (b + 1) * block), b);
}

}  // namespace

template <typename T>
void piecewise(const LogitFunction& f, const T* input, int64_t count, T* output) {
  const PiecewiseKernels<T>& kernels = chosen_kernels<PiecewiseKernels<T>>();
  const Function<accumulate_t<T>> function(f);
  const int64_t blocks = (count + block - 1) / block;
  parallel(blocks, 1, [&](int64_t first, int64_t last) {
    for_blocks(count, first, last, [&](int64_t begin, int64_t end, int64_t) {
      kernels.forward(function, input + begin, end - begin, output + begin);
    });
  });
}

template <typename T>
void piecewise_backward(const LogitFunction& f, const T* grad, const T* input, int64_t count, T* grad_input,
                        accumulate_t<T>* grad_table) {
  using A = accumulate_t<T>;
  const PiecewiseKernels<T>& kernels = chosen_kernels<PiecewiseKernels<T>>();
  const Function<A> function(f);
  const int64_t blocks = (count + block - 1) / block;
  std::vector<A> largest(blocks);
  parallel(blocks, 1, [&](int64_t first, int64_t last) {
    for_blocks(count, first, last, [&](int64_t begin, int64_t end, int64_t b) {
      largest[b] = kernels.largest(grad + begin, end - begin);
    });
  });
  A most = 0;
  for (const A value : largest) most = most >= value ? most : value;
  for (const A value : largest) most = value == value ? most : value;
  TableGradient gradient(f, blocks, static_cast<double>(count), most);
  gradient.run([&](int64_t first, int64_t last, TableSums sums) {
    for_blocks(count, first, last, [&](int64_t begin, int64_t end, int64_t b) {
      sums.beyond = gradient.beyond(b);
      kernels.backward(function, grad + begin, input + begin, end - begin, grad_input + begin, sums);
    });
  });
  gradient.store(grad_table);
}

#define HSTREE_PIECEWISE(T)                                                                  \
  template void piecewise<T>(const LogitFunction&, const T*, int64_t, T*);                   \
  template void piecewise_backward<T>(const LogitFunction&, const T*, const T*, int64_t, T*, \
                                      accumulate_t<T>*);
HSTREE_PIECEWISE(float)
HSTREE_PIECEWISE(double)
HSTREE_PIECEWISE(BFloat16)
HSTREE_PIECEWISE(Half)

}  // namespace hstree::cpu
