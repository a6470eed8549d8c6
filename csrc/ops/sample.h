// What the CPU and the CUDA ops hstree::sample and hstree::candidate_log_prob check alike.
#pragma once

#include <cmath>

#include "ops/tree_vectors.h"

namespace hstree {

inline void check_temperature(const char* op, double temperature) {
  check(std::isfinite(temperature) && temperature > 0, op,
        ": temperature: expected a finite positive number, got ", temperature);
}

inline void check_draws(const TreeTensors& tensors, const Tensor& seed, int64_t n, double temperature) {
  check_dim(tensors.op, "seed", seed, 1, "[1]");
  check_size(tensors.op, "seed", seed, 0, 1, "one number");
  check_dtype(tensors.op, "seed", seed, Dtype::Long);
  check_device(tensors.op, "seed", seed, tensors.hidden);
  check(n >= 1, tensors.op, ": n: expected at least 1 draw of a row, got ", n);
  check_temperature(tensors.op, temperature);
}

inline void check_candidates(const TreeTensors& tensors, const Tensor& candidates, double temperature) {
  check_temperature(tensors.op, temperature);
  check_dim(tensors.op, "candidates", candidates, 2, "[N, K]");
  check_size(tensors.op, "candidates", candidates, 0, tensors.rows(), "rows of hidden");
  check_dtype(tensors.op, "candidates", candidates, Dtype::Long);
  check_device(tensors.op, "candidates", candidates, tensors.hidden);
}

}  // namespace hstree
