// What piecewise and target_log_softmax need on CUDA beyond logit_function.h.
#pragma once

#include "ops/cuda.h"
#include "ops/logit_function.h"

namespace hstree {

// table, copied if its address is not aligned for loading an interval in one access.
inline Tensor aligned_table(const Tensor& table) {
  const bool aligned = reinterpret_cast<uintptr_t>(table.const_data_ptr()) % 16 == 0;
  return aligned ? table : torch::stable::clone(table);
}

// bytes: a multiple of 8.
inline Tensor zero_workspace(const Tensor& like, int64_t bytes) {
  return zeros(like, {bytes / 8}, Dtype::Long);
}

}  // namespace hstree
