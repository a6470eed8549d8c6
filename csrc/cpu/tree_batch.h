// What the path op and the wide op have in common on the CPU: rows in leaf order, products with the weight
// rows on their paths, and the gradients of those. They differ in their `Link`, which turns the scores of a
// row into a log-probability:
//
//     struct Link {
//       // rows and weight rows of one tree
//       LeafOrder order(const TreeTable&) const;
//       // of the row at place j; may overwrite its scores
//       A log_prob(const LeafOrder&, int64_t j, A* score) const;
//       // d (grad * log_prob) / d score
//       void grad(const LeafOrder&, int64_t j, A grad, const A* score, A* grad_score) const;
//     };
//
// Results do not depend on the number of threads: rows are independent in the forward pass, features in the
// backward pass, where each thread takes an interval of features through all rows of a tree.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <vector>

#include "cpu/leaf_order.h"
#include "cpu/row_kernels.h"

namespace hstree::cpu {

// Pointers and sizes of an op's arguments, all contiguous. N rows, D features, T trees, M weight rows of a
// tree, S features of a tree, V classes, P path entries. L: max_depth or max_width, the last dimension of
// score.
struct TreeBatch {
  const char* op;                // for messages
  const int64_t* target;         // [N]
  const int64_t* path_offset;    // [T, V + 1]
  const int32_t* path;           // [P] or [P, 3]
  const int32_t* leaf_position;  // [T, V]
  const int32_t* feature_index;  // [T, S] or null
  int64_t rows, in_features, trees, weight_rows, features, classes, path_size, longest;
};

template <typename T>
struct Forward {
  const T* input;             // [N, D]
  const T* weight;            // [T, M, S]
  const T* bias;              // [T, M] or null
  accumulate_t<T>* log_prob;  // [N, T] zeros
  accumulate_t<T>* score;     // [N, T, L] zeros
};

template <typename T>
struct Backward {
  const accumulate_t<T>* grad_log_prob;  // [N, T]
  const accumulate_t<T>* score;          // [N, T, L]
  const T* input;                        // [N, D]
  const T* weight;                       // [T, M, S]
  accumulate_t<T>* grad_input;           // [N, D]
  T* grad_weight;                        // [T, M, S] zeros, or [nnz, S] if sparse
  T* grad_bias;                          // [T, M] zeros, or [nnz] if sparse
  bool sparse;
};

// Throws std::runtime_error unless each row of feature_index increases within [0, D).
void check_feature_index(const TreeBatch& batch);

// tree and weight row of each visited weight row, in the order of the row-sparse gradient. index [2, nnz].
void visited_index(const std::vector<LeafOrder>& orders, int64_t* index);

// Asks for huge pages where the memory has none yet: a large gradient's first write else costs as much time in
// page faults as its sums.
void advise_huge_pages(void* memory, int64_t bytes);

int64_t visited(const std::vector<LeafOrder>& orders);

inline TreeTable tree_table(const TreeBatch& batch, int64_t t) {
  return {batch.path_offset + t * (batch.classes + 1),
          batch.path,
          batch.leaf_position + t * batch.classes,
          batch.classes,
          batch.path_size,
          batch.weight_rows,
          batch.longest};
}

// Runs f(begin, end) on parts of [0, count), in parallel; the first exception is thrown again here.
template <typename F>
void parallel(int64_t count, int64_t grain, const F& f) {
  std::exception_ptr error;
  std::mutex mutex;
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    try {
      f(begin, end);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

// A thread's workspace, kept from call to call: fresh pages would cost more than the sums in them.
template <typename A, int which>
A* scratch(int64_t size) {
  thread_local std::vector<A> buffer;
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  return buffer.data();
}

template <typename Link>
std::vector<LeafOrder> leaf_orders(const TreeBatch& batch, const Link& link) {
  check_feature_index(batch);
  std::vector<LeafOrder> orders(batch.trees);
  parallel(batch.trees, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) orders[t] = link.order(tree_table(batch, t));
  });
  return orders;
}

// feature_index of tree t as bits, 16 features each; a thread's workspace.
const uint16_t* feature_lanes(const TreeBatch& batch, int64_t t);

template <typename T>
TreeRows<T> tree_rows(const TreeBatch& batch, const LeafOrder& order, int64_t t, const T* input,
                      const T* weight, const T* bias) {
  return {order.row.data(),
          order.offset.data(),
          order.entry.data(),
          order.shared.data(),
          order.slot.data(),
          order.rows(),
          order.longest,
          order.shift,
          input,
          batch.feature_index ? batch.feature_index + t * batch.features : nullptr,
          batch.feature_index ? feature_lanes(batch, t) : nullptr,
          batch.in_features,
          batch.features,
          weight + t * batch.weight_rows * batch.features,
          bias ? bias + t * batch.weight_rows : nullptr};
}

template <typename T, typename Link>
void tree_forward(const TreeBatch& batch, const Link& link, const Forward<T>& tensors) {
  using A = accumulate_t<T>;
  const RowKernels<T>& kernels = row_kernels<T>();
  const std::vector<LeafOrder> orders = leaf_orders(batch, link);
  const int64_t stride = batch.trees * batch.longest;
  for (int64_t t = 0; t < batch.trees; ++t) {
    const LeafOrder& order = orders[t];
    const TreeRows<T> rows = tree_rows(batch, order, t, tensors.input, tensors.weight, tensors.bias);
    A* score = tensors.score + t * batch.longest;
    parallel((order.rows() + tile_rows - 1) / tile_rows, 16, [&](int64_t first, int64_t last) {
      const int64_t begin = first * tile_rows, end = std::min(last * tile_rows, order.rows());
      kernels.scores(rows, begin, end, score, stride, scratch<A, 0>(scores_scratch(batch.features)),
                     scratch<const T*, 1>(order.longest));
      for (int64_t j = begin; j < end; ++j) {
        const int64_t i = order.row[j];
        tensors.log_prob[i * batch.trees + t] = link.log_prob(order, j, score + i * stride);
      }
    });
  }
}

// Zeros where the first tree does not store: everywhere if it reads a subset of the features, else in ignored
// rows.
template <typename A>
void clear_grad_input(const TreeBatch& batch, A* grad_input) {
  for (int64_t i = 0; i < batch.rows; ++i) {
    if (batch.trees > 0 && !batch.feature_index && batch.target[i] >= 0) continue;
    std::fill_n(grad_input + i * batch.in_features, batch.in_features, A{0});
  }
}

template <typename T, typename Link>
void tree_backward(const TreeBatch& batch, const Link& link, const std::vector<LeafOrder>& orders,
                   const Backward<T>& tensors) {
  using A = accumulate_t<T>;
  const RowKernels<T>& kernels = row_kernels<T>();
  const int64_t stride = batch.trees * batch.longest;
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t parts = std::max<int64_t>(1, std::min(threads, batch.features / 64));
  const int64_t width = std::max<int64_t>(16, ((batch.features + parts - 1) / parts + 15) / 16 * 16);
  clear_grad_input(batch, tensors.grad_input);
  int64_t first_slot = 0;
  for (int64_t t = 0; t < batch.trees; ++t) {
    const LeafOrder& order = orders[t];
    const A* score = tensors.score + t * batch.longest;
    A* grad_score = scratch<A, 2>(static_cast<int64_t>(order.entry.size()));
    parallel(order.rows(), 256, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        const int64_t i = order.row[j];
        link.grad(order, j, tensors.grad_log_prob[i * batch.trees + t], score + i * stride,
                  grad_score + order.offset[j]);
      }
    });
    const TreeRows<T> rows = tree_rows<T>(batch, order, t, tensors.input, tensors.weight, nullptr);
    const int64_t first = tensors.sparse ? first_slot : t * batch.weight_rows;
    const bool add = t > 0 || batch.feature_index;
    T* grad_weight = tensors.grad_weight + first * batch.features;
    parallel((batch.features + width - 1) / width, 1, [&](int64_t part, int64_t end) {
      for (; part < end; ++part) {
        const int64_t begin = part * width;
        A* sums = scratch<A, 0>(gradients_scratch(order.longest, width));
        const T** pointers = scratch<const T*, 1>(tile_rows * order.longest);
        T** targets = scratch<T*, 3>((tile_rows + 1) * order.longest);
        kernels.gradients(rows, begin, std::min(begin + width, batch.features), grad_score,
                          tensors.grad_input, add, grad_weight, tensors.sparse, sums, pointers, targets);
      }
    });
    kernels.bias_gradients(rows, grad_score, tensors.grad_bias + first, tensors.sparse,
                           scratch<A, 0>(order.longest + 1), scratch<T*, 3>(order.longest + 1));
    first_slot += order.visited();
  }
}

}  // namespace hstree::cpu
