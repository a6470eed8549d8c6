// The five launches of screened_topk, for up to most_rows rows at a time: the rounded queries, the previews, the n best
// of these, their exact scores with the sums over all other classes, the k best. Integer atomics only, in shared memory;
// every sum has a fixed order: deterministic, and the result of a row does not depend on other rows.
#include "logit_function.cuh"
#include "screened_topk.h"

namespace hstree {
namespace {

constexpr int threads = 256;
constexpr int warps = threads / 32;
constexpr int block_classes = 16;
constexpr int most_tile = 8;        // rows for which the preview is read once
constexpr int64_t most_rows = 64;   // in the workspace
constexpr int chunk = 8 * threads;  // classes of a partial sum
constexpr int row_threads = 1024;   // of a block that selects or sorts for one row
constexpr int64_t most_shared_pairs = 8192;

struct Query {
  float step;
  int sum;  // of the rounded values
  float shift;
  int finite;
};

// A class is among the n best if its key is above this one, or equal and the class at most `last`.
struct Threshold {
  unsigned key;
  int32_t last;
};

// sum = sum exp((x - largest) / temperature)
struct PartialSum {
  float largest, sum;
};

using Pair = unsigned long long;

struct Workspace {
  int8_t* values;        // [rows / tile, groups, tile, features of a group]; rows fill up the last tile
  Query* query;          // [rows], as many
  Threshold* threshold;  // [rows]
  float* score;          // [rows, 16 blocks]
  float* largest;        // [rows, blocks]
  int32_t* candidate;    // [rows, blocks]
  int32_t* best;         // [rows, n], ascending
  float* exact;          // [rows, n]
  PartialSum* partial;   // [rows, chunks]
  Pair* pair;            // [rows, pairs]; null if they fit into shared memory
};

int64_t chunks_of(const ScreenedTopk& s) {
  return divide_up(s.classes, chunk);
}

// A power of two, at least n.
int64_t pairs_of(const ScreenedTopk& s) {
  int64_t pairs = 1;
  while (pairs < s.n) pairs *= 2;
  return pairs;
}

// The arrays, and where they end.
char* divide_workspace(const ScreenedTopk& s, void* memory, Workspace& w) {
  char* end = static_cast<char*>(memory);
  const int64_t rows = divide_up(s.rows < most_rows ? s.rows : most_rows, most_tile) * most_tile;
  const auto take = [&](auto*& array, int64_t of_row) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(end);
    end += divide_up(rows * of_row * int64_t(sizeof *array), 256) * 256;
  };
  take(w.values, s.groups * (s.bits == 4 ? 8 : 4));
  take(w.query, 1);
  take(w.threshold, 1);
  take(w.score, s.blocks * block_classes);
  take(w.largest, s.blocks);
  take(w.candidate, s.blocks);
  take(w.best, s.n);
  take(w.exact, s.n);
  take(w.partial, chunks_of(s));
  w.pair = nullptr;
  if (pairs_of(s) > most_shared_pairs) take(w.pair, pairs_of(s));
  return end;
}

__device__ __forceinline__ unsigned bits_of(float x) {
  unsigned bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Unsigned numbers in the order of the floats; both zeros have one. Not for NaN.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = bits_of(x == 0 ? 0.0f : x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// exp((x - largest) sharpness) for x <= largest; 1 where they are equal, infinite too.
__device__ __forceinline__ float weight_of(float x, float largest, float sharpness) {
  return x == largest ? 1.0f : expf((x - largest) * sharpness);
}

// value_i = round(query_i / step), their sum, and whether the query is finite; the rows from s.rows on are zeros.
// One block for each row.
__global__ void __launch_bounds__(threads) quantize_kernel(ScreenedTopk s, Workspace w, int tile) {
  __shared__ unsigned scratch[warps];
  __shared__ int sum_scratch[warps];
  const int64_t row = blockIdx.x;
  const int64_t features = row < s.rows ? s.preview_features : 0;
  const float* const query = s.query + (row < s.rows ? row : 0) * (s.preview_features + 1);
  unsigned bits = 0;  // of the largest magnitude; those of NaN are above those of infinity
  for (int64_t i = threadIdx.x; i < features; i += threads) {
    const unsigned other = bits_of(query[i]) & 0x7fffffffu;
    bits = other > bits ? other : bits;
  }
  bits = block_max<threads>(bits, scratch);
  float largest;
  memcpy(&largest, &bits, sizeof largest);
  // A row of less than 3.7e-37 changes no score: as 0.
  const float inverse = 127 / largest < INFINITY ? 127 / largest : 0.0f;
  const float shift = features > 0 ? query[features] : 0.0f;
  const bool finite = bits < 0x7f800000u && shift - shift == 0;
  const int per_group = s.bits == 4 ? 8 : 4;
  int8_t* const values = w.values + (row / tile * s.groups * tile + row % tile) * per_group;
  int sum = 0;
  for (int64_t i = threadIdx.x; i < s.groups * per_group; i += threads) {
    const int value = finite && i < features ? static_cast<int>(rintf(query[i] * inverse)) : 0;
    values[i / per_group * tile * per_group + i % per_group] = static_cast<int8_t>(value);
    sum += value;
  }
  sum = block_sum<threads>(sum, sum_scratch);
  if (threadIdx.x == 0) w.query[row] = {largest / 127, sum, shift, finite};
}

// score[row, v] = (offset_v + shift) + scale_v (step sum_i preview_vi value_i), -inf for NaN and beyond V; NaN where the
// query is not finite. largest[row, block]: of 16 classes.
// The preview is read once for Tile rows. A warp for each block of classes: 4 lanes read a group of features for all 16
// classes, 16 bytes each, and every eighth group is theirs. The sums over 8 lanes halve the sums that a lane has at each
// step. Grid: blocks of 16 classes, tiles of rows.
template <int Bits, int Tile>
__global__ void __launch_bounds__(threads, 3) preview_kernel(ScreenedTopk s, Workspace w) {
  constexpr int words = Bits == 4 ? 2 : 1;  // of a group
  constexpr int values = Tile * words, at_once = values < 4 ? values : 4;
  constexpr int loads = 4;                          // under way at a time
  constexpr int results = Tile < 2 ? 1 : Tile / 2;  // of a lane
  const int lane = threadIdx.x % 32, groups = static_cast<int>(s.groups);
  const int64_t block = int64_t(blockIdx.x) * warps + threadIdx.x / 32;
  if (block >= s.blocks) return;
  const uint4* const rows = static_cast<const uint4*>(s.preview) + block * groups * 4 + lane % 4;
  const int* const query = reinterpret_cast<const int*>(w.values) + int64_t(blockIdx.y) * groups * values;
  int sum[4 * Tile] = {};  // of the class c of 4 and the row q at 4 q + c
  for (int begin = 0; begin < groups; begin += 8 * loads) {
    uint4 raw[loads];
#pragma unroll
    for (int j = 0; j < loads; ++j) {
      const int g = begin + 8 * j + lane / 4;
      raw[j] = g < groups ? __ldcg(rows + 4 * g) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int j = 0; j < loads; ++j) {
      if (begin + 8 * j >= groups) break;
      const int g = begin + 8 * j + lane / 4;
      const int* const of_group = query + int64_t(g < groups ? g : 0) * values;
      int value[values];
#pragma unroll
      for (int k = 0; k < values; k += at_once) {
        int some[at_once];
        load_raw(of_group + k, some);
#pragma unroll
        for (int e = 0; e < at_once; ++e) value[k + e] = some[e];
      }
      const unsigned of_class[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int low = static_cast<int>(Bits == 4 ? of_class[c] & 0x0f0f0f0fu : of_class[c]);
        const int high = static_cast<int>(of_class[c] >> 4 & 0x0f0f0f0fu);
#pragma unroll
        for (int q = 0; q < Tile; ++q) {
          sum[4 * q + c] = __dp4a(low, value[q * words], sum[4 * q + c]);
          if (Bits == 4) sum[4 * q + c] = __dp4a(high, value[q * words + words - 1], sum[4 * q + c]);
        }
      }
    }
  }
  int first = 0;  // of the sums that this lane keeps
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const int bit = 16 >> step, half = 2 * Tile >> step;
    const bool upper = (lane & bit) != 0;
    if (half == 0) sum[0] += __shfl_xor_sync(all_lanes, sum[0], bit);
    if (half > 0 && upper) first += half;
#pragma unroll
    for (int i = 0; i < 2 * Tile; ++i) {
      if (i >= half) continue;
      const int given = upper ? sum[i] : sum[i + half], kept = upper ? sum[i + half] : sum[i];
      sum[i] = kept + __shfl_xor_sync(all_lanes, given, bit);
    }
  }
  const int64_t row = int64_t(blockIdx.y) * Tile + first / 4;
  const int64_t v = block * block_classes + lane % 4 * 4 + first % 4;
  const Query of_row = w.query[row];
  float score[results], largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < results; ++i) {
    const float total = static_cast<float>(Bits == 4 ? sum[i] - 8 * of_row.sum : sum[i]);
    score[i] = (__ldg(s.offset + v + i) + of_row.shift) + __ldg(s.scale + v + i) * (total * of_row.step);
    if (score[i] != score[i] || v + i >= s.classes) score[i] = -INFINITY;
    largest = score[i] > largest ? score[i] : largest;
    if (!of_row.finite) score[i] = NAN;
  }
#pragma unroll
  for (int bit = 1; bit < 32 / Tile; bit *= 2) {
    const float other = __shfl_xor_sync(all_lanes, largest, bit);
    largest = other > largest ? other : largest;
  }
  if (row >= s.rows || (Tile == 1 && (lane & 4) != 0)) return;  // 8 lanes have the 4 sums of a row alone
  float* const to = w.score + row * s.blocks * block_classes + v;
  if constexpr (results == 4) {
    store_raw(to, pack_group<float>(score));
  } else {
#pragma unroll
    for (int i = 0; i < results; ++i) to[i] = score[i];
  }
  if (lane % (32 / Tile) == 0) w.largest[row * s.blocks + block] = largest;
}

// ---- selection by a block of row_threads

constexpr int digit_bits = 11;
constexpr int digits = 1 << digit_bits;
static_assert(digits == 2 * row_threads);

struct Counts {
  unsigned above, equal;
};

struct SelectScratch {
  unsigned histogram[digits];  // from the largest digit
  unsigned sum[row_threads / 32];
  unsigned digit, left;
  Counts count[row_threads / 32];
};

// The n-th largest of the keys key_at(i), i < count, by as many of its three digits of 11, 11 and 10 bits as wanted; the
// others are 0. n becomes its place among the keys with the same digits.
template <typename KeyAt>
__device__ unsigned nth_largest(int64_t count, int64_t& n, int wanted, const KeyAt& key_at,
                                SelectScratch& scratch) {
  constexpr int at_once = 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned key = 0, known = 0;  // mask of the digits so far
  for (int d = 0; d < wanted; ++d) {
    const int shift = d == 0 ? 21 : d == 1 ? 10 : 0;
    const unsigned mask = d < 2 ? digits - 1 : digits / 2 - 1;
    scratch.histogram[threadIdx.x] = scratch.histogram[threadIdx.x + row_threads] = 0;
    __syncthreads();
    for (int64_t begin = threadIdx.x; begin < count; begin += at_once * row_threads) {
      unsigned other[at_once];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int64_t i = begin + k * row_threads;
        other[k] = i < count ? key_at(i) : 0;
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        if (begin + k * row_threads < count && (other[k] & known) == key) {
          atomicAdd(&scratch.histogram[mask - (other[k] >> shift & mask)], 1u);
        }
      }
    }
    __syncthreads();
    const unsigned first = scratch.histogram[2 * threadIdx.x],
                   both = first + scratch.histogram[2 * threadIdx.x + 1];
    unsigned end = warp_prefix(both);
    if (lane == 31) scratch.sum[warp] = end;
    __syncthreads();
    const unsigned of_warps = warp_prefix(scratch.sum[lane]);
    const unsigned before = __shfl_sync(all_lanes, of_warps, warp > 0 ? warp - 1 : 0);
    end += warp > 0 ? before : 0;
    const unsigned begin = end - both;
    if (begin < n && n <= end) {
      const bool second = n > begin + first;
      scratch.digit = mask - (2 * threadIdx.x + (second ? 1 : 0));
      scratch.left = static_cast<unsigned>(n) - begin - (second ? first : 0);
    }
    __syncthreads();
    key |= scratch.digit << shift;
    known |= mask << shift;
    n = scratch.left;
  }
  return key;
}

enum Place { below, equal, above };

// Calls write(i, number, is_last) in ascending order of numbers for the i < count whose place(i) is `above`, and for the
// first `quota` that are `equal`; is_last: of these. Returns how many are above.
template <typename PlaceAt, typename Write>
__device__ int64_t compact(int64_t count, unsigned quota, const PlaceAt& place_at, const Write& write,
                           Counts (&scratch)[row_threads / 32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t run = divide_up(count, row_threads) * 32, begin = warp * run;
  const int64_t end = begin + run < count ? begin + run : count;
  Counts own = {0, 0};
  for (int64_t first = begin; first < end; first += 32) {
    const Place place = first + lane < end ? place_at(first + lane) : below;
    own.above += __popc(__ballot_sync(all_lanes, place == above));
    own.equal += __popc(__ballot_sync(all_lanes, place == equal));
  }
  if (lane == 0) scratch[warp] = own;
  __syncthreads();
  Counts before = {0, 0};
  unsigned total = 0;
  for (int other = 0; other < row_threads / 32; ++other) {
    const Counts of_other = scratch[other];
    if (other < warp) before = {before.above + of_other.above, before.equal + of_other.equal};
    total += of_other.above;
  }
  for (int64_t first = begin; first < end; first += 32) {
    const Place place = first + lane < end ? place_at(first + lane) : below;
    const unsigned are_above = __ballot_sync(all_lanes, place == above);
    const unsigned are_equal = __ballot_sync(all_lanes, place == equal);
    const unsigned lower = (1u << lane) - 1;
    const unsigned above_before = before.above + __popc(are_above & lower);
    const unsigned equal_before = before.equal + __popc(are_equal & lower);
    if (place == above || (place == equal && equal_before < quota)) {
      write(first + lane, above_before + (equal_before < quota ? equal_before : quota),
            place == equal && equal_before + 1 == quota);
    }
    before.above += __popc(are_above);
    before.equal += __popc(are_equal);
  }
  return total;
}

// best[row]: the n classes with the largest scores, of equal ones those of small numbers, in ascending order; and their
// threshold. A radix selection: the n-th largest of the largest scores of groups of classes, about 3 n of them, is at
// most that of all, so that it looks at the classes of few blocks. One block for each row.
__global__ void __launch_bounds__(row_threads) select_kernel(ScreenedTopk s, Workspace w) {
  __shared__ SelectScratch scratch;
  const int64_t row = blockIdx.x;
  int32_t* const best = w.best + row * s.n;
  if (s.n == s.classes || !w.query[row].finite) {
    for (int64_t i = threadIdx.x; i < s.n; i += row_threads) best[i] = static_cast<int32_t>(i);
    if (threadIdx.x == 0) w.threshold[row] = {0, 0};  // below every key
    return;
  }
  const float* const score = w.score + row * s.blocks * block_classes;
  const float* const largest = w.largest + row * s.blocks;
  int32_t* const candidate = w.candidate + row * s.blocks;
  unsigned least = 0;
  if (s.n <= s.blocks) {
    const int64_t run = s.blocks < 6 * s.n ? 1 : s.blocks / (3 * s.n);
    int64_t n = s.n;
    const auto key_at = [&](int64_t group) {
      float most = -INFINITY;
      for (int64_t b = group * run; b < (group + 1) * run && b < s.blocks; ++b) {
        most = fmaxf(most, __ldg(largest + b));
      }
      return ordered(most);
    };
    least = nth_largest(divide_up(s.blocks, run), n, 2, key_at, scratch);
  }
  const int64_t candidates = compact(
      s.blocks, 0, [&](int64_t b) { return ordered(__ldg(largest + b)) >= least ? above : below; },
      [&](int64_t b, unsigned number, bool) { candidate[number] = static_cast<int32_t>(b); }, scratch.count);
  const auto class_at = [&](int64_t i) {
    return int64_t(candidate[i / block_classes]) * block_classes + i % block_classes;
  };
  const auto key_at = [&](int64_t i) { return ordered(__ldg(score + class_at(i))); };
  int64_t equals = s.n;
  // Its first barrier is after the candidates.
  const unsigned key = nth_largest(candidates * block_classes, equals, 3, key_at, scratch);
  compact(
      candidates * block_classes, static_cast<unsigned>(equals),
      [&](int64_t i) {
        const unsigned other = key_at(i);
        return other > key ? above : other == key ? equal : below;
      },
      [&](int64_t i, unsigned number, bool is_last) {
        best[number] = static_cast<int32_t>(class_at(i));
        if (is_last) w.threshold[row] = {key, best[number]};
      },
      scratch.count);
}

// partial[row, chunk]: the sum over the classes of a chunk that are not among the n best; all[row] <- score[row].
__device__ __forceinline__ void sum_chunk(const ScreenedTopk& s, const Workspace& w, int64_t row, int64_t c,
                                          float (&scratch)[warps]) {
  constexpr int of_thread = chunk / threads;
  const float* const score = w.score + row * s.blocks * block_classes;
  const Threshold threshold = w.threshold[row];
  float value[of_thread], largest = -INFINITY, sum = 0;
  bool is_rest[of_thread];
#pragma unroll
  for (int k = 0; k < of_thread; ++k) {
    const int64_t v = c * chunk + k * threads + threadIdx.x;
    value[k] = v < s.classes ? __ldg(score + v) : -INFINITY;
    const unsigned key = ordered(value[k]);
    is_rest[k] = v < s.classes && (key < threshold.key || (key == threshold.key && v > threshold.last));
    if (is_rest[k] && value[k] > largest) largest = value[k];
    if (s.all != nullptr && v < s.classes) s.all[row * s.classes + v] = value[k];
  }
  largest = block_max<threads>(largest, scratch);
#pragma unroll
  for (int k = 0; k < of_thread; ++k) {
    if (is_rest[k]) sum += weight_of(value[k], largest, 1 / s.temperature);
  }
  sum = block_sum<threads>(sum, scratch);
  if (threadIdx.x == 0) w.partial[row * divide_up(s.classes, chunk) + c] = {largest, sum};
}

// exact[row, i] = weight_v . hidden + bias_v of v = best[row, i]; NaN where the query is not finite. The first blocks of
// a row sum its chunks, the others have a warp for each class. Grid: blocks, rows.
template <typename T, bool Aligned>
__global__ void __launch_bounds__(threads, 4) exact_kernel(ScreenedTopk s, Workspace w) {
  constexpr int vector = Aligned ? 16 / sizeof(T) : 1;
  __shared__ float scratch[warps];
  const int64_t row = blockIdx.y, chunks = divide_up(s.classes, chunk);
  if (blockIdx.x < chunks) return sum_chunk(s, w, row, blockIdx.x, scratch);
  const int64_t i = (blockIdx.x - chunks) * warps + threadIdx.x / 32;
  if (i >= s.n) return;
  const int64_t v = w.best[row * s.n + i];
  const T* const weight = static_cast<const T*>(s.weight) + v * s.in_features;
  const T* const hidden = static_cast<const T*>(s.hidden) + row * s.in_features;
  float sum = 0;
#pragma unroll 4
  for (int64_t f = threadIdx.x % 32 * vector; f < s.in_features; f += 32 * vector) {
    float a[vector], b[vector];
    load<vector>(weight + f, a);
    load<vector>(hidden + f, b);
#pragma unroll
    for (int e = 0; e < vector; ++e) sum += a[e] * b[e];
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 != 0) return;
  if (s.bias != nullptr) sum += to_sum(static_cast<const T*>(s.bias)[v]);
  w.exact[row * s.n + i] = w.query[row].finite ? sum : NAN;
}

// log sum over i < count of part(i).sum exp(part(i).largest / temperature). By a block.
template <typename PartAt>
__device__ float log_sum(int64_t count, float sharpness, const PartAt& part_at,
                         float (&scratch)[row_threads / 32]) {
  float largest = -INFINITY, sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += row_threads) {
    const PartialSum part = part_at(i);
    if (part.largest > largest) largest = part.largest;
  }
  largest = block_max<row_threads>(largest, scratch);
  for (int64_t i = threadIdx.x; i < count; i += row_threads) {
    const PartialSum part = part_at(i);
    sum += part.sum * weight_of(part.largest, largest, sharpness);
  }
  return largest * sharpness + logf(block_sum<row_threads>(sum, scratch));
}

// The k largest of the exact scores, by a bitonic sort of pairs of a key and a place; both sums; all[row] gets the exact
// scores. One block for each row.
__global__ void __launch_bounds__(row_threads) finish_kernel(ScreenedTopk s, Workspace w, int64_t pairs) {
  __shared__ float scratch[row_threads / 32];
  __shared__ Pair pair_scratch[row_threads / 32];
  const int64_t row = blockIdx.x, chunks = divide_up(s.classes, chunk);
  const bool finite = w.query[row].finite;
  const int32_t* const best = w.best + row * s.n;
  const float* const exact = w.exact + row * s.n;
  const float sharpness = 1 / s.temperature;
  const float rest =
      log_sum(chunks, sharpness, [&](int64_t c) { return w.partial[row * chunks + c]; }, scratch);
  const float of_best = log_sum(s.n, sharpness, [&](int64_t i) { return PartialSum{exact[i], 1}; }, scratch);
  if (threadIdx.x == 0) {
    const float most = rest > of_best ? rest : of_best, least = rest > of_best ? of_best : rest;
    s.log_rest[row] = finite ? rest : NAN;
    s.log_normalizer[row] = finite ? most + log1pf(weight_of(least, most, 1)) : NAN;
  }
  // NaN is the largest, as infinity is; of equal scores the first place is the largest.
  const auto pair_at = [&](int64_t i) {
    const float x = exact[i] == exact[i] ? exact[i] : INFINITY;
    return Pair(ordered(x)) << 32 | ~static_cast<unsigned>(i);
  };
  Pair* const pair = w.pair == nullptr ? reinterpret_cast<Pair*>(HSTREE_SHARED_MEMORY) : w.pair + row * pairs;
  Pair largest = 0;
  for (int64_t i = threadIdx.x; i < pairs; i += row_threads) {
    const Pair own = i < s.n ? pair_at(i) : 0;
    largest = own > largest ? own : largest;
    if (s.k > 1) pair[i] = own;
    if (s.all != nullptr && i < s.n) s.all[row * s.classes + best[i]] = exact[i];
  }
  if (s.k == 1) largest = block_max<row_threads>(largest, pair_scratch);
  for (int64_t run = 2; s.k > 1 && run <= pairs; run *= 2) {
    for (int64_t distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int64_t i = threadIdx.x; i < pairs / 2; i += row_threads) {
        const int64_t a = 2 * i - (i & (distance - 1)), b = a + distance;
        const Pair x = pair[a], y = pair[b];
        if ((x < y) == ((a & run) == 0)) pair[a] = y, pair[b] = x;
      }
    }
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < s.k; i += row_threads) {
    const unsigned place = ~static_cast<unsigned>(s.k == 1 ? largest : pair[i]);
    s.score[row * s.k + i] = exact[place];
    s.index[row * s.k + i] = best[place];
  }
}

template <int Bits>
void launch_preview(const ScreenedTopk& s, const Workspace& w, int tile, cudaStream_t stream) {
  const dim3 grid(grid_size(divide_up(s.blocks, warps)), grid_size(divide_up(s.rows, tile)));
  const auto kernel = tile == 1   ? preview_kernel<Bits, 1>
                      : tile == 2 ? preview_kernel<Bits, 2>
                      : tile == 4 ? preview_kernel<Bits, 4>
                                  : preview_kernel<Bits, 8>;
  launch(kernel, grid, threads, 0, stream, s, w);
}

template <typename T>
void launch_exact(const ScreenedTopk& s, const Workspace& w, cudaStream_t stream) {
  const dim3 grid(grid_size(chunks_of(s) + divide_up(s.n, warps)), grid_size(s.rows));
  const bool is_aligned = aligned<T>(s.weight, s.in_features, 16) && aligned_to_16(s.hidden);
  launch(is_aligned ? exact_kernel<T, true> : exact_kernel<T, false>, grid, threads, 0, stream, s, w);
}

}  // namespace

int64_t screened_topk_workspace_bytes(const ScreenedTopk& sizes) {
  Workspace w;
  char memory;
  return divide_workspace(sizes, &memory, w) - &memory;
}

void screened_topk(ScalarType type, const ScreenedTopk& arguments, void* workspace, cudaStream_t stream) {
  Workspace w;
  divide_workspace(arguments, workspace, w);
  const int64_t pairs = pairs_of(arguments);
  for (int64_t begin = 0; begin < arguments.rows; begin += most_rows) {
    ScreenedTopk s = arguments;
    s.rows = arguments.rows - begin < most_rows ? arguments.rows - begin : most_rows;
    s.query += begin * (s.preview_features + 1);
    s.score += begin * s.k;
    s.index += begin * s.k;
    s.log_rest += begin;
    s.log_normalizer += begin;
    if (s.all != nullptr) s.all += begin * s.classes;
    int tile = 1;
    while (tile < s.rows && tile < most_tile) tile *= 2;
    launch(quantize_kernel, grid_size(divide_up(s.rows, tile) * tile), threads, 0, stream, s, w, tile);
    s.bits == 4 ? launch_preview<4>(s, w, tile, stream) : launch_preview<8>(s, w, tile, stream);
    launch(select_kernel, grid_size(s.rows), row_threads, 0, stream, s, w);
    dispatch(type, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (std::is_same_v<T, double>) {
        throw std::runtime_error("hstree: screened_topk supports float32, bfloat16 and float16 only");
      } else {
        s.hidden = static_cast<const T*>(arguments.hidden) + begin * s.in_features;
        launch_exact<T>(s, w, stream);
      }
    });
    const size_t shared = w.pair != nullptr || s.k == 1 ? 0 : pairs * sizeof(Pair);
    launch(finish_kernel, grid_size(s.rows), row_threads, shared, stream, s, w, pairs);
  }
}

}  // namespace hstree
