// Loops on several threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

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

// The same, where f may throw. Rethrows the first exception when all threads have ended.
template <typename F>
void parallel(int64_t count, int64_t grain, const F& f) {
  std::exception_ptr error;
  std::mutex mutex;
  on_threads(count, grain, [&](int64_t begin, int64_t end) {
    try {
      f(begin, end);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(std::exchange(error, nullptr));
}

}  // namespace hstree::cpu
