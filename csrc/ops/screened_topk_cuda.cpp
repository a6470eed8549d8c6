// hstree::screened_topk on CUDA. The schema is in screened_topk.cpp.
#ifdef HSTREE_CUDA
#include "kernels/screened_topk.h"
#include "ops/cuda.h"
#include "ops/screened_topk.h"

namespace hstree {
namespace {

ScreenedTopkResult screened_topk_cuda(const Tensor& query, const Tensor& preview, const Tensor& scale,
                                      const Tensor& offset, const Tensor& hidden, const Tensor& weight,
                                      const std::optional<Tensor>& bias, int64_t n, int64_t k,
                                      double temperature, bool all) {
  const ScreenedTopkTensors t =
      screened_topk_tensors(query, preview, scale, offset, hidden, weight, bias, n, k, temperature, all);
  if (t.rows() == 0) return t.result();
  const CudaCall call(query);
  const bool is_aligned = reinterpret_cast<uintptr_t>(t.preview.const_data_ptr()) % 16 == 0;
  const Tensor table = is_aligned ? t.preview : torch::stable::clone(t.preview);
  const ScreenedTopk arguments = {table.const_data_ptr(),
                                  const_data<float>(t.scale),
                                  const_data<float>(t.offset),
                                  const_data<float>(t.query),
                                  t.hidden.const_data_ptr(),
                                  t.weight.const_data_ptr(),
                                  t.bias ? t.bias->const_data_ptr() : nullptr,
                                  t.bits,
                                  table.size(0),
                                  table.size(1),
                                  t.rows(),
                                  t.classes(),
                                  hidden.size(1),
                                  query.size(1) - 1,
                                  n,
                                  k,
                                  static_cast<float>(temperature),
                                  data<float>(t.score),
                                  data<int64_t>(t.index),
                                  data<float>(t.log_rest),
                                  data<float>(t.log_normalizer),
                                  all ? data<float>(t.all) : nullptr};
  const Tensor workspace = empty(query, {screened_topk_workspace_bytes(arguments)}, Dtype::Byte);
  screened_topk(t.type, arguments, workspace.mutable_data_ptr(), call.stream());
  return t.result();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("screened_topk", TORCH_BOX(&screened_topk_cuda));
}

}  // namespace hstree
#endif
