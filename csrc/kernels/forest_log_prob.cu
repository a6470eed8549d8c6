#include <limits>

#include "common.cuh"
#include "forest_log_prob.h"

namespace hstree {
namespace {

constexpr int64_t ignored_row = -1;
// Classes or clusters whose numbers a warp loads at a time, for sums and for gradients.
constexpr int batch = 8, grad_batch = 4;
constexpr int most_warps = 16;                 // of a block
constexpr int64_t most_tile_bytes = 16 << 20;  // of scores, which the trees read from the L2 cache
constexpr int score_threads = 256;
constexpr int64_t score_classes = score_threads / 32 * grad_batch;  // of a block

// Where maxima start: less the maximum of numbers of -inf alone, such a number is -inf, and not NaN.
template <typename A>
constexpr A lowest = std::numeric_limits<A>::lowest();

// e^x for x of at most about 0, in two instructions instead of eight. The error, about 2^-22 + |x| 2^-23 of the result, is
// what rounding an x of float32 costs too. Below 2^-126: 0.
__device__ __forceinline__ float decay(float x) {
  x *= 1.4426950408889634f;
#ifdef HSTREE_CUDA_EMULATION
  return exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}
__device__ __forceinline__ double decay(double x) {
  return exp(x);
}

// Rows of a lane, so that a warp reads 256 bytes of a class.
template <typename A>
constexpr int lane_rows = 8 / sizeof(A);

// The rows of a lane in a tile of 32 Count: neighboring lanes have neighboring rows.
template <typename A, int Count = lane_rows<A>>
struct LaneRows {
  int64_t first, rows;

  __device__ LaneRows(int64_t tile, int64_t rows) : first(tile * 32 * Count + threadIdx.x % 32), rows(rows) {}
  __device__ __forceinline__ int64_t row(int i) const { return first + 32 * i; }
  __device__ __forceinline__ bool has(int i) const { return row(i) < rows; }
  // Numbers at `values`, which has one for each row; 0 beyond the last row.
  template <typename T>
  __device__ __forceinline__ T get(const T* values, int i) const {
    return has(i) ? values[row(i)] : T(0);
  }
  template <typename T>
  __device__ __forceinline__ void put(T* values, int i, A value) const {
    if (has(i)) store(values + row(i), value);
  }
};

// Sums of e^x for the rows of a tile as e^most sum.
template <typename A, int rows>
struct ExpSums {
  A most[rows];
  A sum[rows];
};
template <typename A, int rows>
struct BlockSums {
  ExpSums<A, rows> lane[most_warps][32];
};

// The sums over k in [begin, end) of e^x(k), x(k) as read(k, x) writes it for the rows of a lane; for warp 0, after all
// warps have left theirs in scratch. An x of -inf adds 0; a NaN or +inf gives NaN.
template <typename A, int rows, typename Read>
__device__ __forceinline__ ExpSums<A, rows> block_exp_sums(int64_t begin, int64_t end, const Read& read,
                                                           BlockSums<A, rows>& scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  ExpSums<A, rows> all;
#pragma unroll
  for (int i = 0; i < rows; ++i) all.most[i] = lowest<A>, all.sum[i] = 0;
  for (int64_t k = begin + warp * batch; k < end; k += warps * batch) {
    A x[batch][rows];
#pragma unroll
    for (int b = 0; b < batch; ++b) read(k + b < end ? k + b : end - 1, x[b]);
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      A most = all.most[i], sum = 0;
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        if (k + b >= end) x[b][i] = -INFINITY;
        most = fmax(most, x[b][i]);
      }
#pragma unroll
      for (int b = 0; b < batch; ++b) sum += decay(x[b][i] - most);
      all.sum[i] = all.sum[i] * decay(all.most[i] - most) + sum;
      all.most[i] = most;
    }
  }
  scratch.lane[warp][lane] = all;
  __syncthreads();
  if (warp != 0) return all;
  for (int w = 1; w < warps; ++w) {
    const ExpSums<A, rows> other = scratch.lane[w][lane];
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const A most = fmax(all.most[i], other.most[i]);
      all.sum[i] = all.sum[i] * decay(all.most[i] - most) + other.sum[i] * decay(other.most[i] - most);
      all.most[i] = most;
    }
  }
  return all;
}

// The bias of a class in s; 0 without one.
template <typename A>
__device__ __forceinline__ A bias_of(const Forest& f, int64_t v) {
  return f.bias == nullptr ? A(0) : static_cast<const A*>(f.bias)[v];
}

// log_sum[t, c] = log sum of e^s_v over the classes v of cluster c.
// Tensors as in Forest; -inf for a cluster without classes. In A, sums in batches; a logarithm, so that a cluster far
//   below the others counts when its r is large.
// Work O(T R V): T V exponentials for each row. Reads score T times. The clusters of a tile of rows follow each other
//   in the grid: while they read the tile again, it is in the L2 cache.
// No atomics; warps are added in their order: deterministic.
// One block for each cluster and tile; its warps take batches of the classes in turns, its lanes the rows.
template <typename A, int rows>
__global__ void __launch_bounds__(32 * most_warps, 1) forest_sums_kernel(Forest f) {
  __shared__ BlockSums<A, rows> scratch;
  const int64_t groups = f.trees * f.clusters, group = blockIdx.x % groups, tree = group / f.clusters;
  const LaneRows<A, rows> lane(blockIdx.x / groups, f.rows);
  const int64_t* order = f.order + tree * f.classes;
  const int64_t* boundary = f.boundary + group + tree;
  const auto* score = static_cast<const A*>(f.score);
  const ExpSums<A, rows> all = block_exp_sums<A, rows>(
      boundary[0], boundary[1],
      [&](int64_t place, A(&x)[rows]) {
        const int64_t v = order[place];
        const A* of_class = score + v * f.rows;
        const A bias = bias_of<A>(f, v);
#pragma unroll
        for (int i = 0; i < rows; ++i) x[i] = lane.get(of_class, i) + bias;
      },
      scratch);
  if (threadIdx.x >= 32) return;
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    lane.put(static_cast<A*>(f.log_sum) + group * f.rows, i, all.most[i] + logarithm(all.sum[i]));
  }
}

// log Z_t, and log_prior + log P_t(y), NaN where the target y or its cluster is out of range.
template <typename A>
__device__ __forceinline__ void finish_tree(const Forest& f, int64_t t, int64_t row, A most, A sum) {
  const double log_normalizer = double(most) + logarithm(double(sum));
  const int64_t target = f.target[row];
  double joint = NAN;
  if (target >= 0 && target < f.classes) {
    const int64_t cluster = f.cluster[target * f.trees + t];
    if (cluster >= 0 && cluster < f.clusters) {
      const A score = static_cast<const A*>(f.score)[target * f.rows + row] + bias_of<A>(f, target);
      const A r = static_cast<const A*>(f.cluster_score)[(t * f.clusters + cluster) * f.rows + row];
      joint = double(static_cast<const A*>(f.log_prior)[t * f.rows + row]) +
              ((double(score) + double(r)) - log_normalizer);
    }
  }
  f.of_trees[t * f.rows + row] = log_normalizer;
  f.of_trees[(f.trees + t) * f.rows + row] = joint;
}

// log_prob and rho_t of a row, from what finish_tree wrote.
template <typename A>
__device__ __forceinline__ void mix_trees(const Forest& f, int64_t row) {
  const double* joint = f.of_trees + f.trees * f.rows + row;
  const bool ignored = f.target[row] == ignored_row;
  double most = lowest<double>, sum = 0;
  for (int64_t t = 0; t < f.trees; ++t) most = fmax(most, joint[t * f.rows]);
  for (int64_t t = 0; t < f.trees; ++t) sum += exponential(joint[t * f.rows] - most);
  static_cast<A*>(f.log_prob)[row] = ignored ? A(0) : static_cast<A>(most + logarithm(sum));
  if (f.grad_log_prob == nullptr) return;
  const double grad = static_cast<const A*>(f.grad_log_prob)[row];
  for (int64_t t = 0; t < f.trees; ++t) {
    const double share = ignored || sum == 0 ? 0 : grad * (exponential(joint[t * f.rows] - most) / sum);
    static_cast<A*>(f.grad_log_prior)[t * f.rows + row] = static_cast<A>(share);
  }
}

// log_prob, and with gradients grad_log_prior, rho_t; cluster_score <- its gradient, log_sum <- r - log Z.
// Tensors as in Forest; log_sum as forest_sums_kernel wrote it. Target -1: log_prob and gradients are 0; other targets
//   outside [0, V), or in a cluster outside [0, C), make the row NaN, as do a NaN or inf of the row and -inf for all
//   classes. A target of probability 0 has log_prob -inf and no gradient.
// Sums over clusters in A, log Z and what follows for a row in float64.
// Work O(R T C). No atomics; warps are added in their order: deterministic.
// One block for each tile of rows; its warps take batches of the clusters in turns, its lanes the rows.
template <typename A>
__global__ void __launch_bounds__(32 * most_warps, 1) forest_rows_kernel(Forest f) {
  constexpr int rows = lane_rows<A>;
  __shared__ BlockSums<A, rows> scratch;
  const LaneRows<A> lane(blockIdx.x, f.rows);
  const bool first_warp = threadIdx.x < 32;
  for (int64_t t = 0; t < f.trees; ++t) {
    const A* r = static_cast<const A*>(f.cluster_score) + t * f.clusters * f.rows;
    const A* log_sum = static_cast<const A*>(f.log_sum) + t * f.clusters * f.rows;
    const ExpSums<A, rows> all = block_exp_sums<A, rows>(
        0, f.clusters,
        [&](int64_t c, A(&x)[rows]) {
#pragma unroll
          for (int i = 0; i < rows; ++i) {
            x[i] = lane.get(r + c * f.rows, i) + lane.get(log_sum + c * f.rows, i);
          }
        },
        scratch);
    for (int i = 0; first_warp && i < rows; ++i) {
      if (lane.has(i)) finish_tree(f, t, lane.row(i), all.most[i], all.sum[i]);
    }
    __syncthreads();  // the next tree overwrites scratch
  }
  for (int i = 0; first_warp && i < rows; ++i) {
    if (lane.has(i)) mix_trees<A>(f, lane.row(i));
  }
  if (f.grad_log_prob == nullptr) return;
  __syncthreads();
  for (int64_t t = 0; t < f.trees; ++t) {
    A rho[rows];
    double log_normalizer[rows];
    int64_t chosen[rows];  // the cluster of the target; -1: none
    bool ignored[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int64_t target = lane.get(f.target, i);
      rho[i] = lane.get(static_cast<const A*>(f.grad_log_prior) + t * f.rows, i);
      log_normalizer[i] = lane.get(f.of_trees + t * f.rows, i);
      chosen[i] = target >= 0 && target < f.classes ? f.cluster[target * f.trees + t] : -1;
      ignored[i] = target == ignored_row;
    }
    for (int64_t c = threadIdx.x / 32 * grad_batch; c < f.clusters; c += blockDim.x / 32 * grad_batch) {
      A* r = static_cast<A*>(f.cluster_score) + (t * f.clusters + c) * f.rows;
      A* log_sum = static_cast<A*>(f.log_sum) + (t * f.clusters + c) * f.rows;
      A of_cluster[grad_batch][rows], sum[grad_batch][rows];
#pragma unroll
      for (int b = 0; b < grad_batch; ++b) {
#pragma unroll
        for (int i = 0; i < rows; ++i) {
          of_cluster[b][i] = c + b < f.clusters ? lane.get(r + b * f.rows, i) : A(0);
          sum[b][i] = c + b < f.clusters ? lane.get(log_sum + b * f.rows, i) : A(0);
        }
      }
#pragma unroll
      for (int b = 0; b < grad_batch; ++b) {
        if (c + b >= f.clusters) break;
#pragma unroll
        for (int i = 0; i < rows; ++i) {
          const A shift = static_cast<A>(double(of_cluster[b][i]) - log_normalizer[i]);
          const A gradient = rho[i] * ((c + b == chosen[i] ? A(1) : A(0)) - decay(sum[b][i] + shift));
          lane.put(r + b * f.rows, i, ignored[i] ? A(0) : gradient);
          lane.put(log_sum + b * f.rows, i, shift);
        }
      }
    }
  }
}

// grad_score = sum_t rho_t ([v = y] - e^(s_v + a_t[c_t(v)])), of type T, a_t = r - log Z, which forest_rows_kernel left in log_sum.
// Tensors as in Forest. Rows that are ignored: 0. A class in a cluster outside [0, C): NaN.
// Work O(T R V): T V exponentials for each row. Reads score once, and reads T numbers of log_sum for each
//   of its elements, from the caches: the classes of a tile of rows follow each other in the grid.
// No atomics, deterministic.
// A warp for a few classes and tile, whose lanes have the rows; score_threads / 32 of them in a block.
template <typename A, typename T>
__global__ void __launch_bounds__(score_threads) forest_scores_kernel(Forest f) {
  constexpr int rows = lane_rows<A>;
  const int64_t blocks = divide_up(f.classes, score_classes);
  const LaneRows<A> lane(blockIdx.x / blocks, f.rows);
  const int64_t v = blockIdx.x % blocks * score_classes + threadIdx.x / 32 * grad_batch;
  const A* score = static_cast<const A*>(f.score) + v * f.rows;
  T* output = static_cast<T*>(f.grad_score) + v * f.grad_stride;
  A x[grad_batch][rows], gradient[grad_batch][rows], of_target[rows];
  int64_t target[rows];
  bool known[grad_batch];
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    target[i] = lane.get(f.target, i);
    of_target[i] = 0;
#pragma unroll
    for (int b = 0; b < grad_batch; ++b) {
      x[b][i] = v + b < f.classes ? lane.get(score + b * f.rows, i) + bias_of<A>(f, v + b) : A(0);
      gradient[b][i] = 0;
    }
  }
#pragma unroll
  for (int b = 0; b < grad_batch; ++b) known[b] = true;
  for (int64_t t = 0; t < f.trees; ++t) {
    const A* shift = static_cast<const A*>(f.log_sum) + t * f.clusters * f.rows;
    A rho[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      rho[i] = lane.get(static_cast<const A*>(f.grad_log_prior) + t * f.rows, i);
      of_target[i] += rho[i];
    }
#pragma unroll
    for (int b = 0; b < grad_batch; ++b) {
      const int64_t c = v + b < f.classes ? f.cluster[(v + b) * f.trees + t] : 0;
      const bool valid = c >= 0 && c < f.clusters;
      const A* of_cluster = shift + (valid ? c : 0) * f.rows;
      known[b] = known[b] && valid;
#pragma unroll
      for (int i = 0; i < rows; ++i) gradient[b][i] -= rho[i] * decay(x[b][i] + lane.get(of_cluster, i));
    }
  }
#pragma unroll
  for (int b = 0; b < grad_batch; ++b) {
    if (v + b >= f.classes) break;
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const A all = gradient[b][i] + (v + b == target[i] ? of_target[i] : A(0));
      lane.put(output + b * f.grad_stride, i, target[i] == ignored_row ? A(0) : known[b] ? all : A(NAN));
    }
  }
}

// A: type of the scores, T: of their gradients.
template <typename A, typename T>
void run(const Forest& f, cudaStream_t stream) {
  int warps = 1;  // enough for two batches of a cluster of mean size each
  while (warps < most_warps && warps * 2 * batch < f.classes / f.clusters) warps *= 2;
  const auto sum = [&](auto kernel, int64_t tile) {
    launch(kernel, grid_size(divide_up(f.rows, tile) * f.trees * f.clusters), 32 * warps, 0, stream, f);
  };
  if (f.classes * 256 > most_tile_bytes) {
    sum(forest_sums_kernel<A, 1>, 32);
  } else {
    sum(forest_sums_kernel<A, lane_rows<A>>, 32 * lane_rows<A>);
  }
  const int64_t tiles = divide_up(f.rows, 32 * lane_rows<A>);
  launch(forest_rows_kernel<A>, grid_size(tiles), 32 * most_warps, 0, stream, f);
  if (f.grad_log_prob == nullptr) return;
  launch(forest_scores_kernel<A, T>, grid_size(tiles * divide_up(f.classes, score_classes)), score_threads, 0,
         stream, f);
}

}  // namespace

void forest_gradient(ScalarType type, ScalarType grad_type, const Forest& forest, cudaStream_t stream) {
  if (forest.rows == 0) return;
  dispatch(grad_type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (type != (std::is_same_v<T, double> ? ScalarType::float64 : ScalarType::float32)) {
      throw std::runtime_error("hstree: forest_gradient_: the dtypes of score and grad_score do not fit");
    }
    run<Sum<T>, T>(forest, stream);
  });
}

}  // namespace hstree
