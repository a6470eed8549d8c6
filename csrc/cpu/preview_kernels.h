// Kernels of screened_topk for one instruction set.
#pragma once

#include <cstdint>

namespace hstree::cpu {

// The quantized rows of all classes, in blocks of 16 classes; classes beyond the last have the offset -inf.
struct Preview {
  const uint8_t* rows;  // [blocks, groups, 16, 4]
  const float* scale;   // [blocks, 16]
  const float* offset;  // [blocks, 16]
  int64_t bits;         // 8: a byte is a number, int8. 4: two, low nibble first, each plus 8
  int64_t blocks;
  int64_t groups;  // of 4 features, 8 for 4 bits: low nibbles are the first 4, high ones the others

  int64_t features() const { return groups * (bits == 8 ? 4 : 8); }
};

// Quantized queries: 1, 2, 4 or 8.
struct PreviewQueries {
  static constexpr int64_t most = 8;

  int64_t count;
  const int8_t* values;  // [count, features], -127 to 127
  const float* step;     // [count] that of a value
  const int32_t* sum;    // [count] of the values
  const float* shift;    // [count]
  float* score;          // [count, blocks, 16]
  float* largest;        // [count, 16 blocks / width] of each vector
};

struct PreviewKernels {
  int64_t width;  // numbers of a vector, which divides 16

  // score_v = offset_v + shift + scale_v step sum_i row_vi value_i of the classes of begin <= block < end, -inf for NaN;
  // and the largest of each `width` of them.
  void (*scores)(const Preview& preview, const PreviewQueries& queries, int64_t begin, int64_t end);

  // log sum_v exp(sharpness z_v); -inf if no z_v is larger.
  float (*log_sum_exp)(const float* z, int64_t count, float sharpness);
};

}  // namespace hstree::cpu
