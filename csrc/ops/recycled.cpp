// hstree::recycled: `count` uninitialized numbers of the dtype of `like`, for operators that are written in Python.
#include "ops/recycled.h"

#include "ops/cpu.h"

namespace hstree {
namespace {

Tensor recycled_cpu(const Tensor& like, int64_t count) {
  element_type("hstree::recycled", "like", like);
  check(count >= 0, "hstree::recycled: count: expected a number of at least 0, got ", count);
  return recycled(like, {count}, like.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("recycled(Tensor like, int count) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("recycled", HSTREE_CPU_BOX(&recycled_cpu));
}

}  // namespace hstree
