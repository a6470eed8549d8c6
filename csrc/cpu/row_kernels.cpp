#include "cpu/row_kernels.h"

#include <cstdlib>
#include <cstring>

namespace hstree::cpu {
namespace {

enum class Capability { portable, avx2, avx512 };

Capability capability() {
  static const Capability best = [] {
    Capability allowed = Capability::avx512;
    if (const char* limit = std::getenv("HSTREE_CPU_CAPABILITY")) {
      if (!std::strcmp(limit, "portable")) allowed = Capability::portable;
      if (!std::strcmp(limit, "avx2")) allowed = Capability::avx2;
    }
#if defined(__x86_64__)
    if (allowed >= Capability::avx512 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      return Capability::avx512;
    }
    if (allowed >= Capability::avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
      return Capability::avx2;
    }
#endif
    return Capability::portable;
  }();
  return best;
}

}  // namespace

template <typename T>
const RowKernels<T>& row_kernels() {
  switch (capability()) {
#if defined(__x86_64__)
    case Capability::avx512:
      return *row_kernels_avx512<T>();
    case Capability::avx2:
      return *row_kernels_avx2<T>();
#endif
    default:
      return *row_kernels_portable<T>();
  }
}

template const RowKernels<float>& row_kernels<float>();
template const RowKernels<double>& row_kernels<double>();
template const RowKernels<BFloat16>& row_kernels<BFloat16>();
template const RowKernels<Half>& row_kernels<Half>();

}  // namespace hstree::cpu
