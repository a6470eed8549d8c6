// hstree::cpu_capability: the instruction set of the CPU kernels, by the names of HSTREE_CPU_CAPABILITY.
#include "cpu/capability.h"

#include <torch/csrc/stable/library.h>

#include <string>

namespace hstree {
namespace {

std::string cpu_capability() {
  constexpr const char* names[] = {"portable", "dotprod", "avx2", "avx512"};
  return names[static_cast<int>(cpu::capability())];
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def("cpu_capability() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_BOX(&cpu_capability));
}

}  // namespace hstree
