// hstree::sample: draws from a mixture of trees. hstree::candidate_log_prob: log-probabilities of some classes of
// each row. sample_cuda.cpp registers the CUDA implementations.
#include "ops/sample.h"

namespace hstree {

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("sample(" HSTREE_TREE_VECTORS_SCHEMA
        ", Tensor seed, int n, float temperature) -> (Tensor index, Tensor log_prob)");
  m.def("candidate_log_prob(" HSTREE_TREE_VECTORS_SCHEMA ", Tensor candidates, float temperature) -> Tensor");
}

}  // namespace hstree
