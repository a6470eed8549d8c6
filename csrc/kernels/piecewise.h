// Launchers of piecewise: a piecewise polynomial of every element, and its gradients.
//
// Plain C++: no CUDA and no torch include. All arrays are contiguous and on the device of the stream.
// function.table: [K, width] in the accumulation dtype of the type; it must not be null.
// Launchers throw std::runtime_error when a launch fails, launch nothing when there is no element, and never
// synchronize.
#pragma once

#include <cstdint>

#include "limits.h"
#include "logit_function.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

// output = f(input), both of `elements` elements of the type.
void piecewise(ScalarType type, const LogitFunction& function, int64_t elements, const void* input,
               void* output, cudaStream_t stream);

// Size of the workspace of piecewise_backward: 16 bytes for each element of the table, and 290 KiB.
int64_t piecewise_workspace_bytes(const LogitFunction& function);

// grad_input = grad * f'(input), `elements` elements of the type each; grad_table: shape and dtype of the
// table, zero-filled if elements is 0, otherwise arbitrary. workspace: piecewise_workspace_bytes,
// zero-filled, aligned to 8 bytes.
void piecewise_backward(ScalarType type, const LogitFunction& function, int64_t elements, const void* grad,
                        const void* input, void* workspace, void* grad_input, void* grad_table,
                        cudaStream_t stream);

}  // namespace hstree
