// hstree::leaf_order: sorts the rows of a batch by their leaves, for the tree ops. leaf_order_cuda.cpp
// registers the CUDA implementation.
#include "ops/leaf_order.h"

#include "cpu/tree_batch.h"
#include "ops/cpu.h"

namespace hstree {
namespace {

Tensor leaf_order(const Tensor& target, const Tensor& leaf_position) {
  const LeafOrderArguments a = leaf_order_arguments(target, leaf_position);
  return leaf_order_cpu(leaf_order_op, a.target, a.leaf_position);
}

}  // namespace

Tensor leaf_order_cpu(const char* op, const Tensor& target, const Tensor& leaf_position) {
  const int64_t rows = target.size(0), trees = leaf_position.size(0), classes = leaf_position.size(1);
  const Tensor order = empty(target, {trees, rows}, Dtype::Long);
  cpu::parallel(trees, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      cpu::leaf_order(op, const_data<int32_t>(leaf_position) + t * classes, classes,
                      const_data<int64_t>(target), rows, data<int64_t>(order) + t * rows);
    }
  });
  return order;
}

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("leaf_order(Tensor target, Tensor leaf_position) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("leaf_order", HSTREE_CPU_BOX(&leaf_order));
}

}  // namespace hstree
