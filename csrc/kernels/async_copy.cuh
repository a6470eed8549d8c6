// Copies from global to shared memory that run beside the computation (cp.async of the PTX manual).
//
// A copy is under way from its call until the async_copy_wait that covers its group. Until then its destination
// is neither read nor written, nor its source written. The wait is for the calling thread's own copies: other
// threads see them after a barrier that follows it. A thread waits for all its copies before it ends.
#pragma once

#include "launch.h"

namespace hstree {

// Copies Bytes bytes where `copy` is true, else writes as many zeros. Both addresses are multiples of Bytes.
// `global` is a valid address even where `copy` is false. 16 bytes pass by the L1 cache.
template <int Bytes>
__device__ __forceinline__ void async_copy_or_zero(void* shared, const void* global, bool copy) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "the sizes that cp.async has");
#ifdef HSTREE_CUDA_EMULATION
  emu::async_copy<Bytes>(shared, global, copy);
#else
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t bytes = copy ? Bytes : 0;
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(to), "l"(__cvta_generic_to_global(global)), "n"(Bytes), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(to), "l"(__cvta_generic_to_global(global)), "n"(Bytes), "r"(bytes)
                 : "memory");
  }
#endif
}

// Copies Bytes bytes. Both addresses are multiples of Bytes.
template <int Bytes>
__device__ __forceinline__ void async_copy(void* shared, const void* global) {
  async_copy_or_zero<Bytes>(shared, global, true);
}

// Makes one group of the calling thread's copies since its last group; the group may be empty.
__device__ __forceinline__ void async_copy_commit() {
#ifdef HSTREE_CUDA_EMULATION
  emu::async_copy_commit();
#else
  asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// Waits until no more than the last Pending groups of the calling thread are under way.
template <int Pending>
__device__ __forceinline__ void async_copy_wait() {
  static_assert(Pending >= 0);
#ifdef HSTREE_CUDA_EMULATION
  emu::async_copy_wait(Pending);
#else
  asm volatile("cp.async.wait_group %0;" : : "n"(Pending) : "memory");
#endif
}

}  // namespace hstree
