// Gradients of weight rows over a segment: the runs of rows below its nodes, and products of their factors with
// the features of the segment, which a block stages in shared memory.
#pragma once

#include "mma.cuh"
#include "segment.cuh"
#include "split.cuh"

namespace hstree {

constexpr int run_threads = 256;
constexpr int run_group = 16;     // runs that a warp sums at a time
constexpr int chunk_places = 16;  // of a segment, the inner dimension of a matrix instruction
constexpr int most_places = 512;  // of a segment

// Rows [begin, end) of a segment that have a node at a level of their paths. Empty: no run.
struct PlaceRun {
  int level, begin, end;

  __device__ __forceinline__ unsigned bits() const {
    return static_cast<unsigned>(level | begin << 6 | end << 16);
  }
  static __device__ __forceinline__ PlaceRun of(unsigned bits) {
    return {static_cast<int>(bits & 63u), static_cast<int>(bits >> 6 & 1023u), static_cast<int>(bits >> 16)};
  }
};
static_assert(max_depth <= 64 && most_places <= 1023, "PlaceRun::bits");

// The runs of a segment, in two lists by first row and level: long runs, of rows in more than one chunk, and
// short ones. A group, 16 runs of one list, then meets few chunks. No list is kept: a run is found by its number.
// In shared memory.
struct SegmentRuns {
  int64_t row[most_places];                          // of the input; -1: no usable path
  uint8_t shared[most_places];                       // nodes shared with the row before in the segment
  uint8_t chunk_shared[most_places / chunk_places];  // the least of a chunk
  unsigned first[most_places + 1];  // long runs that start before a row, and short ones in the upper half
  unsigned warp_total[run_threads / 32];
  int rows;

  static __device__ __forceinline__ int part(unsigned counts, bool is_short) {
    return static_cast<int>(is_short ? counts >> 16 : counts & 0xffffu);
  }
  __device__ __forceinline__ int count(bool is_short) const { return part(first[rows], is_short); }
  __device__ __forceinline__ int groups(bool is_short) const {
    return (count(is_short) + run_group - 1) / run_group;
  }

  // Places [begin, begin + rows) of a tree. Called by all threads of a block; ends with a barrier.
  __device__ void fill(const Tables& tables, const LeafOrder& leaf_order, int tree, int64_t begin, int rows) {
    static_assert(most_places == 2 * run_threads);
    const int tid = threadIdx.x, lane = tid % 32;
    const int64_t at = tree * tables.rows + begin;
    int length[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = 2 * tid + k;
      length[k] = i < rows ? leaf_order.length[at + i] : 0;
      row[i] = length[k] > 0 ? leaf_order.order[at + i] : -1;
      shared[i] = static_cast<uint8_t>(i > 0 && i < rows ? leaf_order.shared[at + i] : 0);
    }
    if (tid == 0) this->rows = rows;
    __syncthreads();
    if (tid < most_places / chunk_places) {
      uint8_t least = 255;
      for (int i = tid * chunk_places; i < (tid + 1) * chunk_places; ++i)
        least = least < shared[i] ? least : shared[i];
      chunk_shared[tid] = least;
    }
    unsigned counts[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = 2 * tid + k, fresh = shared[i];
      int reach = max_depth;  // levels whose nodes the first row of the next chunk has too
      for (int next = i + 1; next <= (i / chunk_places + 1) * chunk_places; ++next) {
        const int other = next < rows ? shared[next] : 0;
        reach = reach < other ? reach : other;
      }
      const int total = length[k] > fresh ? length[k] - fresh : 0;
      int longer = (reach < length[k] ? reach : length[k]) - fresh;
      if (longer < 0) longer = 0;
      counts[k] = static_cast<unsigned>(longer | (total - longer) << 16);
    }
    unsigned sum = counts[0] + counts[1];
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const unsigned before = __shfl_sync(all_lanes, sum, lane >= delta ? lane - delta : lane);
      if (lane >= delta) sum += before;
    }
    if (lane == 31) warp_total[tid / 32] = sum;
    __syncthreads();
    unsigned before = 0;
    for (int warp = 0; warp < tid / 32; ++warp) before += warp_total[warp];
    first[2 * tid + 2] = before + sum;
    first[2 * tid + 1] = before + sum - counts[1];
    if (tid == 0) first[0] = 0;
    __syncthreads();
  }

  // Run `index` of a list, empty past its end.
  __device__ __forceinline__ PlaceRun run(int index, bool is_short) const {
    if (index >= count(is_short)) return {0, 0, 0};
    int begin = 0;  // the last row before whose runs there are at most `index`
    for (int above = rows; above - begin > 1;) {
      const int middle = (begin + above) / 2;
      (part(first[middle], is_short) <= index ? begin : above) = middle;
    }
    int level = shared[begin] + index - part(first[begin], is_short);
    if (is_short) level += part(first[begin + 1], false) - part(first[begin], false);
    int end = begin + 1;
    while (end < rows && end % chunk_places != 0 && shared[end] > level) ++end;
    if (end % chunk_places == 0) {
      while (end < rows && chunk_shared[end / chunk_places] > level) end += chunk_places;
      while (end < rows && shared[end] > level) ++end;
    }
    return {level, begin, end};
  }
};

// factors of 16 runs times the features of their rows, by a warp. factor: of level 0 and row 0 of the segment, zero
// from its last row to the next multiple of 16; level_stride between levels, a multiple of 16.
//
// float32 and float64: fused multiply-adds, a lane for each column.
template <typename T, bool Half = is_half<T>>
struct RunProduct {
  static constexpr int columns = 32;  // of a block

  static __host__ size_t bytes(int64_t places) { return sizeof(T) * columns * places; }

  // staged [rows, columns] = features [first_column, first_column + columns) of the rows.
  static __device__ void stage(const Tables& tables, const SegmentRuns& runs, int tree, const T* input,
                               int64_t first_column, void* staged) {
    T* feature = static_cast<T*>(staged);
    const int64_t column = first_column + threadIdx.x % 32;
    const int64_t source = column < tables.features ? input_feature(tables, tree, column) : -1;
#pragma unroll 8
    for (int r = threadIdx.x / 32; r < runs.rows; r += run_threads / 32) {
      const int64_t row = runs.row[r];
      feature[r * columns + threadIdx.x % 32] =
          row >= 0 && source >= 0 ? __ldg(input + row * tables.in_features + source) : T(0);
    }
  }

  // own: bits of run threadIdx.x % 16. Calls take(k, column of the block, sums of consecutive columns) for all
  // runs and columns of a lane, by all lanes at once.
  template <typename Take>
  static __device__ __forceinline__ void multiply(unsigned own, const T* factor, int64_t level_stride,
                                                  const void* staged, Take take) {
    const int lane = threadIdx.x % 32;
    const T* feature = static_cast<const T*>(staged) + lane;
    for (int k = 0; k < run_group; ++k) {
      const PlaceRun run = PlaceRun::of(__shfl_sync(all_lanes, own, k));
      if (run.end == 0) break;
      const T* of_row = factor + run.level * level_stride;
      T sum[1] = {};
#pragma unroll 4
      for (int r = run.begin; r < run.end; ++r) sum[0] += __ldg(of_row + r) * feature[r * columns];
      take(k, lane, sum);
    }
  }
};

// bfloat16 and float16: [16 runs] x [16 rows] x [8 columns] by matrix instructions. The features of two rows are
// one word, as the instruction takes them. A factor is two elements of type T after the largest of a run in 16 rows
// is scaled to [1, 2): split.cuh. Lane t of four has columns 8 t ... 8 t + 7 of each 32, so that it writes 16 bytes
// of a gradient row: column 2 t + e of instruction j is 32 (j / 4) + 8 t + 2 (j % 4) + e.
template <typename T>
struct RunProduct<T, true> {
  static constexpr int columns = 64;
  static constexpr int stride = columns + 2;  // words; the banks of the words of an operand all differ

  static __host__ size_t bytes(int64_t places) { return sizeof(uint32_t) * stride * places / 2; }

  // staged [rows / 2 up to a multiple of 8, stride] = features of the rows, zero past the last one.
  static __device__ void stage(const Tables& tables, const SegmentRuns& runs, int tree, const T* input,
                               int64_t first_column, void* staged) {
    const int lane = threadIdx.x % 32;
    int64_t source[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int64_t column = first_column + lane + 32 * c;
      source[c] = column < tables.features ? input_feature(tables, tree, column) : -1;
    }
    uint32_t* word = static_cast<uint32_t*>(staged) + lane;
    const int pairs = (runs.rows + chunk_places - 1) / chunk_places * (chunk_places / 2);
#pragma unroll 4
    for (int pair = threadIdx.x / 32; pair < pairs; pair += run_threads / 32) {
      T element[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t row = runs.row[2 * pair + i];
        const T* features = input + (row < 0 ? 0 : row) * tables.in_features;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          element[c][i] = row >= 0 && source[c] >= 0 ? __ldg(features + source[c]) : round_to<T>(0.0f);
        }
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) word[pair * stride + 32 * c] = pack(element[c][0], element[c][1]);
    }
  }

  template <typename Take>
  static __device__ __forceinline__ void multiply(unsigned own, const float* factor, int64_t level_stride,
                                                  const void* staged, Take take) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const PlaceRun run[2] = {PlaceRun::of(__shfl_sync(all_lanes, own, g)),
                             PlaceRun::of(__shfl_sync(all_lanes, own, g + 8))};
    const int begin = PlaceRun::of(__shfl_sync(all_lanes, own, 0)).begin / chunk_places * chunk_places;
    const int end = warp_max(PlaceRun::of(own).end);
    const float* of_row[2] = {factor + run[0].level * level_stride + 2 * t,
                              factor + run[1].level * level_stride + 2 * t};
    const uint32_t* words =
        static_cast<const uint32_t*>(staged) + (begin / 2 + t) * stride + g / 2 * 8 + g % 2;
    float sum[8][4] = {};
    for (int first = begin; first < end; first += chunk_places, words += chunk_places / 2 * stride) {
      uint32_t high[4], low[4];
      float scale[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float value[2][2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          load<2>(of_row[h] + first + 8 * k, value[k]);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int r = first + 8 * k + 2 * t + e;
            if (r < run[h].begin || r >= run[h].end) value[k][e] = 0.0f;
          }
        }
        float largest = fmaxf(fmaxf(fabsf(value[0][0]), fabsf(value[0][1])),
                              fmaxf(fabsf(value[1][0]), fabsf(value[1][1])));
        largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 2));
        const Scale to = scale_of(largest);
        scale[h] = to.back;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          split<T>(value[k][0] * to.inverse, value[k][1] * to.inverse, high[2 * k + h], low[2 * k + h]);
        }
      }
      // A product may be NaN where a feature is not finite.
      const bool meets[2] = {run[0].begin < first + chunk_places && run[0].end > first,
                             run[1].begin < first + chunk_places && run[1].end > first};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = 32 * (j / 4) + 2 * (j % 4);
        const uint32_t feature[2] = {words[column], words[column + chunk_places / 4 * stride]};
        float product[4] = {};
        mma<T>(product, low, feature);
        mma<T>(product, high, feature);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (meets[i / 2]) sum[j][i] += product[i] * scale[i / 2];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i / 2, j = i % 2 * 4;
      const float part[8] = {sum[j][2 * h],         sum[j][2 * h + 1],    sum[j + 1][2 * h],
                             sum[j + 1][2 * h + 1], sum[j + 2][2 * h],    sum[j + 2][2 * h + 1],
                             sum[j + 3][2 * h],     sum[j + 3][2 * h + 1]};
      take(g + 8 * h, 32 * (i % 2) + 8 * t, part);
    }
  }
};

}  // namespace hstree
