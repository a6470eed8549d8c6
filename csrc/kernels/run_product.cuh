// Gradients of weight rows over a segment: the runs of rows below the nodes that it visits, and products of
// their factors with the features of the segment, which a block stages in shared memory.
#pragma once

#include "mma.cuh"
#include "segment.cuh"
#include "split.cuh"

namespace hstree {

constexpr int run_threads = 256;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
constexpr int run_blocks = 2;  // per multiprocessor, limited by its shared memory
#else
constexpr int run_blocks = 3;
#endif
constexpr int run_group = 16;     // runs that a warp sums at a time
constexpr int chunk_places = 16;  // of a segment, the inner dimension of a matrix instruction
constexpr int most_places = 512;  // of a segment

// The rows [begin, end) of a segment whose paths have a node at a level, and the destination of their sum.
// end = 0: no run.
struct PlaceRun {
  int level, begin, end, goal;
  int64_t row;  // of the gradient; arbitrary unless the run starts in the segment

  __device__ __forceinline__ uint64_t bits() const {
    return static_cast<uint64_t>(row) << 28 | static_cast<uint64_t>(goal) << 26 |
           static_cast<uint64_t>(end) << 16 | static_cast<uint64_t>(begin) << 6 |
           static_cast<uint64_t>(level);
  }
  static __device__ __forceinline__ PlaceRun of(uint64_t bits) {
    return {static_cast<int>(bits & 63u), static_cast<int>(bits >> 6 & 1023u),
            static_cast<int>(bits >> 16 & 1023u), static_cast<int>(bits >> 26 & 3u),
            static_cast<int64_t>(bits >> 28)};
  }
};
static_assert(max_depth <= 64 && most_places <= 1023, "PlaceRun::bits; rows of a gradient are below 2^36");

// The runs of a segment, in two lists by first row and level: long runs, with rows in more than one chunk,
// and short ones. Then a group, 16 runs of one list, covers few chunks. In shared memory.
struct SegmentRuns {
  uint8_t shared[most_places];                       // nodes shared with the previous row of the segment
  uint8_t chunk_shared[most_places / chunk_places];  // the smallest of a chunk
  uint32_t warp_total[run_threads / 32];

  // Writes the runs of places [begin, begin + rows) of a tree, the long ones first, each list filled up with
  // empty runs to a multiple of 16, and the number of groups. finish(run): sets goal and row. Called by all
  // threads of a block, two places each.
  template <typename Finish>
  __device__ void list(const Tables& tables, const LeafOrder& leaf_order, int tree, int64_t begin, int rows,
                       Finish finish, uint64_t* runs, int32_t* groups) {
    static_assert(most_places == 2 * run_threads);
    const int tid = threadIdx.x, lane = tid % 32;
    const int64_t at = tree * tables.rows + begin;
    int length[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = 2 * tid + k;
      length[k] = i < rows ? leaf_order.length[at + i] : 0;
      shared[i] = static_cast<uint8_t>(i > 0 && i < rows ? leaf_order.shared[at + i] : 0);
    }
    __syncthreads();
    if (tid < most_places / chunk_places) {
      uint8_t least = max_depth;
      for (int i = tid * chunk_places; i < (tid + 1) * chunk_places; ++i) {
        least = least < shared[i] ? least : shared[i];
      }
      chunk_shared[tid] = least;
    }
    int longs[2];        // levels [0, longs) have long runs
    uint32_t counts[2];  // number of long runs that start at a place; in the upper half, of short ones
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = 2 * tid + k, fresh = shared[i];
      int reach = max_depth;  // levels [0, reach) are shared with the first row of the next chunk
#pragma unroll 1
      for (int next = i + 1; next <= (i / chunk_places + 1) * chunk_places; ++next) {
        const int other = next < rows ? shared[next] : 0;
        reach = reach < other ? reach : other;
      }
      const int total = length[k] > fresh ? length[k] - fresh : 0;
      longs[k] = reach < length[k] ? reach : length[k];
      if (longs[k] < fresh) longs[k] = fresh;
      counts[k] = static_cast<uint32_t>(longs[k] - fresh);
      counts[k] |= static_cast<uint32_t>(total - static_cast<int>(counts[k])) << 16;
    }
    uint32_t sum = counts[0] + counts[1];
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const uint32_t before = __shfl_sync(all_lanes, sum, lane >= delta ? lane - delta : lane);
      if (lane >= delta) sum += before;
    }
    if (lane == 31) warp_total[tid / 32] = sum;
    __syncthreads();
    uint32_t total = 0;
    for (int warp = 0; warp < run_threads / 32; ++warp) {
      if (warp < tid / 32) sum += warp_total[warp];
      total += warp_total[warp];
    }
    const int longs_end = static_cast<int>(total & 0xffffu), shorts_end = static_cast<int>(total >> 16);
    const int shorts_at = (longs_end + run_group - 1) / run_group * run_group;
    const int last = shorts_at + (shorts_end + run_group - 1) / run_group * run_group;
    if (tid == 0) *groups = last / run_group;
    if (tid < run_group && longs_end + tid < shorts_at) runs[longs_end + tid] = 0;
    if (tid < run_group && shorts_at + shorts_end + tid < last) runs[shorts_at + shorts_end + tid] = 0;
    uint32_t before = sum - counts[0] - counts[1];
    for (int k = 0; k < 2; ++k) {
      const int i = 2 * tid + k;
      int to = static_cast<int>(before & 0xffffu);
      for (int level = shared[i]; level < length[k]; ++level, ++to) {
        if (level == longs[k]) to = shorts_at + static_cast<int>(before >> 16);
        runs[to] = finish(PlaceRun{level, i, run_end(i, level, rows), 0, 0}).bits();
      }
      before += counts[k];
    }
  }

 private:
  __device__ __forceinline__ int run_end(int begin, int level, int rows) const {
    int end = begin + 1;
    while (end < rows && end % chunk_places != 0 && shared[end] > level) ++end;
    if (end % chunk_places == 0) {
      while (end < rows && chunk_shared[end / chunk_places] > level) end += chunk_places;
      while (end < rows && shared[end] > level) ++end;
    }
    return end;
  }
};

// The offset of the row of hidden of each place of a segment; -1 without a valid path. In shared memory.
struct SegmentRows {
  int64_t offset[most_places];

  // Rounds up to a multiple of 16 places. Called by all threads of a block; ends with a barrier.
  __device__ __forceinline__ void fill(const Tables& tables, const LeafOrder& leaf_order, int tree,
                                       int64_t begin, int rows) {
    const int64_t at = tree * tables.rows + begin;
    for (int i = threadIdx.x; i < (rows + chunk_places - 1) / chunk_places * chunk_places; i += run_threads) {
      const bool used = i < rows && leaf_order.length[at + i] > 0;
      offset[i] = used ? leaf_order.order[at + i] * tables.in_features : -1;
    }
    __syncthreads();
  }
};

// Factors of 16 runs times the features of their rows, by a warp. Factors are by level and place, zero from
// the last place to the next multiple of 16; level_stride between levels is a multiple of 16.
//
// float32 and float64: fused multiply-adds, a lane for each column.
template <typename T, bool Half = is_half<T>>
struct RunProduct {
  static constexpr int columns = 32;  // of a block

  static __host__ size_t bytes(int64_t places) { return sizeof(T) * columns * places; }

  // The representation of a factor in multiply and value.
  static __device__ __forceinline__ T factor(T value) { return value; }
  static __device__ __forceinline__ T value(T factor) { return factor; }

  // staged [rows, columns] = features [first_column, first_column + columns) of the rows; arbitrary columns
  // past the last one.
  static __device__ void stage(const Tables& tables, const SegmentRows& from, int rows, int tree,
                               const T* hidden, int64_t first_column, void* staged) {
    T* feature = static_cast<T*>(staged) + threadIdx.x % 32;
    const int64_t column = first_column + threadIdx.x % 32;
    if (tables.features == 0) return;
    hidden += hidden_feature(tables, tree, column < tables.features ? column : 0);
#pragma unroll 8
    for (int r = threadIdx.x / 32; r < rows; r += run_threads / 32) {
      feature[r * columns] = from.offset[r] < 0 ? T(0) : __ldg(hidden + from.offset[r]);
    }
  }

  // own: bits of run threadIdx.x % 16. factor: points to level 0 and the segment's first place. Calls
  // take(run, column of the block, sums of consecutive columns) for all runs and columns of a lane.
  template <typename Take>
  static __device__ __forceinline__ void multiply(uint64_t own, const T* factor, int64_t level_stride,
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
      take(run, lane, sum);
    }
  }
};

// bfloat16 and float16: [16 runs] x [16 rows] x [8 columns] by matrix instructions. The features of two rows
// are packed in one word, as the instruction requires. A factor is two elements of type T. In bfloat16 they
// are one word; in float16 the largest factor of a run in 16 rows is first scaled to [1, 2): split.cuh. Lane
// t of four has columns 8 t ... 8 t + 7 of each 32, so that it writes 16 bytes of a gradient row: column 2 t
// + e of instruction j is 32 (j / 4) + 8 t + 2 (j % 4) + e.
template <typename T>
struct RunProduct<T, true> {
  static constexpr int columns = 64;
  static constexpr int stride = columns + 2;  // words; the banks of the words of an operand all differ
  static constexpr bool scaled = std::is_same_v<T, __half>;

  static __host__ size_t bytes(int64_t places) { return sizeof(uint32_t) * stride * places / 2; }

  static __device__ __forceinline__ float factor(float value) {
    if constexpr (scaled) return value;
    const uint32_t word = split<T>(value);
    memcpy(&value, &word, sizeof value);
    return value;
  }
  static __device__ __forceinline__ float value(float factor) {
    if constexpr (scaled) return factor;
    uint32_t word;
    memcpy(&word, &factor, sizeof word);
    return unpack_sum<T>(word);
  }

  // staged [rows / 2 up to a multiple of 8, stride] = features of the rows, zero past the last one; arbitrary
  // columns past the last one.
  static __device__ void stage(const Tables& tables, const SegmentRows& from, int rows, int tree,
                               const T* hidden, int64_t first_column, void* staged) {
    if (tables.features == 0) return;
    const int lane = threadIdx.x % 32;
    const T* feature[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int64_t column = first_column + lane + 32 * c;
      feature[c] = hidden + hidden_feature(tables, tree, column < tables.features ? column : 0);
    }
    uint32_t* word = static_cast<uint32_t*>(staged) + lane;
    const T zero = round_to<T>(0.0f);
#pragma unroll 4
    for (int pair = threadIdx.x / 32; pair < (rows + chunk_places - 1) / chunk_places * (chunk_places / 2);
         pair += run_threads / 32) {
      const int64_t first = from.offset[2 * pair], second = from.offset[2 * pair + 1];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        word[pair * stride + 32 * c] = pack(first < 0 ? zero : __ldg(feature[c] + first),
                                            second < 0 ? zero : __ldg(feature[c] + second));
      }
    }
  }

  template <typename Take>
  static __device__ __forceinline__ void multiply(uint64_t own, const float* factor, int64_t level_stride,
                                                  const void* staged, Take take) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint64_t bits[2] = {__shfl_sync(all_lanes, own, g), __shfl_sync(all_lanes, own, g + 8)};
    const int first_begin = PlaceRun::of(__shfl_sync(all_lanes, own, 0)).begin;
    const int end = warp_max(PlaceRun::of(own).end);
    int first = first_begin / chunk_places * chunk_places;
    const uint32_t* words =
        static_cast<const uint32_t*>(staged) + (first / 2 + t) * stride + g / 2 * 8 + g % 2;
    const float* of_row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      of_row[h] = factor + PlaceRun::of(bits[h]).level * level_stride + first + 2 * t;
    }
    float sum[8][4] = {};
    Quad next[2] = {quad(of_row[0]), quad(of_row[1])};
#pragma unroll 1
    for (; first < end; first += chunk_places, words += chunk_places / 2 * stride) {
      Quad part[2] = {next[0], next[1]};
      if (first + chunk_places < end) {
#pragma unroll
        for (int h = 0; h < 2; ++h) next[h] = quad(of_row[h] += chunk_places);
      }
      uint32_t high[4], low[4];
      float scale[2];
      bool meets[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const PlaceRun run = PlaceRun::of(bits[h]);
        const unsigned before = static_cast<unsigned>(first + 2 * t - run.begin);
        const auto rows = static_cast<unsigned>(run.end - run.begin);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (before + k / 2 * 8 + k % 2 >= rows) part[h].word[k] = 0;
        }
        meets[h] = run.begin < first + chunk_places && run.end > first;
        if constexpr (scaled) scale[h] = scale_of_item(part[h]);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          high[2 * k + h] = halves(part[h].word[2 * k], part[h].word[2 * k + 1], false);
          low[2 * k + h] = halves(part[h].word[2 * k], part[h].word[2 * k + 1], true);
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = 32 * (j / 4) + 2 * (j % 4);
        const uint32_t feature[2] = {words[column], words[column + chunk_places / 4 * stride]};
        if constexpr (scaled) {
          float product[4] = {};
          mma<T>(product, low, feature);
          mma<T>(product, high, feature);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (meets[i / 2]) sum[j][i] += product[i] * scale[i / 2];
          }
        } else {
          mma<T>(sum[j], low, feature);
          mma<T>(sum[j], high, feature);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i / 2, j = i % 2 * 4;
      const float columns_of_run[8] = {sum[j][2 * h],         sum[j][2 * h + 1],    sum[j + 1][2 * h],
                                       sum[j + 1][2 * h + 1], sum[j + 2][2 * h],    sum[j + 2][2 * h + 1],
                                       sum[j + 3][2 * h],     sum[j + 3][2 * h + 1]};
      const PlaceRun run = PlaceRun::of(bits[h]);
      if (run.end > 0) take(run, 32 * (i % 2) + 8 * t, columns_of_run);
    }
  }

 private:
  // Factors of rows 0, 1, 8 and 9 of a chunk, from the lane's first row on.
  struct Quad {
    uint32_t word[4];
  };
  static __device__ __forceinline__ Quad quad(const float* factor) {
    const uint2 above = __ldg(reinterpret_cast<const uint2*>(factor));
    const uint2 below = __ldg(reinterpret_cast<const uint2*>(factor + 8));
    return {{above.x, above.y, below.x, below.y}};
  }

  // Replaces the factors of a run in 16 rows, held by four lanes, by scaled and split ones. Returns their
  // scale.
  static __device__ __forceinline__ float scale_of_item(Quad& quad) {
    float value[4], largest = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      memcpy(&value[k], &quad.word[k], sizeof(float));
      largest = fmaxf(largest, fabsf(value[k]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 2));
    const Scale scale = scale_of(largest);
#pragma unroll
    for (int k = 0; k < 4; ++k) quad.word[k] = split<T>(value[k] * scale.inverse);
    return scale.back;
  }
};

}  // namespace hstree
