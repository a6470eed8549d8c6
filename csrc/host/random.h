// Random numbers from integer arithmetic only, so that a seed gives the same numbers on every machine.
#pragma once

#include <cstdint>
#include <utility>

namespace hstree::host {

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection that scatters the bits of x.
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// SplitMix64. `stream` selects one of the streams of a seed.
class Random {
 public:
  explicit Random(uint64_t seed, uint64_t stream = 0) : state_(mix(seed) ^ mix(stream + golden)) {}

  uint64_t next() { return mix(state_ += golden); }

  // Uniform on 0 .. n - 1, n >= 1, without bias: draws under the smallest mask that covers n - 1, and again
  // if the draw is above n - 1.
  uint64_t below(uint64_t n) {
    uint64_t mask = n - 1;
    for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
    for (;;) {
      const uint64_t x = next() >> 11 & mask;  // n <= 2^53
      if (x < n) return x;
    }
  }

  // Mean 0, variance 1, nearly normal: the sum of the four 16-bit parts of one draw, each uniform with
  // variance (2^32 - 1) / 12. The scale is 1 / sqrt(4 (2^32 - 1) / 12).
  float nearly_normal() {
    const uint64_t x = next();
    const int64_t sum =
        static_cast<int64_t>((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48));
    return static_cast<float>(sum - 2 * 0xffff) * 2.6428996e-05f;
  }

  template <typename T>
  void shuffle(T* values, int64_t n) {
    for (int64_t i = n - 1; i > 0; --i) std::swap(values[i], values[below(static_cast<uint64_t>(i) + 1)]);
  }

 private:
  static constexpr uint64_t golden = 0x9e3779b97f4a7c15u;
  uint64_t state_;
};

}  // namespace hstree::host
