#include "cpu/sample.h"

#include <algorithm>

#include "kernels/philox.h"

namespace hstree::cpu {
namespace {

template <typename T>
class Sampler {
 public:
  using A = accumulate_t<T>;

  Sampler(const TreeVectors& vectors, const FeatureSubsets& subsets, const Draws<T>& draws)
      : v_(vectors), draws_(draws), paths_(vectors, subsets), by_tree_(v_.trees) {}

  void run(int64_t row) {
    paths_.begin(row);
    for (int64_t place = row * draws_.n; place < (row + 1) * draws_.n; ++place) {
      const int64_t drawn = draw(place);
      draws_.index[place] = drawn;
      for (int64_t t = 0; t < v_.trees; ++t) by_tree_[t] = paths_.log_prob(t, drawn);
      draws_.log_prob[place] = paths_.gated(by_tree_.data());
    }
  }

 private:
  int64_t draw(int64_t place) {
    if (v_.nodes == 0) return 0;
    const int64_t t = choose(paths_.gates(), v_.trees, uniform(draws_.seed, place, 0));
    int32_t node = 0;
    for (uint32_t step = 1;; ++step) {
      const A* const log_prob = paths_.children(t, node);
      const TreeNode& n = paths_.node(t, node);
      const int32_t edge =
          n.first_edge + static_cast<int32_t>(choose(log_prob, n.width, uniform(draws_.seed, place, step)));
      if (paths_.edge(t, edge).below < 0) return paths_.class_below(t, edge);
      node = paths_.node_below(t, edge);
    }
  }

  // The first element whose share and those before it exceed u times the sum.
  int64_t choose(const A* log_prob, int64_t width, double u) {
    share_.resize(width);
    paths_.kernels().shares(log_prob, width, share_.data());
    double total = 0, sum = 0;
    for (int64_t c = 0; c < width; ++c) total += share_[c];
    int64_t last = 0;
    for (int64_t c = 0; c < width; ++c) {
      if (!(share_[c] > 0)) continue;
      last = c;
      if ((sum += share_[c]) > u * total) break;
    }
    return last;
  }

  const TreeVectors& v_;
  const Draws<T>& draws_;
  MixtureRow<T> paths_;
  std::vector<A> share_;
  std::vector<A> by_tree_;  // [T]
};

}  // namespace

template <typename T>
void sample(const TreeVectors& vectors, const Draws<T>& draws) {
  each_row<Sampler<T>>(vectors, draws);
}

template void sample<float>(const TreeVectors&, const Draws<float>&);
template void sample<double>(const TreeVectors&, const Draws<double>&);
template void sample<BFloat16>(const TreeVectors&, const Draws<BFloat16>&);
template void sample<Half>(const TreeVectors&, const Draws<Half>&);

}  // namespace hstree::cpu
