#include <numeric>
#include <utility>
#include <vector>

#include "random.h"
#include "recipes.h"

namespace hstree::host {

TreeArrays random_tree(int64_t n_classes, uint64_t seed) {
  BinaryTree tree(n_classes);
  int32_t* order = tree.arrays.order.data();
  std::iota(order, order + n_classes, 0);
  Random(seed).shuffle(order, n_classes);

  std::vector<std::pair<int64_t, int64_t>> pending{{0, n_classes}};
  while (!pending.empty()) {
    const auto [begin, end] = pending.back();
    pending.pop_back();
    if (end - begin == 1) continue;
    const int64_t middle = end - (end - begin) / 2;
    tree.add_node(begin, middle, end);
    pending.emplace_back(middle, end);
    pending.emplace_back(begin, middle);
  }
  return std::move(tree.arrays);
}

}  // namespace hstree::host
