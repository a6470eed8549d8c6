// Checked arguments and results of hstree::screened_topk, for both devices.
#pragma once

#include <cmath>
#include <tuple>
#include <utility>

#include "ops/tensor.h"

namespace hstree {

using ScreenedTopkResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Contiguous tensors.
struct ScreenedTopkTensors {
  ScalarType type;  // of hidden, weight and bias
  int bits;
  Tensor query, preview, scale, offset, hidden, weight;
  std::optional<Tensor> bias;
  Tensor score, index, log_rest, log_normalizer, all;

  int64_t rows() const { return query.size(0); }
  int64_t classes() const { return weight.size(0); }
  ScreenedTopkResult result() const { return {score, index, log_rest, log_normalizer, all}; }
};

inline ScreenedTopkTensors screened_topk_tensors(const Tensor& query, const Tensor& preview,
                                                 const Tensor& scale, const Tensor& offset,
                                                 const Tensor& hidden, const Tensor& weight,
                                                 const std::optional<Tensor>& bias, int64_t n, int64_t k,
                                                 double temperature, bool all) {
  const char* op = "hstree::screened_topk";
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
  return {type,
          packed ? 4 : 8,
          contiguous(query),
          contiguous(preview),
          contiguous(scale),
          contiguous(offset),
          contiguous(hidden),
          contiguous(weight),
          bias ? std::optional(contiguous(*bias)) : std::nullopt,
          empty(query, {rows, k}, Dtype::Float),
          empty(query, {rows, k}, Dtype::Long),
          empty(query, {rows}, Dtype::Float),
          empty(query, {rows}, Dtype::Float),
          empty(query, {all ? rows : 0, classes}, Dtype::Float)};
}

}  // namespace hstree
