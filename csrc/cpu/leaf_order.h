// The rows of a batch in the order of their leaves: the rows below any inner node are consecutive.
#pragma once

#include <cstdint>
#include <vector>

namespace hstree::cpu {

// The tables of one tree, as passed to the op. V classes, P path entries in total.
struct TreeTable {
  const int64_t* offset;         // [V + 1] into path
  const int32_t* path;           // [P] node << 1 | goes_left
  const int32_t* leaf_position;  // [V]
  const int64_t* order;          // [N] rows in leaf order
  int64_t classes;               // V
  int64_t path_size;             // P
  int64_t weight_rows;           // inner nodes
  int64_t max_depth;             // largest number of entries that the caller allows on a path
};

// A stable sort of the rows by the leaves of their targets, into order [N]. Rows with a negative target come
// last. leaf_position [V], target [N].
// Throws std::runtime_error, its message beginning with `op`, for a target out of range.
void leaf_order(const char* op, const int32_t* leaf_position, int64_t classes, const int64_t* target,
                int64_t rows, int64_t* order);

// Rows whose target is not negative, in the table's order. Throws as leaf_order, also for a row out of range.
std::vector<int32_t> rows_in_leaf_order(const char* op, const TreeTable& table, const int64_t* target,
                                        int64_t rows);

// The entries of a class's path.
struct PathSpan {
  int64_t begin, end;
};

// The entries of the paths of the rows in `row`. Throws std::runtime_error for an interval out of range.
std::vector<PathSpan> path_spans(const char* op, const TreeTable& table, const int64_t* target,
                                 const std::vector<int32_t>& row);

}  // namespace hstree::cpu
