// Checks of hstree::scale_ for both devices.
#pragma once

#include "ops/tensor.h"

namespace hstree {

inline void check_scale(const Tensor& x, const Tensor& factor) {
  const char* op = "hstree::scale_";
  const Dtype dtype = x.scalar_type();
  check(dtype == Dtype::BFloat16 || dtype == Dtype::Half, op, ": x: expected dtype bfloat16 or float16, got ",
        torch::headeronly::toString(dtype));
  check(x.is_contiguous(), op, ": x: expected a contiguous tensor, got shape ", shape_of(x));
  check(factor.numel() == 1, op, ": factor: expected one number, got shape ", shape_of(factor));
  check_dtype(op, "factor", factor, Dtype::Float);
  check_device(op, "factor", factor, x);
}

}  // namespace hstree
