// The instruction set of the CPU kernels, chosen once at run time.
#pragma once

namespace hstree::cpu {

enum class Capability { portable, avx2, avx512 };

// The best one that the processor supports and HSTREE_CPU_CAPABILITY (portable, avx2 or avx512) allows.
Capability capability();

}  // namespace hstree::cpu

// Calls name_<capability><T>(), which every kernels_<capability>.cpp defines. The AVX ones exist on x86-64
// only.
#if defined(__x86_64__)
#define HSTREE_BY_CAPABILITY(name, T)                      \
  (capability() == Capability::avx512 ? name##_avx512<T>() \
   : capability() == Capability::avx2 ? name##_avx2<T>()   \
                                      : name##_portable<T>())
#else
#define HSTREE_BY_CAPABILITY(name, T) (name##_portable<T>())
#endif
