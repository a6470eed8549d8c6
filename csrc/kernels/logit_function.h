// The increasing function f of a logit that plif.h and monotone.h take.
#pragma once

#include <cstdint>

namespace hstree {

// Without a table f(x) = x + (k - 1) log sigmoid(x - c), the identity at k = 1 whatever c. With one
//   f(x) = P_j(uc) + P_j'(uc) (u - uc),  P_j(u) = sum_m table[j, m] u^m,  rate = K / (2 radius),
//   j = clamp(floor(x rate + K / 2), 0, K - 1),  u = x rate + K / 2 - j,  uc = clamp(u, 0, 1).
struct PointwiseFunction {
  double c, k;
  const void* table;  // [intervals, width], contiguous and aligned to 16 bytes, or null
  int64_t intervals;  // K, 1 to 2^23, so that K / 2 - j is exact in float32
  int width;          // 2 or 4
  double radius;      // positive, finite

  bool identity() const { return table == nullptr && k == 1; }
  double rate() const { return static_cast<double>(intervals) / (2 * radius); }
};

}  // namespace hstree
