// What hstree::sample checks on both devices.
#pragma once

#include <cmath>

#include "ops/tree_vectors.h"

namespace hstree {

inline void check_draws(const TreeTensors& tensors, const Tensor& seed, int64_t n, double temperature) {
  check_dim(tensors.op, "seed", seed, 1, "[1]");
  check_size(tensors.op, "seed", seed, 0, 1, "one number");
  check_dtype(tensors.op, "seed", seed, Dtype::Long);
  check_device(tensors.op, "seed", seed, tensors.hidden);
  check(n >= 1, tensors.op, ": n: expected at least 1 draw of a row, got ", n);
  check(std::isfinite(temperature) && temperature > 0, tensors.op,
        ": temperature: expected a finite positive number, got ", temperature);
}

}  // namespace hstree
