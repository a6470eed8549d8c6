// Uninitialized tensors in recycled memory, for large results of every step.
#pragma once

#include "cpu/recycled_memory.h"
#include "ops/tensor.h"

namespace hstree {

// On the CPU; small ones come from torch.
inline Tensor recycled(const Tensor& like, const std::vector<int64_t>& shape, Dtype dtype) {
  std::vector<int64_t> strides(shape.size());
  int64_t bytes = dtype == Dtype::Double ? 8 : dtype == Dtype::Float ? 4 : 2, count = 1;
  for (size_t d = shape.size(); d-- > 0; count *= shape[d]) strides[d] = count;
  bytes *= count;
  if (bytes < cpu::smallest_recycled) return empty(like, shape, dtype);
  return torch::stable::from_blob(cpu::acquire(bytes), shape, strides, like.device(), dtype, cpu::release);
}

}  // namespace hstree
