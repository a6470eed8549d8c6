// Checked arguments of hstree::forest_gradient_, for both devices.
#pragma once

#include "ops/tensor.h"

namespace hstree {

inline constexpr const char* forest_op = "hstree::forest_gradient_";

struct ForestArguments {
  ScalarType type;
  Tensor score;                         // [V, R], contiguous as all
  Tensor cluster_score;                 // [T, C, R]
  Tensor log_prior;                     // [T, R]
  Tensor cluster;                       // [V, T]
  Tensor target;                        // [R]
  std::optional<Tensor> grad_log_prob;  // [R]; without it nothing is overwritten
  Tensor log_prob;                      // [R], new
  Tensor grad_log_prior;                // [T, R], new; empty without grad_log_prob

  int64_t classes() const { return score.size(0); }
  int64_t rows() const { return score.size(1); }
  int64_t trees() const { return cluster_score.size(0); }
  int64_t clusters() const { return cluster_score.size(1); }
};

ForestArguments forest_arguments(const Tensor& score, const Tensor& cluster_score, const Tensor& log_prior,
                                 const Tensor& cluster, const Tensor& target,
                                 const std::optional<Tensor>& grad_log_prob);

}  // namespace hstree
