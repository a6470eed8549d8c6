// Trees over classes, as flat arrays on the host.
//
// A tree over V classes with M inner nodes, numbered in preorder (root 0; V = 1 has M = 0):
//   order        int32 [V]      class at each leaf position
//   node_offset  int64 [M + 1]  node m's boundaries are boundary[node_offset[m] .. node_offset[m + 1])
//   boundary     int32 [B]      strictly increasing inside a node; child k owns leaf positions [b_k, b_{k+1})
// A child that owns one position is a leaf; any other child is the inner node with exactly that interval. A
// node with two children is binary, one with more is wide. An edge is a pair (node, child), E = M + V - 1 of
// them, in the order of node_offset: edge (m, k) has index node_offset[m] - m + k.
//
// Only `validate` and `from_parents` check their input; the other functions expect arrays that passed
// `validate`.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "../kernels/limits.h"
#include "../kernels/tree_nodes.h"

namespace hstree::host {

// Paths store `node << 1 | goes_left` in an int32.
constexpr int64_t max_classes = int64_t{1} << 30;

// An owned array, not initialized on allocation.
template <typename T>
class Array {
 public:
  Array() = default;
  explicit Array(int64_t size) : data_(new T[static_cast<size_t>(size)]), size_(size) {}
  Array(int64_t size, T value) : Array(size) {
    for (int64_t i = 0; i < size; ++i) data_[i] = value;
  }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  T* release() { return data_.release(); }
  void shrink(int64_t size) { size_ = size; }  // drops the tail, keeps the memory

 private:
  std::unique_ptr<T[]> data_;
  int64_t size_ = 0;
};

struct TreeView {
  int64_t n_classes = 0;
  int64_t n_nodes = 0;
  const int32_t* order = nullptr;
  const int64_t* node_offset = nullptr;
  const int32_t* boundary = nullptr;

  int64_t n_edges() const { return n_nodes + n_classes - 1; }
  int64_t n_children(int64_t m) const { return node_offset[m + 1] - node_offset[m] - 1; }
  int64_t first_edge(int64_t m) const { return node_offset[m] - m; }
  const int32_t* bounds(int64_t m) const { return boundary + node_offset[m]; }
  int32_t begin(int64_t m) const { return boundary[node_offset[m]]; }
  int32_t end(int64_t m) const { return boundary[node_offset[m + 1] - 1]; }
};

struct TreeArrays {
  Array<int32_t> order;
  Array<int64_t> node_offset;
  Array<int32_t> boundary;

  TreeView view() const {
    return {order.size(), node_offset.size() - 1, order.data(), node_offset.data(), boundary.data()};
  }
};

struct Edges {
  Array<int32_t> node, ordinal, child_node, begin, end, parent_edge, depth;
};

// How large the tables of a tree are; see TreeTables in hstree/trees/tables.py.
struct TableSizes {
  int64_t root_width = 0, n_binary = 0;
  int64_t n_path = 0;  // entries of the paths of all classes
  int64_t max_depth = 0, max_group = 0;
};

// Memory for the tables of a tree. Those of a null pointer are left out.
struct TableMemory {
  int32_t* leaf_position = nullptr;  // [V]
  int32_t* root_child = nullptr;     // [V]
  // Offsets [V + 1] count from the entry `path_begin` on, where those of this tree begin; path is the memory of
  // all entries.
  int64_t* path_offset = nullptr;
  int32_t* path = nullptr;
  int64_t path_begin = 0;
  int32_t* node = nullptr;       // [M, 5]
  int32_t* edge = nullptr;       // [E, 2]
  int32_t* leaf_edge = nullptr;  // [V]
};

// Throws std::invalid_argument that names the first offending entry. O(V).
void validate(const int32_t* order, int64_t n_classes, const int64_t* node_offset, int64_t n_offsets,
              const int32_t* boundary, int64_t n_boundaries);

// Inner nodes on the path of each class, [V].
Array<int32_t> class_depth(const TreeView& tree);
Edges edges(const TreeView& tree);
// Of a tree of two levels, a root and groups of classes, or with binary nodes below the root. Both throw
// std::invalid_argument for any other.
TableSizes table_sizes(const TreeView& tree, bool groups);
// Takes memory for the nodes of one path and the children that wait.
void write_tables(const TreeView& tree, bool groups, const TableMemory& out);

// Mass below each edge, float64 [E], summed from the leaves upwards, children left to right.
Array<double> edge_masses(const TreeView& tree, const double* frequencies);

// See Tree.collapse in hstree/trees/tree.py. `frequencies` [V], or null: the mass of a node is its leaf
// count. `max_group` V: no bound, as it must be if `binary`.
TreeArrays collapse(const TreeView& tree, int64_t clusters, bool binary, int64_t max_group,
                    const double* frequencies);

// All nodes, leaves included, numbered in preorder: parent (-1 for the root) and class (-1 for an inner
// node).
std::pair<Array<int64_t>, Array<int64_t>> to_parents(const TreeView& tree);
// If `leaf_class` is null, the class of a leaf is its rank among the leaves.
TreeArrays from_parents(const int64_t* parent, const int64_t* leaf_class, int64_t n);

}  // namespace hstree::host
