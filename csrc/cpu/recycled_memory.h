// Recycled memory for large results that every step allocates and frees: a step reuses the blocks of the
// previous one. Page faults of fresh memory would cost more than writing the results.
#pragma once

#include <cstdint>

namespace hstree::cpu {

// Blocks below this size are not worth keeping.
constexpr int64_t smallest_recycled = 1 << 20;

// Returns uninitialized memory, aligned to at least 64 bytes: a free block that is not much too large, or a
// new one, slightly larger than requested because the next step's size will differ. Throws std::bad_alloc.
// Thread-safe.
void* acquire(int64_t bytes);

// Frees a block of `acquire`. A few free blocks are kept.
void release(void* block);

// Zeros of which only a part will be touched: pages that the system fills at the first access. Throws
// std::bad_alloc.
void* acquire_zero_pages(int64_t bytes);
void release_pages(void* pages, int64_t bytes);

}  // namespace hstree::cpu
