// Element types of the CPU kernels, and their accumulation types.
#pragma once

#include <cstdint>

namespace hstree::cpu {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// Sums are taken in float32, in float64 for float64 elements.
template <typename T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <typename T>
using accumulate_t = typename Accumulate<T>::type;

}  // namespace hstree::cpu
