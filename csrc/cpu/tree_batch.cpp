#include "cpu/tree_batch.h"

namespace hstree::cpu {

void check_feature_index(const TreeBatch& batch) {
  if (!batch.feature_index) return;
  for (int64_t t = 0; t < batch.trees; ++t) {
    const int32_t* index = batch.feature_index + t * batch.features;
    for (int64_t s = 0; s < batch.features; ++s) {
      const int32_t lowest = s == 0 ? 0 : index[s - 1] + 1;
      if (index[s] >= lowest && index[s] < batch.in_features) continue;
      fail(batch.op, ": feature_index[", t, ", ", s, "]: expected a value in [", lowest, ", ",
           batch.in_features, "), as each row increases within the input's features; got ", index[s]);
    }
  }
}

}  // namespace hstree::cpu
