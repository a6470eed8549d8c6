#include "common.cuh"
#include "philox.h"
#include "sample.h"

namespace hstree {
namespace {

constexpr int threads = 256;
constexpr int warps = threads / 32;
constexpr int chunk = 1024;  // scores of a node that a block holds at a time
constexpr int blocks = 2;    // of a multiprocessor at a time: for three, ptxas spills registers

// The exponentials of a node's scores: the largest score, and the sum of exp(score - largest).
template <typename S>
struct Exponentials {
  S largest;
  double sum;
};

// One row of hidden in one tree, for a whole block. Its methods are called by all threads, which get the same
// results. A warp multiplies a weight row; every warp adds up the exponentials by itself.
template <typename T, bool Aligned>
class TreeRow {
 public:
  using S = Sum<T>;

  // x: room for the features of the tree.
  __device__ TreeRow(const TreeVectors& v, int64_t t, int64_t row, S* x, S* score)
      : v_(v), t_(t), row_(row), x_(x), score_(score) {
    const T* const hidden = static_cast<const T*>(v.hidden) + row * v.in_features;
    for (int64_t i = threadIdx.x; i < v.features; i += threads) {
      const int64_t feature = v.feature_index == nullptr ? i : v.feature_index[t * v.features + i];
      x[i] = feature < 0 || feature >= v.in_features ? S(NAN) : to_sum(hidden[feature]);
    }
    __syncthreads();
  }

  // Whether the children, rows and edges of a node are within the tables.
  __device__ bool is_sound(const TreeNode& n) const {
    if (n.first_edge < 0 || n.width < 2 || n.width > v_.edges - n.first_edge) return false;
    if (n.block == wide_root) return n.width == v_.root_width;
    if (v_.groups) return n.block == class_group;
    return n.block == binary_node && n.width == 2 && n.row >= 0 && n.row < v_.weight_rows;
  }

  // The first child with cumulative probability above u; never one of probability 0 beside others.
  __device__ int64_t choose(const TreeNode& n, double u) {
    if (n.block == binary_node) {
      const S left = log_sigmoid(binary_score(n)), right = log_sigmoid(-score_[0]);
      const S largest = left > right ? left : right;
      const double of_left = share(left, largest), sum = of_left + share(right, largest);
      return of_left > u * sum ? 0 : 1;
    }
    const Exponentials<S> all = exponentials(n);
    const int lane = threadIdx.x % 32;
    double before = 0;
    int last = 0;  // that has a probability above 0
    for (int64_t begin = 0; begin < n.width; begin += chunk) {
      const int count = hold(n, begin);
      for (int first = 0; first < count; first += 32) {
        const int i = first + lane;
        const double own = i < count ? static_cast<double>(share(score_[i], all.largest)) : 0.0;
        const double sum = before + warp_prefix(own);
        const unsigned above = __ballot_sync(all_lanes, own > 0 && sum > u * all.sum);
        if (above != 0) return begin + first + __ffs(static_cast<int>(above)) - 1;
        last = warp_max(own > 0 ? static_cast<int>(begin) + i : last);
        before = __shfl_sync(all_lanes, sum, 31);
      }
    }
    return last;
  }

  // log P(child | node) of a group.
  __device__ S log_prob(const TreeNode& n, int64_t child) {
    S score = 0;
    const Exponentials<S> all = exponentials(n, child, &score);
    return (score - all.largest) - S(log(all.sum));
  }

  // log P(child | node) of a binary node, computed by the calling warp alone.
  __device__ S binary_log_prob(const TreeNode& n, int64_t child) const {
    S z[1];
    products<1>(n, 0, 1, 0, z);
    return log_sigmoid(child == 0 ? z[0] : -z[0]);
  }

  __device__ S root_log_prob(int64_t child) const {
    return static_cast<const S*>(v_.root)[(t_ * v_.rows + row_) * v_.root_width + child];
  }

 private:
  static constexpr int vector = Aligned ? 16 / sizeof(T) : 1;
  static constexpr int at_once = sizeof(T) == 8 ? 2 : 4;  // rows that a warp multiplies; 4 of float64 spill

  static __device__ int32_t scores(const TreeNode& n) { return n.block == binary_node ? 1 : n.width; }

  __device__ S binary_score(const TreeNode& n) {
    hold(n, 0);
    return score_[0];
  }

  __device__ Exponentials<S> exponentials(const TreeNode& n, int64_t child = -1, S* score = nullptr) {
    const int lane = threadIdx.x % 32;
    Exponentials<S> all = {-INFINITY, 0};
    for (int64_t begin = 0; begin < n.width; begin += chunk) {
      const int count = hold(n, begin);
      S largest = all.largest;
      for (int i = lane; i < count; i += 32) largest = score_[i] > largest ? score_[i] : largest;
      largest = warp_max(largest);
      double sum = 0;
      for (int i = lane; i < count; i += 32) sum += share(score_[i], largest);
      all = {largest, all.sum * share(all.largest, largest) + warp_sum(sum)};
      if (begin <= child && child < begin + count) *score = score_[child - begin];
    }
    return all;
  }

  // Writes the scores of a node from child `begin` to the shared scores, and returns their number.
  __device__ int hold(const TreeNode& n, int64_t begin) {
    const int count = static_cast<int>(scores(n) - begin < chunk ? scores(n) - begin : chunk);
    if (held_edge_ == n.first_edge && held_begin_ == begin) return count;
    held_edge_ = n.first_edge;
    held_begin_ = begin;
    __syncthreads();  // until every warp has read the scores before
    if (n.block == wide_root) {
      for (int i = threadIdx.x; i < count; i += threads) score_[i] = root_log_prob(begin + i);
    } else {
      const int warp = threadIdx.x / 32;
      int i = warp;
      for (; i + warps < count; i += at_once * warps) {
        S z[at_once];
        products<at_once>(n, begin, count, i, z);
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
          if (threadIdx.x % 32 == 0 && i + k * warps < count) score_[i + k * warps] = z[k];
        }
      }
      if (i < count) {
        S z[1];
        products<1>(n, begin, count, i, z);
        if (threadIdx.x % 32 == 0) score_[i] = z[0];
      }
    }
    __syncthreads();
    return count;
  }

  // The scores of the children begin + i, begin + i + warps, ... of a node, those before begin + count. By a warp.
  template <int Rows>
  __device__ __forceinline__ void products(const TreeNode& n, int64_t begin, int count, int i,
                                           S (&z)[Rows]) const {
    const int64_t features = v_.features;
    const T* const vectors = static_cast<const T*>(v_.weight);
    const T* const biases = static_cast<const T*>(v_.bias);
    const T* weight[Rows];
    S bias[Rows];
#pragma unroll
    for (int k = 0; k < Rows; ++k) {
      const int64_t child = begin + (i + k * warps < count ? i + k * warps : i);
      int64_t row = t_ * v_.weight_rows + n.row, bias_row = row;
      bool exists = true;
      if (v_.groups) {
        row = ~int64_t(v_.edge[t_ * v_.edges + n.first_edge + child].below);
        exists = row >= 0 && row < v_.classes;
        row = exists ? row : 0;
        bias_row = t_ * v_.classes + row;
      }
      weight[k] = vectors + row * features;
      bias[k] = biases == nullptr ? S(0) : to_sum(biases[bias_row]);
      if (!exists) bias[k] = S(NAN);
      z[k] = 0;
    }
    for (int64_t f = threadIdx.x % 32 * vector; f < features; f += 32 * vector) {
      S w[Rows][vector];
#pragma unroll
      for (int k = 0; k < Rows; ++k) load<vector>(weight[k] + f, w[k]);
#pragma unroll
      for (int e = 0; e < vector; ++e) {
#pragma unroll
        for (int k = 0; k < Rows; ++k) z[k] += w[k][e] * x_[f + e];
      }
    }
#pragma unroll
    for (int k = 0; k < Rows; ++k) z[k] = (warp_sum(z[k]) + bias[k]) * S(v_.sharpness);
  }

  const TreeVectors& v_;
  const int64_t t_, row_;
  const S* const x_;  // [features] in shared memory, as the scores
  S* const score_;    // [chunk]
  int64_t held_edge_ = -1, held_begin_ = -1;
};

// A tree of the mixture: the first with cumulative weight above u.
template <typename S>
__device__ int64_t choose_tree(const TreeVectors& v, int64_t row, double u) {
  const S* const gate = static_cast<const S*>(v.log_gate) + row * v.trees;
  S largest = -INFINITY;
  double sum = 0, before = 0;
  for (int64_t t = 0; t < v.trees; ++t) largest = gate[t] > largest ? gate[t] : largest;
  for (int64_t t = 0; t < v.trees; ++t) sum += share(gate[t], largest);
  int64_t last = 0;
  for (int64_t t = 0; t < v.trees; ++t) {
    const double own = share(gate[t], largest);
    before += own;
    if (!(own > 0)) continue;
    if (before > u * sum) return t;
    last = t;
  }
  return last;
}

// Draws index[n, i]: a tree by the gate, then a child at each node (ancestral sampling). Random numbers: philox.h,
// step 0 for the tree, step l for the l-th node of the path. A child is the first whose cumulative probability is
// above the random number; sums of the exponentials in float64. A row with NaN, or tables that are not those of a
// tree, give some class. Scores O(L) nodes; no atomics; deterministic. One block for each draw.
template <typename T, bool Aligned>
__global__ void __launch_bounds__(threads, blocks)
    draw_kernel(TreeVectors v, const int64_t* seed, int64_t n, int64_t* index) {
  using S = Sum<T>;
  __shared__ S score[chunk];
  const int64_t draw = blockIdx.x, row = draw / n;
  const uint64_t key = static_cast<uint64_t>(*seed);
  const int64_t t = choose_tree<S>(v, row, uniform(key, static_cast<uint64_t>(draw), 0));
  TreeRow<T, Aligned> tree(v, t, row, reinterpret_cast<S*>(HSTREE_SHARED_MEMORY), score);
  int64_t below = v.classes > 1 && v.nodes > 0 ? 0 : -1;
  for (uint32_t step = 1; step <= max_depth && below >= 0 && below < v.nodes; ++step) {
    const TreeNode node = v.node[t * v.nodes + below];
    if (!tree.is_sound(node)) break;
    const int64_t child = tree.choose(node, uniform(key, static_cast<uint64_t>(draw), step));
    below = v.edge[t * v.edges + node.first_edge + child].below;
  }
  if (threadIdx.x == 0) index[draw] = below < 0 && ~below < v.classes ? ~below : 0;
}

// path[i, t] = log P_t(index[i]), from the nodes on the path of the class: the warps divide the binary nodes, and
// share the others. NaN for tables that are not those of a tree. index [N, n] -> path [N, n, T]. No atomics;
// deterministic. One block for each (i, tree).
template <typename T, bool Aligned>
__global__ void __launch_bounds__(threads, blocks)
    class_path_kernel(TreeVectors v, int64_t n, const int64_t* index, void* path) {
  using S = Sum<T>;
  __shared__ S score[chunk];
  __shared__ S part[warps];
  __shared__ int32_t edge[max_depth];  // from the leaf up
  __shared__ int shared_length;        // -1: no path
  const int64_t i = blockIdx.x / v.trees, t = blockIdx.x % v.trees;
  const TreeEdge* const edges = v.edge + t * v.edges;
  const TreeNode* const nodes = v.node + t * v.nodes;
  if (threadIdx.x == 0) {
    const int64_t y = index[i];
    bool is_path = y >= 0 && y < v.classes;
    int length = 0;
    int64_t at = is_path ? v.leaf_edge[t * v.classes + y] : 0, below = v.classes > 1 ? v.nodes : 0;
    while (is_path && below > 0) {
      const int64_t above = at < 0 || at >= v.edges ? -1 : edges[at].above;
      is_path = above >= 0 && above < below && length < max_depth;
      if (!is_path) break;
      edge[length++] = static_cast<int32_t>(at);
      at = nodes[above].above;
      below = above;
    }
    shared_length = is_path ? length : -1;
  }
  // Waits for thread 0.
  TreeRow<T, Aligned> tree(v, t, i / n, reinterpret_cast<S*>(HSTREE_SHARED_MEMORY), score);
  const int warp = threadIdx.x / 32, length = shared_length;
  S own = length < 0 ? S(NAN) : S(0);
  int binary = 0;  // nodes so far
  for (int e = 0; e < length; ++e) {
    const TreeNode node = nodes[edges[edge[e]].above];
    const int64_t child = int64_t(edge[e]) - node.first_edge;
    if (!tree.is_sound(node) || child < 0 || child >= node.width) {
      own = S(NAN);
    } else if (node.block == binary_node) {
      if (binary++ % warps == warp) own += tree.binary_log_prob(node, child);
    } else {
      const S log_prob = node.block == wide_root ? tree.root_log_prob(child) : tree.log_prob(node, child);
      if (warp == 0) own += log_prob;
    }
  }
  if (threadIdx.x % 32 == 0) part[warp] = own;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < warps; ++w) own += part[w];
  static_cast<S*>(path)[blockIdx.x] = own;
}

// log_prob[i] = log sum_t exp(log_gate[row, t] + path[i, t]). One thread for each i.
template <typename S>
__global__ void __launch_bounds__(threads)
    mixture_kernel(TreeVectors v, int64_t n, const S* path, S* log_prob) {
  const int64_t i = int64_t(blockIdx.x) * threads + threadIdx.x;
  if (i >= v.rows * n) return;
  const S* const gate = static_cast<const S*>(v.log_gate) + i / n * v.trees;
  const S* const own = path + i * v.trees;
  S largest = -INFINITY, sum = 0;
  for (int64_t t = 0; t < v.trees; ++t) largest = gate[t] + own[t] > largest ? gate[t] + own[t] : largest;
  for (int64_t t = 0; t < v.trees; ++t) sum += share(gate[t] + own[t], largest);
  log_prob[i] = largest + S(log(sum));
}

}  // namespace

void sample(ScalarType type, const TreeVectors& v, const int64_t* seed, int64_t n, int64_t* index,
            void* workspace, void* log_prob, cudaStream_t stream) {
  if (v.rows * n == 0) return;
  dispatch_aligned(type, v.weight, v.features, [&](auto tag, auto is_aligned) {
    using T = typename decltype(tag)::type;
    using S = Sum<T>;
    constexpr bool vectors = decltype(is_aligned)::value;
    const size_t bytes = v.features * sizeof(S);
    launch(draw_kernel<T, vectors>, grid_size(v.rows * n), threads, bytes, stream, v, seed, n, index);
    launch(class_path_kernel<T, vectors>, grid_size(v.rows * n * v.trees), threads, bytes, stream, v, n,
           static_cast<const int64_t*>(index), workspace);
    launch(mixture_kernel<S>, grid_size(divide_up(v.rows * n, threads)), threads, 0, stream, v, n,
           static_cast<const S*>(workspace), static_cast<S*>(log_prob));
  });
}

}  // namespace hstree
