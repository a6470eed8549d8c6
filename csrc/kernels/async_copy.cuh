// Asynchronous copies from global to shared memory (cp.async of the PTX manual).
//
// A copy is in flight from its call until the async_copy_wait that covers its group. Until then its
// destination must not be read or written, and its source must not be written. The wait covers only the
// calling thread's copies: other threads see them after a following barrier. A thread must wait for all its
// copies before it exits.
#pragma once

#include "launch.h"

namespace hstree {

// Copies Bytes bytes if `copy` is true, otherwise writes as many zeros. Both addresses are multiples of
// Bytes. `global` must be a valid address even if `copy` is false. Copies of 16 bytes bypass the L1 cache.
template <int Bytes>
__device__ __forceinline__ void async_copy_or_zero(void* shared, const void* global, bool copy) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
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

// Commits the calling thread's copies since its last group as one group, which may be empty.
__device__ __forceinline__ void async_copy_commit() {
#ifdef HSTREE_CUDA_EMULATION
  emu::async_copy_commit();
#else
  asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// Waits until at most the last Pending groups of the calling thread are in flight.
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
