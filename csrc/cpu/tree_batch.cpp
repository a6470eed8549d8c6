#include "cpu/tree_batch.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <sstream>
#include <stdexcept>

namespace hstree::cpu {

void check_feature_index(const TreeBatch& batch) {
  if (!batch.feature_index) return;
  for (int64_t t = 0; t < batch.trees; ++t) {
    const int32_t* index = batch.feature_index + t * batch.features;
    for (int64_t s = 0; s < batch.features; ++s) {
      const int32_t lowest = s == 0 ? 0 : index[s - 1] + 1;
      if (index[s] >= lowest && index[s] < batch.in_features) continue;
      std::ostringstream message;
      message << batch.op << ": feature_index[" << t << ", " << s << "]: expected a value in [" << lowest
              << ", " << batch.in_features << "), as each row increases within the input's features; got "
              << index[s];
      throw std::runtime_error(message.str());
    }
  }
}

const uint16_t* feature_lanes(const TreeBatch& batch, int64_t t) {
  const int64_t blocks = (batch.in_features + 15) / 16;
  uint16_t* lanes = scratch<uint16_t, 4>(blocks);
  std::fill(lanes, lanes + blocks, uint16_t{0});
  for (int64_t s = 0; s < batch.features; ++s) {
    const int32_t feature = batch.feature_index[t * batch.features + s];
    lanes[feature / 16] |= static_cast<uint16_t>(1 << feature % 16);
  }
  return lanes;
}

void advise_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t page = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

int64_t visited(const std::vector<LeafOrder>& orders) {
  int64_t total = 0;
  for (const LeafOrder& order : orders) total += order.visited();
  return total;
}

void visited_index(const std::vector<LeafOrder>& orders, int64_t* index) {
  int64_t* row_index = index + visited(orders);
  for (size_t t = 0; t < orders.size(); ++t) {
    const LeafOrder& order = orders[t];
    for (int64_t j = 0; j < order.rows(); ++j) {
      for (int64_t e = order.offset[j] + order.shared[j]; e < order.offset[j + 1]; ++e) {
        *index++ = static_cast<int64_t>(t);
        *row_index++ = order.weight_row(e);
      }
    }
  }
}

}  // namespace hstree::cpu
