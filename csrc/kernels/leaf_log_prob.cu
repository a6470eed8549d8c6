#include "leaf_log_prob.h"
#include "round.cuh"
#include "wide_weight_gradient.cuh"

namespace hstree {
namespace {

constexpr int leaf_threads = 128;

// count of leaf_count. Reads leaf_class once for each node that the batch visits: O(N T + visited rows).
// Threads may store the same 1; deterministic. One warp for each (tree, place).
__global__ void __launch_bounds__(leaf_threads)
    leaf_count_kernel(Tables tables, LeafOrder leaf_order, int32_t* count) {
  const int64_t i = (int64_t(blockIdx.x) * leaf_threads + threadIdx.x) / 32;
  if (i >= tables.trees * tables.rows || leaf_order.length[i] <= leaf_order.shared[i]) return;
  const int tree = static_cast<int>(i / tables.rows);
  const int64_t begin = path_begin(tables, tree, leaf_order.order[i]);
  for (int level = leaf_order.shared[i]; level < leaf_order.length[i]; ++level) {
    const int32_t* entry = tables.path + 3 * (begin + level);
    for (int k = threadIdx.x % 32; k < entry[1]; k += 32) {
      const int32_t own = weight_row(tables, tree, entry[0] + k);
      count[1 + own] = 1;
      count[1 + (tree + 1) * tables.classes + own] = 1;
    }
  }
}

// index and bias_index of leaf_index. O(T V). No atomics; deterministic. One thread for each class of all
// trees together and of each tree.
__global__ void __launch_bounds__(leaf_threads)
    leaf_index_kernel(Tables tables, const int64_t* slot, int64_t nnz, int64_t biases, int64_t* index,
                      int64_t* bias_index) {
  const int64_t i = int64_t(blockIdx.x) * leaf_threads + threadIdx.x;
  if (i >= (tables.trees + 1) * tables.classes || slot[i + 1] == slot[i]) return;
  if (i < tables.classes) {
    index[slot[i]] = i;
  } else {
    const int64_t at = slot[i] - nnz;
    bias_index[at] = i / tables.classes - 1;
    bias_index[biases + at] = i % tables.classes;
  }
}

// Gradients of the rows of a weight that all trees share, and of the bias of each tree. Row t V + r: row
// leaf_class[t, r] of the weight, to which a tree adds; bias leaf_class[t, r] of tree t, which is stored.
template <typename T>
struct AddedRows {
  const int32_t* leaf_class;  // [T, V]
  const int64_t* slot;        // of leaf_count, or null
  int64_t classes;
  Sum<T>* sum;   // [V or nnz, D]
  T* grad_bias;  // [T, V] or [biases], or null

  __device__ __forceinline__ Sum<T>* row_of(int64_t row, int64_t features) const {
    const int32_t own = __ldg(leaf_class + row);
    return sum + (slot == nullptr ? own : __ldg(slot + own)) * features;
  }

  __device__ __forceinline__ void put(int64_t row, int64_t features, int64_t column, Sum<T> value) const {
    if (column < features) {
      row_of(row, features)[column] += value;
    } else if (grad_bias != nullptr) {
      const int64_t at = row - row % classes + __ldg(leaf_class + row);
      store(grad_bias + (slot == nullptr ? at : __ldg(slot + classes + at) - __ldg(slot + classes)), value);
    }
  }

  template <int Count>
  __device__ __forceinline__ bool put_vector(int64_t row, int64_t features, int64_t column,
                                             const Sum<T> (&value)[Count]) const {
    if constexpr (Count * sizeof(Sum<T>) == 16) {
      auto* const address = reinterpret_cast<uint4*>(row_of(row, features) + column);
      uint4 raw = *address;
      Sum<T> total[Count];
      memcpy(total, &raw, sizeof raw);
#pragma unroll
      for (int e = 0; e < Count; ++e) total[e] += value[e];
      memcpy(&raw, total, sizeof raw);
      *address = raw;
      return true;
    } else {
      return false;
    }
  }
};

}  // namespace

void leaf_count(const Tables& tables, const LeafOrder& leaf_order, int32_t* count, cudaStream_t stream) {
  const int64_t places = tables.trees * tables.rows;
  if (places == 0) return;
  launch(leaf_count_kernel, grid_size(divide_up(32 * places, leaf_threads)), leaf_threads, 0, stream, tables,
         leaf_order, count);
}

void leaf_index(const Tables& tables, const int64_t* slot, int64_t nnz, int64_t biases, int64_t* index,
                int64_t* bias_index, cudaStream_t stream) {
  if (nnz == 0) return;
  launch(leaf_index_kernel, grid_size(divide_up((tables.trees + 1) * tables.classes, leaf_threads)),
         leaf_threads, 0, stream, tables, slot, nnz, biases, index, bias_index);
}

// grad_weight[y] = sum over the trees, in order, of the gradient of tree t's row of class y as in the wide op.
// A tree adds to sum after the one before it, and each of its elements in one thread: no atomics, and the order
// of every sum is fixed. Bytes: as the wide op, and sum read and written for the visited rows of each tree. The
// workspace is that of one tree.
void leaf_log_prob_backward_weight(ScalarType type, const Tables& tables, const LeafOrder& leaf_order,
                                   const int64_t* slot, const WideBackward& tensors, void* workspace,
                                   int64_t rows, void* sum, void* grad_weight, void* grad_bias,
                                   cudaStream_t stream) {
  if (tables.rows == 0 || tables.trees == 0) return;
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Segments segments(type, tables);
    const AddedRows<T> added = {tables.leaf_class, slot, tables.classes, static_cast<Sum<T>*>(sum),
                                static_cast<T*>(grad_bias)};
    const SegmentOutput<T, AddedRows<T>> output(segments, workspace, added);
    for (int tree = 0; tree < tables.trees && tables.stride > 0; ++tree) {
      wide_weight_gradient<T>(tables, leaf_order, nullptr, tensors, segments, output, tree,
                              aligned<Sum<T>>(sum, tables.features, 16), stream);
    }
    round_sums<T>(sum, grad_weight, rows * tables.features, stream);
  });
}

}  // namespace hstree
