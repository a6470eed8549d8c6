// Philox4x32-10: random numbers that are a function of a seed and a counter, the same on CPU and GPU.
// Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HSTREE_HOST_DEVICE __host__ __device__
#else
#define HSTREE_HOST_DEVICE
#endif

namespace hstree {

struct PhiloxCounter {
  uint32_t word[4];
};

HSTREE_HOST_DEVICE constexpr PhiloxCounter philox(PhiloxCounter c, uint64_t key) {
  uint32_t low_key = static_cast<uint32_t>(key), high_key = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xd2511f53u} * c.word[0], b = uint64_t{0xcd9e8d57u} * c.word[2];
    c = {{static_cast<uint32_t>(b >> 32) ^ c.word[1] ^ low_key, static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ c.word[3] ^ high_key, static_cast<uint32_t>(a)}};
    low_key += 0x9e3779b9u;
    high_key += 0xbb67ae85u;
  }
  return c;
}

// Uniform on the multiples of 2^-53 in [0, 1), of step `step` of draw `row_draw` under a seed.
HSTREE_HOST_DEVICE constexpr double uniform(uint64_t seed, uint64_t row_draw, uint32_t step) {
  const PhiloxCounter random =
      philox({{static_cast<uint32_t>(row_draw), static_cast<uint32_t>(row_draw >> 32), step, 0}}, seed);
  const uint64_t bits = uint64_t{random.word[1]} << 32 | random.word[0];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace hstree
