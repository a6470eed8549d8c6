// The rows of a batch in the order of their leaves, and the weight rows that each of them visits.
//
// Rows below any inner node are then neighbours: what a row shares with the one before it is a prefix of its
// path, each weight row is met in one run of rows, and its gradient can be finished before the next one is
// begun.
#pragma once

#include <cstdint>
#include <vector>

namespace hstree::cpu {

// The tables of one tree, as the op received them. V classes, P path entries in all.
struct TreeTable {
  const int64_t* offset;         // [V + 1] into path
  const int32_t* path;           // [P] node << 1 | goes_left; wide: [P, 3] (first_row, width, child)
  const int32_t* leaf_position;  // [V]
  int64_t classes;               // V
  int64_t path_size;             // P
  int64_t weight_rows;           // inner nodes, or rows of wide nodes
  int64_t longest;               // most entries of a path, or widths on it, that the caller allows
};

struct LeafOrder {
  std::vector<int32_t> row;     // [n] rows that are not ignored, in leaf order
  std::vector<int64_t> offset;  // [n + 1] into entry
  std::vector<int32_t> entry;   // weight row << shift, and for binary nodes the direction in bit 0
  std::vector<int32_t> shared;  // [n + 1] leading weight rows shared with the row before; 0 at the ends
  std::vector<int64_t> slot;    // [n + 1] weight rows first visited by earlier rows; slot[n] is their number
  int shift = 0;                // 1 for binary nodes, 0 for wide ones
  int64_t longest = 0;          // most entries of a row
  TreeTable table{};            // what it was built from

  int64_t rows() const { return static_cast<int64_t>(row.size()); }
  int64_t visited() const { return slot.empty() ? 0 : slot.back(); }
  int64_t weight_row(int64_t e) const { return entry[e] >> shift; }
};

// Negative targets are ignored. Throws std::runtime_error, its message beginning with `op`, for a target or
// an entry of the tables that is out of range.
LeafOrder binary_leaf_order(const char* op, const TreeTable& table, const int64_t* target, int64_t rows);
LeafOrder wide_leaf_order(const char* op, const TreeTable& table, const int64_t* target, int64_t rows);

}  // namespace hstree::cpu
