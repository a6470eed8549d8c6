// Memory for gradients that are made anew at every step and soon given back: what a step frees, the next one
// takes. malloc gives large blocks back to the system, and fresh pages take a third of a step over wide nodes:
// benchmarks/results/recycled-memory.md.
#pragma once

#include <cstdint>

namespace hstree::cpu {

// Blocks below this size are not worth keeping.
constexpr int64_t smallest_recycled = 1 << 20;

// Uninitialised memory, aligned to 64 bytes: a free block that is not much too large, or a new one,
// a little larger than asked for, as the next step's need will differ. Throws std::bad_alloc. Safe for
// threads.
void* acquire(int64_t bytes);

// Takes back a block of `acquire`; a few free ones are kept.
void release(void* block);

}  // namespace hstree::cpu
