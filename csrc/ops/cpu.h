// The entrance of every CPU kernel.
//
// The file of an op registers its schema and its kernels for both devices. A build without CUDA has no
// HSTREE_CUDA. HSTREE_CUDA_ONLY leaves out the schema and the CPU kernel, for a library of CUDA kernels that is loaded
// beside such a build, as tests/cuda_emu does.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace hstree {

// A boxed kernel. Exhausted memory becomes RuntimeError.
template <auto kernel>
void cpu_call(StableIValue* stack, uint64_t arguments, uint64_t results) {
  const std::string message = "hstree: not enough memory for an operator; fewer rows at a time need less";
  try {
    kernel(stack, arguments, results);
  } catch (const std::bad_alloc&) {
    throw std::runtime_error(message);
  } catch (const std::length_error&) {
    throw std::runtime_error(message);
  } catch (const std::runtime_error& error) {
    // What fails in torch's allocator may come without its message through the stable ABI.
    const bool has_message = std::strncmp(error.what(), "hstree:", 7) == 0;
    if (has_message || !std::strstr(error.what(), "API call failed")) throw;
    throw std::runtime_error(message + " (" + error.what() + ")");
  }
}

}  // namespace hstree

// TORCH_BOX for kernels of the CPU.
#define HSTREE_CPU_BOX(kernel) (&::hstree::cpu_call<TORCH_BOX(kernel)>)
