#include "cpu/leaf_order.h"

#include <algorithm>

#include "cpu/tree_batch.h"

namespace hstree::cpu {
namespace {

struct KeyedRow {
  uint32_t key;
  int32_t row;
};

// Stable least-significant-digit radix sort; keys below 2^bits.
void sort_by_key(std::vector<KeyedRow>& rows, int bits) {
  constexpr int digit = 11;
  if (rows.size() < 128) {  // the counts would take longer
    std::stable_sort(rows.begin(), rows.end(), [](KeyedRow a, KeyedRow b) { return a.key < b.key; });
    return;
  }
  std::vector<KeyedRow> other(rows.size());
  for (int shift = 0; shift < bits; shift += digit) {
    uint32_t count[(1 << digit) + 1] = {};
    for (const KeyedRow& r : rows) ++count[((r.key >> shift) & ((1 << digit) - 1)) + 1];
    for (int d = 0; d < 1 << digit; ++d) count[d + 1] += count[d];
    for (const KeyedRow& r : rows) other[count[(r.key >> shift) & ((1 << digit) - 1)]++] = r;
    rows.swap(other);
  }
}

void check_target(const char* op, int64_t classes, int64_t row, int64_t target) {
  if (target >= classes) {
    fail(op, ": target[", row, "]: expected less than ", classes, " (the number of classes), got ", target);
  }
}

}  // namespace

void leaf_order(const char* op, const int32_t* leaf_position, int64_t classes, const int64_t* target,
                int64_t rows, int64_t* order) {
  std::vector<KeyedRow> sorted;
  sorted.reserve(rows);
  uint32_t largest = 0;
  int64_t last = rows;
  for (int64_t i = rows - 1; i >= 0; --i) {
    if (target[i] < 0) order[--last] = i;
  }
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t y = target[i];
    if (y < 0) continue;
    check_target(op, classes, i, y);
    const uint32_t key = static_cast<uint32_t>(leaf_position[y]);
    largest = std::max(largest, key);
    sorted.push_back({key, static_cast<int32_t>(i)});
  }
  int bits = 0;
  while (bits < 32 && largest >> bits) ++bits;
  sort_by_key(sorted, bits);
  for (size_t j = 0; j < sorted.size(); ++j) order[j] = sorted[j].row;
}

std::vector<int32_t> rows_in_leaf_order(const char* op, const TreeTable& table, const int64_t* target,
                                        int64_t rows) {
  std::vector<int32_t> row;
  row.reserve(rows);
  for (int64_t j = 0; j < rows; ++j) {
    const int64_t i = table.order[j];
    if (i < 0 || i >= rows) fail(op, ": order: expected rows in [0, ", rows, "), got ", i);
    if (target[i] < 0) continue;
    check_target(op, table.classes, i, target[i]);
    row.push_back(static_cast<int32_t>(i));
  }
  return row;
}

std::vector<PathSpan> path_spans(const char* op, const TreeTable& table, const int64_t* target,
                                 const std::vector<int32_t>& row) {
  std::vector<PathSpan> spans(row.size());
  for (size_t j = 0; j < row.size(); ++j) {
    const int64_t y = target[row[j]];
    const PathSpan span = {table.offset[y], table.offset[y + 1]};
    if (span.begin < 0 || span.end < span.begin || span.end > table.path_size) {
      fail(op, ": path_offset of class ", y, ": expected an interval within [0, ", table.path_size,
           "], got [", span.begin, ", ", span.end, ")");
    }
    spans[j] = span;
  }
  return spans;
}

}  // namespace hstree::cpu
