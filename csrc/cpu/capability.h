// The instruction set of the CPU kernels, chosen once at run time.
#pragma once

namespace hstree::cpu {

enum class Capability { portable, dotprod, avx2, avx512 };

// The best one that the processor supports and HSTREE_CPU_CAPABILITY (portable, avx2 or avx512) allows. `portable` is
// NEON on AArch64, `dotprod` NEON with the dot products of 8 bits of ARMv8.2.
Capability capability();

// The kernels of an op for one instruction set: a struct of pointers to functions. kernels_<capability>.cpp defines
// them, the AVX ones on x86-64 only, that of dot products on AArch64 only.
template <typename Kernels>
const Kernels& kernels_portable();
template <typename Kernels>
const Kernels& kernels_dotprod();
template <typename Kernels>
const Kernels& kernels_avx2();
template <typename Kernels>
const Kernels& kernels_avx512();

template <typename Kernels>
const Kernels& chosen_kernels() {
#if defined(__x86_64__)
  if (capability() == Capability::avx512) return kernels_avx512<Kernels>();
  if (capability() == Capability::avx2) return kernels_avx2<Kernels>();
#elif defined(__aarch64__)
  if (capability() == Capability::dotprod) return kernels_dotprod<Kernels>();
#endif
  return kernels_portable<Kernels>();
}

}  // namespace hstree::cpu
