#include "cpu/row_kernels.h"

#include "cpu/capability.h"

namespace hstree::cpu {

template <typename T>
const RowKernels<T>& row_kernels() {
  return *HSTREE_BY_CAPABILITY(row_kernels, T);
}

template const RowKernels<float>& row_kernels<float>();
template const RowKernels<double>& row_kernels<double>();
template const RowKernels<BFloat16>& row_kernels<BFloat16>();
template const RowKernels<Half>& row_kernels<Half>();

}  // namespace hstree::cpu
