// hstree::screened_topk: the best classes of a linear layer, from scores of quantized rows and exact scores of a few.
#include "cpu/screened_topk.h"

#include <cmath>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/screened_topk.h"
#include "ops/cpu.h"
#include "ops/cuda.h"

namespace hstree {
namespace {

constexpr const char* op = "hstree::screened_topk";

// Contiguous tensors.
struct Arguments {
  ScalarType type;  // of hidden, weight and bias
  int bits;
  Tensor query, preview, scale, offset, hidden, weight;
  std::optional<Tensor> bias;
  int64_t n, k;
  float temperature;
  Tensor score, index, log_rest, log_normalizer;  // new
  std::optional<Tensor> all;                      // new, or not wanted

  int64_t rows() const { return query.size(0); }
  int64_t classes() const { return weight.size(0); }
  int64_t in_features() const { return hidden.size(1); }
  int64_t preview_features() const { return query.size(1) - 1; }
  float* all_scores() const { return all ? data<float>(*all) : nullptr; }
};

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <void (*kernel)(const Arguments&)>
Result screened_topk_(const Tensor& query, const Tensor& preview, const Tensor& scale, const Tensor& offset,
                      const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                      int64_t n, int64_t k, double temperature, bool all) {
  check_dim(op, "query", query, 2, "[N, R + 1]");
  check(query.size(1) >= 2, op, ": query: expected shape [N, R + 1] with R of at least 1, got ",
        shape_of(query));
  check_dtype(op, "query", query, Dtype::Float);
  const int64_t rows = query.size(0), features = query.size(1) - 1;
  check_dim(op, "hidden", hidden, 2, "[N, D]");
  check_size(op, "hidden", hidden, 0, rows, "rows of query");
  check_dim(op, "weight", weight, 2, "[V, D]");
  check_size(op, "weight", weight, 1, hidden.size(1), "features of hidden");
  const int64_t classes = weight.size(0), blocks = (classes + 15) / 16;
  check(classes >= 1 && classes < INT32_MAX, op, ": weight: expected 1 to 2147483646 rows, got ", classes);
  const ScalarType type = element_type(op, "hidden", hidden);
  check(type != ScalarType::float64, op, ": hidden: expected dtype float32, bfloat16 or float16, got Double");
  check_dtype(op, "weight", weight, hidden.scalar_type());
  if (bias) {
    check_dim(op, "bias", *bias, 1, "[V]");
    check_size(op, "bias", *bias, 0, classes, "rows of weight");
    check_dtype(op, "bias", *bias, hidden.scalar_type());
  }
  const bool packed = preview.scalar_type() == Dtype::Byte;
  check(packed || preview.scalar_type() == Dtype::Char, op, ": preview: expected dtype int8 or uint8, got ",
        torch::headeronly::toString(preview.scalar_type()));
  const int64_t per_group = packed ? 8 : 4;
  check_dim(op, "preview", preview, 4, "[blocks, groups, 16, 4]");
  check_size(op, "preview", preview, 0, blocks, "16 rows of weight each");
  check_size(op, "preview", preview, 1, (features + per_group - 1) / per_group,
             packed ? "8 of R features each" : "4 of R features each");
  check_size(op, "preview", preview, 2, 16, "classes");
  check_size(op, "preview", preview, 3, 4, "bytes");
  for (const auto& [name, tensor] : {std::pair("scale", &scale), std::pair("offset", &offset)}) {
    check_dim(op, name, *tensor, 1, "[16 blocks]");
    check_size(op, name, *tensor, 0, 16 * blocks, "16 classes for each block");
    check_dtype(op, name, *tensor, Dtype::Float);
  }
  check(n >= 1 && n <= classes, op, ": n: expected 1 to ", classes, " (the number of classes), got ", n);
  check(k >= 1 && k <= n, op, ": k: expected 1 to ", n, " (n), got ", k);
  check(std::isfinite(temperature) && temperature > 0, op, ": temperature: expected a positive number, got ",
        temperature);
  for (const auto& [name, tensor] :
       {std::pair("preview", &preview), std::pair("scale", &scale), std::pair("offset", &offset),
        std::pair("hidden", &hidden), std::pair("weight", &weight),
        std::pair("bias", bias ? &*bias : &query)}) {
    check_device(op, name, *tensor, query);
  }
  const auto contiguous = [](const Tensor& tensor) { return torch::stable::contiguous(tensor); };
  const Tensor scores = empty(query, {all ? rows : 0, classes}, Dtype::Float);
  const Arguments a = {type,
                       packed ? 4 : 8,
                       contiguous(query),
                       contiguous(preview),
                       contiguous(scale),
                       contiguous(offset),
                       contiguous(hidden),
                       contiguous(weight),
                       hstree::contiguous(bias),
                       n,
                       k,
                       static_cast<float>(temperature),
                       empty(query, {rows, k}, Dtype::Float),
                       empty(query, {rows, k}, Dtype::Long),
                       empty(query, {rows}, Dtype::Float),
                       empty(query, {rows}, Dtype::Float),
                       all ? std::optional(scores) : std::nullopt};
  kernel(a);
  return {a.score, a.index, a.log_rest, a.log_normalizer, scores};
}

#ifndef HSTREE_CUDA_ONLY
void screened_topk_cpu(const Arguments& a) {
  const cpu::Preview quantized = {static_cast<const uint8_t*>(a.preview.const_data_ptr()),
                                  const_data<float>(a.scale),
                                  const_data<float>(a.offset),
                                  a.bits,
                                  a.preview.size(0),
                                  a.preview.size(1)};
  dispatch(a.type, [&](auto element) {
    using T = decltype(element);
    if constexpr (!std::is_same_v<T, double>) {
      cpu::screened_topk<T>(
          quantized,
          {a.rows(), a.classes(), a.in_features(), a.preview_features(), const_data<float>(a.query),
           const_data<T>(a.hidden), const_data<T>(a.weight), const_data<T>(a.bias), a.n, a.k, a.temperature,
           data<float>(a.score), data<int64_t>(a.index), data<float>(a.log_rest),
           data<float>(a.log_normalizer), a.all_scores()});
    }
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(hstree, m) {
  m.def(
      "screened_topk(Tensor query, Tensor preview, Tensor scale, Tensor offset, Tensor hidden, Tensor "
      "weight, Tensor? bias, int n, int k, float temperature=1.0, bool all=False) -> (Tensor score, Tensor "
      "index, Tensor log_rest, Tensor log_normalizer, Tensor scores)");
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CPU, m) {
  m.impl("screened_topk", HSTREE_CPU_BOX(&screened_topk_<screened_topk_cpu>));
}
#endif

#ifdef HSTREE_CUDA
void screened_topk_cuda(const Arguments& a) {
  if (a.rows() == 0) return;
  const CudaCall call(a.query);
  const bool is_aligned = reinterpret_cast<uintptr_t>(a.preview.const_data_ptr()) % 16 == 0;
  const Tensor table = is_aligned ? a.preview : torch::stable::clone(a.preview);
  const ScreenedTopk arguments = {table.const_data_ptr(),
                                  const_data<float>(a.scale),
                                  const_data<float>(a.offset),
                                  const_data<float>(a.query),
                                  a.hidden.const_data_ptr(),
                                  a.weight.const_data_ptr(),
                                  const_data<void>(a.bias),
                                  a.bits,
                                  table.size(0),
                                  table.size(1),
                                  a.rows(),
                                  a.classes(),
                                  a.in_features(),
                                  a.preview_features(),
                                  a.n,
                                  a.k,
                                  a.temperature,
                                  data<float>(a.score),
                                  data<int64_t>(a.index),
                                  data<float>(a.log_rest),
                                  data<float>(a.log_normalizer),
                                  a.all_scores()};
  const Tensor workspace = empty(a.query, {screened_topk_workspace_bytes(arguments)}, Dtype::Byte);
  screened_topk(a.type, arguments, workspace.mutable_data_ptr(), call.stream());
}

STABLE_TORCH_LIBRARY_IMPL(hstree, CUDA, m) {
  m.impl("screened_topk", TORCH_BOX(&screened_topk_<screened_topk_cuda>));
}
#endif

}  // namespace
}  // namespace hstree
