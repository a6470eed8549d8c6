// hstree::screened_topk: the best classes of a linear layer, from scores of quantized rows and exact scores of a few.
// screened_topk_cuda.cpp registers the CUDA implementation.
#include "cpu/screened_topk.h"

#include <type_traits>

#include "ops/cpu.h"
#include "ops/screened_topk.h"

namespace hstree {
namespace {

ScreenedTopkResult screened_topk_cpu(const Tensor& query, const Tensor& preview, const Tensor& scale,
                                     const Tensor& offset, const Tensor& hidden, const Tensor& weight,
                                     const std::optional<Tensor>& bias, int64_t n, int64_t k,
                                     double temperature, bool all) {
  const ScreenedTopkTensors t =
      screened_topk_tensors(query, preview, scale, offset, hidden, weight, bias, n, k, temperature, all);
  const cpu::Preview quantized = {static_cast<const uint8_t*>(t.preview.const_data_ptr()),
                                  const_data<float>(t.scale),
                                  const_data<float>(t.offset),
                                  t.bits,
                                  t.preview.size(0),
                                  t.preview.size(1)};
  dispatch(t.type, [&](auto element) {
    using T = decltype(element);
    if constexpr (!std::is_same_v<T, double>) {
      cpu::screened_topk<T>(
          quantized,
          {t.rows(), t.classes(), hidden.size(1), query.size(1) - 1, const_data<float>(t.query),
           const_data<T>(t.hidden), const_data<T>(t.weight), t.bias ? const_data<T>(*t.bias) : nullptr, n, k,
           static_cast<float>(temperature), data<float>(t.score), data<int64_t>(t.index),
           data<float>(t.log_rest), data<float>(t.log_normalizer), all ? data<float>(t.all) : nullptr});
    }
  });
  return t.result();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "screened_topk(Tensor query, Tensor preview, Tensor scale, Tensor offset, Tensor hidden, Tensor "
      "weight, "
      "Tensor? bias, int n, int k, float temperature=1.0, bool all=False) -> (Tensor score, Tensor index, "
      "Tensor log_rest, Tensor log_normalizer, Tensor scores)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("screened_topk", HSTREE_CPU_BOX(&screened_topk_cpu));
}

}  // namespace hstree
