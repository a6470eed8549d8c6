// hstree::scale_, for gradients on CUDA: multiplies numbers of 16 bits by one of float32 that the host does not read.
#include "ops/tensor.h"

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("scale_(Tensor(a!) x, Tensor factor) -> ()");
}
