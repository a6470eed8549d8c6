#include "tree.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace hstree::host {
namespace {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// The edge above each inner node; -1 for the root. In preorder, a node belongs to the last unvisited inner
// edge.
Array<int32_t> edge_above(const TreeView& tree) {
  Array<int32_t> above(tree.n_nodes);
  std::vector<int32_t> pending;
  for (int64_t m = 0; m < tree.n_nodes; ++m) {
    above[m] = -1;
    if (m > 0) {
      above[m] = pending.back();
      pending.pop_back();
    }
    const int32_t* b = tree.bounds(m);
    for (int64_t k = tree.n_children(m) - 1; k >= 0; --k) {
      if (b[k + 1] - b[k] > 1) pending.push_back(static_cast<int32_t>(tree.first_edge(m) + k));
    }
  }
  return above;
}

// A node on the path to the node that is visited.
struct Node {
  int64_t number = 0, first_edge = 0, n_children = 0;
  int32_t above = -1;    // edge above it
  int32_t row = 0;       // number of a binary node, first leaf of a group
  int32_t n_binary = 0;  // binary nodes down to it, itself included
  NodeBlock block = wide_root;
};

// Calls visit(path, depth) for each node in preorder, path[0] the root and path[depth] the node. The next
// node in preorder is the last child that waits. Throws std::invalid_argument for a tree of another shape.
template <typename Visit>
void for_each_node(const TreeView& tree, bool groups, const Visit& visit) {
  struct Pending {
    int32_t edge, depth;
  };
  std::vector<Pending> pending;
  Node path[max_depth];
  int64_t n_binary = 0;
  for (int64_t m = 0; m < tree.n_nodes; ++m) {
    Pending here{-1, 0};
    if (m > 0) {
      here = pending.back();
      pending.pop_back();
    }
    const int64_t n_children = tree.n_children(m);
    Node& node = path[here.depth];
    node = here.depth == 0 ? Node{} : path[here.depth - 1];
    node.number = m;
    node.first_edge = tree.first_edge(m);
    node.n_children = n_children;
    node.above = here.edge;
    if (m == 0 && (groups || n_children > 2)) {
      node.block = wide_root;
    } else if (groups) {
      const int64_t n_classes = tree.end(m) - tree.begin(m);
      if (n_classes != n_children) {
        fail("trees: expected two levels, a root and below it classes and groups of classes, got node ", m,
             " with ", n_children, " children, which are not all classes");
      }
      node.block = class_group;
      node.row = tree.begin(m);
    } else {
      if (n_children != 2) {
        fail("trees: expected binary nodes below the root, got node ", m, " with ", n_children, " children");
      }
      node.block = binary_node;
      node.row = static_cast<int32_t>(n_binary++);
      ++node.n_binary;
    }
    visit(path, here.depth);
    const int32_t* b = tree.bounds(m);
    for (int64_t k = n_children - 1; k >= 0; --k) {
      if (b[k + 1] - b[k] > 1) pending.push_back({static_cast<int32_t>(node.first_edge + k), here.depth + 1});
    }
  }
}

}  // namespace

void validate(const int32_t* order, int64_t n_classes, const int64_t* node_offset, int64_t n_offsets,
              const int32_t* boundary, int64_t n_boundaries) {
  if (n_classes < 1) fail("order: expected at least one class, got an empty array");
  if (n_classes > max_classes) fail("order: expected at most ", max_classes, " classes, got ", n_classes);
  std::vector<bool> seen(n_classes);  // bits, which stay in the cache
  for (int64_t i = 0; i < n_classes; ++i) {
    const int32_t c = order[i];
    if (c < 0 || c >= n_classes) {
      fail("order[", i, "]: expected a class from 0 to ", n_classes - 1, ", got ", c);
    }
    if (seen[c]) {
      fail("order[", i, "]: class ", c, " appears twice (first at order[",
           std::find(order, order + i, c) - order, "])");
    }
    seen[c] = true;
  }

  if (n_offsets < 1) fail("node_offset: expected n_nodes + 1 entries, got an empty array");
  if (node_offset[0] != 0) fail("node_offset[0]: expected 0, got ", node_offset[0]);
  const int64_t n_nodes = n_offsets - 1;
  if (n_nodes == 0 && n_classes > 1) {
    fail("node_offset: expected at least one inner node for ", n_classes, " classes, got none");
  }
  for (int64_t m = 0; m < n_nodes; ++m) {
    // Avoids node_offset[m] + 3, which an invalid entry could overflow.
    if (node_offset[m + 1] < 3 || node_offset[m + 1] - 3 < node_offset[m]) {
      fail("node_offset[", m + 1, "]: expected at least node_offset[", m, "] + 3 = ", node_offset[m] + 3,
           " (at least two children), got ", node_offset[m + 1]);
    }
    if (node_offset[m + 1] > n_boundaries) {
      fail("node_offset[", m + 1, "]: expected at most the length of boundary, ", n_boundaries, ", got ",
           node_offset[m + 1]);
    }
  }
  if (node_offset[n_nodes] != n_boundaries) {
    fail("node_offset[", n_nodes, "]: expected the length of boundary, ", n_boundaries, ", got ",
         node_offset[n_nodes]);
  }

  // In preorder the next node is the leftmost child that has had none: children wait on a stack, the
  // rightmost at the bottom.
  struct Interval {
    int32_t begin, end, depth;
    int64_t parent;
  };
  std::vector<Interval> pending;
  if (n_classes > 1) pending.push_back({0, static_cast<int32_t>(n_classes), 1, -1});
  for (int64_t m = 0; m < n_nodes; ++m) {
    if (pending.empty()) {
      fail("node_offset: expected ", m, " inner nodes, which reach all ", n_classes, " leaves, got ",
           n_nodes);
    }
    const Interval want = pending.back();
    pending.pop_back();
    const int64_t first = node_offset[m], last = node_offset[m + 1] - 1;
    if (boundary[first] != want.begin) {
      fail("boundary[", first, "]: node ", m, " in preorder owns [", want.begin, ", ", want.end,
           "), expected it to begin at ", want.begin, ", got ", boundary[first]);
    }
    for (int64_t i = first + 1; i <= last; ++i) {
      if (boundary[i] <= boundary[i - 1]) {
        fail("boundary[", i, "]: expected more than ", boundary[i - 1], ", got ", boundary[i]);
      }
    }
    if (boundary[last] != want.end) {
      fail("boundary[", last, "]: node ", m, " in preorder owns [", want.begin, ", ", want.end,
           "), expected it to end at ", want.end, ", got ", boundary[last]);
    }
    if (want.depth > max_depth) {
      fail("boundary[", first, "]: node ", m, " is the ", want.depth,
           "th inner node on its path, expected at most MAX_DEPTH = ", max_depth);
    }
    for (int64_t i = last - 1; i >= first; --i) {
      if (boundary[i + 1] - boundary[i] > 1)
        pending.push_back({boundary[i], boundary[i + 1], want.depth + 1, m});
    }
  }
  if (!pending.empty()) {
    fail("node_offset: expected another inner node for the child [", pending.back().begin, ", ",
         pending.back().end, ") of node ", pending.back().parent, ", got ", n_nodes, " nodes");
  }
}

Array<int32_t> class_depth(const TreeView& tree) {
  Array<int32_t> depth(tree.n_classes, 0);
  const Array<int32_t> above = edge_above(tree);
  Array<int32_t> node_depth(tree.n_nodes);
  Array<int32_t> edge_node(tree.n_edges());
  for (int64_t m = 0; m < tree.n_nodes; ++m) {
    node_depth[m] = m == 0 ? 1 : node_depth[edge_node[above[m]]] + 1;
    const int32_t* b = tree.bounds(m);
    for (int64_t k = 0; k < tree.n_children(m); ++k) {
      edge_node[tree.first_edge(m) + k] = static_cast<int32_t>(m);
      if (b[k + 1] - b[k] == 1) depth[tree.order[b[k]]] = node_depth[m];
    }
  }
  return depth;
}

Edges edges(const TreeView& tree) {
  const int64_t n = tree.n_edges();
  Edges out{Array<int32_t>(n), Array<int32_t>(n), Array<int32_t>(n, -1), Array<int32_t>(n),
            Array<int32_t>(n), Array<int32_t>(n), Array<int32_t>(n)};
  const Array<int32_t> above = edge_above(tree);
  for (int64_t m = 0; m < tree.n_nodes; ++m) {
    if (m > 0) out.child_node[above[m]] = static_cast<int32_t>(m);
    const int32_t* b = tree.bounds(m);
    for (int64_t k = 0; k < tree.n_children(m); ++k) {
      const int64_t e = tree.first_edge(m) + k;
      out.node[e] = static_cast<int32_t>(m);
      out.ordinal[e] = static_cast<int32_t>(k);
      out.begin[e] = b[k];
      out.end[e] = b[k + 1];
      out.parent_edge[e] = above[m];
      out.depth[e] = m == 0 ? 0 : out.depth[above[m]] + 1;
    }
  }
  return out;
}

TableSizes table_sizes(const TreeView& tree, bool groups) {
  TableSizes out;
  if (tree.n_nodes > 0 && (groups || tree.n_children(0) > 2)) out.root_width = tree.n_children(0);
  for_each_node(tree, groups, [&](const Node* path, int64_t depth) {
    const Node& node = path[depth];
    if (node.block == binary_node) ++out.n_binary;
    if (node.block == class_group) out.max_group = std::max(out.max_group, node.n_children);
    const int32_t* b = tree.bounds(node.number);
    int64_t n_leaves = 0;
    for (int64_t k = 0; k < node.n_children; ++k) n_leaves += b[k + 1] - b[k] == 1;
    if (n_leaves == 0) return;
    out.n_path += n_leaves * node.n_binary;
    out.max_depth = std::max<int64_t>(out.max_depth, node.n_binary);
  });
  return out;
}

void write_tables(const TreeView& tree, bool groups, const TableMemory& out) {
  const int64_t n_classes = tree.n_classes;
  if (tree.n_nodes == 0) {
    if (out.leaf_position != nullptr) out.leaf_position[0] = 0;
    if (out.leaf_edge != nullptr) out.leaf_edge[0] = -1;
  }
  // The classes lie anywhere in memory: all that has a place for each is written at once. Lengths of paths
  // first, in entry c + 1 for class c: their running sums are the offsets.
  for_each_node(tree, groups, [&](const Node* path, int64_t depth) {
    const Node& node = path[depth];
    const int64_t m = node.number;
    if (out.node != nullptr) {
      int32_t* entry = out.node + 5 * m;
      entry[0] = node.block;
      entry[1] = node.block == wide_root ? 0 : node.row;
      entry[2] = static_cast<int32_t>(node.first_edge);
      entry[3] = static_cast<int32_t>(node.n_children);
      entry[4] = node.above;
      if (m > 0) out.edge[2 * int64_t{node.above} + 1] = static_cast<int32_t>(m);
    }
    const int32_t* b = tree.bounds(m);
    for (int64_t k = 0; k < node.n_children; ++k) {
      const int64_t e = node.first_edge + k;
      if (out.edge != nullptr) out.edge[2 * e] = static_cast<int32_t>(m);
      if (b[k + 1] - b[k] > 1) continue;
      const int32_t c = tree.order[b[k]];
      // A complement is negative, also that of class 0, and so differs from every node.
      if (out.edge != nullptr) out.edge[2 * e + 1] = ~c;
      if (out.leaf_edge != nullptr) out.leaf_edge[c] = static_cast<int32_t>(e);
      if (out.leaf_position != nullptr) out.leaf_position[c] = b[k];
      if (out.root_child != nullptr) {
        out.root_child[c] = depth == 0 ? static_cast<int32_t>(k) : path[1].above;
      }
      if (out.path_offset != nullptr) out.path_offset[c + 1] = node.n_binary;
    }
  });
  if (out.path_offset == nullptr) return;
  out.path_offset[0] = out.path_begin;
  if (tree.n_nodes == 0) out.path_offset[1] = 0;
  for (int64_t c = 0; c < n_classes; ++c) out.path_offset[c + 1] += out.path_offset[c];
  if (out.path == nullptr) return;

  // The decisions above the current node. In preorder, every entry except the last stays valid between
  // visits.
  int32_t path_above[max_depth];
  const auto decide = [&](const Node& node, int64_t k) {
    if (node.block == binary_node) path_above[node.n_binary - 1] = node.row << 1 | (k == 0 ? 1 : 0);
  };
  for_each_node(tree, groups, [&](const Node* path, int64_t depth) {
    const Node& node = path[depth];
    if (depth > 0) decide(path[depth - 1], node.above - path[depth - 1].first_edge);
    const int32_t* b = tree.bounds(node.number);
    for (int64_t k = 0; k < node.n_children; ++k) {
      if (b[k + 1] - b[k] > 1) continue;
      decide(node, k);
      std::copy_n(path_above, node.n_binary, out.path + out.path_offset[tree.order[b[k]]]);
    }
  });
}

Array<double> edge_masses(const TreeView& tree, const double* frequencies) {
  Array<double> mass(tree.n_edges());
  const Array<int32_t> above = edge_above(tree);
  for (int64_t m = tree.n_nodes - 1; m >= 0; --m) {  // children come after their parent
    const int32_t* b = tree.bounds(m);
    double sum = 0;
    for (int64_t k = 0; k < tree.n_children(m); ++k) {
      double& below = mass[tree.first_edge(m) + k];
      if (b[k + 1] - b[k] == 1) below = frequencies[tree.order[b[k]]];
      sum += below;
    }
    if (m > 0) mass[above[m]] = sum;
  }
  return mass;
}

std::pair<Array<int64_t>, Array<int64_t>> to_parents(const TreeView& tree) {
  const int64_t n = tree.n_nodes + tree.n_classes;
  Array<int64_t> parent(n, -1), leaf_class(n, -1);
  struct Item {
    int64_t parent;
    int32_t begin, end;
  };
  std::vector<Item> pending{{-1, 0, static_cast<int32_t>(tree.n_classes)}};
  int64_t node = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Item item = pending.back();
    pending.pop_back();
    parent[i] = item.parent;
    if (item.end - item.begin == 1) {
      leaf_class[i] = tree.order[item.begin];
      continue;
    }
    const int32_t* b = tree.bounds(node);
    for (int64_t k = tree.n_children(node) - 1; k >= 0; --k) pending.push_back({i, b[k], b[k + 1]});
    ++node;
  }
  return {std::move(parent), std::move(leaf_class)};
}

TreeArrays from_parents(const int64_t* parent, const int64_t* leaf_class, int64_t n) {
  if (n < 1) fail("parent: expected at least one node, got an empty array");
  if (n >= 2 * max_classes) fail("parent: expected fewer than ", 2 * max_classes, " nodes, got ", n);
  int64_t root = -1;
  Array<int64_t> child_offset(n + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    if (parent[i] < -1 || parent[i] >= n) {
      fail("parent[", i, "]: expected a node from 0 to ", n - 1, ", or -1 for the root, got ", parent[i]);
    }
    if (parent[i] == -1) {
      if (root >= 0) fail("parent[", i, "]: a second root (the first is node ", root, "), expected one");
      root = i;
    } else {
      ++child_offset[parent[i] + 1];
    }
  }
  if (root < 0) fail("parent: expected one root, marked -1, got none");
  int64_t n_classes = 0;
  for (int64_t i = 0; i < n; ++i) {
    n_classes += child_offset[i + 1] == 0;
    child_offset[i + 1] += child_offset[i];
  }
  if (n_classes > max_classes) fail("parent: expected at most ", max_classes, " leaves, got ", n_classes);
  const auto n_children = [&](int64_t i) { return child_offset[i + 1] - child_offset[i]; };
  Array<int64_t> child(n), fill(n);
  std::copy_n(child_offset.data(), n, fill.data());
  for (int64_t i = 0; i < n; ++i) {
    if (parent[i] >= 0) child[fill[parent[i]]++] = i;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (n_children(i) == 1) {
      fail("parent[", child[child_offset[i]], "]: node ", child[child_offset[i]],
           " is the only child of node ", i, ", expected at least two children");
    }
  }

  Array<int32_t> class_of(n, -1);
  if (leaf_class == nullptr) {
    int32_t rank = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (n_children(i) == 0) class_of[i] = rank++;
    }
  } else {
    Array<int64_t> first(n_classes, -1);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t c = leaf_class[i];
      if (n_children(i) > 0) {
        if (c != -1) fail("leaf_class[", i, "]: expected -1 for an inner node, got ", c);
        continue;
      }
      if (c < 0 || c >= n_classes) {
        fail("leaf_class[", i, "]: expected a class from 0 to ", n_classes - 1, ", got ", c);
      }
      if (first[c] >= 0) {
        fail("leaf_class[", i, "]: class ", c, " appears twice (first at leaf_class[", first[c], "])");
      }
      first[c] = i;
      class_of[i] = static_cast<int32_t>(c);
    }
  }

  // Breadth first: parents before children, so that leaf counts are summed in reverse.
  std::vector<int64_t> queue{root};
  queue.reserve(n);
  Array<int64_t> leaves(n, 0);
  for (size_t i = 0; i < queue.size(); ++i) {
    for (int64_t k = child_offset[queue[i]]; k < child_offset[queue[i] + 1]; ++k) queue.push_back(child[k]);
  }
  if (static_cast<int64_t>(queue.size()) < n) {
    std::vector<char> reached(n, 0);
    for (const int64_t i : queue) reached[i] = 1;
    const int64_t i = std::find(reached.begin(), reached.end(), 0) - reached.begin();
    fail("parent[", i, "]: node ", i, " does not descend from the root ", root,
         " (its parents form a cycle)");
  }
  for (int64_t i = n - 1; i >= 0; --i) {
    const int64_t node = queue[i];
    if (n_children(node) == 0) leaves[node] = 1;
    if (node != root) leaves[parent[node]] += leaves[node];
  }

  const int64_t n_nodes = n - n_classes;
  TreeArrays out{Array<int32_t>(n_classes), Array<int64_t>(n_nodes + 1), Array<int32_t>(n - 1 + n_nodes)};
  out.node_offset[0] = 0;
  int64_t position = 0, n_out = 0, n_boundary = 0;
  struct Item {
    int64_t node;
    int32_t depth;
  };
  std::vector<Item> pending{{root, 1}};
  while (!pending.empty()) {
    const Item item = pending.back();
    pending.pop_back();
    if (n_children(item.node) == 0) {
      out.order[position++] = class_of[item.node];
      continue;
    }
    if (item.depth > max_depth) {
      fail("parent: node ", item.node, " is the ", item.depth,
           "th inner node on its path, expected at most MAX_DEPTH = ", max_depth);
    }
    int64_t b = position;
    for (int64_t k = child_offset[item.node]; k < child_offset[item.node + 1]; ++k) {
      out.boundary[n_boundary++] = static_cast<int32_t>(b);
      b += leaves[child[k]];
    }
    out.boundary[n_boundary++] = static_cast<int32_t>(b);
    out.node_offset[++n_out] = n_boundary;
    for (int64_t k = child_offset[item.node + 1] - 1; k >= child_offset[item.node]; --k) {
      pending.push_back({child[k], item.depth + 1});
    }
  }
  return out;
}

}  // namespace hstree::host
