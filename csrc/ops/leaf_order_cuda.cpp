// hstree::leaf_order on CUDA. The schema is in leaf_order.cpp.
#ifdef HSTREE_CUDA
#include "ops/leaf_order_cuda.h"

#include "ops/leaf_order.h"

namespace hstree {
namespace {

Tensor leaf_order_cuda(const Tensor& target, const Tensor& leaf_position) {
  const LeafOrderArguments a = leaf_order_arguments(target, leaf_position);
  if (a.rows() == 0 || a.trees() == 0) return empty(target, {a.trees(), a.rows()}, Dtype::Long);
  const CudaCall call(target);
  Tables tables{};
  tables.target = const_data<int64_t>(a.target);
  tables.leaf_position = const_data<int32_t>(a.leaf_position);
  tables.rows = a.rows();
  tables.classes = a.classes();
  tables.trees = static_cast<int>(a.trees());
  return leaf_order_of(target, tables, call.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("leaf_order", TORCH_BOX(&leaf_order_cuda));
}

}  // namespace hstree
#endif
