// How every kernel is launched, on a GPU and under the emulation of the tests (tests/cuda_emu/cuda_emu.h).
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#elif !defined(HSTREE_CUDA_EMULATION)
#error "launch.h is for nvcc, or for g++ -include cuda_emu.h"
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "hstree needs compute capability 8.0 or later: set TORCH_CUDA_ARCH_LIST"
#endif

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

typedef struct CUstream_st* cudaStream_t;

// The dynamic shared memory of a block, aligned to 16 bytes.
#ifdef __CUDACC__
extern __shared__ uint4 hstree_shared_memory[];
#define HSTREE_SHARED_MEMORY reinterpret_cast<unsigned char*>(hstree_shared_memory)
#else
#define HSTREE_SHARED_MEMORY static_cast<unsigned char*>(emu::shared_memory())
#endif

namespace hstree {

constexpr int default_shared_bytes = 48 << 10;  // of a block that does not ask for more

// Blocks in the x direction of a grid.
inline unsigned grid_size(int64_t blocks) {
  if (blocks > 0x7fffffff) throw std::runtime_error("hstree: the input has too many rows for one launch");
  return static_cast<unsigned>(blocks);
}

// Bytes of shared memory that a block can ask for on the current device.
inline int64_t shared_memory_limit() {
#ifdef __CUDACC__
  int device = 0, bytes = default_shared_bytes;
  if (cudaGetDevice(&device) == cudaSuccess) {
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  return bytes;
#else
  return emu::shared_limit;
#endif
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            Arguments... arguments) {
#ifdef __CUDACC__
  if (shared_bytes > default_shared_bytes) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  }
  kernel<<<grid, block, shared_bytes, stream>>>(Parameters(arguments)...);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("hstree: a CUDA kernel could not be launched: ") +
                             cudaGetErrorString(error));
  }
#else
  (void)stream;
  emu::launch(kernel, grid, block, shared_bytes, Parameters(arguments)...);
#endif
}

}  // namespace hstree
