#include "cpu/interrupt.h"

#include <chrono>
#include <utility>

namespace hstree::cpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds interval(250);  // between two checks

struct Abandoned {};  // the loop has another exception to rethrow

thread_local const std::atomic<bool>* loop_failed = nullptr;
thread_local void (*check_here)() = nullptr;
thread_local Clock::time_point due;  // time of the next check

}  // namespace

void check_on_this_thread(void (*check)()) {
  check_here = check;
}

void begin_call() {
  if (check_here) due = Clock::now() + interval;
}

void poll() {
  if (loop_failed && loop_failed->load(std::memory_order_relaxed)) throw Abandoned();
  if (!check_here) return;
  const Clock::time_point now = Clock::now();
  if (now < due) return;
  due = now + interval;
  check_here();
}

const std::atomic<bool>* end_when(const std::atomic<bool>* failed) {
  return std::exchange(loop_failed, failed);
}

}  // namespace hstree::cpu
