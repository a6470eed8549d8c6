// Memory for large results that are made anew at every step and soon given back: what a step frees, the next
// one takes. Fresh pages cost more than the sums that are written to them.
#pragma once

#include <cstdint>

namespace hstree::cpu {

// Blocks below this size are not worth keeping.
constexpr int64_t smallest_recycled = 1 << 20;

// Uninitialised memory, aligned to 64 bytes at least: a free block that is not much too large, or a new one,
// a little larger than asked for, as the next step's need will differ. Throws std::bad_alloc. Safe for
// threads.
void* acquire(int64_t bytes);

// Takes back a block of `acquire`; a few free ones are kept.
void release(void* block);

}  // namespace hstree::cpu
