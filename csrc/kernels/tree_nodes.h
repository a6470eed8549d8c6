// A tree as tables of its nodes, in preorder, and edges, for ops that walk it from the root down.
#pragma once

#include <cstdint>

namespace hstree {

// class_group: a node whose children are all classes, with vectors that all trees share.
enum NodeBlock : int32_t { binary_node, class_group, wide_root };

struct TreeNode {
  int32_t block;       // NodeBlock
  int32_t row;         // in the block; of a group, the place of its first class among the leaves
  int32_t first_edge;  // its children are edges first_edge to first_edge + width - 1
  int32_t width;
  int32_t above;  // edge; negative at the root, node 0
};

struct TreeEdge {
  int32_t above;  // node
  int32_t below;  // node, or ~class
};

}  // namespace hstree
