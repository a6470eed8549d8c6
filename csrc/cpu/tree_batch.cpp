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
           batch.in_features, "), as each row increases within the features of hidden; got ", index[s]);
    }
  }
}

FeatureSubsets::FeatureSubsets(const TreeBatch& batch)
    : batch_(batch), blocks_((batch.in_features + 15) / 16) {
  if (!batch.feature_index) return;
  lanes_.resize(batch.trees * blocks_);
  for (int64_t t = 0; t < batch.trees; ++t) {
    for (int64_t s = 0; s < batch.features; ++s) {
      const int32_t feature = batch.feature_index[t * batch.features + s];
      lanes_[t * blocks_ + feature / 16] |= static_cast<uint16_t>(1 << feature % 16);
    }
  }
}

FeatureSubset FeatureSubsets::operator[](int64_t t) const {
  if (!batch_.feature_index) return {nullptr, nullptr};
  return {batch_.feature_index + t * batch_.features, lanes_.data() + t * blocks_};
}

}  // namespace hstree::cpu
