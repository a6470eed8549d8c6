// Kernel launches, on a GPU and in the CPU emulation of the tests (tests/cuda_emu/cuda_emu.h).
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

#include <cxxabi.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
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

// Default limit of a block's shared memory in bytes, static and dynamic together.
constexpr size_t default_shared_bytes = 48 << 10;
// Limit of a kernel's static shared memory (enforced by tools/check_cuda.py), so that a launch with little
// dynamic shared memory needs no query.
constexpr size_t most_static_bytes = 24 << 10;

// Number of blocks in the x direction of a grid.
inline unsigned grid_size(int64_t blocks) {
  if (blocks > 0x7fffffff) throw std::runtime_error("hstree: the input has too many rows for one launch");
  return static_cast<unsigned>(blocks);
}

// What to do about a device that the binary has no code for.
inline std::string remedy(cudaError_t error) {
#ifdef __CUDACC__
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion) {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    const std::string capability = std::to_string(major) + "." + std::to_string(minor);
    if (major < 8)
      return "; the device has compute capability " + capability + ", and hstree needs 8.0 or later";
    return "; the device has compute capability " + capability +
           ", which hstree.build_info().cuda_arch_list lacks: " + "build hstree with TORCH_CUDA_ARCH_LIST=" +
           capability;
  }
#endif
  (void)error;
  return "";
}

[[noreturn]] inline void cuda_failed(cudaError_t error, const std::string& what) {
  throw std::runtime_error("hstree: " + what + ": " + cudaGetErrorString(error) + remedy(error));
}

inline std::string kernel_name(const void* kernel) {
  const char* name = nullptr;
#if !defined(__CUDACC__) || CUDART_VERSION >= 12030
  if (cudaFuncGetName(&name, kernel) != cudaSuccess) name = nullptr;
#else
  (void)kernel;
#endif
  if (name == nullptr) return "a CUDA kernel";
  char* const readable = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
  const std::string result = readable == nullptr ? name : readable;
  std::free(readable);
  return result;
}

// Largest shared memory of a block on the current device in bytes, static and dynamic together.
inline int64_t shared_memory_limit() {
  int device = 0, bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) cuda_failed(error, "cannot query the shared memory of the CUDA device");
  return bytes;
}

// Whether a multiprocessor has memory for several blocks of more than 50 KiB: not on 8.6, 8.9 and 12.0, whose 100 KiB
// would hold one, and leave most of its threads idle.
inline bool has_large_shared_memory() {
  return shared_memory_limit() >= 160 << 10;
}

// Raises the kernel's shared memory limit where a block needs more than default_shared_bytes: to the most that it can
// have, not to what this launch needs, since another thread may launch the same kernel with more.
inline void allow_shared_memory(const void* kernel, size_t dynamic_bytes) {
  if (dynamic_bytes + most_static_bytes <= default_shared_bytes) return;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) cuda_failed(error, "cannot query the attributes of " + kernel_name(kernel));
  const size_t bytes = attributes.sharedSizeBytes + dynamic_bytes;
  if (bytes <= default_shared_bytes) return;
  const int64_t limit = shared_memory_limit();
  if (bytes > static_cast<size_t>(limit)) {
    throw std::runtime_error("hstree: a block of " + kernel_name(kernel) + " needs " + std::to_string(bytes) +
                             " bytes of shared memory, but the CUDA device has " + std::to_string(limit));
  }
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(limit - static_cast<int64_t>(attributes.sharedSizeBytes)));
  if (error != cudaSuccess) {
    cuda_failed(error, "cannot reserve " + std::to_string(bytes) + " bytes of shared memory for a block of " +
                           kernel_name(kernel));
  }
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            Arguments... arguments) {
  const auto* address = reinterpret_cast<const void*>(kernel);
  allow_shared_memory(address, shared_bytes);
#ifdef __CUDACC__
  kernel<<<grid, block, shared_bytes, stream>>>(Parameters(arguments)...);
#else
  emu::launch(kernel, grid, block, shared_bytes, stream, Parameters(arguments)...);
#endif
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    const auto text = [](dim3 size) {
      return std::to_string(size.x) + " x " + std::to_string(size.y) + " x " + std::to_string(size.z);
    };
    cuda_failed(error, "cannot launch " + kernel_name(address) + " with " + text(grid) + " blocks of " +
                           text(block) + " threads and " + std::to_string(shared_bytes) +
                           " bytes of dynamic shared memory");
  }
}

}  // namespace hstree
