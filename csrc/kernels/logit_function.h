// The increasing function f of a logit, as passed to the kernels of both devices.
#pragma once

#include <cmath>
#include <cstdint>

namespace hstree {

// Without a table, f(x) = x + (k - 1) log sigmoid(x - c): the identity if k = 1, for any c. With a table,
//   f(x) = P_j(uc) + P_j'(uc) (u - uc),  P_j(u) = sum_m table[j, m] u^m,  rate = K / (2 radius),
//   j = clamp(floor(x rate + K / 2), 0, K - 1),  u = x rate + K / 2 - j,  uc = clamp(u, 0, 1).
struct LogitFunction {
  double c, k;
  const void* table;  // [intervals, width] of the accumulation dtype, contiguous, or null; on CUDA aligned
                      // to 16 bytes
  int64_t intervals;  // K, 1 to 2^23, so that K / 2 - j is exact in float32
  int width;          // 2 or 4
  double radius;      // positive, finite

  bool identity() const { return !table && k == 1; }
  double rate() const { return static_cast<double>(intervals) / (2 * radius); }
};

// The largest e such that count * largest * 2^e < 2^62, for sums in 64-bit integers of quantum 2^-e; at most
// 1023, so that 2^e is a double. count >= 1; largest: finite, not negative; 0 gives 0.
inline int fixed_point_exponent(double count, double largest) {
  if (!(largest > 0)) return 0;
  int count_exponent, largest_exponent, exponent;
  const double product = std::frexp(count, &count_exponent) * std::frexp(largest, &largest_exponent);
  std::frexp(product, &exponent);
  const int e = 62 - (count_exponent + largest_exponent + exponent);
  return e < 1023 ? e : 1023;
}

}  // namespace hstree
