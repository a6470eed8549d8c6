#include "cpu/leaf_order.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace hstree::cpu {
namespace {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

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

std::vector<KeyedRow> rows_in_leaf_order(const char* op, const TreeTable& table, const int64_t* target,
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
  return sorted;
}

// Entries of the path of class y in table.path.
std::pair<int64_t, int64_t> path_range(const char* op, const char* name, const TreeTable& table, int64_t y) {
  const int64_t begin = table.offset[y], end = table.offset[y + 1];
  if (begin < 0 || end < begin || end > table.path_size) {
    fail(op, ": ", name, " of class ", y, ": expected an interval within [0, ", table.path_size, "], got [",
         begin, ", ", end, ")");
  }
  return {begin, end};
}

// Appends the entries of each row through `append` and finds what it shares with the row before.
template <typename Append>
LeafOrder build(const char* op, const TreeTable& table, const int64_t* target, int64_t rows, int shift,
                const Append& append) {
  const std::vector<KeyedRow> sorted = rows_in_leaf_order(op, table, target, rows);
  const int64_t n = static_cast<int64_t>(sorted.size());
  LeafOrder out;
  out.table = table;
  out.shift = shift;
  out.row.resize(n);
  out.offset.resize(n + 1);
  out.shared.resize(n + 1);
  out.slot.resize(n + 1);
  out.entry.reserve(n * 16);
  const int stride = shift ? 1 : 3;  // numbers of an entry of table.path
  int64_t before = -1;               // class of the row before
  for (int64_t j = 0; j < n; ++j) {
    // The tables of V classes are read at random: what later rows need is fetched early, first the offset of
    // a path and then the path.
    if (j + 16 < n) __builtin_prefetch(table.offset + target[sorted[j + 16].row]);
    if (j + 8 < n) __builtin_prefetch(table.path + stride * table.offset[target[sorted[j + 8].row]]);
    const int64_t y = target[sorted[j].row];
    const int64_t begin = out.offset[j];
    out.row[j] = sorted[j].row;
    int64_t length, shared = 0;
    if (y == before) {
      length = shared = begin - out.offset[j - 1];
      out.entry.resize(begin + length);
      std::copy_n(out.entry.data() + begin - length, length, out.entry.data() + begin);
    } else {
      append(path_range(op, shift ? "path_offset" : "wide_offset", table, y), y, out.entry);
      length = static_cast<int64_t>(out.entry.size()) - begin;
      if (j > 0) {
        const int32_t* now = out.entry.data() + begin;
        const int32_t* last = out.entry.data() + out.offset[j - 1];
        const int64_t most = std::min(length, begin - out.offset[j - 1]);
        while (shared < most && (now[shared] >> shift) == (last[shared] >> shift)) ++shared;
      }
      before = y;
    }
    out.offset[j + 1] = begin + length;
    out.longest = std::max(out.longest, length);
    out.shared[j] = static_cast<int32_t>(shared);
    out.slot[j + 1] = out.slot[j] + length - shared;
  }
  return out;
}

}  // namespace

LeafOrder binary_leaf_order(const char* op, const TreeTable& table, const int64_t* target, int64_t rows) {
  return build(op, table, target, rows, 1,
               [&](std::pair<int64_t, int64_t> range, int64_t y, std::vector<int32_t>& entry) {
                 if (range.second - range.first > table.longest) {
                   fail(op, ": max_depth: the path of class ", y, " has ", range.second - range.first,
                        " nodes, got max_depth ", table.longest);
                 }
                 for (int64_t e = range.first; e < range.second; ++e) {
                   const int32_t node = table.path[e] >> 1;
                   if (node < 0 || node >= table.weight_rows) {
                     fail(op, ": path[", e, "]: expected a node in [0, ", table.weight_rows, "), got ", node);
                   }
                 }
                 entry.insert(entry.end(), table.path + range.first, table.path + range.second);
               });
}

LeafOrder wide_leaf_order(const char* op, const TreeTable& table, const int64_t* target, int64_t rows) {
  return build(
      op, table, target, rows, 0,
      [&](std::pair<int64_t, int64_t> range, int64_t y, std::vector<int32_t>& entry) {
        int64_t total = 0;
        for (int64_t e = range.first; e < range.second; ++e) {
          const int64_t first = table.path[3 * e], width = table.path[3 * e + 1],
                        child = table.path[3 * e + 2];
          if (first < 0 || width < 1 || first + width > table.weight_rows || child < 0 || child >= width) {
            fail(op, ": wide_path[", e, "]: expected a child of a block of rows in [0, ", table.weight_rows,
                 "), got (first_row ", first, ", width ", width, ", child ", child, ")");
          }
          total += width;
          if (total > table.longest) {
            fail(op, ": max_width: the wide nodes on the path of class ", y, " have at least ", total,
                 " children, got max_width ", table.longest);
          }
          for (int64_t c = 0; c < width; ++c) entry.push_back(static_cast<int32_t>(first + c));
        }
      });
}

}  // namespace hstree::cpu
