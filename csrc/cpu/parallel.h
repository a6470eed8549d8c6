// Loops on several threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/interrupt.h"

namespace hstree::cpu {

// Runs f(begin, end) on parts of [0, count), one for each thread. f must not throw.
template <typename F>
void on_threads(int64_t count, int64_t grain, const F& f) {
#if defined(__SANITIZE_THREAD__)
  // ThreadSanitizer sees where a std::thread begins and ends, but not the barriers of torch's OpenMP.
  const int64_t most = std::min<int64_t>(torch::stable::get_num_threads(), (count + grain - 1) / grain);
  std::vector<std::thread> others;
  for (int64_t i = 1; i < most; ++i) others.emplace_back(f, count * i / most, count * (i + 1) / most);
  if (most > 0) f(0, count / most);
  for (std::thread& other : others) other.join();
#else
  torch::stable::parallel_for(0, count, grain, f);
#endif
}

// The same, where f may throw, and a thread calls f for one part of its share after another and can be
// interrupted in between. Rethrows the first exception; the other threads end at their next `poll`.
template <typename F>
void parallel(int64_t count, int64_t grain, const F& f) {
  constexpr int64_t most_parts = 1024, smallest = 16;
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  std::mutex mutex;
  on_threads(count, grain, [&](int64_t begin, int64_t end) {
    const std::atomic<bool>* const outer = end_when(&failed);
    const int64_t part = std::max({smallest, grain, (end - begin + most_parts - 1) / most_parts});
    try {
      for (int64_t from = begin; from < end; from += part) {
        f(from, std::min(from + part, end));
        poll();
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
      failed = true;
    }
    end_when(outer);
  });
  if (error) std::rethrow_exception(std::exchange(error, nullptr));
}

}  // namespace hstree::cpu
