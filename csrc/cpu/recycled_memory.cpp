#include "cpu/recycled_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

namespace hstree::cpu {
namespace {

constexpr int64_t page = 2 << 20;  // size of the requested huge pages
constexpr size_t most_free = 4;    // blocks

struct Block {
  void* data;
  int64_t bytes;
};

class Pool {
 public:
  Pool() { free_.reserve(most_free + 1); }  // `release`, called by destructors, allocates nothing

  void* acquire(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto fit =
        std::find_if(free_.begin(), free_.end(), [&](const Block& b) { return b.bytes >= bytes; });
    if (fit != free_.end() && fit->bytes <= 2 * bytes + page) {
      const Block block = *fit;
      used_.emplace(block.data, block.bytes);
      free_.erase(fit);
      return block.data;
    }
    if (fit != free_.begin()) drop(fit - 1);  // outgrown
    const int64_t size = (bytes + bytes / 8 + page - 1) / page * page;
    std::unique_ptr<void, decltype(&std::free)> data(std::aligned_alloc(page, size), &std::free);
    if (!data) {
      while (!free_.empty()) drop(free_.begin());
      data.reset(std::aligned_alloc(page, size));
    }
    if (!data) throw std::bad_alloc();
#if defined(__linux__)
    madvise(data.get(), size, MADV_HUGEPAGE);
#endif
    used_.emplace(data.get(), size);
    return data.release();
  }

  void release(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto used = used_.find(data);
    const Block block = {data, used->second};
    used_.erase(used);
    free_.insert(std::upper_bound(free_.begin(), free_.end(), block,
                                  [](const Block& a, const Block& b) { return a.bytes < b.bytes; }),
                 block);
    if (free_.size() > most_free) drop(free_.begin());
  }

 private:
  void drop(std::vector<Block>::iterator block) {
    std::free(block->data);
    free_.erase(block);
  }

  std::mutex mutex_;
  std::vector<Block> free_;  // by size
  std::unordered_map<void*, int64_t> used_;
};

// Never destroyed, because tensors may be freed after the end of main.
Pool& pool() {
  static Pool* const only = new Pool;
  return *only;
}

}  // namespace

void* acquire(int64_t bytes) {
  return pool().acquire(bytes);
}

void release(void* block) {
  pool().release(block);
}

void* acquire_zero_pages(int64_t bytes) {
  void* const pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
#if defined(__linux__)
  madvise(pages, bytes, MADV_NOHUGEPAGE);  // a huge page would be filled as a whole
#endif
  return pages;
}

void release_pages(void* pages, int64_t bytes) {
  munmap(pages, bytes);
}

}  // namespace hstree::cpu
