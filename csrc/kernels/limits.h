#pragma once

namespace hstree {

// Largest number of inner nodes on the path of a class. Builders reject deeper trees; kernels size their
// tiles by it.
constexpr int max_depth = 64;

// Element type of the floating-point tensors of an op. Sums are float32, or float64 for float64 elements.
enum class ScalarType : int { float32, float64, bfloat16, float16 };

}  // namespace hstree
