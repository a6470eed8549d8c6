// How a long operator ends early: after Ctrl-C, and after an exception on another of its threads.
#pragma once

#include <atomic>

namespace hstree::cpu {

// Operators of this thread call `check` every quarter of a second, between parts of their work. It throws to end
// the operator.
void check_on_this_thread(void (*check)());

// An operator begins on this thread.
void begin_call();

// Between parts of work: throws what `check` throws, or ends this thread's part of a loop that has failed.
void poll();

// From now on `poll` ends this thread's work once *failed is true; null: never. Returns the pointer before.
const std::atomic<bool>* end_when(const std::atomic<bool>* failed);

}  // namespace hstree::cpu
