// The arguments of piecewise and target_log_softmax, checked and made contiguous for the kernels of both
// devices. Every check throws std::runtime_error with the argument's name, the expected value and the actual
// one.
//
// Dimensions: R rows, V classes, K intervals.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/logit_function.h"
#include "ops/tensor.h"

namespace hstree {

constexpr int64_t max_intervals = 1 << 23;

// tensor has the device of `first`, whose name is first_name; its dtype too, unless dtype is given.
inline void check_like(const char* op, const char* name, const Tensor& tensor, const char* first_name,
                       const Tensor& first, std::optional<Dtype> dtype = std::nullopt) {
  const Dtype expected = dtype ? *dtype : first.scalar_type();
  check(tensor.scalar_type() == expected, op, ": ", name, ": expected dtype ",
        torch::headeronly::toString(expected), " for ", first_name, " of dtype ",
        torch::headeronly::toString(first.scalar_type()), ", got ",
        torch::headeronly::toString(tensor.scalar_type()));
  check(tensor.device() == first.device(), op, ": ", name, ": expected the device of ", first_name, ", ",
        first.is_cuda() ? "cuda:" : "cpu:", static_cast<int>(first.get_device()), ", got ",
        tensor.is_cuda() ? "cuda:" : "cpu:", static_cast<int>(tensor.get_device()));
}

inline void check_radius(const char* op, const LogitFunction& function, Dtype accumulate) {
  const bool wide = accumulate == Dtype::Double;
  const double largest = wide ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  const double smallest = wide ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  check(std::isfinite(function.radius) && function.radius > 0, op,
        ": radius: expected a finite number above 0, got ", function.radius);
  check(function.rate() >= smallest && function.rate() <= largest, op,
        ": radius: expected K / (2 radius) in ", torch::headeronly::toString(accumulate), ", got ",
        function.intervals, " / (2 * ", function.radius, ")");
}

// table [K, 2] or [K, 4], of the accumulation dtype of `first`; returned contiguous.
inline Tensor checked_table(const char* op, const Tensor& table, const char* first_name,
                            const Tensor& first) {
  check_dim(op, "table", table, 2, "[K, 2] or [K, 4]");
  check(table.size(1) == 2 || table.size(1) == 4, op, ": table: expected shape [K, 2] or [K, 4], got ",
        shape_of(table));
  check(table.size(0) >= 1 && table.size(0) <= max_intervals, op, ": table: expected 1 to ", max_intervals,
        " intervals, got shape ", shape_of(table));
  check_like(op, "table", table, first_name, first, accumulate_dtype(first));
  return torch::stable::contiguous(table);
}

inline LogitFunction table_function(const char* op, const Tensor& table, double radius) {
  const LogitFunction function = {
      0, 1, table.const_data_ptr(), table.size(0), static_cast<int>(table.size(1)), radius};
  check_radius(op, function, table.scalar_type());
  return function;
}

struct MonotoneArguments {
  const char* op;
  ScalarType type;              // of logits: float32 or float64
  Tensor logits;                // [R, V]; rows are contiguous
  Tensor target;                // [R] int64, contiguous
  std::optional<Tensor> table;  // contiguous
  LogitFunction function;       // with table's pointer

  int64_t rows() const { return logits.size(0); }
  int64_t classes() const { return logits.size(1); }
  int64_t stride() const { return rows() > 1 ? logits.stride(0) : classes(); }
};

// [K, width], or [0, 0] if there is no table or its gradient is not needed.
inline std::vector<int64_t> grad_table_shape(const MonotoneArguments& a, bool table_gradient) {
  if (!table_gradient) return {0, 0};
  return {a.function.intervals, a.function.width};
}

// in_place: logits are overwritten, so they must already have the layout of the kernels: contiguous rows that do
// not overlap.
inline MonotoneArguments monotone_arguments(const char* op, bool in_place, const Tensor& logits,
                                            const Tensor& target, double c, double k,
                                            const std::optional<Tensor>& table, double radius) {
  check_dim(op, "logits", logits, 2, "[R, V]");
  check(logits.scalar_type() == Dtype::Float || logits.scalar_type() == Dtype::Double, op,
        ": logits: expected dtype float32 or float64, got ",
        torch::headeronly::toString(logits.scalar_type()));
  check(logits.size(1) >= 1, op, ": logits: expected at least 1 class, got shape ", shape_of(logits));
  const bool as_is = logits.is_contiguous() || (logits.stride(1) == 1 && logits.stride(0) >= logits.size(1));
  check(!in_place || as_is, op, ": logits: expected contiguous rows, got strides ", logits.stride(0), " and ",
        logits.stride(1));
  check_dim(op, "target", target, 1, "[R]");
  check_dtype(op, "target", target, Dtype::Long);
  check_like(op, "target", target, "logits", logits, Dtype::Long);
  check_size(op, "target", target, 0, logits.size(0), "rows of logits");

  MonotoneArguments arguments = {op,
                                 element_type(op, "logits", logits),
                                 as_is ? logits : torch::stable::contiguous(logits),
                                 torch::stable::contiguous(target),
                                 std::nullopt,
                                 {c, k, nullptr, 0, 0, 0}};
  if (table) {
    arguments.table = checked_table(op, *table, "logits", logits);
    arguments.function = table_function(op, *arguments.table, radius);
  } else {
    check(std::isfinite(c), op, ": c: expected a finite number, got ", c);
    check(std::isfinite(k) && k > 0, op, ": k: expected a finite number above 0, got ", k);
  }
  return arguments;
}

// grad_log_prob or log_normalizer: [R], dtype and device of logits; returned contiguous.
inline Tensor checked_row_values(const MonotoneArguments& arguments, const char* name, const Tensor& values) {
  check_dim(arguments.op, name, values, 1, "[R]");
  check_size(arguments.op, name, values, 0, arguments.rows(), "rows of logits");
  check_like(arguments.op, name, values, "logits", arguments.logits);
  return torch::stable::contiguous(values);
}

// bias: [V], dtype and device of logits; returned contiguous.
inline std::optional<Tensor> checked_bias(const MonotoneArguments& arguments, const char* name,
                                          const std::optional<Tensor>& bias) {
  if (!bias) return std::nullopt;
  check_dim(arguments.op, name, *bias, 1, "[V]");
  check_size(arguments.op, name, *bias, 0, arguments.classes(), "classes of logits");
  check_like(arguments.op, name, *bias, "logits", arguments.logits);
  return torch::stable::contiguous(*bias);
}

// low: 16-bit rows for the gradient of float32 logits, with gaps between them.
inline void check_low(const MonotoneArguments& arguments, const std::optional<Tensor>& low) {
  if (!low) return;
  check_dim(arguments.op, "low", *low, 2, "[R, V]");
  check_size(arguments.op, "low", *low, 0, arguments.rows(), "rows of logits");
  check_size(arguments.op, "low", *low, 1, arguments.classes(), "classes of logits");
  const Dtype dtype = low->scalar_type();
  check(dtype == Dtype::BFloat16 || dtype == Dtype::Half, arguments.op,
        ": low: expected dtype bfloat16 or float16, got ", torch::headeronly::toString(dtype));
  check(arguments.type == ScalarType::float32, arguments.op,
        ": low: expected None for logits that are not float32, got ", torch::headeronly::toString(dtype));
  check_like(arguments.op, "low", *low, "logits", arguments.logits, dtype);
  check(low->stride(1) == 1 && low->stride(0) >= low->size(1), arguments.op,
        ": low: expected contiguous rows, got strides ", low->stride(0), " and ", low->stride(1));
}

// The rest is for CUDA.

// table, copied if its address is not aligned for loading an interval in one access.
inline Tensor aligned_table(const Tensor& table) {
  const bool aligned = reinterpret_cast<uintptr_t>(table.const_data_ptr()) % 16 == 0;
  return aligned ? table : torch::stable::clone(table);
}

// bytes: a multiple of 8.
inline Tensor zero_workspace(const Tensor& like, int64_t bytes) {
  return zeros(like, {bytes / 8}, Dtype::Long);
}

}  // namespace hstree
