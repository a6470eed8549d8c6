#include "cpu/tree_batch.h"

namespace hstree::cpu {

void check_feature_index(const char* op, const FeatureIndex& f) {
  for (int64_t t = 0; f.index && t < f.trees; ++t) {
    const int32_t* const index = f.index + t * f.features;
    for (int64_t s = 0; s < f.features; ++s) {
      const int32_t lowest = s == 0 ? 0 : index[s - 1] + 1;
      if (index[s] >= lowest && index[s] < f.in_features) continue;
      fail(op, ": feature_index[", t, ", ", s, "]: expected a value in [", lowest, ", ", f.in_features,
           "), as each row increases within the features of hidden; got ", index[s]);
    }
  }
}

FeatureSubsets::FeatureSubsets(const FeatureIndex& f) : features_(f), blocks_((f.in_features + 15) / 16) {
  if (!f.index) return;
  lanes_.resize(f.trees * blocks_);
  for (int64_t t = 0; t < f.trees; ++t) {
    for (int64_t s = 0; s < f.features; ++s) {
      const int32_t feature = f.index[t * f.features + s];
      lanes_[t * blocks_ + feature / 16] |= static_cast<uint16_t>(1 << feature % 16);
    }
  }
}

FeatureSubset FeatureSubsets::operator[](int64_t t) const {
  if (!features_.index) return {nullptr, nullptr};
  return {features_.index + t * features_.features, lanes_.data() + t * blocks_};
}

}  // namespace hstree::cpu
