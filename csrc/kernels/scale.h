// Launcher of scale_: x <- factor x.
//
// Plain C++: no CUDA and no torch include. Throws std::runtime_error when the launch fails, launches nothing when there
// is no number, and never synchronizes.
#pragma once

#include <cstdint>

#include "limits.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

// x [count]: contiguous, not of float64 (which throws); factor: one float32, on the device.
void scale(ScalarType type, void* x, int64_t count, const float* factor, cudaStream_t stream);

}  // namespace hstree
