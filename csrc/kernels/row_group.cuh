// Groups of 16 rows that are neighbours in the leaf order of the first tree, what they visit in each tree,
// and products of their factors with the weight rows that they visit.
#pragma once

#include "common.cuh"
#include "split.cuh"

namespace hstree {

constexpr int group_rows = 16;
constexpr int group_threads = 160;
constexpr int group_trees = group_threads / group_rows;  // whose rows are sorted at a time

// Number of entries of an ascending array below a value. Called by whole warps, which try 32 entries at a
// time.
__device__ __forceinline__ int64_t entries_below(const int32_t* entry, int64_t count, int64_t value) {
  int64_t begin = 0;
  while (count > 0) {
    const int64_t step = divide_up(count, 32), offset = threadIdx.x % 32 * step;
    const unsigned below = __ballot_sync(all_lanes, offset < count && __ldg(entry + begin + offset) < value);
    const int first_above = __ffs(static_cast<int>(~below));
    if (first_above == 1) break;
    const int64_t last =
        ((first_above == 0 ? 33 : first_above) - 2) * step;  // the last one tried that is below
    begin += last + 1;
    count = (last + step < count ? last + step : count) - last - 1;
  }
  return begin;
}

// A node of the group: at `level` of the paths of rows [begin, end) in their order in the tree.
struct Visit {
  int level, begin, end;

  __device__ __forceinline__ uint16_t bits() const {
    return static_cast<uint16_t>(level | begin << 6 | (end - 1) << 10);
  }
  static __device__ __forceinline__ Visit of(unsigned bits) {
    return {static_cast<int>(bits & 63u), static_cast<int>(bits >> 6 & 15u),
            static_cast<int>(bits >> 10) + 1};
  }
};
static_assert(max_depth <= 64 && group_rows <= 16, "Visit::bits packs a visit into 16 bits");

// What a group visits in one tree, in dynamic shared memory.
template <typename S>
struct Visits {
  int stride;
  S* factor;  // [group_rows, stride] by row in the tree's order, and level, as GroupProduct::prepare leaves them
  int32_t* node;   // [group_rows, stride], -1 past the end of a path
  uint16_t* bits;  // [group_rows * stride], one visit for each node

  static __host__ size_t bytes(int stride) {
    return group_rows * stride * (sizeof(S) + sizeof(int32_t) + sizeof(uint16_t));
  }

  __device__ Visits(int stride, S* memory)
      : stride(stride),
        factor(memory),
        node(reinterpret_cast<int32_t*>(memory + group_rows * stride)),
        bits(reinterpret_cast<uint16_t*>(node + group_rows * stride)) {}
};

// In shared memory. Whatever the leaf positions are, rows of a tree are sorted only to find shared nodes
// together.
template <typename S>
struct RowGroup {
  int64_t row[group_rows];  // of the input, or -1

  // Of group_trees trees, by tree and place among the group's rows in leaf order:
  int64_t begin[group_trees][group_rows];   // first entry of the path
  int32_t key[group_trees][group_rows];     // by number in the group: leaf position
  uint8_t length[group_trees][group_rows];  // nodes on the path, 0 without a usable one
  uint8_t number[group_trees][group_rows];  // of the row in the group
  int64_t columns[group_trees][2];          // of the subset, that are in the window: first, and past the last

  // Of one tree:
  int fresh[group_rows];         // max_depth - nodes shared with the row before
  uint32_t largest[group_rows];  // bits of the largest magnitude of the row's factors
  int visits;

  // Finds the rows. Called by all threads of a block, as the functions below; ends without a barrier.
  __device__ void start(const Tables& tables, const LeafOrder& leaf_order, int64_t place) {
    const int i = threadIdx.x;
    if (i < group_rows) row[i] = place + i < tables.rows ? leaf_order.order[place + i] : -1;
  }

  // Sorts the rows in trees [first_tree, first_tree + group_trees) and finds those columns of their subsets
  // that are in the window [first, last). Begins and ends with a barrier.
  __device__ void sort(const Tables& tables, const LeafOrder& leaf_order, int first_tree, int64_t first,
                       int64_t last) {
    __syncthreads();
    const int u = threadIdx.x / group_rows, i = threadIdx.x % group_rows, tree = first_tree + u;
    int own_length = 0;
    int64_t own_begin = 0;
    int32_t own_key = 0x7fffffff;
    if (tree < tables.trees && row[i] >= 0) own_length = leaf_order.row_length[tree * tables.rows + row[i]];
    if (own_length > 0) {
      own_begin = path_begin(tables, tree, row[i]);
      own_key = tables.leaf_position[tree * tables.classes + tables.target[row[i]]];
    }
    key[u][i] = own_key;
    for (int v = threadIdx.x / 32; v < group_trees && first_tree + v < tables.trees;
         v += group_threads / 32) {
      const int64_t limit[2] = {first, last};
      for (int k = 0; k < 2; ++k) {
        int64_t column = limit[k] < tables.features ? limit[k] : tables.features;
        if (tables.feature_index != nullptr) {
          column = entries_below(tables.feature_index + (first_tree + v) * tables.features, tables.features,
                                 limit[k]);
        }
        if (threadIdx.x % 32 == 0) columns[v][k] = static_cast<int32_t>(column);
      }
    }
    __syncthreads();
    int before = 0;
    for (int k = 0; k < group_rows; ++k) before += key[u][k] < own_key || (key[u][k] == own_key && k < i);
    begin[u][before] = own_begin;
    length[u][before] = static_cast<uint8_t>(own_length > 0 ? own_length : 0);
    number[u][before] = static_cast<uint8_t>(i);
    __syncthreads();
  }

  // Lists the nodes that the group visits in a tree, each once. factor_of(row, level, entry). Begins and ends
  // with a barrier. A thread has every group_threads-th of the [group_rows, stride] nodes.
  template <typename P, typename FactorOf>
  __device__ void find_visits(const Tables& tables, int tree, const Visits<S>& to, FactorOf factor_of) {
    const int u = tree % group_trees, stride = to.stride, lane = threadIdx.x % 32;
    const float inverse = 1.0f / static_cast<float>(stride);
    const auto row_of = [&](int i) { return static_cast<int>((static_cast<float>(i) + 0.5f) * inverse); };
    __syncthreads();
    if (threadIdx.x < group_rows) {
      fresh[threadIdx.x] = max_depth - length[u][threadIdx.x];
      largest[threadIdx.x] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < group_rows * stride; i += group_threads) {
      const int p = row_of(i), level = i - p * stride;
      int32_t entry = -1;
      S value = 0;
      if (level < length[u][p]) {
        entry = tables.path[begin[u][p] + level];
        value = factor_of(row[number[u][p]], level, entry);
        if constexpr (P::scaled) {
          const float magnitude = fabsf(value);
          uint32_t bits;
          memcpy(&bits, &magnitude, sizeof bits);
          atomicMax(&largest[p], bits);
        }
      }
      to.node[i] = entry < 0 ? -1 : entry >> 1;
      to.factor[i] = value;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < group_rows * stride; i += group_threads) {
      const int p = row_of(i), level = i - p * stride;
      if constexpr (P::scaled) to.factor[i] = P::prepare(to.factor[i], largest[p]);
      if (level >= length[u][p]) continue;
      // The first level at which the row before has another node.
      const int32_t *own = to.node + i, *other = own - stride;
      const bool same = p > 0 && own[0] == other[0];
      const bool same_above = level == 0 || (p > 0 && own[-1] == other[-1]);
      if (!same && same_above) atomicMax(&fresh[p], max_depth - level);
    }
    __syncthreads();
    const int counted = lane < group_rows ? length[u][lane] - (max_depth - fresh[lane]) : 0;
    int sum = counted;
#pragma unroll
    for (int delta = 1; delta < group_rows; delta *= 2) {
      const int before = __shfl_sync(all_lanes, sum, lane >= delta ? lane - delta : lane);
      if (lane >= delta) sum += before;
    }
    if (threadIdx.x == group_rows - 1) visits = sum;
    for (int first = 0; first < group_rows * stride; first += group_threads) {
      const int i = first + threadIdx.x, p = row_of(i), level = i - p * stride;
      const int before = __shfl_sync(all_lanes, sum - counted, p % 32);
      if (p >= group_rows || level >= length[u][p]) continue;
      const int shared = max_depth - fresh[p];
      if (level < shared) continue;
      int end = p + 1;
      while (end < group_rows && max_depth - fresh[end] > level) ++end;
      to.bits[before + level - shared] = Visit{level, p, end}.bits();
    }
    __syncthreads();
  }
};

// Factors of the group's rows times the weight rows that they visit in a tree, in the columns of the window,
// added to total [group_rows, total_stride] by number of the row in the group and feature - first.
//
// float32 and float64: fused multiply-adds; a thread has a column of all rows in registers.
template <typename T, bool Aligned, bool Half = is_half<T>>
struct GroupProduct {
  static constexpr bool scaled = false;

  static __device__ __forceinline__ void multiply(const Tables& tables, const RowGroup<T>& group,
                                                  const Visits<T>& from, int tree, const T* weight,
                                                  int64_t first, T* total, int total_stride) {
    const int u = tree % group_trees;
    const int end = group.columns[u][1];
    for (int column = group.columns[u][0] + threadIdx.x; column < end; column += group_threads) {
      T sum[group_rows] = {};
#pragma unroll 2
      for (int k = 0; k < group.visits; ++k) {
        const Visit visit = Visit::of(from.bits[k]);
        const T* factor = from.factor + visit.level;
        const T value =
            __ldg(weight + from.node[visit.begin * from.stride + visit.level] * tables.features + column);
#pragma unroll
        for (int four = 0; four < group_rows; four += 4) {
          if (visit.begin >= four + 4 || visit.end <= four) continue;
#pragma unroll
          for (int r = four; r < four + 4; ++r) {
            if (r >= visit.begin && r < visit.end) sum[r] += factor[r * from.stride] * value;
          }
        }
      }
      T* at = total + (input_feature(tables, tree, column) - first);
#pragma unroll
      for (int r = 0; r < group_rows; ++r) {
        if (group.length[u][r] > 0) at[group.number[u][r] * total_stride] += sum[r];
      }
    }
  }
};

// bfloat16 and float16: [16 rows] x [16 visits] x [8 columns] by matrix instructions, 64 columns for a warp.
// A lane reads eight columns of four weight rows in 16 bytes each: column 8 n + j is column n of instruction
// j. A factor is two elements of type T in one word, after the largest of the row is scaled to [1, 2):
// split.cuh.
template <typename T, bool Aligned>
struct GroupProduct<T, Aligned, true> {
  static constexpr bool scaled = true;

  static __device__ __forceinline__ Scale scale(uint32_t largest) {
    float magnitude;
    memcpy(&magnitude, &largest, sizeof magnitude);
    return scale_of(magnitude);
  }

  static __device__ __forceinline__ float prepare(float factor, uint32_t largest) {
    const uint32_t word = split<T>(factor * scale(largest).inverse);
    memcpy(&factor, &word, sizeof factor);
    return factor;
  }

  static __device__ __forceinline__ void multiply(const Tables& tables, const RowGroup<float>& group,
                                                  const Visits<float>& from, int tree, const T* weight,
                                                  int64_t first, float* total, int total_stride) {
    const int u = tree % group_trees, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int stride = from.stride, visits = group.visits;
    const int begin = group.columns[u][0], end = group.columns[u][1];
    const auto features = static_cast<uint32_t>(tables.features);
    const float* own_factor = from.factor + g * stride;
    if (visits == 0) return;
    for (int tile = begin / 16 * 16 + threadIdx.x / 32 * 64; tile < end; tile += group_threads / 32 * 64) {
      float sum[8][4] = {};
      const T* own_weight = weight + tile + 8 * g;
      const int left = end - (tile + 8 * g);
#pragma unroll 1
      for (int k = 2 * t; k < visits + 2 * t; k += 16) {
        uint32_t part[4][4], word[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int own = k + i % 2 + i / 2 * 8;
          const bool inside = own < visits;
          const Visit visit = Visit::of(from.bits[inside ? own : 0]);
          const auto node = static_cast<uint32_t>(from.node[visit.begin * stride + visit.level]);
          load_eight(own_weight + static_cast<uint64_t>(node) * features, inside ? left : 0, part[i]);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int r = g + 8 * h;
            word[h][i] = 0;
            if (inside && r >= visit.begin && r < visit.end) {
              memcpy(&word[h][i], own_factor + 8 * h * stride + visit.level, sizeof(uint32_t));
            }
          }
        }
        uint32_t high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          high[i] = halves(word[i % 2][i / 2 * 2], word[i % 2][i / 2 * 2 + 1], false);
          low[i] = halves(word[i % 2][i / 2 * 2], word[i % 2][i / 2 * 2 + 1], true);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t operand[2] = {halves(part[0][j / 2], part[1][j / 2], j % 2),
                                       halves(part[2][j / 2], part[3][j / 2], j % 2)};
          mma<T>(sum[j], low, operand);
          mma<T>(sum[j], high, operand);
        }
      }
      const bool used[2] = {group.length[u][g] > 0, group.length[u][g + 8] > 0};
      const float back[2] = {scale(group.largest[g]).back, scale(group.largest[g + 8]).back};
      float* row[2] = {total + group.number[u][g] * total_stride,
                       total + group.number[u][g + 8] * total_stride};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = tile + 16 * t + 8 * e;
        if (column >= end) continue;
        int feature[8];
        load_features(tables, tree, column, end, feature);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (column + j < begin || column + j >= end) continue;
          const int at = feature[j] - static_cast<int>(first);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (used[h]) row[h][at] += sum[j][2 * h + e] * back[h];
          }
        }
      }
    }
  }

 private:
  // Features of eight columns, arbitrary from `end` on.
  static __device__ __forceinline__ void load_features(const Tables& tables, int tree, int column, int end,
                                                       int (&feature)[8]) {
    if (tables.feature_index == nullptr) {
#pragma unroll
      for (int j = 0; j < 8; ++j) feature[j] = column + j;
      return;
    }
    const int32_t* index = tables.feature_index + tree * tables.features + column;
    if constexpr (Aligned) {
      const uint4 raw[2] = {__ldg(reinterpret_cast<const uint4*>(index)),
                            __ldg(reinterpret_cast<const uint4*>(index) + 1)};
      memcpy(feature, raw, sizeof feature);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) feature[j] = __ldg(index + (column + j < end ? j : 0));
    }
  }

  // Eight elements, arbitrary from `left` on, zero if that is not positive.
  static __device__ __forceinline__ void load_eight(const T* address, int left, uint32_t (&part)[4]) {
    if (left <= 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) part[i] = 0;
    } else if constexpr (Aligned) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(address));
      memcpy(part, &raw, sizeof raw);
    } else {
      const T zero = round_to<T>(0.0f);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        part[i] = pack(2 * i < left ? __ldg(address + 2 * i) : zero,
                       2 * i + 1 < left ? __ldg(address + 2 * i + 1) : zero);
      }
    }
  }
};

}  // namespace hstree
