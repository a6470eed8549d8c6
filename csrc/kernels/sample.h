// Launchers of sample and candidate_log_prob: classes drawn from a mixture of trees, and the log-probabilities of
// some classes of each row.
//
// Plain C++: no CUDA and no torch include. All arrays are contiguous and on the device of the stream; type: of
// hidden. Whatever the tables hold, nothing outside the arrays is read. Launchers throw std::runtime_error when a
// launch fails, launch nothing when there is no class to find, and never synchronize.
#pragma once

#include "limits.h"
#include "tree_vectors.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

// Draws n classes for each row with the random numbers of seed[0]. seed [1], index [N, n]; log_prob [N, n] and the
// workspace [N, n, T] are of the sums.
void sample(ScalarType type, const TreeVectors& vectors, const int64_t* seed, int64_t n, int64_t* index,
            void* workspace, void* log_prob, cudaStream_t stream);

// log_prob of the classes index [N, n]: 0 for -1, NaN for others out of range. Workspace as above.
void candidate_log_prob(ScalarType type, const TreeVectors& vectors, const int64_t* index, int64_t n,
                        void* workspace, void* log_prob, cudaStream_t stream);

}  // namespace hstree
