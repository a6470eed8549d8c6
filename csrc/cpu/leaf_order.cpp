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
  std::vector<KeyedRow> other(rows.size());
  for (int shift = 0; shift < bits; shift += digit) {
    uint32_t count[(1 << digit) + 1] = {};
    for (const KeyedRow& r : rows) ++count[((r.key >> shift) & ((1 << digit) - 1)) + 1];
    for (int d = 0; d < 1 << digit; ++d) count[d + 1] += count[d];
    for (const KeyedRow& r : rows) other[count[(r.key >> shift) & ((1 << digit) - 1)]++] = r;
    rows.swap(other);
  }
}

}  // namespace

std::vector<int32_t> rows_in_leaf_order(const char* op, const TreeTable& table, const int64_t* target,
                                        int64_t rows) {
  std::vector<KeyedRow> sorted;
  sorted.reserve(rows);
  uint32_t largest = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t y = target[i];
    if (y < 0) continue;
    if (y >= table.classes) {
      fail(op, ": target[", i, "]: expected less than ", table.classes, " (the number of classes), got ", y);
    }
    const uint32_t key = static_cast<uint32_t>(table.leaf_position[y]);
    largest = std::max(largest, key);
    sorted.push_back({key, static_cast<int32_t>(i)});
  }
  int bits = 0;
  while (bits < 32 && largest >> bits) ++bits;
  sort_by_key(sorted, bits);
  std::vector<int32_t> row(sorted.size());
  for (size_t j = 0; j < row.size(); ++j) row[j] = sorted[j].row;
  return row;
}

std::vector<PathSpan> path_spans(const char* op, const char* offset_name, const TreeTable& table,
                                 const int64_t* target, const std::vector<int32_t>& row) {
  std::vector<PathSpan> spans(row.size());
  for (size_t j = 0; j < row.size(); ++j) {
    const int64_t y = target[row[j]];
    const PathSpan span = {table.offset[y], table.offset[y + 1]};
    if (span.begin < 0 || span.end < span.begin || span.end > table.path_size) {
      fail(op, ": ", offset_name, " of class ", y, ": expected an interval within [0, ", table.path_size,
           "], got [", span.begin, ", ", span.end, ")");
    }
    spans[j] = span;
  }
  return spans;
}

}  // namespace hstree::cpu
