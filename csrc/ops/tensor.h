// Helpers of every op: error messages, dtypes, allocation.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/elements.h"
#include "kernels/limits.h"

// Text of the last error of torch in this thread; null in a torch before 2.13.
extern "C" __attribute__((weak, visibility("default"))) const char*
torch_exception_get_what_without_backtrace();

namespace hstree {

using torch::stable::Tensor;
using Dtype = torch::headeronly::ScalarType;

// Throws std::runtime_error (RuntimeError in Python) with the message made of the parts, unless the condition
// holds.
template <typename... Parts>
void check(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline std::string shape_of(const Tensor& tensor) {
  std::ostringstream text;
  text << "[";
  for (int64_t d = 0; d < tensor.dim(); ++d) text << (d ? ", " : "") << tensor.size(d);
  text << "]";
  return text.str();
}

inline void check_dim(const char* op, const char* name, const Tensor& tensor, int64_t dim,
                      const char* shape) {
  check(tensor.dim() == dim, op, ": ", name, ": expected shape ", shape, ", got ", shape_of(tensor));
}

inline void check_size(const char* op, const char* name, const Tensor& tensor, int64_t dim, int64_t size,
                       const char* what) {
  check(tensor.size(dim) == size, op, ": ", name, ": expected size ", size, " (", what, ") in dimension ",
        dim, ", got shape ", shape_of(tensor));
}

inline void check_dtype(const char* op, const char* name, const Tensor& tensor, Dtype dtype) {
  check(tensor.scalar_type() == dtype, op, ": ", name, ": expected dtype ",
        torch::headeronly::toString(dtype), ", got ", torch::headeronly::toString(tensor.scalar_type()));
}

// Checks that tensor is on the device of `first`, the first argument of the op.
inline void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& first) {
  check(tensor.device() == first.device(), op, ": ", name, ": expected device ",
        first.is_cuda() ? "cuda:" : "cpu:", static_cast<int>(first.get_device()), ", got ",
        tensor.is_cuda() ? "cuda:" : "cpu:", static_cast<int>(tensor.get_device()));
}

// Checks that tensor has the dtype of `other`, an argument called `like`.
inline void check_same_dtype(const char* op, const char* name, const Tensor& tensor, const char* like,
                             const Tensor& other) {
  check(tensor.scalar_type() == other.scalar_type(), op, ": ", name, ": expected the dtype of ", like, ", ",
        torch::headeronly::toString(other.scalar_type()), ", got ",
        torch::headeronly::toString(tensor.scalar_type()));
}

inline ScalarType element_type(const char* op, const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case Dtype::Float:
      return ScalarType::float32;
    case Dtype::Double:
      return ScalarType::float64;
    case Dtype::BFloat16:
      return ScalarType::bfloat16;
    case Dtype::Half:
      return ScalarType::float16;
    default:
      check(false, op, ": ", name, ": expected dtype float32, float64, bfloat16 or float16, got ",
            torch::headeronly::toString(tensor.scalar_type()));
      return ScalarType::float32;
  }
}

// The dtype of sums.
inline Dtype accumulate_dtype(const Tensor& tensor) {
  return tensor.scalar_type() == Dtype::Double ? Dtype::Double : Dtype::Float;
}

// The result of allocate(), a new tensor. Through the stable ABI an error of torch comes without its type, so that an
// operator cannot raise torch.OutOfMemoryError, and before torch 2.13 without its text.
template <typename F>
Tensor allocated(const std::vector<int64_t>& size, Dtype dtype, const F& allocate) {
  try {
    return allocate();
  } catch (const std::runtime_error& error) {
    const bool has_text = torch_exception_get_what_without_backtrace != nullptr;
    const std::string text = has_text ? torch_exception_get_what_without_backtrace() : error.what();
    const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
    const bool earlier = says("CUDA error") && !says("out of memory");  // what a kernel left behind
    std::ostringstream shape;
    for (size_t d = 0; d < size.size(); ++d) shape << (d ? ", " : "") << size[d];
    check(false, "hstree: ", earlier ? "cannot allocate" : "not enough memory for", " a tensor of shape [",
          shape.str(), "] and dtype ", torch::headeronly::toString(dtype),
          earlier ? "" : "; fewer rows at a time need less", " (torch: ", text, ")");
    throw;
  }
}
inline Tensor empty(const Tensor& like, const std::vector<int64_t>& size, Dtype dtype) {
  return allocated(size, dtype, [&] { return torch::stable::new_empty(like, size, dtype); });
}
inline Tensor zeros(const Tensor& like, const std::vector<int64_t>& size, Dtype dtype) {
  return allocated(size, dtype, [&] { return torch::stable::new_zeros(like, size, dtype); });
}

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}
template <typename T>
const T* const_data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

// Null without a tensor.
template <typename T>
const T* const_data(const std::optional<Tensor>& tensor) {
  return tensor ? const_data<T>(*tensor) : nullptr;
}

inline std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional(torch::stable::contiguous(*tensor)) : std::nullopt;
}

// Calls f with a value of the element type that the CPU kernels use for it.
template <typename F>
void dispatch(ScalarType type, const F& f) {
  switch (type) {
    case ScalarType::float32:
      return f(float{});
    case ScalarType::float64:
      return f(double{});
    case ScalarType::bfloat16:
      return f(cpu::BFloat16{});
    case ScalarType::float16:
      return f(cpu::Half{});
  }
}

// Calls f with a zero of a dtype of sums.
template <typename F>
void dispatch_sums(Dtype sums, const F& f) {
  if (sums == Dtype::Double) return f(double{});
  f(float{});
}

}  // namespace hstree
