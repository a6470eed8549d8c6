// Element types, loads, reductions and table look-ups that the kernels share.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "launch.h"
#include "leaf_order.h"

namespace hstree {

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls function(TypeTag<T>()) with the C++ type of the elements.
template <typename Function>
void dispatch(ScalarType type, Function function) {
  switch (type) {
    case ScalarType::float32:
      return function(TypeTag<float>());
    case ScalarType::float64:
      return function(TypeTag<double>());
    case ScalarType::bfloat16:
      return function(TypeTag<__nv_bfloat16>());
    case ScalarType::float16:
      return function(TypeTag<__half>());
  }
}

// The type of sums over elements of type T.
template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ __forceinline__ float to_sum(float value) {
  return value;
}
__device__ __forceinline__ double to_sum(double value) {
  return value;
}
__device__ __forceinline__ float to_sum(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float to_sum(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

__device__ __forceinline__ void store(float* address, float value) {
  *address = value;
}
__device__ __forceinline__ void store(double* address, double value) {
  *address = value;
}
__device__ __forceinline__ void store(__half* address, float value) {
  *address = __float2half_rn(value);
}
__device__ __forceinline__ void store(__nv_bfloat16* address, float value) {
  *address = __float2bfloat16_rn(value);
}

template <typename T>
__device__ __forceinline__ T round_to(Sum<T> value) {
  T rounded;
  store(&rounded, value);
  return rounded;
}

// Loads Vector consecutive elements in one access of 16 or 8 bytes where they make one.
template <int Vector, typename T>
__device__ __forceinline__ void load_raw(const T* address, T (&element)[Vector]) {
  if constexpr (Vector > 1 && Vector * sizeof(T) == 16) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(address));
    memcpy(element, &raw, sizeof raw);
  } else if constexpr (Vector > 1 && Vector * sizeof(T) == 8) {
    const uint2 raw = __ldg(reinterpret_cast<const uint2*>(address));
    memcpy(element, &raw, sizeof raw);
  } else {
#pragma unroll
    for (int k = 0; k < Vector; ++k) element[k] = __ldg(address + k);
  }
}

// load_raw, converted to the type of sums.
template <int Vector, typename T>
__device__ __forceinline__ void load(const T* address, Sum<T> (&value)[Vector]) {
  T element[Vector];
  load_raw(address, element);
#pragma unroll
  for (int k = 0; k < Vector; ++k) value[k] = to_sum(element[k]);
}

// Whether rows of `width` elements can be read in accesses of `bytes`.
template <typename T>
bool aligned(const void* rows, int64_t width, int bytes) {
  return reinterpret_cast<uintptr_t>(rows) % bytes == 0 &&
         width * static_cast<int64_t>(sizeof(T)) % bytes == 0;
}

// Calls function(TypeTag<T>(), std::bool_constant<Aligned>()); Aligned: whether weight rows of `features` elements
// can be read in 16 bytes.
template <typename Function>
void dispatch_aligned(ScalarType type, const void* weight, int64_t features, Function function) {
  dispatch(type, [&](auto tag) {
    if (aligned<typename decltype(tag)::type>(weight, features, 16)) {
      function(tag, std::true_type());
    } else {
      function(tag, std::false_type());
    }
  });
}

__device__ __forceinline__ float log_sigmoid(float x) {
  return fminf(x, 0.0f) - log1pf(expf(-fabsf(x)));
}
__device__ __forceinline__ double log_sigmoid(double x) {
  return fmin(x, 0.0) - log1p(exp(-fabs(x)));
}

__device__ __forceinline__ float exponential(float x) {
  return expf(x);
}
__device__ __forceinline__ double exponential(double x) {
  return exp(x);
}
__device__ __forceinline__ float logarithm(float x) {
  return logf(x);
}
__device__ __forceinline__ double logarithm(double x) {
  return log(x);
}

// exp(a - largest) for a <= largest; 1 where they are equal, infinite too.
template <typename S>
__device__ __forceinline__ S share(S a, S largest) {
  return a == largest ? S(1) : exp(a - largest);
}

constexpr unsigned all_lanes = 0xffffffffu;

template <typename S>
__device__ __forceinline__ S warp_sum(S value) {
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) value += __shfl_xor_sync(all_lanes, value, bits);
  return value;
}

template <typename S>
__device__ __forceinline__ S warp_max(S value) {
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) {
    const S other = __shfl_xor_sync(all_lanes, value, bits);
    value = other > value ? other : value;
  }
  return value;
}

// The sums over a warp's lanes up to each lane.
template <typename S>
__device__ __forceinline__ S warp_prefix(S value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const S other = __shfl_sync(all_lanes, value, lane >= step ? lane - step : lane);
    if (lane >= step) value += other;
  }
  return value;
}

// The feature of hidden at index `feature` of a tree's subset.
__device__ __forceinline__ int64_t hidden_feature(const Tables& tables, int tree, int64_t feature) {
  return tables.feature_index == nullptr ? feature
                                         : __ldg(tables.feature_index + tree * tables.features + feature);
}

// First entry in tables.path of the path of the row's target, which leaf_plan found valid.
__device__ __forceinline__ int64_t path_begin(const Tables& tables, int tree, int64_t row) {
  return tables.offset[tree * (tables.classes + 1) + tables.target[row]];
}

__host__ __device__ inline int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

}  // namespace hstree
