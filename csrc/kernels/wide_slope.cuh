// The slope of the wide op and of the leaf op.
#pragma once

#include "common.cuh"

namespace hstree {

// d log_softmax(z)[child] / dz[k] from score[k] = log_softmax(z)[k]
__device__ __forceinline__ float wide_slope(float score, bool chosen) {
  return (chosen ? 1.0f : 0.0f) - expf(score);
}
__device__ __forceinline__ double wide_slope(double score, bool chosen) {
  return (chosen ? 1.0 : 0.0) - exp(score);
}

}  // namespace hstree
