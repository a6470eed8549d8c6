// The arguments of the path op on the CPU, and what other ops use too: subsets of the features, workspaces.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "cpu/elements.h"
#include "cpu/features.h"
#include "cpu/parallel.h"
#include "cpu/recycled_memory.h"

namespace hstree::cpu {

// S of D features for each of T trees.
struct FeatureIndex {
  const int32_t* index;  // [T, S], or null: all features
  int64_t trees, features, in_features;
};

// Pointers and sizes of the arguments, all contiguous. N rows, D features, T trees, M inner nodes of a tree, S
// features of a tree, V classes, P path entries, L = max_depth.
struct TreeBatch {
  const char* op;                // for messages
  const int64_t* target;         // [N]
  const int64_t* path_offset;    // [T, V + 1]
  const int32_t* path;           // [P]
  const int32_t* leaf_position;  // [T, V]
  const int32_t* feature_index;  // [T, S] or null
  const int64_t* order;          // [T, N], the result of leaf_order
  int64_t rows, in_features, trees, weight_rows, features, classes, path_size, max_depth;

  FeatureIndex features_of_trees() const { return {feature_index, trees, features, in_features}; }
};

template <typename T>
struct Forward {
  const T* hidden;            // [N, D]
  const T* weight;            // [T, M, S]
  const T* bias;              // [T, M] or null
  accumulate_t<T>* log_prob;  // [N, T] zeros
  accumulate_t<T>* score;     // [N, T, L] zeros
};

// Gradients that are not wanted are null.
template <typename T>
struct Backward {
  const accumulate_t<T>* grad_log_prob;  // [N, T]
  const accumulate_t<T>* score;          // [N, T, L]
  const T* hidden;                       // [N, D]
  const T* weight;                       // [T, M, S]
  accumulate_t<T>* grad_hidden;          // [N, D]
  T* grad_weight;                        // [T, M, S] zeros, or [nnz, S] if sparse
  T* grad_bias;                          // [T, M] zeros, or [nnz] if sparse
  bool sparse;
};

// Throws std::runtime_error with the concatenated parts as its message.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Throws std::runtime_error unless each row of the index increases within [0, D).
void check_feature_index(const char* op, const FeatureIndex& features);

// The features of each tree.
class FeatureSubsets {
 public:
  explicit FeatureSubsets(const FeatureIndex& features);
  FeatureSubset operator[](int64_t t) const;

 private:
  const FeatureIndex features_;
  const int64_t blocks_;         // of 16 features
  std::vector<uint16_t> lanes_;  // [T, blocks]
};

// A thread's workspace, kept between calls: page faults of fresh memory would cost more than the sums.
template <typename A, int which>
A* scratch(int64_t size) {
  thread_local std::vector<A> buffer;
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  return buffer.data();
}

// Uninitialized memory for one call, too large to be kept by a thread.
template <typename A>
class Workspace {
 public:
  explicit Workspace(int64_t size) : data_(size ? static_cast<A*>(acquire(size * sizeof(A))) : nullptr) {}
  ~Workspace() {
    if (data_) release(data_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  A* data() const { return data_; }

 private:
  A* data_;
};

}  // namespace hstree::cpu
