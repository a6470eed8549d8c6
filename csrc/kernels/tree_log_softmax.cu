#include "common.cuh"
#include "tree_log_softmax.h"

namespace hstree {
namespace {

constexpr int threads = 128;
constexpr int most_lanes = 32;       // rows of a block
constexpr int tile = 1024;           // log-probabilities of a block of tree_log_softmax_kernel
constexpr int most_chunk = 32;       // nodes of a thread of node_path_kernel
constexpr int64_t plenty = 1 << 18;  // threads that fill a GPU

template <typename S>
struct Normalizer {
  S largest, log_sum;  // of the exponentials of the differences to the largest
};

// Where the log-probability of an edge comes from.
struct alignas(8) Place {
  int32_t above;  // the node above, plus 1; 0: no such edge
  int32_t row;    // of score; ~row for the right edge of a binary node; R for a class of a group
};
static_assert(sizeof(Place) == sizeof(int64_t), "a place is an int64 of the table");

template <typename S>
struct Mixture : TreeScores {
  Place* place;               // [T, V + nodes] of the edges to each class and to each node
  Normalizer<S>* normalizer;  // [T, softmaxes, N]
  S* path;                    // [T, nodes, N] log-probability of the path from the root to the node
  int64_t softmaxes;          // normalized()
  int lanes;                  // rows of a block
  unsigned groups;            // of as many rows

  __device__ __forceinline__ Place place_of(int64_t t, int64_t i) const {
    return place[t * (classes + nodes) + i];
  }

  __device__ __forceinline__ bool is_group(const TreeNode& node) const {
    return class_bias && node.block == class_group;
  }

  // Whether a node has `count` rows of score from `row` on; not for groups.
  __device__ __forceinline__ bool has_rows(const TreeNode& node, int64_t row, int64_t count) const {
    return node.block == binary_node ? count <= root_begin - row
                                     : node.block == wide_root && count <= score_rows - row;
  }

  __device__ __forceinline__ S of_class(int64_t t, int64_t y, int64_t n) const {
    return static_cast<const S*>(class_score)[y * rows + n] +
           static_cast<const S*>(class_bias)[t * classes + y];
  }
};

// log P(edge | node above) of row n; y: the class below, if there is one.
template <typename S>
__device__ __forceinline__ S edge_log_prob(const Mixture<S>& m, int64_t t, Place edge, int64_t n, int64_t y) {
  const bool right = edge.row < 0;
  const int64_t row = right ? ~edge.row : edge.row;
  const S z = row == m.score_rows ? m.of_class(t, y, n)
                                  : static_cast<const S*>(m.score)[(t * m.score_rows + row) * m.rows + n];
  if (row < m.root_begin) return log_sigmoid(right ? -z : z);
  const Normalizer<S> all = m.normalizer[(t * m.softmaxes + edge.above - 1) * m.rows + n];
  return (z - all.largest) - all.log_sum;
}

// place[t, y] and place[t, V + node] of the edges to class y and to the node. place: zero-filled; stays so for
// edges that are not those of a tree. One thread for each (tree, edge).
template <typename S>
__global__ void __launch_bounds__(threads) place_kernel(Mixture<S> m) {
  const int64_t i = int64_t(blockIdx.x) * threads + threadIdx.x;
  if (i >= m.trees * m.edges) return;
  const int64_t t = i / m.edges;
  const TreeEdge edge = m.edge[i];
  if (edge.above < 0 || edge.above >= m.nodes) return;
  // A node below has a higher number, so that every way up ends at node 0.
  if (edge.below < 0 ? ~edge.below >= m.classes : edge.below <= edge.above || edge.below >= m.nodes) return;
  const TreeNode node = m.node[t * m.nodes + edge.above];
  const bool binary = node.block == binary_node;
  // Below the root are groups of classes, or binary nodes.
  const bool is_below = node.block == (m.class_bias ? class_group : binary_node);
  if (!(edge.above == 0 ? node.block == wide_root || (binary && is_below) : is_below) || node.row < 0) return;
  const int64_t child = i - t * m.edges - node.first_edge;
  const bool of_group = m.is_group(node);
  const int64_t row = of_group ? m.score_rows : binary ? node.row : m.root_begin + node.row + child;
  if (child < 0 || child >= node.width) return;
  if (of_group ? edge.below >= 0 : !m.has_rows(node, row, 1)) return;
  if (!binary && edge.above >= m.softmaxes) return;
  m.place[t * (m.classes + m.nodes) + (edge.below < 0 ? ~edge.below : m.classes + edge.below)] = {
      edge.above + 1, static_cast<int32_t>(binary && child > 0 ? ~row : row)};
}

// normalizer[t, node, n] = max and log sum exp(z - max) over the children of a wide root or a group.
// score [T, R, N] -> normalizer [T, softmaxes, N], written for these only. NaN if a score is NaN.
// Each thread takes every (threads / lanes)-th child; their sums are merged in a fixed order. One block for each
// (tree, node, group of rows), one lane for each row.
template <typename S>
__global__ void __launch_bounds__(threads) normalizer_kernel(Mixture<S> m) {
  __shared__ S shared_largest[threads], shared_sum[threads];
  const unsigned i = blockIdx.x / m.groups;  // (tree, node)
  const int64_t t = i / static_cast<unsigned>(m.softmaxes);
  const TreeNode node = m.node[t * m.nodes + (i - t * m.softmaxes)];
  const bool of_group = m.is_group(node);
  const int64_t first = m.root_begin + node.row;
  if ((!of_group && node.block != wide_root) || node.row < 0 || node.width < 1) return;
  if (of_group ? node.first_edge < 0 || node.width > m.edges - node.first_edge
               : !m.has_rows(node, first, node.width)) {
    return;
  }
  const int lane = threadIdx.x % m.lanes, way = threadIdx.x / m.lanes, ways = threads / m.lanes;
  const int64_t n = int64_t(blockIdx.x % m.groups) * m.lanes + lane;
  S largest = -INFINITY, sum = 0;
  if (n < m.rows) {
    const S* const z = static_cast<const S*>(m.score) + (t * m.score_rows + first) * m.rows + n;
    const TreeEdge* const edge = m.edge + t * m.edges + node.first_edge;
    for (int64_t c = way; c < node.width; c += ways) {
      S own;
      if (of_group) {
        const int64_t y = ~static_cast<int64_t>(edge[c].below);
        own = y < 0 || y >= m.classes ? S(NAN) : m.of_class(t, y, n);
      } else {
        own = z[c * m.rows];
      }
      if (own > largest) {
        sum = sum * share(largest, own) + 1;
        largest = own;
      } else {
        sum += share(own, largest);
      }
    }
  }
  shared_largest[threadIdx.x] = largest;
  shared_sum[threadIdx.x] = sum;
  for (int half = ways / 2; half > 0; half /= 2) {
    __syncthreads();
    if (way >= half) continue;
    const int other = threadIdx.x + half * m.lanes;
    const S its = shared_largest[other], both = its > largest ? its : largest;
    sum = sum * share(largest, both) + shared_sum[other] * share(its, both);
    largest = both;
    shared_largest[threadIdx.x] = largest;
    shared_sum[threadIdx.x] = sum;
  }
  if (way == 0 && n < m.rows) m.normalizer[int64_t(i) * m.rows + n] = {largest, S(log(sum))};
}

// path[t, node, n] = sum of log P(edge) over the edges from the root to the node; -> path [T, nodes, N].
// A thread takes `chunk` adjacent nodes of one row, and walks up from each to the root or to a node that it has
// done: nodes are in preorder, so most have their parent in the chunk. O(T m N L) reads for L nodes on a path with
// chunks of one node, and about O(T m N) with longer ones. NaN where no path leads to the root.
template <typename S>
__global__ void __launch_bounds__(threads) node_path_kernel(Mixture<S> m, int64_t chunk) {
  S* const done = reinterpret_cast<S*>(HSTREE_SHARED_MEMORY) + threadIdx.x;  // [chunk, threads]
  const int64_t i = int64_t(blockIdx.x) * threads + threadIdx.x, chunks = divide_up(m.nodes, chunk);
  if (i >= m.trees * chunks * m.rows) return;
  const int64_t n = i % m.rows, t = i / m.rows / chunks, begin = i / m.rows % chunks * chunk;
  const int64_t end = begin + chunk < m.nodes ? begin + chunk : m.nodes;
  for (int64_t node = begin; node < end; ++node) {
    S sum = 0;
    int64_t at = node;
    while (at > 0) {
      const Place edge = m.place_of(t, m.classes + at);
      if (edge.above == 0) {
        sum = S(NAN);
        break;
      }
      sum += edge_log_prob(m, t, edge, n, 0);  // never to a class
      at = edge.above - 1;
      if (at >= begin) {
        sum += done[(at - begin) * threads];
        break;
      }
    }
    done[(node - begin) * threads] = sum;
    m.path[(t * m.nodes + node) * m.rows + n] = sum;
  }
}

// The mixture of all trees:
//   log_prob[n, y] = log sum_t exp(log_gate[n, t] + path[t, node above y, n] + log P_t(edge to y))
// log_gate [N, T], score [T, R, N] -> log_prob [N, V]. A class that a tree does not have is NaN; -inf where all
// trees have -inf. Terms are added from the first tree to the last.
// A block takes `lanes` rows of tile / lanes classes. It reads along the rows, which are adjacent in score, and
// writes along the classes, through shared memory.
template <typename S>
__global__ void __launch_bounds__(threads) tree_log_softmax_kernel(Mixture<S> m, S* log_prob) {
  __shared__ S shared[tile + most_lanes];
  const int width = tile / m.lanes, stride = width + 1;
  const int64_t first_row = int64_t(blockIdx.x % m.groups) * m.lanes,
                first_class = int64_t(blockIdx.x / m.groups) * width;
  const int64_t n = first_row + threadIdx.x % m.lanes;
  const S* const gate = static_cast<const S*>(m.log_gate) + n * m.trees;
  for (int i = threadIdx.x; i < tile; i += threads) {
    const int64_t y = first_class + i / m.lanes;
    if (n >= m.rows || y >= m.classes) break;
    S largest = -INFINITY, sum = 0;
    for (int64_t t = 0; t < m.trees; ++t) {
      S term = gate[t];
      if (m.classes > 1) {
        const Place edge = m.place_of(t, y);
        term += edge.above == 0
                    ? S(NAN)
                    : m.path[(t * m.nodes + edge.above - 1) * m.rows + n] + edge_log_prob(m, t, edge, n, y);
      }
      if (term > largest) {
        sum = sum * share(largest, term) + 1;
        largest = term;
      } else {
        sum += share(term, largest);
      }
    }
    shared[i % m.lanes * stride + i / m.lanes] = largest + S(log(sum));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < tile; i += threads) {
    const int64_t row = first_row + i / width, y = first_class + i % width;
    if (row < m.rows && y < m.classes) log_prob[row * m.classes + y] = shared[i / width * stride + i % width];
  }
}

template <typename S>
void launch_all(const TreeScores& scores, void* place, void* workspace, void* log_prob, cudaStream_t stream) {
  Mixture<S> m{};
  static_cast<TreeScores&>(m) = scores;
  m.place = static_cast<Place*>(place);
  m.softmaxes = scores.normalized();
  m.normalizer = static_cast<Normalizer<S>*>(workspace);
  m.path = reinterpret_cast<S*>(m.normalizer + m.trees * m.softmaxes * m.rows);
  m.lanes = 1;
  while (m.lanes < most_lanes && m.lanes < m.rows) m.lanes *= 2;
  const int64_t groups = divide_up(m.rows, m.lanes);
  m.groups = grid_size(groups);
  if (m.classes > 1) {
    launch(place_kernel<S>, grid_size(divide_up(m.trees * m.edges, threads)), threads, 0, stream, m);
    if (m.softmaxes > 0) {
      launch(normalizer_kernel<S>, grid_size(m.trees * m.softmaxes * groups), threads, 0, stream, m);
    }
    int64_t chunk = 1;
    while (chunk < most_chunk && m.trees * m.nodes * m.rows >= 2 * chunk * plenty) chunk *= 2;
    const int64_t walks = m.trees * divide_up(m.nodes, chunk) * m.rows;
    launch(node_path_kernel<S>, grid_size(divide_up(walks, threads)), threads, chunk * threads * sizeof(S),
           stream, m, chunk);
  }
  const int64_t tiles = groups * divide_up(m.classes, tile / m.lanes);
  launch(tree_log_softmax_kernel<S>, grid_size(tiles), threads, 0, stream, m, static_cast<S*>(log_prob));
}

}  // namespace

void tree_log_softmax(ScalarType type, const TreeScores& scores, void* place, void* workspace, void* log_prob,
                      cudaStream_t stream) {
  if (scores.rows == 0) return;
  const auto run = type == ScalarType::float64 ? launch_all<double> : launch_all<float>;
  run(scores, place, workspace, log_prob, stream);
}

}  // namespace hstree
