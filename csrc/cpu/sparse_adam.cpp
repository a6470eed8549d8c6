#include "cpu/sparse_adam.h"

#include <algorithm>

#include "cpu/capability.h"
#include "cpu/tree_batch.h"

namespace hstree::cpu {
namespace {

constexpr int64_t fewest_elements = 1 << 14;  // that justify a thread

void check_range(const char* op, int dim, const int64_t* index, int64_t i, int64_t size) {
  if (index[i] >= 0 && index[i] < size) return;
  fail(op, ": index[", dim, ", ", i, "]: expected a value in [0, ", size, "), got ", index[i]);
}

void check_index(const char* op, const SparseAdam& tensors) {
  int64_t before = -1;
  for (int64_t i = 0; i < tensors.visited; ++i) {
    if (tensors.outer) check_range(op, 0, tensors.outer, i, tensors.outer_size);
    check_range(op, tensors.outer ? 1 : 0, tensors.inner, i, tensors.inner_size);
    const int64_t row = (tensors.outer ? tensors.outer[i] * tensors.inner_size : 0) + tensors.inner[i];
    if (row <= before) {
      fail(op, ": index: expected strictly increasing rows, as coalesce() makes them, got row ", row,
           " at place ", i, " after row ", before);
    }
    before = row;
  }
}

}  // namespace

template <typename T>
void sparse_adam(const char* op, const SparseAdam& tensors) {
  check_index(op, tensors);
  const auto run = chosen_kernels<SparseAdamKernel<T>>().run;
  const int64_t grain = 1 + fewest_elements / std::max<int64_t>(tensors.features, 1);
  on_threads(tensors.visited, grain, [&](int64_t begin, int64_t end) { run(tensors, begin, end); });
}

template void sparse_adam<float>(const char*, const SparseAdam&);
template void sparse_adam<double>(const char*, const SparseAdam&);
template void sparse_adam<BFloat16>(const char*, const SparseAdam&);
template void sparse_adam<Half>(const char*, const SparseAdam&);

}  // namespace hstree::cpu
