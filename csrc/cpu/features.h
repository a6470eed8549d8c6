// The features of hidden that a tree reads, and the workspaces for the gathered features.
#pragma once

#include <cstdint>

namespace hstree::cpu {

// S of D features.
struct FeatureSubset {
  const int32_t* index;   // [S] increasing within [0, D), or null: all of them, S = D
  const uint16_t* lanes;  // [D / 16 rounded up] the same as bits, 16 features each; null if index is
};

// Row stride of a workspace: whole vectors, one of them spare because a gather may write beyond the features,
// and not a multiple of 1024 bytes, because such rows would compete for the same cache lines.
inline int64_t workspace_stride(int64_t features) {
  const int64_t stride = (features + 31) / 16 * 16;
  return stride % 128 ? stride : stride + 16;
}

}  // namespace hstree::cpu
