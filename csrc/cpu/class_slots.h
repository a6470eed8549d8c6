// Consecutive numbers of the classes of a set, in increasing order.
#pragma once

#include <cstdint>
#include <vector>

namespace hstree::cpu {

class ClassSlots {
 public:
  explicit ClassSlots(int64_t classes) : bits_((classes + 63) / 64), before_(bits_.size() + 1) {}

  void add(int64_t c) { bits_[c / 64] |= uint64_t{1} << c % 64; }

  // To be called after the last `add`.
  void count() {
    for (size_t w = 0; w < bits_.size(); ++w) before_[w + 1] = before_[w] + __builtin_popcountll(bits_[w]);
  }

  int64_t size() const { return before_.back(); }
  // The number of a class of the set.
  int64_t operator[](int64_t c) const {
    return before_[c / 64] + __builtin_popcountll(bits_[c / 64] & ((uint64_t{1} << c % 64) - 1));
  }

  // The classes, in order. classes [size()].
  void list(int64_t* classes) const {
    for (size_t w = 0; w < bits_.size(); ++w) {
      for (uint64_t rest = bits_[w]; rest; rest &= rest - 1) *classes++ = w * 64 + __builtin_ctzll(rest);
    }
  }

 private:
  std::vector<uint64_t> bits_;
  std::vector<int64_t> before_;  // classes in earlier words
};

}  // namespace hstree::cpu
