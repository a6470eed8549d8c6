#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "random.h"
#include "recipes.h"

namespace hstree::host {
namespace {

constexpr int64_t lanes =
    8;  // independent sums of a dot product, so that every compiler gives the same result

enum Stream : uint64_t { noise_stream = 3, node_stream = 5 };

// The vectors used by the tree, with noise; rows padded with zeros to whole lanes.
class Points {
 public:
  Points(const float* vectors, int64_t n, int64_t n_features, uint64_t seed, const ClusterOptions& options) {
    stride_ = (n_features + lanes - 1) / lanes * lanes;
    data_ = Array<float>(n * stride_, 0.0f);

    // A power of two brings the largest entry to [1, 2), so that squares neither overflow nor vanish.
    float largest = 0;
    for (int64_t i = 0; i < n * n_features; ++i) largest = std::max(largest, std::fabs(vectors[i]));
    const int exponent = largest > 0 ? std::ilogb(largest) : 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t f = 0; f < n_features; ++f) {
        data_[i * stride_ + f] = std::ldexp(vectors[i * n_features + f], -exponent);
      }
    }
    if (options.noise > 0) {
      double sum = 0;
      for (int64_t i = 0; i < n * stride_; ++i) sum += static_cast<double>(data_[i]) * data_[i];
      const float scale = static_cast<float>(
          options.noise * std::sqrt(sum / (static_cast<double>(n) * static_cast<double>(n_features))));
      Random random(seed, noise_stream);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t f = 0; f < n_features; ++f) data_[i * stride_ + f] += scale * random.nearly_normal();
      }
    }
  }

  const float* operator[](int64_t i) const { return data_.data() + i * stride_; }
  int64_t stride() const { return stride_; }

 private:
  Array<float> data_;
  int64_t stride_ = 0;
};

float dot(const float* a, const float* b, int64_t n) {
  float sum[lanes] = {};
  for (int64_t f = 0; f < n; f += lanes) {
    for (int64_t j = 0; j < lanes; ++j) sum[j] += a[f + j] * b[f + j];
  }
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

// Unsigned integers in the order of the floats; -0 and 0 are equal.
uint32_t sortable(float x) {
  uint32_t bits;
  x += 0.0f;
  std::memcpy(&bits, &x, sizeof(bits));
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Integer weights, whose sums do not depend on the order: the share of the total in units of 2^-48, plus one
// so that classes without mass are still divided by their number.
Array<uint64_t> integer_weights(const double* frequencies, int64_t n) {
  Array<uint64_t> weight(n, 1);
  if (frequencies == nullptr) return weight;
  const double largest = *std::max_element(frequencies, frequencies + n);
  if (!(largest > 0)) return weight;
  const int exponent = std::ilogb(largest);
  double total = 0;
  for (int64_t c = 0; c < n; ++c) total += std::ldexp(frequencies[c], -exponent);
  for (int64_t c = 0; c < n; ++c) {
    weight[c] += static_cast<uint64_t>(std::ldexp(std::ldexp(frequencies[c], -exponent) / total, 48));
  }
  return weight;
}

class Builder {
 public:
  Builder(const Points& points, Array<uint64_t> weight, std::vector<float> share, uint64_t seed,
          const ClusterOptions& options)
      : points_(points),
        weight_(std::move(weight)),
        share_(std::move(share)),
        seed_(seed),
        options_(options),
        n_(weight_.size()),
        key_(n_),
        right_(n_, 0),
        buffer_(n_),
        axis_(points.stride()),
        sum_(2 * points.stride()),
        part_(2 * points.stride()),
        tree_(n_) {
    std::iota(tree_.arrays.order.data(), tree_.arrays.order.data() + n_, 0);
  }

  TreeArrays build() {
    split(0, n_, 0);
    return std::move(tree_.arrays);
  }

 private:
  // Splits the classes at [begin, end), which are in increasing order, below `above` inner nodes.
  void split(int64_t begin, int64_t end, int above) {
    if (end - begin == 1) return;
    int64_t middle = begin + 1;
    if (end - begin > 2 && !split_off_heavy(begin, end, above)) middle = begin + halve(begin, end, above);
    tree_.add_node(begin, middle, end);
    split(begin, middle, above + 1);
    split(middle, end, above + 1);
  }

  // Both halves of a node must fit below it: r more inner nodes hold 2^r leaves. The largest half:
  int64_t most_leaves(int64_t n, int above) const {
    const int64_t room = options_.max_depth - above - 1;
    return room < 40 ? std::min(n - 1, int64_t{1} << room) : n - 1;
  }

  // A class with at least half of the mass is one of the halves; it moves to the front.
  bool split_off_heavy(int64_t begin, int64_t end, int above) {
    int32_t* ids = tree_.arrays.order.data() + begin;
    const int64_t n = end - begin;
    uint64_t total = 0;
    int64_t heaviest = 0;
    for (int64_t i = 0; i < n; ++i) {
      total += weight_[ids[i]];
      if (weight_[ids[i]] > weight_[ids[heaviest]]) heaviest = i;
    }
    if (2 * weight_[ids[heaviest]] < total || n - 1 > most_leaves(n, above)) return false;
    std::rotate(ids, ids + heaviest, ids + heaviest + 1);
    return true;
  }

  // Splits by 2-means; returns the number of classes on the left.
  int64_t halve(int64_t begin, int64_t end, int above) {
    const int64_t n = end - begin, stride = points_.stride();
    const int32_t* ids = tree_.arrays.order.data() + begin;
    // The interval names the node, so that its random numbers do not depend on the order of the work.
    Random random(seed_, node_stream + mix(static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end)));
    const int64_t first = static_cast<int64_t>(random.below(n));
    const int64_t second = (first + 1 + static_cast<int64_t>(random.below(n - 1))) % n;
    for (int64_t f = 0; f < stride; ++f) axis_[f] = points_[ids[second]][f] - points_[ids[first]][f];

    int64_t n_left = 0;
    for (int64_t iteration = 0; iteration < options_.iterations; ++iteration) {
      for (int64_t i = 0; i < n; ++i) {
        key_[i] = static_cast<uint64_t>(sortable(dot(axis_.data(), points_[ids[i]], stride))) << 32 |
                  static_cast<uint64_t>(i);
      }
      n_left = balance(ids, n, above);
      bool changed = iteration == 0;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t k = static_cast<int64_t>(key_[i] & 0xffffffffu);
        const char side = i >= n_left ? 1 : 0;
        changed |= right_[k] != side;
        right_[k] = side;
      }
      if (!changed || iteration + 1 == options_.iterations) break;
      update_axis(ids, n);
    }

    // A stable partition keeps the classes of each half in increasing order.
    int32_t* order = tree_.arrays.order.data() + begin;
    int64_t l = 0, r = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (right_[i]) {
        buffer_[r++] = order[i];
      } else {
        order[l++] = order[i];
      }
    }
    std::copy_n(buffer_.data(), r, order + l);
    return n_left;
  }

  // Partitions the keys so that the first k are the lowest and weigh as close to half as possible. Returns k.
  int64_t balance(const int32_t* ids, int64_t n, int above) {
    const auto weight = [&](int64_t i) { return weight_[ids[key_[i] & 0xffffffffu]]; };
    uint64_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += weight(i);
    // Invariant: keys before `low` are the lowest and weigh `below` < total / 2, keys from `high` on the
    // highest.
    int64_t low = 0, high = n;
    uint64_t below = 0;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      std::nth_element(key_.data() + low, key_.data() + middle, key_.data() + high);
      uint64_t sum = 0;
      for (int64_t i = low; i < middle; ++i) sum += weight(i);
      if (2 * (below + sum) < total) {
        below += sum;
        low = middle;
      } else {
        high = middle;
      }
    }
    // Key `low` reaches half of the mass: it goes to the side that leaves the smaller difference.
    const uint64_t left_out = total - 2 * below, taken = 2 * (below + weight(low)) - total;
    int64_t k = low;
    if (taken < left_out || (taken == left_out && n - 2 * low > 1)) ++k;
    const int64_t most = most_leaves(n, above);
    const int64_t clamped = std::min(std::max(k, std::max<int64_t>(1, n - most)), most);
    if (clamped != k) {
      std::nth_element(key_.data(), key_.data() + clamped, key_.data() + n);
    }
    return clamped;
  }

  // axis = mean of the right half - mean of the left half, each class weighted by its share.
  void update_axis(const int32_t* ids, int64_t n) {
    constexpr int64_t block = 256;  // summed in float, then added in double
    const int64_t stride = points_.stride();
    std::vector<double>& sum = sum_;
    std::fill(sum.begin(), sum.end(), 0.0);
    double mass[2] = {0, 0};
    for (int64_t start = 0; start < n; start += block) {
      std::fill(part_.begin(), part_.end(), 0.0f);
      for (int64_t i = start; i < std::min(n, start + block); ++i) {
        const float share = share_[ids[i]];
        const float* x = points_[ids[i]];
        float* p = part_.data() + (right_[i] ? stride : 0);
        for (int64_t f = 0; f < stride; ++f) p[f] += share * x[f];
        mass[right_[i] ? 1 : 0] += share;
      }
      for (int64_t f = 0; f < 2 * stride; ++f) sum[f] += part_[f];
    }
    for (int64_t f = 0; f < stride; ++f)
      axis_[f] = static_cast<float>(sum[stride + f] / mass[1] - sum[f] / mass[0]);
  }

  const Points& points_;
  Array<uint64_t> weight_;
  std::vector<float> share_;
  uint64_t seed_;
  const ClusterOptions& options_;
  int64_t n_;
  Array<uint64_t> key_;
  Array<char> right_;
  Array<int32_t> buffer_;
  std::vector<float> axis_;
  std::vector<double> sum_;  // of the left half, then of the right half
  std::vector<float> part_;
  BinaryTree tree_;
};

}  // namespace

TreeArrays cluster_tree(const float* vectors, int64_t n_classes, int64_t n_features,
                        const double* frequencies, uint64_t seed, const ClusterOptions& options) {
  const Points points(vectors, n_classes, n_features, seed, options);
  Array<uint64_t> weight = integer_weights(frequencies, n_classes);
  std::vector<float> share(n_classes);
  for (int64_t c = 0; c < n_classes; ++c) share[c] = std::ldexp(static_cast<float>(weight[c]), -48);
  return Builder(points, std::move(weight), std::move(share), seed, options).build();
}

}  // namespace hstree::host
