#include "cpu/feature_gather.h"

#include "cpu/tree_batch.h"

namespace hstree::cpu {
namespace {

template <typename E>
void gather(const void* hidden, const int32_t* feature_index, int64_t rows, int64_t in_features,
            int64_t places, void* output) {
  parallel(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const E* from = static_cast<const E*>(hidden) + n * in_features;
      E* to = static_cast<E*>(output) + n * places;
      for (int64_t p = 0; p < places; ++p) to[p] = from[feature_index[p]];
    }
  });
}

}  // namespace

void feature_gather(int64_t size, const void* hidden, const int32_t* feature_index, int64_t rows,
                    int64_t in_features, int64_t trees, int64_t features, void* output) {
  const int64_t places = trees * features;
  if (size == 2) gather<uint16_t>(hidden, feature_index, rows, in_features, places, output);
  if (size == 4) gather<uint32_t>(hidden, feature_index, rows, in_features, places, output);
  if (size == 8) gather<uint64_t>(hidden, feature_index, rows, in_features, places, output);
}

template <typename A>
void feature_gather_backward(const A* grad, const int32_t* feature_index, int64_t rows, int64_t in_features,
                             int64_t trees, int64_t features, A* grad_hidden) {
  const int64_t places = trees * features;
  parallel(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const A* from = grad + n * places;
      A* to = grad_hidden + n * in_features;
      for (int64_t p = 0; p < places; ++p) to[feature_index[p]] += from[p];
    }
  });
}

template void feature_gather_backward<float>(const float*, const int32_t*, int64_t, int64_t, int64_t, int64_t,
                                             float*);
template void feature_gather_backward<double>(const double*, const int32_t*, int64_t, int64_t, int64_t,
                                              int64_t, double*);

}  // namespace hstree::cpu
