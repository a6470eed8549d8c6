// Kernels for the paths of one row at a time: its features, products with weight rows, and log-softmax; one table
// of functions for each instruction set.
#pragma once

#include <cstdint>

#include "cpu/elements.h"
#include "cpu/features.h"

namespace hstree::cpu {

template <typename T>
struct MixtureRowKernels {
  using A = accumulate_t<T>;

  // x = the features of a row of hidden, followed by a vector of zeros.
  void (*features)(const FeatureSubset& subset, int64_t features, const T* row, A* x);

  // z_l = dot(x, weight_r) + bias_r, with r = row[l], or r = l if row is null; bias may be null.
  void (*products)(const A* x, const T* weight, const T* bias, const int32_t* row, int64_t rows,
                   int64_t features, A* z);

  // z_l = above + the log-softmax of sharpness z_l.
  void (*log_softmax)(A* z, int64_t width, A sharpness, A above);

  // out_l = exp(z_l - most) with the largest z_l, or all NaN if one is.
  void (*shares)(const A* z, int64_t width, A* out);
};

}  // namespace hstree::cpu
