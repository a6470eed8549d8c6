// CPU kernels of feature_gather: output[n, t, s] = hidden[n, feature_index[t, s]]. Its gradient adds the trees
// of a row in order, in float32 (float64 for float64). Work and bytes O(N T S). No atomics; deterministic.
#pragma once

#include <cstdint>

#include "cpu/elements.h"

namespace hstree::cpu {

// size: bytes of an element. hidden [N, D], feature_index [T, S] in [0, D), output [N, T, S].
void feature_gather(int64_t size, const void* hidden, const int32_t* feature_index, int64_t rows,
                    int64_t in_features, int64_t trees, int64_t features, void* output);

// grad [N, T, S], grad_hidden [N, D] zeros. A: float or double; the caller converts.
template <typename A>
void feature_gather_backward(const A* grad, const int32_t* feature_index, int64_t rows, int64_t in_features,
                             int64_t trees, int64_t features, A* grad_hidden);

}  // namespace hstree::cpu
