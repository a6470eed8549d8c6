// Products of two factors whose rows are listed, [64, K] times [K, 128], by the threads of a block.
#pragma once

#include "async_copy.cuh"
#include "split.cuh"

namespace hstree {

constexpr int tile_threads = 256;

// A part of a factor in shared memory, all lines and `depth` of K. by_line: its rows in global memory are the lines, and
// K is adjacent; otherwise its rows are K, and the lines are adjacent. The banks of a warp's words differ.
template <typename T, int lines, bool by_line>
struct StagedTile {
  static constexpr int depth = is_half<T> ? 32 : 16;
  static constexpr int rows = by_line ? lines : depth, columns = by_line ? depth : lines;
  static constexpr int stride = columns + (is_half<T> ? 8 : 1), elements = rows * stride;

  // Begins to copy elements [first, first + columns) of listed rows, which begin row_stride elements apart in source.
  // Zero where row_of is -1, and from element `end` on. aligned: whether 16-bit elements can be read in 16 bytes.
  template <typename RowOf>
  static __device__ __forceinline__ void load(const T* source, int64_t row_stride, const RowOf& row_of,
                                              int64_t first, int64_t end, bool aligned, T* tile) {
    constexpr int piece = is_half<T> ? 8 : 1, pieces = columns / piece;
    static_assert(rows * pieces % tile_threads == 0);
    if (is_half<T> && !aligned) {
      const T zero = round_to<T>(Sum<T>(0));
#pragma unroll 1
      for (int i = threadIdx.x; i < rows * columns; i += tile_threads) {
        const int64_t row = row_of(i / columns), at = first + i % columns;
        tile[i / columns * stride + i % columns] =
            row >= 0 && at < end ? __ldg(source + row * row_stride + at) : zero;
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < rows * pieces / tile_threads; ++k) {
      const int i = threadIdx.x + k * tile_threads, at = i % pieces * piece;
      const int64_t row = row_of(i / pieces);
      const bool inside = row >= 0 && first + at < end;
      async_copy_or_zero<piece * sizeof(T)>(tile + i / pieces * stride + at,
                                            inside ? source + row * row_stride + first + at : source, inside);
    }
  }
};

// The sums of a product, which a block's threads share out: `rows` x `columns` each, of which `run` columns are
// adjacent. The row_warps warps of a row and their row_lanes lanes hold the others of its columns.
//
// float32 and float64: fused multiply-adds; a thread has every eighth row and every 32nd column, so that a warp reads
// one element of A for all its lanes. bfloat16 and float16: matrix instructions; eight warps have 32 x 32 each.
template <typename T, bool a_by_line, bool b_by_line>
class TileProduct {
 public:
  using A = StagedTile<T, 64, a_by_line>;
  using B = StagedTile<T, 128, b_by_line>;
  static constexpr int depth = A::depth, stages = 3, stage = A::elements + B::elements;
  static constexpr size_t bytes = sizeof(T) * stages * stage;  // of shared memory
  static constexpr int rows = is_half<T> ? 4 : 8, columns = 32 / rows;
  static constexpr int run = !is_half<T> ? 1 : b_by_line ? 2 : 4;
  static constexpr int row_lanes = is_half<T> ? 4 : 32, row_warps = is_half<T> ? 4 : 1;

  static __device__ __forceinline__ int row(int j) {
    if constexpr (!is_half<T>) return threadIdx.x / 32 + 8 * j;
    const int g = threadIdx.x % 32 / 4;
    return warp_row() + j / 2 * 16 + (a_by_line ? g + j % 2 * 8 : 2 * g + j % 2);
  }
  static __device__ __forceinline__ int column(int k) {
    if constexpr (!is_half<T>) return threadIdx.x % 32 + 32 * k;
    const int t = threadIdx.x % 4;
    return warp_column() + (b_by_line ? k / 2 * 8 + 2 * t + k % 2 : k / 4 * 16 + 4 * t + k % 4);
  }
  static __device__ __forceinline__ int row_warp() { return is_half<T> ? threadIdx.x / 32 % 4 : 0; }

  __device__ __forceinline__ Sum<T> sum(int j, int k) const {
    if constexpr (!is_half<T>) return sums_[j][k];
    const int pair = j / 2 * 4, half = j % 2 * 2;
    return b_by_line ? sums_[pair + k / 2][half + k % 2] : sums_[pair + k / 4 * 2 + k % 2][half + k % 4 / 2];
  }

  __device__ __forceinline__ void scale(Sum<T> factor) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sums_[i / 4][i % 4] *= factor;
  }

  // Adds the product of `chunks` parts of both factors, which load(chunk, a, b) begins to stage; two are under way while
  // a third is multiplied. Lines from a_lines and b_lines on are not used. before(chunk, a): called by all threads
  // before a part is multiplied. Begins with a barrier, which publishes the lists that load reads. When it returns, all
  // threads have loaded all parts, but may still multiply the last one.
  template <typename Load, typename Before>
  __device__ __forceinline__ void add(unsigned char* memory, int64_t chunks, int64_t a_lines, int64_t b_lines,
                                      const Load& load, const Before& before) {
    const bool used = warp_row() < a_lines && warp_column() < b_lines;
    const auto begin = [&](int64_t chunk, int which) {
      T* const a = reinterpret_cast<T*>(memory) + which * stage;
      if (chunk < chunks) load(chunk, a, a + A::elements);
      async_copy_commit();
    };
    __syncthreads();
#pragma unroll
    for (int k = 0; k < stages - 1; ++k) begin(k, k);
    int which = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      async_copy_wait<stages - 2>();
      __syncthreads();
      begin(chunk + stages - 1, which == 0 ? stages - 1 : which - 1);
      T* const a = reinterpret_cast<T*>(memory) + which * stage;
      before(chunk, a);
      if (used) multiply(a, a + A::elements);
      which = which == stages - 1 ? 0 : which + 1;
    }
  }
  template <typename Load>
  __device__ __forceinline__ void add(unsigned char* memory, int64_t chunks, int64_t a_lines, int64_t b_lines,
                                      const Load& load) {
    add(memory, chunks, a_lines, b_lines, load, [](int64_t, T*) {});
  }

 private:
  static __device__ __forceinline__ int warp_row() {
    return is_half<T> ? threadIdx.x / 128 * 32 : threadIdx.x / 32;
  }
  static __device__ __forceinline__ int warp_column() { return is_half<T> ? threadIdx.x / 32 % 4 * 32 : 0; }

  static __device__ __forceinline__ uint32_t word(const T* from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
  }

  __device__ __forceinline__ void multiply(const T* a, const T* b) {
    if constexpr (is_half<T>) {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
      for (int step = 0; step < depth; step += 16) {
        uint32_t b_operand[4][2];
        if constexpr (b_by_line) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int line = warp_column() + i / 2 * 8 + g;
            b_operand[i / 2][i % 2] = word(b + line * B::stride + step + 2 * t + i % 2 * 8);
          }
        } else {  // columns 2 g and 2 g + 1 of 16 go to two instructions
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const T* const from =
                b + (step + 2 * t + i % 2 * 8) * B::stride + warp_column() + i / 2 * 16 + 2 * g;
            const uint32_t above = word(from), below = word(from + B::stride);
            b_operand[i / 2 * 2][i % 2] = halves(above, below, false);
            b_operand[i / 2 * 2 + 1][i % 2] = halves(above, below, true);
          }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          uint32_t a_operand[4];
          if constexpr (a_by_line) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int line = warp_row() + 16 * m + i % 2 * 8 + g;
              a_operand[i] = word(a + line * A::stride + step + 2 * t + i / 2 * 8);
            }
          } else {  // lines 2 g and 2 g + 1 of 16 are rows g and g + 8
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const T* const from = a + (step + 2 * t + 8 * i) * A::stride + warp_row() + 16 * m + 2 * g;
              const uint32_t above = word(from), below = word(from + A::stride);
              a_operand[2 * i] = halves(above, below, false);
              a_operand[2 * i + 1] = halves(above, below, true);
            }
          }
#pragma unroll
          for (int n = 0; n < 4; ++n) mma<T>(sums_[4 * m + n], a_operand, b_operand[n]);
        }
      }
    } else {
      const auto at = [](int line, int k, bool by_line, int stride) {
        return by_line ? line * stride + k : k * stride + line;
      };
#pragma unroll 4
      for (int k = 0; k < depth; ++k) {
        T of_column[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) of_column[j] = b[at(column(j), k, b_by_line, B::stride)];
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          const T own = a[at(row(r), k, a_by_line, A::stride)];
#pragma unroll
          for (int j = 0; j < 4; ++j) sums_[r][j] += own * of_column[j];
        }
      }
    }
  }

  Sum<T> sums_[8][4] = {};  // 16-bit elements: of two fragments of rows by four of columns
};

}  // namespace hstree
