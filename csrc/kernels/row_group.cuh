// Groups of 16 consecutive rows in the leaf order of the first tree, the nodes that they visit in each tree,
// and products of their factors with the weight rows of these nodes.
#pragma once

#include "common.cuh"
#include "split.cuh"

namespace hstree {

constexpr int group_rows = 16;
constexpr int group_threads = 160;
constexpr int group_trees = 16;  // number of trees whose windows are found at a time
constexpr int visit_threads = 128;

// Number of entries of an ascending array that are below a value. Called by whole warps, which compare 32
// entries at a time.
__device__ __forceinline__ int64_t entries_below(const int32_t* entry, int64_t count, int64_t value) {
  int64_t begin = 0;
  while (count > 0) {
    const int64_t step = divide_up(count, 32), offset = threadIdx.x % 32 * step;
    const unsigned below = __ballot_sync(all_lanes, offset < count && __ldg(entry + begin + offset) < value);
    const int first_above = __ffs(static_cast<int>(~below));
    if (first_above == 1) break;
    const int64_t last =
        ((first_above == 0 ? 33 : first_above) - 2) * step;  // the last compared entry that is below
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

// The nodes that a group visits in one tree, written once by path_group_kernel and read by the blocks of all
// windows. Rows are in the order of the tree.
template <typename S>
struct GroupVisits {
  struct Header {
    S back[group_rows];          // the scale of the row's factors
    uint8_t number[group_rows];  // of the row in the group
    uint8_t used[group_rows];    // whether it has a path
    int32_t visits, padding[3];
  };

  int stride;
  Header* header;
  S* factor;       // [group_rows, stride] by level, as GroupProduct::prepare leaves them
  int32_t* node;   // [visits]
  uint16_t* bits;  // [visits] Visit::bits

  static __host__ __device__ size_t bytes(int stride) {
    return sizeof(Header) + group_rows * stride * (sizeof(S) + sizeof(int32_t) + sizeof(uint16_t));
  }

  // memory: aligned to 16 bytes.
  __device__ GroupVisits(int stride, void* memory)
      : stride(stride),
        header(static_cast<Header*>(memory)),
        factor(reinterpret_cast<S*>(header + 1)),
        node(reinterpret_cast<int32_t*>(factor + group_rows * stride)),
        bits(reinterpret_cast<uint16_t*>(node + group_rows * stride)) {}
};

// Finds the visits of a group in a tree, with a whole block. In shared memory. Rows are sorted only so that
// rows with shared nodes are consecutive: the result is correct for any leaf positions.
template <typename S>
struct GroupOrder {
  // By number in the group.
  int32_t key[group_rows];  // leaf position
  // By place in the order of the tree.
  int64_t row[group_rows];    // of hidden, or -1
  int64_t begin[group_rows];  // first entry of the path
  int length[group_rows];     // nodes on the path, 0 without a valid one
  int number[group_rows];
  int fresh[group_rows];         // max_depth - number of nodes shared with the previous row
  uint32_t largest[group_rows];  // bits of the largest magnitude of the row's factors

  // Ends with a barrier.
  __device__ void sort(const Tables& tables, const LeafOrder& leaf_order, int tree, int64_t place) {
    const int i = threadIdx.x;
    int64_t own_row = -1, own_begin = 0;
    int own_length = 0;
    int32_t own_key = 0x7fffffff;
    if (i < group_rows) {
      if (place + i < tables.rows) own_row = leaf_order.order[place + i];
      if (own_row >= 0) own_length = leaf_order.row_length[tree * tables.rows + own_row];
      if (own_length > 0) {
        own_begin = path_begin(tables, tree, own_row);
        own_key = tables.leaf_position[tree * tables.classes + tables.target[own_row]];
      }
      key[i] = own_key;
    }
    __syncthreads();
    if (i < group_rows) {
      int before = 0;
      for (int k = 0; k < group_rows; ++k) before += key[k] < own_key || (key[k] == own_key && k < i);
      row[before] = own_row;
      begin[before] = own_begin;
      length[before] = own_length > 0 ? own_length : 0;
      number[before] = i;
      fresh[before] = max_depth - length[before];
      largest[before] = 0;
    }
    __syncthreads();
  }

  // Lists the nodes that the rows visit, each once. factor_of(row, level, entry). memory: shared, [group_rows,
  // stride] S and as many int32. Threads stride over the [group_rows, stride] nodes.
  template <typename P, typename FactorOf>
  __device__ void list(const Tables& tables, S* factor, const GroupVisits<S>& to, FactorOf factor_of) {
    const int stride = to.stride, lane = threadIdx.x % 32;
    int32_t* node = reinterpret_cast<int32_t*>(factor + group_rows * stride);
    for (int i = threadIdx.x; i < group_rows * stride; i += blockDim.x) {
      const int p = i / stride, level = i % stride;
      int32_t entry = -1;
      S value = 0;
      if (level < length[p]) {
        entry = tables.path[begin[p] + level];
        value = factor_of(row[p], level, entry);
        if constexpr (P::scaled) {
          const float magnitude = fabsf(value);
          uint32_t bits;
          memcpy(&bits, &magnitude, sizeof bits);
          atomicMax(&largest[p], bits);
        }
      }
      node[i] = entry < 0 ? -1 : entry >> 1;
      factor[i] = value;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < group_rows * stride; i += blockDim.x) {
      const int p = i / stride, level = i % stride;
      to.factor[i] = P::prepare(factor[i], largest[p]);
      if (level >= length[p]) continue;
      // The first level at which the previous row has another node.
      const int32_t *own = node + i, *other = own - stride;
      const bool same = p > 0 && own[0] == other[0];
      const bool same_above = level == 0 || (p > 0 && own[-1] == other[-1]);
      if (!same && same_above) atomicMax(&fresh[p], max_depth - level);
    }
    __syncthreads();
    const int counted = lane < group_rows ? length[lane] - (max_depth - fresh[lane]) : 0;
    int sum = counted;
#pragma unroll
    for (int delta = 1; delta < group_rows; delta *= 2) {
      const int before = __shfl_sync(all_lanes, sum, lane >= delta ? lane - delta : lane);
      if (lane >= delta) sum += before;
    }
    if (threadIdx.x < group_rows) {
      const int p = threadIdx.x;
      to.header->back[p] = P::back(largest[p]);
      to.header->number[p] = static_cast<uint8_t>(number[p]);
      to.header->used[p] = length[p] > 0;
      if (p == group_rows - 1) to.header->visits = sum;
    }
    // Blocks of path_log_prob_backward_hidden_kernel copy all of it.
    const int visits = __shfl_sync(all_lanes, sum, group_rows - 1);
    for (int i = visits + threadIdx.x; i < group_rows * stride; i += blockDim.x) {
      to.bits[i] = 0;
      to.node[i] = 0;
    }
    if (threadIdx.x < 3) to.header->padding[threadIdx.x] = 0;
    for (int first = 0; first < group_rows * stride; first += blockDim.x) {
      const int i = first + threadIdx.x, p = i / stride, level = i % stride;
      const int before = __shfl_sync(all_lanes, sum - counted, p % 32);
      if (p >= group_rows || level >= length[p]) continue;
      const int shared = max_depth - fresh[p];
      if (level < shared) continue;
      int end = p + 1;
      while (end < group_rows && max_depth - fresh[end] > level) ++end;
      to.bits[before + level - shared] = Visit{level, p, end}.bits();
      to.node[before + level - shared] = node[i];
    }
  }
};

// Factors of the group's rows times the weight rows that they visit in a tree, in the columns of the window,
// added to total [group_rows, total_stride] by number of the row in the group and feature - first.
//
// float32 and float64: fused multiply-adds; a thread holds one column of all rows in registers.
template <typename T, bool Aligned, bool Half = is_half<T>>
struct GroupProduct {
  static constexpr bool scaled = false;

  static __device__ __forceinline__ T prepare(T factor, uint32_t) { return factor; }
  static __device__ __forceinline__ T back(uint32_t) { return T(1); }

  static __device__ __forceinline__ void multiply(const Tables& tables, const GroupVisits<T>& from, int tree,
                                                  int begin, int end, const T* weight, int64_t first,
                                                  T* total, int total_stride) {
    for (int column = begin + threadIdx.x; column < end; column += group_threads) {
      T sum[group_rows] = {};
#pragma unroll 2
      for (int k = 0; k < from.header->visits; ++k) {
        const Visit visit = Visit::of(from.bits[k]);
        const T* factor = from.factor + visit.level;
        const T value = __ldg(weight + from.node[k] * tables.features + column);
#pragma unroll
        for (int four = 0; four < group_rows; four += 4) {
          if (visit.begin >= four + 4 || visit.end <= four) continue;
#pragma unroll
          for (int r = four; r < four + 4; ++r) {
            if (r >= visit.begin && r < visit.end) sum[r] += factor[r * from.stride] * value;
          }
        }
      }
      T* at = total + (hidden_feature(tables, tree, column) - first);
#pragma unroll
      for (int r = 0; r < group_rows; ++r) {
        if (from.header->used[r]) at[from.header->number[r] * total_stride] += sum[r];
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

  static __device__ __forceinline__ float back(uint32_t largest) { return scale(largest).back; }

  static __device__ __forceinline__ float prepare(float factor, uint32_t largest) {
    const uint32_t word = split<T>(factor * scale(largest).inverse);
    memcpy(&factor, &word, sizeof factor);
    return factor;
  }

  static __device__ __forceinline__ void multiply(const Tables& tables, const GroupVisits<float>& from,
                                                  int tree, int begin, int end, const T* weight,
                                                  int64_t first, float* total, int total_stride) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int stride = from.stride, visits = from.header->visits;
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
          const auto node = static_cast<uint32_t>(from.node[inside ? own : 0]);
          load_eight(own_weight + static_cast<uint64_t>(node) * features, inside ? left : 0, part[i]);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int r = g + 8 * h;
            word[h][i] = 0;
            if (inside && r >= visit.begin && r < visit.end) {
              const float factor = own_factor[8 * h * stride + visit.level];
              memcpy(&word[h][i], &factor, sizeof factor);
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
      const auto& header = *from.header;
      const bool used[2] = {header.used[g] != 0, header.used[g + 8] != 0};
      const float back[2] = {header.back[g], header.back[g + 8]};
      float* row[2] = {total + header.number[g] * total_stride, total + header.number[g + 8] * total_stride};
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

  // Eight elements, arbitrary from index `left` on; all zero if left <= 0.
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
