// Tree.collapse: the top of a tree, and what lies below each cluster, as single softmaxes.
#include <algorithm>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "tree.h"

namespace hstree::host {
namespace {

// The number of inner nodes of each subtree, its top included. In preorder, the first inner child of node m is
// m + 1, and the subtree of the next one follows that of the last.
Array<int32_t> subtree_sizes(const TreeView& tree) {
  Array<int32_t> parent(tree.n_nodes), size(tree.n_nodes, 1);
  std::vector<int32_t> pending;  // parents of the inner nodes that follow, the next one last
  for (int64_t m = 0; m < tree.n_nodes; ++m) {
    if (m > 0) {
      parent[m] = pending.back();
      pending.pop_back();
    }
    const int32_t* b = tree.bounds(m);
    for (int64_t k = 0; k < tree.n_children(m); ++k) {
      if (b[k + 1] - b[k] > 1) pending.push_back(static_cast<int32_t>(m));
    }
  }
  for (int64_t m = tree.n_nodes - 1; m > 0; --m) size[parent[m]] += size[m];
  return size;
}

// The mass below each node, summed as in edge_masses.
Array<double> node_masses(const TreeView& tree, const Array<int32_t>& size, const double* frequencies) {
  Array<double> mass(tree.n_nodes);
  for (int64_t m = tree.n_nodes - 1; m >= 0; --m) {
    const int32_t* b = tree.bounds(m);
    double sum = 0;
    for (int64_t k = 0, child = m + 1; k < tree.n_children(m); ++k) {
      if (b[k + 1] - b[k] == 1) {
        sum += frequencies[tree.order[b[k]]];
      } else {
        sum += mass[child];
        child += size[child];
      }
    }
    mass[m] = sum;
  }
  return mass;
}

// Where part i begins if the leaf positions of a node are divided into equal parts.
int64_t part_begin(const TreeView& tree, int64_t node, int64_t parts, int64_t i) {
  return tree.begin(node) + (tree.end(node) - tree.begin(node)) * i / parts;
}

// Writes the nodes of the collapsed tree in preorder. It has no more boundaries than the tree itself, but for
// the parts of divided clusters: a root and disjoint groups of two or more classes have at most 2 V + 1.
class Writer {
 public:
  Writer(const TreeView& tree, const Array<int32_t>& size, bool binary)
      : tree_(tree),
        binary_(binary),
        out_{Array<int32_t>(tree.n_classes), Array<int64_t>(std::max(tree.n_nodes, tree.n_classes) + 1),
             Array<int32_t>(std::max(tree.node_offset[tree.n_nodes], 2 * tree.n_classes + 1))},
        size_(size) {
    std::copy_n(tree.order, tree.n_classes, out_.order.data());
    out_.node_offset[0] = 0;
  }

  void bound(int64_t position) { out_.boundary[n_boundary_++] = static_cast<int32_t>(position); }
  void finish_node() { out_.node_offset[++n_out_] = n_boundary_; }

  // One softmax over the classes at the leaf positions [begin, end).
  void softmax(int64_t begin, int64_t end) {
    for (int64_t i = begin; i <= end; ++i) bound(i);
    finish_node();
  }

  // The subtree of node `top`, as that many equal parts, each a child of the root.
  void divided(int64_t top, int64_t parts) {
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t begin = part_begin(tree_, top, parts, i), end = part_begin(tree_, top, parts, i + 1);
      if (end - begin > 1) softmax(begin, end);
    }
  }

  // The subtree of node `top`, a child of the root.
  void cluster(int64_t top) {
    if (!binary_) return softmax(tree_.begin(top), tree_.end(top));
    for (int64_t m = top; m < top + size_[top]; ++m) {
      for (const int32_t* b = tree_.bounds(m); b <= tree_.bounds(m) + tree_.n_children(m); ++b) bound(*b);
      finish_node();
    }
  }

  TreeArrays finish() {
    out_.node_offset.shrink(n_out_ + 1);
    out_.boundary.shrink(n_boundary_);
    return std::move(out_);
  }

 private:
  const TreeView& tree_;
  const bool binary_;
  TreeArrays out_;
  const Array<int32_t>& size_;
  int64_t n_out_ = 0, n_boundary_ = 0;
};

}  // namespace

TreeArrays collapse(const TreeView& tree, int64_t clusters, bool binary, int64_t max_group,
                    const double* frequencies) {
  const int64_t n_classes = tree.n_classes;
  const Array<int32_t> size = subtree_sizes(tree);
  Writer writer(tree, size, binary);
  if (tree.n_nodes == 0) return writer.finish();

  Array<double> mass;
  if (frequencies != nullptr) mass = node_masses(tree, size, frequencies);

  // The children of the root that a cluster becomes.
  const auto parts = [&](int64_t leaves) { return (leaves + max_group - 1) / max_group; };
  const auto parts_of = [&](int64_t m) { return parts(tree.end(m) - tree.begin(m)); };
  // By how much the root grows if node m is replaced by its children. Nothing if m is above the bound and
  // its children divide it into no more parts than it has to have.
  const auto growth = [&](int64_t m) {
    const int32_t* b = tree.bounds(m);
    int64_t sum = -parts_of(m);
    for (int64_t k = 0; k < tree.n_children(m); ++k) sum += parts(b[k + 1] - b[k]);
    return sum;
  };

  // Expand the heaviest node first; ties go to the node with more leaves, then to the earlier one. A node
  // whose children are more than the rest of C allows stays a child, and the search continues with the next.
  using Entry = std::tuple<double, int32_t, int32_t, int32_t>;  // mass, leaves, -begin, node
  std::priority_queue<Entry> frontier;
  std::vector<int32_t> kept;  // frontier nodes that are not expanded
  std::vector<char> cut(n_classes, 0);
  int64_t width = parts(n_classes);
  const auto expand = [&](int64_t m) {
    width += growth(m);
    const int32_t* b = tree.bounds(m);
    for (int64_t k = 0, child = m + 1; k < tree.n_children(m); ++k) {
      cut[b[k]] = 1;
      const int32_t leaves = b[k + 1] - b[k];
      if (leaves == 1) continue;
      frontier.emplace(frequencies == nullptr ? leaves : mass[child], leaves, -b[k], child);
      child += size[child];
    }
  };
  expand(0);
  while (!frontier.empty()) {
    const int32_t m = std::get<3>(frontier.top());
    frontier.pop();
    const int64_t more = growth(m);
    if (more == 0 || width + more <= clusters) {
      expand(m);
    } else {
      kept.push_back(m);
    }
  }
  for (const int32_t m : kept) {
    for (int64_t i = 1; i < parts_of(m); ++i) cut[part_begin(tree, m, parts_of(m), i)] = 1;
  }
  for (int64_t i = 0; i < n_classes; ++i) {
    if (cut[i]) writer.bound(i);
  }
  writer.bound(n_classes);
  writer.finish_node();
  std::sort(kept.begin(), kept.end());  // preorder
  for (const int32_t m : kept) {
    if (parts_of(m) > 1) {
      writer.divided(m, parts_of(m));
    } else {
      writer.cluster(m);
    }
  }
  return writer.finish();
}

}  // namespace hstree::host
