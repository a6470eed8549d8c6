// The sort that hstree::leaf_order is, for the op and for the ops that are not given its result.
#pragma once

#include "kernels/leaf_order.h"
#include "ops/cuda.h"

namespace hstree {

// [T, N] int64; of the tables target, leaf_position and sizes are read. like: a tensor on the device.
inline Tensor leaf_order_of(const Tensor& like, const Tables& tables, cudaStream_t stream) {
  const Tensor key = empty(like, {tables.trees, tables.rows}, Dtype::Int);
  leaf_key(tables, data<int32_t>(key), stream);
  return stable_argsort(key);
}

}  // namespace hstree
