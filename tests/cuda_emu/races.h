// Finds races between the threads of an emulated launch: two accesses to one byte of shared or global memory by
// different threads, of which one is a write and not both are atomic, with no barrier between them that both threads
// wait at: __syncthreads in a block, __syncwarp of all lanes in a warp, nothing between blocks. Shuffles and votes
// order no memory. Every such pair shows, whichever thread goes first.
//
// Kernels are compiled with -fsanitize=thread, which calls a hook at each access; races.cpp has the hooks in place of
// the sanitizer's library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

namespace emu {

enum class Access { read, write, atomic };

// What orders the accesses of a thread.
struct Moment {
  uint64_t block;
  unsigned thread, block_barriers, warp_barriers;  // passed since the block began
};

struct Race {
  const void* address;
  Moment before;     // of the other thread
  std::string text;  // what both do, and where
};

struct RaceDetector {
  bool wanted = false;  // in the launches to come
  uint64_t block = 0;   // what runs, and its stack, which no other thread reads
  unsigned thread = 0;
  const char* stack = nullptr;
  size_t stack_bytes = 0;
  std::string unordered;       // FILE:LINE of a barrier that is taken for none
  std::set<std::string> seen;  // launched kernels, mangled, and FILE:LINE of the barriers that were passed
  void (*found)(const Race&) = nullptr;  // does not return

  // Whether the running code is a kernel's, and not the emulator's; returns whether it was before.
  bool watch(bool kernel);
  void begin_launch(const std::string& kernel);
  void begin_block(uint64_t block);
  void forget(const void* address, size_t bytes);  // the memory is new
  void pass_barrier(bool of_block, const char* file, int line);
  void record(const void* address, size_t bytes, Access access, const void* place = nullptr);
};
extern RaceDetector races;

// The emulator at work, not a kernel.
struct Unwatched {
  const bool before = races.watch(false);
  Unwatched() = default;
  Unwatched(const Unwatched&) = delete;
  ~Unwatched() { races.watch(before); }
};

}  // namespace emu
