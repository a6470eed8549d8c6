#include "cpu/capability.h"

#include <cstdlib>
#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace hstree::cpu {

#if defined(__aarch64__)
static bool has_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // Apple silicon
#endif
}
#endif

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
#elif defined(__aarch64__)
    if (allowed >= Capability::dotprod && has_dot_products()) return Capability::dotprod;
#endif
    return Capability::portable;
  }();
  return best;
}

}  // namespace hstree::cpu
