// The sort of hstree::leaf_order, also used by the tree ops when `order` is not given.
#pragma once

#include "kernels/leaf_order.h"
#include "ops/cuda.h"

namespace hstree {

// Returns [T, N] int64. Reads target, leaf_position and the sizes of the tables. like: a tensor on the
// device.
inline Tensor leaf_order_of(const Tensor& like, const Tables& tables, cudaStream_t stream) {
  const Tensor key = empty(like, {tables.trees, tables.rows}, Dtype::Int);
  leaf_key(tables, data<int32_t>(key), stream);
  return stable_argsort(key);
}

}  // namespace hstree
