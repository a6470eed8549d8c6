// Launcher of sample: classes drawn from a mixture of trees, and their log-probabilities.
//
// Plain C++: no CUDA and no torch include. All arrays are contiguous and on the device of the stream; type: of
// hidden. Whatever the tables hold, nothing outside the arrays is read. Throws std::runtime_error when a
// launch fails, launches nothing when there is nothing to draw, and never synchronizes.
#pragma once

#include "limits.h"
#include "tree_vectors.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

// Draws n classes for each row with the random numbers of seed[0]. seed [1], index [N, n]; log_prob [N, n] and the
// workspace [N, n, T] are of the sums.
void sample(ScalarType type, const TreeVectors& vectors, const int64_t* seed, int64_t n, int64_t* index,
            void* workspace, void* log_prob, cudaStream_t stream);

}  // namespace hstree
