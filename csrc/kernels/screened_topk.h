// Launcher of screened_topk: preview scores of all classes from quantized rows, exact scores of the n best of them, and
// the k best of these. cpu/screened_topk.h has the formulas.
//
// Plain C++: no CUDA and no torch include. All arrays are contiguous and on the device of the stream. The launcher
// throws std::runtime_error when a launch fails, launches nothing when there is no row, and never synchronizes.
#pragma once

#include <cstdint>

#include "limits.h"

typedef struct CUstream_st* cudaStream_t;

namespace hstree {

struct ScreenedTopk {
  const void* preview;       // [blocks, groups, 16, 4], aligned to 16 bytes, as in cpu/preview_kernels.h
  const float* scale;        // [blocks, 16]
  const float* offset;       // [blocks, 16]
  const float* query;        // [N, R + 1]
  const void* hidden;        // [N, D], as weight and bias float32, bfloat16 or float16 (others throw)
  const void* weight;        // [V, D]
  const void* bias;          // [V] or null
  int bits;                  // 8 or 4
  int64_t blocks;            // of 16 classes
  int64_t groups;            // of 4 features, 8 for 4 bits
  int64_t rows;              // N
  int64_t classes;           // V, 1 to 2^31 - 2
  int64_t in_features;       // D
  int64_t preview_features;  // R
  int64_t n;                 // 1 to V
  int64_t k;                 // 1 to n
  float temperature;
  float* score;           // [N, k]
  int64_t* index;         // [N, k]
  float* log_rest;        // [N]
  float* log_normalizer;  // [N]
  float* all;             // [N, V] or null
};

// Of workspace, aligned to 256 bytes.
int64_t screened_topk_workspace_bytes(const ScreenedTopk& sizes);

void screened_topk(ScalarType type, const ScreenedTopk& arguments, void* workspace, cudaStream_t stream);

}  // namespace hstree
