// Device, stream and torch's own CUDA ops for a binding. Compiled by the host compiler; needs no CUDA header.
#pragma once

#include "ops/tensor.h"

#ifdef HSTREE_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <utility>

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

// Makes the device of a tensor current for the lifetime of this object.
class CudaCall {
 public:
  explicit CudaCall(const Tensor& tensor) : guard_(tensor.get_device()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// Indices [T, N] int64 of a stable ascending sort of each row of key [T, N].
inline Tensor stable_argsort(const Tensor& key) {
  using torch::stable::detail::from;
  StableIValue stack[4] = {from(key), from(std::optional<bool>(true)), from(int64_t{-1}), from(false)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "stable", stack, TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // the sorted keys, released
  return torch::stable::detail::to<Tensor>(stack[1]);
}

inline Tensor cumulative_sum(const Tensor& tensor) {
  using torch::stable::detail::from;
  StableIValue stack[3] = {from(tensor), from(int64_t{0}), from(std::optional<Dtype>())};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::cumsum", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The last element of a one-dimensional int64 tensor. Synchronizes with the device.
inline int64_t last_value(const Tensor& tensor) {
  Tensor copy = tensor;
  const Tensor last = torch::stable::narrow(copy, 0, tensor.size(0) - 1, 1);
  const Tensor host = torch::stable::to(last, torch::stable::Device(torch::headeronly::DeviceType::CPU));
  return *const_data<int64_t>(host);
}

// Two elements of a one-dimensional int64 tensor. Synchronizes with the device, once.
inline std::pair<int64_t, int64_t> two_values(const Tensor& tensor, int64_t first, int64_t second) {
  const Tensor both = torch::stable::from_blob(data<int64_t>(tensor) + first, {2}, {second - first},
                                               tensor.device(), Dtype::Long);
  const Tensor host = torch::stable::to(torch::stable::contiguous(both),
                                        torch::stable::Device(torch::headeronly::DeviceType::CPU));
  return {const_data<int64_t>(host)[0], const_data<int64_t>(host)[1]};
}

}  // namespace hstree
#endif
