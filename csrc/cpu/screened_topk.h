// CPU kernel of screened_topk: preview scores of all classes from quantized rows, exact scores of the n best of them,
// and the k best of these.
//
//     preview: a_v = offset_v + query_R + scale_v step sum_i row_vi round(query_i / step)  over i < R,
//              step = max_i |query_i| / 127
//     exact:   s_v = W_v . h + b_v for the n classes with the largest a_v, of equal ones those of small numbers
//
// Tensors, contiguous: query [N, R + 1] float32; those of Preview; hidden [N, D] and weight [V, D] of the type T, bias [V]
//   or null. Results in float32: the k largest s_v [N, k] in descending order, equal ones by number, their classes,
//   log_rest [N] = log sum exp(a_v / temperature) over the V - n other classes, -inf without one, log_normalizer [N],
//   which adds the exp(s_v / temperature), and, unless null, the scores of all classes [N, V]: s_v or a_v.
// A row with a query that is not finite gets NaN and the classes 0 to k - 1; elsewhere an a_v that is NaN counts as
//   -inf, and an s_v that is NaN as the largest. What fills up the last block of the preview counts for nothing.
// Integer sums are exact, others are taken in float32.
// Work O(N (V R + n D)); a thread keeps 32 bytes for each class.
// No atomics; threads divide classes, rows and the n best: the result of a row depends neither on their number nor on
//   other rows.
// The maximum of each of more than n groups of classes bounds the n-th largest from below, so that the selection looks
//   at few classes. Source of the method: Shim, Lee, Choi, Boo and Sung, "SVD-softmax: fast softmax approximation on
//   large vocabulary neural networks" (NeurIPS 2017).
#pragma once

#include <cstdint>

#include "cpu/preview_kernels.h"

namespace hstree::cpu {

template <typename T>
struct ScreenedTopk {
  int64_t rows;              // N
  int64_t classes;           // V
  int64_t in_features;       // D
  int64_t preview_features;  // R
  const float* query;
  const T* hidden;
  const T* weight;
  const T* bias;
  int64_t n;
  int64_t k;  // at most n
  float temperature;
  float* score;
  int64_t* index;
  float* log_rest;
  float* log_normalizer;
  float* all;
};

template <typename T>
void screened_topk(const Preview& preview, const ScreenedTopk<T>& wanted);

}  // namespace hstree::cpu
