// The launchers of csrc/kernels with C linkage, for ctypes: each returns null, or the text of the error.
#include <cstdint>
#include <exception>
#include <string>

#include "feature_gather.h"
#include "leaf_order.h"
#include "monotone.h"
#include "path.h"
#include "plif.h"
#include "sparse_adam.h"
#include "wide.h"

using namespace hstree;  // NOLINT: test code

namespace {

std::string last_error;

template <typename Function>
const char* caught(Function function) {
  try {
    function();
  } catch (const std::exception& error) {
    last_error = error.what();
    return last_error.c_str();
  }
  return nullptr;
}

}  // namespace

extern "C" {

void emu_order(int order, unsigned seed) {
  emu::order = static_cast<emu::Order>(order);
  emu::seed = seed;
}
int64_t emu_sizes(int index) {
  const int64_t sizes[] = {sizeof(Tables),        sizeof(LeafOrder),        sizeof(PathForward),
                           sizeof(PathBackward),  sizeof(FeatureGather),    sizeof(LogitFunction),
                           sizeof(MonotoneSizes), sizeof(MonotoneBackward), sizeof(SparseAdam)};
  return sizes[index];
}
float emu_half_to_float(uint16_t bits) {
  return __half2float({bits});
}
uint16_t emu_float_to_half(float value) {
  return __float2half_rn(value).bits;
}
float emu_bfloat16_to_float(uint16_t bits) {
  return __bfloat162float({bits});
}
uint16_t emu_float_to_bfloat16(float value) {
  return __float2bfloat16_rn(value).bits;
}

const char* emu_check_features(const Tables* tables, int32_t* valid) {
  return caught([&] { check_features(*tables, valid, nullptr); });
}
const char* emu_leaf_key(const Tables* tables, int32_t* key, int32_t* row_length) {
  return caught([&] { leaf_key(*tables, key, row_length, nullptr); });
}
const char* emu_leaf_plan(const Tables* tables, const int64_t* order, const int32_t* row_length,
                          int32_t* length, int32_t* shared, int64_t* count) {
  return caught([&] { leaf_plan(*tables, order, row_length, length, shared, count, nullptr); });
}
const char* emu_slot_index(const Tables* tables, const LeafOrder* leaf_order, const int64_t* slot,
                           int64_t nnz, int64_t* index) {
  return caught([&] { slot_index(*tables, *leaf_order, slot, nnz, index, nullptr); });
}
int64_t emu_workspace_bytes(int type, const Tables* tables) {
  return backward_workspace_bytes(static_cast<ScalarType>(type), *tables);
}

const char* emu_path_forward(int type, const Tables* tables, const LeafOrder* leaf_order,
                             const PathForward* tensors) {
  return caught(
      [&] { path_forward(static_cast<ScalarType>(type), *tables, *leaf_order, *tensors, nullptr); });
}
const char* emu_path_backward_input(int type, const Tables* tables, const LeafOrder* leaf_order,
                                    const PathBackward* tensors, void* grad_input) {
  return caught([&] {
    path_backward_input(static_cast<ScalarType>(type), *tables, *leaf_order, *tensors, grad_input, nullptr);
  });
}
const char* emu_path_backward_weight(int type, const Tables* tables, const LeafOrder* leaf_order,
                                     const int64_t* slot, const PathBackward* tensors, void* workspace,
                                     void* grad_weight, void* grad_bias) {
  return caught([&] {
    path_backward_weight(static_cast<ScalarType>(type), *tables, *leaf_order, slot, *tensors, workspace,
                         grad_weight, grad_bias, nullptr);
  });
}

const char* emu_wide_forward(int type, const Tables* tables, const LeafOrder* leaf_order,
                             const WideForward* tensors) {
  return caught(
      [&] { wide_forward(static_cast<ScalarType>(type), *tables, *leaf_order, *tensors, nullptr); });
}
const char* emu_wide_backward_input(int type, const Tables* tables, const LeafOrder* leaf_order,
                                    const WideBackward* tensors, void* sum, void* grad_input) {
  return caught([&] {
    wide_backward_input(static_cast<ScalarType>(type), *tables, *leaf_order, *tensors, sum, grad_input,
                        nullptr);
  });
}
const char* emu_wide_backward_weight(int type, const Tables* tables, const LeafOrder* leaf_order,
                                     const int64_t* slot, const WideBackward* tensors, void* workspace,
                                     void* grad_weight, void* grad_bias) {
  return caught([&] {
    wide_backward_weight(static_cast<ScalarType>(type), *tables, *leaf_order, slot, *tensors, workspace,
                         grad_weight, grad_bias, nullptr);
  });
}

const char* emu_feature_gather(int type, const FeatureGather* sizes, const void* input, void* output) {
  return caught([&] { feature_gather(static_cast<ScalarType>(type), *sizes, input, output, nullptr); });
}
const char* emu_feature_gather_backward(int type, const FeatureGather* sizes, const void* grad,
                                        int32_t* inverse, void* grad_input) {
  return caught([&] {
    feature_gather_backward(static_cast<ScalarType>(type), *sizes, grad, inverse, grad_input, nullptr);
  });
}

const char* emu_plif(int type, const LogitFunction* function, int64_t elements, const void* input,
                     void* output) {
  return caught([&] { plif(static_cast<ScalarType>(type), *function, elements, input, output, nullptr); });
}
int64_t emu_plif_workspace_bytes(const LogitFunction* function) {
  return plif_workspace_bytes(*function);
}
const char* emu_plif_backward(int type, const LogitFunction* function, int64_t elements, const void* grad,
                              const void* input, void* workspace, void* grad_input, void* grad_table) {
  return caught([&] {
    plif_backward(static_cast<ScalarType>(type), *function, elements, grad, input, workspace, grad_input,
                  grad_table, nullptr);
  });
}

const char* emu_monotone_log_prob(int type, const LogitFunction* function, const MonotoneSizes* sizes,
                                  const void* logits, const int64_t* target, void* log_prob,
                                  void* log_normalizer) {
  return caught([&] {
    monotone_log_prob(static_cast<ScalarType>(type), *function, *sizes, logits, target, log_prob,
                      log_normalizer, nullptr);
  });
}
int64_t emu_monotone_workspace_bytes(const LogitFunction* function) {
  return monotone_workspace_bytes(*function);
}
const char* emu_monotone_log_prob_backward(int type, const LogitFunction* function,
                                           const MonotoneSizes* sizes, const MonotoneBackward* tensors,
                                           void* logits, void* workspace, double* grad_table) {
  return caught([&] {
    monotone_log_prob_backward(static_cast<ScalarType>(type), *function, *sizes, *tensors, logits, workspace,
                               grad_table, nullptr);
  });
}

const char* emu_sparse_adam(int type, const SparseAdam* tensors) {
  return caught([&] { sparse_adam(static_cast<ScalarType>(type), *tensors, nullptr); });
}

}  // extern "C"
