#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "random.h"
#include "recipes.h"

namespace hstree::host {

// Depth. Let v_0 be the deepest leaf, v_1 .. v_L = root the nodes above it, s_i the sibling of v_i. When v_i
// and s_i were merged they were the two lightest, so s_{i+1}, present then or merged later from such nodes,
// is no lighter than v_i: w(v_{i+2}) = w(v_{i+1}) + w(s_{i+1}) >= w(v_{i+1}) + w(v_i), and w(root) >= F_{L+2}
// w(v_0) with Fibonacci's F_1 = F_2 = 1. Raising every frequency to f = total 2^-32 makes w(v_0) >= f and
// w(root) <= total + V f, hence F_{L+2} <= 2^32 + V <= 2^32 + 2^30 < F_49 and L <= 46, well below max_depth;
// rounding errors are far smaller than that gap.
TreeArrays huffman_tree(const double* frequencies, int64_t n_classes, uint64_t seed) {
  // Scale by a power of two, which is exact, so that neither the sum overflows nor the floor vanishes.
  const double largest = *std::max_element(frequencies, frequencies + n_classes);
  const int exponent = largest > 0 ? std::ilogb(largest) : 0;
  double total = 0;
  for (int64_t c = 0; c < n_classes; ++c) total += std::ldexp(frequencies[c], -exponent);
  const double floor = total > 0 ? std::ldexp(total, -32) : 1.0;

  // Leaves by weight, equal weights in random order.
  struct Leaf {
    double weight;
    int32_t rank, id;
  };
  std::vector<Leaf> leaves(n_classes);
  {
    Array<int32_t> rank(n_classes);
    for (int64_t c = 0; c < n_classes; ++c) rank[c] = static_cast<int32_t>(c);
    Random(seed).shuffle(rank.data(), n_classes);
    for (int64_t c = 0; c < n_classes; ++c) {
      leaves[c] = {std::max(std::ldexp(frequencies[c], -exponent), floor), rank[c], static_cast<int32_t>(c)};
    }
  }
  std::sort(leaves.begin(), leaves.end(), [](const Leaf& a, const Leaf& b) {
    return std::make_pair(a.weight, a.rank) < std::make_pair(b.weight, b.rank);
  });

  // Two queues, both increasing: the leaves and the merged nodes. Nodes: 0 .. V - 1 the sorted leaves, then
  // the merged ones in order. A leaf and a merged node of equal weight are taken in random order, and so are
  // left and right.
  const int64_t n_nodes = n_classes - 1;
  Array<double> weight(n_nodes);
  Array<int32_t> left(n_nodes), right(n_nodes), size(n_nodes);
  Random coin(seed, 1);
  int64_t leaf = 0, merged = 0;
  for (int64_t m = 0; m < n_nodes; ++m) {
    const auto take = [&](double& sum, int32_t& count) {
      const bool has_leaf = leaf < n_classes, has_merged = merged < m;
      bool take_leaf = has_leaf;
      if (has_leaf && has_merged) {
        const double a = leaves[leaf].weight, b = weight[merged];
        take_leaf = a < b || (a == b && (coin.next() >> 63) != 0);
      }
      sum += take_leaf ? leaves[leaf].weight : weight[merged];
      count += take_leaf ? 1 : size[merged];
      return static_cast<int32_t>(take_leaf ? leaf++ : n_classes + merged++);
    };
    double sum = 0;
    int32_t count = 0;
    left[m] = take(sum, count);
    right[m] = take(sum, count);
    weight[m] = sum;
    size[m] = count;
    if (coin.next() >> 63) std::swap(left[m], right[m]);
  }

  BinaryTree tree(n_classes);
  std::vector<int64_t> pending{n_classes + n_nodes - 1};
  int64_t position = 0;
  while (!pending.empty()) {
    const int64_t item = pending.back();
    pending.pop_back();
    if (item < n_classes) {
      tree.arrays.order[position++] = leaves[item].id;
      continue;
    }
    const int64_t node = item - n_classes, below = left[node];
    tree.add_node(position, position + (below < n_classes ? 1 : size[below - n_classes]),
                  position + size[node]);
    pending.push_back(right[node]);
    pending.push_back(left[node]);
  }
  return std::move(tree.arrays);
}

}  // namespace hstree::host
