// hstree::screened_topk: the best classes of a linear layer, from scores of quantized rows and exact scores of a few.
// CPU only: on CUDA hstree.ops.screened_topk computes it in torch's own operators.
#include "cpu/screened_topk.h"

#include <cmath>
#include <type_traits>
#include <utility>

#include "ops/cpu.h"
#include "ops/tensor.h"

namespace hstree {
namespace {

constexpr const char* op = "hstree::screened_topk";

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> screened_topk_cpu(
    const Tensor& query, const Tensor& preview, const Tensor& scale, const Tensor& offset,
    const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias, int64_t n, int64_t k,
    double temperature, bool all) {
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

  const auto contiguous = [](const Tensor& tensor) { return torch::stable::contiguous(tensor); };
  const Tensor from = contiguous(query), table = contiguous(preview), scales = contiguous(scale),
               offsets = contiguous(offset), contexts = contiguous(hidden), vectors = contiguous(weight);
  const Tensor biases = bias ? contiguous(*bias) : vectors;  // unused without one
  const Tensor score = empty(query, {rows, k}, Dtype::Float), index = empty(query, {rows, k}, Dtype::Long);
  const Tensor log_rest = empty(query, {rows}, Dtype::Float);
  const Tensor log_normalizer = empty(query, {rows}, Dtype::Float);
  const Tensor scores = empty(query, {all ? rows : 0, classes}, Dtype::Float);
  const cpu::Preview quantized = {static_cast<const uint8_t*>(table.const_data_ptr()),
                                  const_data<float>(scales),
                                  const_data<float>(offsets),
                                  packed ? 4 : 8,
                                  blocks,
                                  preview.size(1)};
  dispatch(type, [&](auto element) {
    using T = decltype(element);
    if constexpr (!std::is_same_v<T, double>) {
      cpu::screened_topk<T>(
          quantized,
          {rows, classes, hidden.size(1), features, const_data<float>(from), const_data<T>(contexts),
           const_data<T>(vectors), bias ? const_data<T>(biases) : nullptr, n, k,
           static_cast<float>(temperature), data<float>(score), data<int64_t>(index), data<float>(log_rest),
           data<float>(log_normalizer), all ? data<float>(scores) : nullptr});
    }
  });
  return {score, index, log_rest, log_normalizer, scores};
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
