// A tile: consecutive places in the leaf order of one tree, and the nodes on their paths, each listed once
// with the run of rows below it. Kernels that work on tiles read a weight row once for 16 rows.
#pragma once

#include "common.cuh"

namespace hstree {

constexpr int tile_rows = 16;
constexpr int tile_items = tile_rows * max_depth;

struct Item {
  int32_t node;           // of the path entry
  int level, begin, end;  // rows [begin, end) of the tile have the node at this level
};

// In shared memory.
struct Tile {
  int64_t row[tile_rows];         // row of hidden, or -1 past the last one
  int64_t path_begin[tile_rows];  // first entry of its path
  int length[tile_rows];          // nodes on its path; -1: corrupt tables
  int shared[tile_rows];          // leading nodes shared with the previous row of this tile
  int first_item[tile_rows + 1];  // the items of a row are its nodes that are not shared
  int32_t node[tile_items];
  uint16_t run[tile_items];  // level | begin << 6 | (end - 1) << 10

  __device__ __forceinline__ int items() const { return first_item[tile_rows]; }

  __device__ __forceinline__ Item item(int index) const {
    const unsigned bits = run[index];
    return {node[index], static_cast<int>(bits & 63u), static_cast<int>(bits >> 6 & 15u),
            static_cast<int>(bits >> 10) + 1};
  }

  // Lists the places from `place` on that are below `limit`. Called by all threads of a block; begins and
  // ends with a barrier.
  __device__ void fill(const Tables& tables, const LeafOrder& leaf_order, int tree, int64_t place,
                       int64_t limit) {
    const int i = threadIdx.x;
    __syncthreads();
    if (i < tile_rows) {
      const bool inside = place + i < limit;
      const int64_t at = tree * tables.rows + place + i;
      row[i] = inside ? leaf_order.order[at] : -1;
      length[i] = inside ? leaf_order.length[at] : 0;
      shared[i] = inside && i > 0 ? leaf_order.shared[at] : 0;
      path_begin[i] = length[i] > 0 ? hstree::path_begin(tables, tree, row[i]) : 0;
    }
    __syncthreads();
    if (i == 0) {
      int sum = 0;
      for (int r = 0; r < tile_rows; ++r) {
        first_item[r] = sum;
        if (length[r] > 0) sum += length[r] - shared[r];
      }
      first_item[tile_rows] = sum;
    }
    __syncthreads();
    constexpr int ahead = 8;  // loads in flight in a thread
    for (int first = threadIdx.x; first < tile_items; first += ahead * blockDim.x) {
      int32_t own[ahead];
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const int k = first + i * blockDim.x, r = k / max_depth, level = k % max_depth;
        if (k >= tile_items || level < shared[r] || level >= length[r]) continue;
        const int64_t entry = path_begin[r] + level;
        own[i] = __ldg(tables.path + entry);
      }
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const int k = first + i * blockDim.x, r = k / max_depth, level = k % max_depth;
        if (k >= tile_items || level < shared[r] || level >= length[r]) continue;
        int end = r + 1;
        while (end < tile_rows && shared[end] > level) ++end;
        const int index = first_item[r] + level - shared[r];
        node[index] = own[i] >> 1;
        run[index] = static_cast<uint16_t>(level | r << 6 | (end - 1) << 10);
      }
    }
    __syncthreads();
  }
};
static_assert(max_depth <= 64 && tile_rows <= 16, "Tile::run packs an item into 16 bits");

// Number of tiles of one tree.
inline int64_t tile_count(const Tables& tables) {
  return divide_up(tables.rows, tile_rows);
}

}  // namespace hstree
