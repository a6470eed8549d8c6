// Launchers of feature_gather: output[n, t, s] = hidden[n, feature_index[t, s]], and its gradient.
//
// Plain C++: no CUDA and no torch include. All tensors are contiguous. Launchers throw std::runtime_error
// when a launch fails and launch nothing when there is no element to write.
#pragma once

#include <cstdint>

#include "limits.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

struct FeatureGather {
  const int32_t* feature_index;  // [T, S], each row strictly increasing, in [0, D)
  int64_t rows;                  // N
  int64_t in_features;           // D
  int64_t features;              // S
  int trees;                     // T
};

// hidden [N, D], output [N, T, S], both of the type; a feature outside [0, D) gives NaN.
void feature_gather(ScalarType type, const FeatureGather& sizes, const void* hidden, void* output,
                    cudaStream_t stream);

// grad [N, T, S] and grad_hidden [N, D], both of the type; inverse: workspace [T, D] int32, content arbitrary.
void feature_gather_backward(ScalarType type, const FeatureGather& sizes, const void* grad, int32_t* inverse,
                             void* grad_hidden, cudaStream_t stream);

}  // namespace hstree
