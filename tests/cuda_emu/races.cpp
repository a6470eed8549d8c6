#include "races.h"

#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace emu {
namespace {

// An access: its moment, a number of `moments` or 0 for none, and its place in the code.
struct Event {
  uint32_t moment = 0;
  int32_t place = 0;  // from `anchor`
};

bool watching = false;
std::vector<Moment> moments;
std::array<Moment, 1024> current;          // of each thread
std::array<uint32_t, 1024> current_index;  // among `moments`, or 0 before it is needed
std::pair<const char*, int> barrier;       // the last one that a thread passed in this launch, and
bool orders = true;                        // whether it counts
const char anchor = 0;

bool same_warp(const Moment& a, const Moment& b) {
  return a.thread / 32 == b.thread / 32;
}
// b happens after a, or at the same time.
bool ordered(const Moment& a, const Moment& b) {
  return a.block == b.block && (a.thread == b.thread || a.block_barriers != b.block_barriers ||
                                (same_warp(a, b) && a.warp_barriers != b.warp_barriers));
}

// Accesses that do not conflict with each other: as many as it takes that whatever conflicts with one of them
// conflicts with one that is kept. One of an earlier block, and since the last barrier of this block the latest two of
// different threads; of different warps where there are such.
struct Accesses {
  Event earlier, latest, other;

  void add(Event event) {
    const Moment &now = moments[event.moment], &before = moments[latest.moment];
    if (latest.moment == event.moment) return;
    if (latest.moment != 0 && before.block != now.block) earlier = latest;
    if (latest.moment == 0 || before.block != now.block || before.block_barriers != now.block_barriers) {
      other = {};
    } else if (before.thread != now.thread &&
               !(other.moment != 0 && same_warp(before, now) && !same_warp(moments[other.moment], now))) {
      other = latest;
    }
    latest = event;
  }
  Event conflict(const Moment& now) const {
    for (const Event& event : {earlier, latest, other})
      if (event.moment != 0 && !ordered(moments[event.moment], now)) return event;
    return {};
  }
};

struct Byte {
  Accesses of[3];  // by Access
};
using Page = std::array<Byte, 256>;
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
std::pair<uintptr_t, Page*> last_page;

Byte& shadow(uintptr_t address) {
  const uintptr_t number = address / 256;
  if (last_page.second == nullptr || last_page.first != number) {
    std::unique_ptr<Page>& page = pages[number];
    if (page == nullptr) page = std::make_unique<Page>();
    last_page = {number, page.get()};
  }
  return (*last_page.second)[address % 256];
}

// The source lines, of inlined functions first, by binutils' addr2line; of the emulator only where it was not inlined.
std::string line_of(int32_t place) {
  const char* address = &anchor + place - 1;
  Dl_info info;
  if (dladdr(address, &info) == 0) return "?";
  char command[1024], line[256] = "?";
  std::snprintf(command, sizeof command, "addr2line -s -i -e '%s' %#zx", info.dli_fname,
                size_t(address - static_cast<const char*>(info.dli_fbase)));
  FILE* const pipe = popen(command, "r");
  std::string lines;
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe) != nullptr) {
    line[std::strcspn(line, " \n")] = 0;
    if (std::strncmp(line, "cuda_emu.h", 10) != 0) lines += (lines.empty() ? "" : " in ") + std::string(line);
  }
  if (pipe != nullptr) pclose(pipe);
  return lines.empty() ? line : lines;
}

}  // namespace

RaceDetector races;

bool RaceDetector::watch(bool kernel) {
  return std::exchange(watching, kernel && wanted);
}

void RaceDetector::begin_launch(const std::string& kernel) {
  if (wanted) seen.insert(kernel);
  moments.assign(1, {});
  pages.clear();
  last_page = {};
  barrier = {};
}

void RaceDetector::begin_block(uint64_t index) {
  if (!wanted) return;
  block = index;
  for (unsigned i = 0; i < current.size(); ++i) current[i] = {block, i, 0, 0};
  current_index.fill(0);
}

void RaceDetector::forget(const void* address, size_t bytes) {
  if (!wanted) return;
  for (size_t i = 0; i < bytes; ++i) shadow(reinterpret_cast<uintptr_t>(address) + i) = {};
}

void RaceDetector::pass_barrier(bool of_block, const char* file, int line) {
  if (!wanted) return;
  if (barrier != std::pair(file, line)) {
    const char* const folder = std::strrchr(file, '/');
    const std::string name = (folder == nullptr ? file : folder + 1) + (":" + std::to_string(line));
    seen.insert(name);
    barrier = {file, line};
    orders = name != unordered;
  }
  if (!orders) return;
  ++(of_block ? current[thread].block_barriers : current[thread].warp_barriers);
  current_index[thread] = 0;
}

void RaceDetector::record(const void* address, size_t bytes, Access access, const void* place) {
  const char* const from = static_cast<const char*>(address);
  if (!wanted || (from >= stack && from < stack + stack_bytes)) return;
  if (place == nullptr) place = __builtin_return_address(0);
  if (current_index[thread] == 0) {
    current_index[thread] = uint32_t(moments.size());
    moments.push_back(current[thread]);
  }
  const Event event = {current_index[thread], int32_t(static_cast<const char*>(place) - &anchor)};
  for (size_t i = 0; i < bytes; ++i) {
    Byte& byte = shadow(reinterpret_cast<uintptr_t>(from) + i);
    for (const Access other : {Access::write, Access::read, Access::atomic}) {
      if (other == access && access != Access::write) continue;
      const Event before = byte.of[int(other)].conflict(current[thread]);
      if (before.moment == 0) continue;
      watching = false;
      const char* const did[] = {"read", "wrote", "accessed atomically"};
      const char* const does[] = {"reads", "writes", "accesses atomically"};
      found({from + i, moments[before.moment],
             std::string(does[int(access)]) + " at " + line_of(event.place) + " what another " +
                 did[int(other)] + " at " + line_of(before.place)});
    }
    byte.of[int(access)].add(event);
  }
}

}  // namespace emu

#pragma GCC visibility push(hidden)
extern "C" {
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
unsigned char __tsan_atomic8_load(const volatile unsigned char* address,
                                  int) {  // of a static variable's guard
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
#define HSTREE_HOOK(name, bytes, access)                                                                    \
  void __tsan_##name##bytes(void* address) {                                                                \
    if (emu::watching) emu::races.record(address, bytes, emu::Access::access, __builtin_return_address(0)); \
  }
#define HSTREE_HOOKS(bytes)                  \
  HSTREE_HOOK(read, bytes, read)             \
  HSTREE_HOOK(write, bytes, write)           \
  HSTREE_HOOK(unaligned_read, bytes, read)   \
  HSTREE_HOOK(unaligned_write, bytes, write) \
  HSTREE_HOOK(volatile_read, bytes, atomic)  \
  HSTREE_HOOK(volatile_write, bytes, atomic)
HSTREE_HOOKS(1)
HSTREE_HOOKS(2)
HSTREE_HOOKS(4)
HSTREE_HOOKS(8)
HSTREE_HOOKS(16)
void __tsan_read_range(void* address, size_t bytes) {
  if (emu::watching) emu::races.record(address, bytes, emu::Access::read, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  if (emu::watching) emu::races.record(address, bytes, emu::Access::write, __builtin_return_address(0));
}
}
#pragma GCC visibility pop
