// Runs CUDA kernels on the CPU, so that their tests need neither a GPU nor a CUDA toolkit.
//
//   g++ -std=c++17 -fPIC -c -g1 -fno-strict-aliasing -fno-gnu-unique -fsanitize=alignment,thread -x c++
//       -include cuda_emu.h kernel.cu
//   g++ -shared kernel.o races.o -o kernel.so
//
// (without the sanitizers' own libraries: this header and races.cpp have what they would.)
// Each CUDA thread is a fiber; the blocks of a grid run one after another on one CPU thread. Barriers,
// shuffles and votes are rendezvous, atomics are plain. A launch throws std::runtime_error when threads wait
// at different barriers or for a thread that has ended, when a shuffle reads a lane outside its mask; at a
// misaligned access; when it is not on torch's current stream within a device guard; and, where they
// are watched, at a race (races.h). It leaves an error, as CUDA does, when it exceeds a limit of the hardware: in the
// shape of the grid and its blocks, in shared memory, static and dynamic together.
// Which thread and which block goes first follows emu::order. Shared memory starts as NaN; dynamic memory is
// exactly as long as asked for, so that AddressSanitizer sees each access beyond it. Asynchronous copies land as
// late as they may. What it cannot show: memory fences, inline PTX, cooperative groups, what __launch_bounds__ and
// the registers of a kernel forbid (every kernel has the bounds: tools/check_cuda.py).
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include "kernel_attributes.h"
#include "races.h"

#define HSTREE_CUDA_EMULATION 1
#define __device__
#define __host__
#define __forceinline__ inline

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct __attribute__((may_alias, aligned(8))) uint2 {
  unsigned x, y;
};
struct __attribute__((may_alias, aligned(16))) uint4 {
  unsigned x, y, z, w;
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

// ---- half precision, round to nearest even
// ----------------------------------------------------------------------
struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};

namespace emu {
template <typename To, typename From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace emu

inline float __bfloat162float(__nv_bfloat16 value) {
  return emu::bit_cast<float>(uint32_t(value.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  uint32_t bits = emu::bit_cast<uint32_t>(value);
  if (value != value) return {0x7fff};
  return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
inline float __half2float(__half value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00u) return emu::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest < 0x400u) return (sign ? -1.0f : 1.0f) * float(rest) * 0x1p-24f;
  return emu::bit_cast<float>(sign | (rest + (112u << 10)) << 13);
}
inline __half __float2half_rn(float value) {
  const uint32_t bits = emu::bit_cast<uint32_t>(value), rest = bits & 0x7fffffffu;
  uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7fff;
  } else if (rest >= 0x47800000u) {  // 65536 and more
    half = 0x7c00;
  } else if (rest < 0x38800000u) {  // below the smallest normal half: 0.5 + x rounds x to a multiple of 2^-24
    half = emu::bit_cast<uint32_t>(emu::bit_cast<float>(rest) + 0.5f) - 0x3f000000u;
  } else {
    half = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  }
  return {uint16_t((bits >> 16 & 0x8000u) | half)};
}

// ---- what launch.h asks the CUDA runtime
// ------------------------------------------------------------------------------------------
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInvalidConfiguration };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
};

namespace emu {

// Bytes of shared memory that a block can have where it asks for them: 227 KiB for compute capability 9.0 and 10.0,
// 163 for 8.0, 99 for 8.6, 8.9 and 12.0.
inline size_t shared_limit = 99 << 10;
constexpr size_t shared_default = 48 << 10;

// Kernels are launched on torch's current stream, while a guard has made its device the current one.
inline char current_stream;
inline int device_guards = 0;

inline cudaError_t last_error = cudaSuccess;
inline std::string error_detail;
inline std::map<const KernelAttributes*, size_t> dynamic_limits;  // of the kernels that have asked for more

// A request holds for one launch only, so that no launch lives on the request of an earlier one.
inline size_t take_dynamic_limit(const KernelAttributes& kernel) {
  const auto asked = dynamic_limits.find(&kernel);
  if (asked == dynamic_limits.end()) return shared_default - std::min(shared_default, kernel.static_bytes);
  const size_t bytes = asked->second;
  dynamic_limits.erase(asked);
  return bytes;
}

}  // namespace emu

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = int(emu::shared_limit);
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  attributes->sharedSizeBytes = emu::kernel_attributes(kernel).static_bytes;
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  const emu::KernelAttributes& attributes = emu::kernel_attributes(kernel);
  if (bytes < 0 || attributes.static_bytes + size_t(bytes) > emu::shared_limit) {
    emu::error_detail = "more shared memory than a block can have";
    return cudaErrorInvalidValue;
  }
  emu::dynamic_limits[&attributes] = size_t(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetName(const char** name, const void* kernel) {
  *name = emu::kernel_attributes(kernel).name.c_str();
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  return std::exchange(emu::last_error, cudaSuccess);
}
inline const char* cudaGetErrorString(cudaError_t) {
  return emu::error_detail.c_str();
}

// ---- threads, blocks, rendezvous
// --------------------------------------------------------------------------------
namespace emu {

enum class Order : int { ascending, descending, shuffled };
inline Order order = Order::ascending;
inline unsigned seed = 0;

enum class State { ready, block, warp, done };

using Context = void* [5];  // of __builtin_setjmp

// cp.async: what a copy read at its issue, and where it lands.
struct AsyncCopy {
  unsigned char* shared;
  const void* global;
  size_t bytes, group;
  bool zero;
  unsigned char source[16];
};

struct Fiber {
  std::unique_ptr<char[]> stack;
  ucontext_t start;
  Context resume;
  bool started = false;
  State state = State::done;
  int line = 0;       // of the rendezvous at which the fiber waits
  unsigned mask = 0;  // of lanes, for State::warp
  int source = 0;     // lane to read from; vote: -1
  uint64_t value = 0, result = 0;
  std::vector<AsyncCopy> copies;  // under way, in the order of their issue
  size_t group = 0;               // of copies that is not yet committed
  void* fake_stack = nullptr;
};

struct Machine {
  static constexpr size_t stack_bytes = 128 << 10;
  std::vector<std::unique_ptr<Fiber>> fibers;
  unsigned threads = 0, current = 0;
  bool running = false;
  Context scheduler;
  ucontext_t scheduler_start;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  void* scheduler_fake_stack = nullptr;
  std::string error;
  void (*call)(void*) = nullptr;
  void* argument = nullptr;
  unsigned char* shared = nullptr;  // dynamic
  size_t shared_bytes = 0;
  const KernelAttributes* kernel = nullptr;
};
inline Machine machine;

inline void* shared_memory() {
  return machine.shared;
}
inline unsigned lane() {
  return machine.current % 32;
}

#define HSTREE_SWITCH __attribute__((noinline, no_sanitize("address", "thread", "undefined"))) inline

HSTREE_SWITCH void jump(Context& context) {
  __builtin_longjmp(context, 1);
}

HSTREE_SWITCH void before_switch(void** fake_stack, const void* stack, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake_stack, stack, bytes);
#else
  (void)fake_stack, (void)stack, (void)bytes;
#endif
}
HSTREE_SWITCH void after_switch(void* fake_stack, const void** stack, size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, stack, bytes);
#else
  (void)fake_stack, (void)stack, (void)bytes;
#endif
}

// Leaves the running fiber for the scheduler; returns when the scheduler resumes it.
HSTREE_SWITCH void yield() {
  Machine& m = machine;
  Fiber& fiber = *m.fibers[m.current];
  before_switch(&fiber.fake_stack, m.scheduler_stack, m.scheduler_stack_bytes);
  if (__builtin_setjmp(fiber.resume) == 0) jump(m.scheduler);
  after_switch(fiber.fake_stack, &machine.scheduler_stack, &machine.scheduler_stack_bytes);
}

inline std::string thread_name(uint3 block, unsigned thread) {
  return "block (" + std::to_string(block.x) + ", " + std::to_string(block.y) + ", " +
         std::to_string(block.z) + "), thread " + std::to_string(thread);
}

inline void fail(const std::string& what) {  // called on a fiber, which never runs again
  const Unwatched unwatched;
  if (machine.error.empty()) machine.error = thread_name(blockIdx, machine.current) + ": " + what;
  for (;;) yield();
}

inline void fiber_main() {
  after_switch(nullptr, &machine.scheduler_stack, &machine.scheduler_stack_bytes);
  for (;;) {
    races.watch(true);
    machine.call(machine.argument);
    races.watch(false);
    Fiber& fiber = *machine.fibers[machine.current];
    if (!fiber.copies.empty()) fail("ended with asynchronous copies under way");
    fiber.state = State::done;
    yield();
  }
}

HSTREE_SWITCH void resume(unsigned thread) {
  Machine& m = machine;
  Fiber& fiber = *m.fibers[thread];
  m.current = races.thread = thread;
  races.stack = fiber.stack.get();
  races.stack_bytes = Machine::stack_bytes;
  threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y)};
  before_switch(&m.scheduler_fake_stack, fiber.stack.get(), Machine::stack_bytes);
  if (__builtin_setjmp(m.scheduler) == 0) {
    if (fiber.started) jump(fiber.resume);
    fiber.started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = Machine::stack_bytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
    setcontext(&fiber.start);
  }
  after_switch(machine.scheduler_fake_stack, nullptr, nullptr);
}

inline void wait_block(int line) {
  const Unwatched unwatched;
  Fiber& fiber = *machine.fibers[machine.current];
  fiber.state = State::block;
  fiber.line = line;
  yield();
}

// source: lane whose value to return, or -1 for the ballot of the values.
inline uint64_t wait_warp(unsigned mask, uint64_t value, int source, int line) {
  const Unwatched unwatched;
  Fiber& fiber = *machine.fibers[machine.current];
  if (!(mask >> lane() & 1u)) fail("a lane outside the mask at line " + std::to_string(line));
  if (source >= 0 && !(mask >> source & 1u))
    fail("shuffle from a lane outside the mask at line " + std::to_string(line));
  fiber.state = State::warp;
  fiber.line = line;
  fiber.mask = mask;
  fiber.source = source;
  fiber.value = value;
  yield();
  return fiber.result;
}

// Lets the lanes of a warp go whose whole mask has arrived at the same line.
inline bool release_warp(unsigned first) {
  Machine& m = machine;
  bool released = false;
  for (unsigned i = first; i < std::min(first + 32, m.threads); ++i) {
    const Fiber& fiber = *m.fibers[i];
    if (fiber.state != State::warp) continue;
    const unsigned mask = fiber.mask;
    const int line = fiber.line;
    bool complete = true;
    uint64_t ballot = 0;
    for (unsigned k = 0; k < 32; ++k) {
      if (!(mask >> k & 1u)) continue;
      if (first + k >= m.threads) {
        complete = false;
        break;
      }
      const Fiber& other = *m.fibers[first + k];
      complete = complete && other.state == State::warp && other.mask == mask && other.line == line;
      ballot |= uint64_t(other.value != 0) << k;
    }
    if (!complete) continue;
    for (unsigned k = 0; k < 32; ++k) {
      if (!(mask >> k & 1u)) continue;
      Fiber& other = *m.fibers[first + k];
      other.result = other.source < 0 ? ballot : m.fibers[first + unsigned(other.source)]->value;
      other.state = State::ready;
    }
    released = true;
  }
  return released;
}

inline bool release_block() {
  Machine& m = machine;
  for (unsigned i = 0; i < m.threads; ++i)
    if (m.fibers[i]->state != State::block || m.fibers[i]->line != m.fibers[0]->line) return false;
  for (unsigned i = 0; i < m.threads; ++i) m.fibers[i]->state = State::ready;
  return true;
}

inline std::string stuck() {
  std::string text = "divergent barrier:";
  for (unsigned i = 0; i < machine.threads; ++i) {
    const Fiber& fiber = *machine.fibers[i];
    const bool same =
        i > 0 && fiber.state == machine.fibers[i - 1]->state && fiber.line == machine.fibers[i - 1]->line;
    if (same) continue;
    text += " from thread " + std::to_string(i) +
            (fiber.state == State::done ? " ended;" : " waiting at line " + std::to_string(fiber.line) + ";");
  }
  return text;
}

// Runs all threads of one block to their end. In order: a warp goes as far as it can before the next one
// starts. Shuffled: warps and lanes take turns at random.
inline void run_block(std::mt19937& random) {
  Machine& m = machine;
  const unsigned warps = (m.threads + 31) / 32;
  std::vector<unsigned> warp(warps), lanes(32);
  for (unsigned i = 0; i < warps; ++i) warp[i] = order == Order::descending ? warps - 1 - i : i;
  for (unsigned i = 0; i < 32; ++i) lanes[i] = order == Order::descending ? 31 - i : i;
  for (unsigned i = 0; i < m.threads; ++i) m.fibers[i]->state = State::ready;
  for (;;) {
    bool progress = false, ended = true;
    if (order == Order::shuffled) std::shuffle(warp.begin(), warp.end(), random);
    for (unsigned w : warp) {
      bool again = true;
      while (again) {
        again = false;
        if (order == Order::shuffled) std::shuffle(lanes.begin(), lanes.end(), random);
        for (unsigned k : lanes) {
          const unsigned thread = 32 * w + k;
          if (thread >= m.threads || m.fibers[thread]->state != State::ready) continue;
          resume(thread);
          if (!m.error.empty()) return;
          progress = true;
        }
        again = release_warp(32 * w);
        progress = progress || again;
        if (order == Order::shuffled && random() % 2) break;
      }
    }
    for (unsigned i = 0; i < m.threads; ++i) ended = ended && m.fibers[i]->state == State::done;
    if (ended) return;
    if (!release_block() && !progress) {
      m.error = stuck();
      return;
    }
  }
}

// What is wrong with a launch, or nothing.
inline std::string refusal(const KernelAttributes& kernel, dim3 grid, dim3 block, size_t dynamic_bytes,
                           size_t dynamic_limit) {
  const auto limits = [](const char* what, dim3 size, dim3 most) -> std::string {
    for (const auto& [n, limit] : {std::pair(size.x, most.x), {size.y, most.y}, {size.z, most.z}})
      if (n == 0 || n > limit)
        return std::to_string(n) + " " + what + " in one direction, of 1 to " + std::to_string(limit);
    return "";
  };
  const std::string shape =
      limits("blocks", grid, {0x7fffffffu, 0xffffu, 0xffffu}) + limits("threads", block, {1024, 1024, 64});
  if (!shape.empty()) return shape;
  const unsigned threads = block.x * block.y * block.z;
  if (threads > 1024) return std::to_string(threads) + " threads in a block of at most 1024";
  if (dynamic_bytes > dynamic_limit)
    return std::to_string(dynamic_bytes) + " bytes of dynamic and " + std::to_string(kernel.static_bytes) +
           " of static shared memory, without having asked for that much";
  return "";
}

inline bool is_shared(const void* address, size_t bytes) {
  const auto in = [&](const unsigned char* begin, size_t size) {
    const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(begin);
    return offset <= size && bytes <= size - offset;
  };
  if (in(machine.shared, machine.shared_bytes)) return true;
  const auto& variables = machine.kernel->shared;
  return std::any_of(variables.begin(), variables.end(),
                     [&](const SharedVariable& variable) { return in(variable.address, variable.bytes); });
}

inline uint3 block_at(uint64_t index) {
  return {unsigned(index % gridDim.x), unsigned(index / gridDim.x % gridDim.y),
          unsigned(index / gridDim.x / gridDim.y)};
}

inline void fail_race(const Race& race) {
  fail("race in " + machine.kernel->name + " on " + (is_shared(race.address, 1) ? "shared" : "global") +
       " memory: " + race.text + "; the other is " +
       thread_name(block_at(race.before.block), race.before.thread));
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, const void* stream,
            Arguments... arguments) {
  if (stream != &current_stream) throw std::runtime_error("emulated launch: not on torch's current stream");
  if (device_guards == 0) throw std::runtime_error("emulated launch: outside a device guard");
  Machine& m = machine;
  m.kernel = &kernel_attributes(reinterpret_cast<const void*>(kernel));
  const size_t dynamic_limit = take_dynamic_limit(*m.kernel);
  const std::string refused = refusal(*m.kernel, grid, block, shared_bytes, dynamic_limit);
  if (!refused.empty()) {
    last_error = cudaErrorInvalidConfiguration;
    error_detail = refused;
    return;
  }
  m.threads = block.x * block.y * block.z;
  using Bound = std::pair<void (*)(Parameters...), std::tuple<Parameters...>>;
  Bound bound(kernel, std::tuple<Parameters...>(arguments...));
  m.argument = &bound;
  m.call = [](void* argument) {
    Bound& bound = *static_cast<Bound*>(argument);
    std::apply(bound.first, bound.second);
  };
  while (m.fibers.size() < m.threads) {
    m.fibers.push_back(std::make_unique<Fiber>());
    m.fibers.back()->stack.reset(new char[Machine::stack_bytes]);
  }
  gridDim = grid;
  blockDim = block;
  std::mt19937 random(seed);
  std::vector<uint64_t> blocks(uint64_t(grid.x) * grid.y * grid.z);
  for (size_t i = 0; i < blocks.size(); ++i)
    blocks[i] = order == Order::descending ? blocks.size() - 1 - i : i;
  if (order == Order::shuffled) std::shuffle(blocks.begin(), blocks.end(), random);
  m.shared = static_cast<unsigned char*>(::operator new(shared_bytes, std::align_val_t(16)));
  m.shared_bytes = shared_bytes;
  m.running = true;
  races.found = fail_race;
  races.begin_launch(m.kernel->name);
  for (uint64_t index : blocks) {
    blockIdx = block_at(index);
    races.begin_block(index);
    const auto renew = [](unsigned char* address, size_t bytes) {
      std::memset(address, 0xff, bytes);
      races.forget(address, bytes);
    };
    renew(m.shared, shared_bytes);
    for (const SharedVariable& variable : m.kernel->shared) renew(variable.address, variable.bytes);
    run_block(random);
    if (!m.error.empty()) break;
  }
  m.running = false;
  ::operator delete(m.shared, std::align_val_t(16));
  m.shared = nullptr;
  m.shared_bytes = 0;
  if (!m.error.empty()) {
    m.fibers.clear();  // some stopped in the middle of a kernel
    const std::string error = std::move(m.error);
    m.error.clear();
    throw std::runtime_error("emulated launch: " + error);
  }
}

template <typename T>
T shuffle(unsigned mask, T value, int source, int line) {
  uint64_t bits = 0;
  static_assert(sizeof(T) <= sizeof bits, "at most 8 bytes");
  std::memcpy(&bits, &value, sizeof value);
  bits = wait_warp(mask, bits, source, line);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// c += a b for a warp, operands as mma.m16n8k16 of the PTX manual deals them out to the lanes; to_float: of the
// 16 bits of an element. Sums in float32, from the first column of a to the last.
template <typename ToFloat>
void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], ToFloat to_float,
         int line = __builtin_LINE()) {
  const Unwatched unwatched;
  struct Operands {
    const uint32_t *a, *b;
  } const own = {a, b};
  const auto address = reinterpret_cast<uint64_t>(&own);
  wait_warp(0xffffffffu, address, int(lane()), line);
  const unsigned warp = machine.current / 32 * 32;
  const auto element = [&](unsigned from, bool of_a, unsigned word, unsigned half) {
    const auto* other = reinterpret_cast<const Operands*>(machine.fibers[warp + from]->value);
    return to_float(uint16_t((of_a ? other->a : other->b)[word] >> 16 * half));
  };
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned quarter = k % 8 / 2;
      c[i] += element(row % 8 * 4 + quarter, true, row / 8 + k / 8 * 2, k % 2) *
              element(column * 4 + quarter, false, k / 8, k % 2);
    }
  }
  wait_warp(0xffffffffu, address, int(lane()), line);  // until all lanes have read the operands
}

// An asynchronous copy lands at the wait that covers its group and at no time before: until then its destination
// is all ones, which is NaN in each floating-point type. A thread that writes there or to the source meanwhile,
// or ends before it has waited, fails.
constexpr unsigned char async_poison = 0xff;

template <size_t Bytes>
void async_copy(void* shared, const void* global, bool copy) {
  const Unwatched unwatched;
  if (reinterpret_cast<uintptr_t>(shared) % Bytes != 0 || reinterpret_cast<uintptr_t>(global) % Bytes != 0)
    fail("misaligned asynchronous copy of " + std::to_string(Bytes) + " bytes");
  if (!is_shared(shared, Bytes)) fail("asynchronous copy to what is not shared memory");
  if (is_shared(global, Bytes)) fail("asynchronous copy from shared memory");
  Fiber& fiber = *machine.fibers[machine.current];
  AsyncCopy issued = {static_cast<unsigned char*>(shared), global, Bytes, fiber.group, !copy, {}};
  std::memcpy(issued.source, global, Bytes);
  std::memset(shared, async_poison, Bytes);
  races.record(shared, Bytes, Access::write);
  if (copy) races.record(global, Bytes, Access::read);
  fiber.copies.push_back(issued);
}

inline void async_copy_commit() {
  const Unwatched unwatched;
  ++machine.fibers[machine.current]->group;
}

inline void async_copy_wait(size_t pending) {
  const Unwatched unwatched;
  Fiber& fiber = *machine.fibers[machine.current];
  size_t landed = 0;  // copies are in the order of their groups
  for (; landed < fiber.copies.size(); ++landed) {
    const AsyncCopy& copy = fiber.copies[landed];
    if (copy.group + pending >= fiber.group) break;
    for (size_t i = 0; i < copy.bytes; ++i)
      if (copy.shared[i] != async_poison)
        fail("shared memory was written while an asynchronous copy to it was under way");
    if (std::memcmp(copy.source, copy.global, copy.bytes) != 0)
      fail("the source of an asynchronous copy was written while it was under way");
    races.record(copy.shared, copy.bytes, Access::write);
    if (copy.zero) {
      std::memset(copy.shared, 0, copy.bytes);
    } else {
      std::memcpy(copy.shared, copy.source, copy.bytes);
    }
  }
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + ptrdiff_t(landed));
}

}  // namespace emu

// What code built with -fsanitize=alignment calls at a misaligned access. With AddressSanitizer in the build, its
// companion library has these functions.
#if !defined(__SANITIZE_ADDRESS__)
namespace emu {
struct TypeMismatch {
  const char* file;
  uint32_t line, column;
  const struct {
    uint16_t kind, info;
    char name[1];
  }* type;
  unsigned char log_alignment, access;
};
}  // namespace emu
extern "C" __attribute__((weak, visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(
    emu::TypeMismatch* mismatch, uintptr_t address) {
  const std::string what = "misaligned address of " + std::string(mismatch->type->name) + " at " +
                           mismatch->file + ":" + std::to_string(mismatch->line) +
                           ": it must be a multiple of " + std::to_string(1u << mismatch->log_alignment) +
                           ", and is " + std::to_string(address % (1u << mismatch->log_alignment)) + " more";
  if (emu::machine.running) emu::fail(what);
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}
extern "C" __attribute__((weak, visibility("hidden"))) void __ubsan_handle_type_mismatch_v1_abort(
    emu::TypeMismatch* mismatch, uintptr_t address) {
  __ubsan_handle_type_mismatch_v1(mismatch, address);
}
#endif

// ---- what kernels call
// ------------------------------------------------------------------------------------------
#define HSTREE_LINE int line = __builtin_LINE()

inline void __syncthreads(HSTREE_LINE, const char* file = __builtin_FILE()) {
  emu::wait_block(line);
  emu::races.pass_barrier(true, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, HSTREE_LINE, const char* file = __builtin_FILE()) {
  emu::wait_warp(mask, 0, -1, line);
  if (mask == 0xffffffffu) emu::races.pass_barrier(false, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, HSTREE_LINE) {
  return unsigned(emu::wait_warp(mask, predicate != 0, -1, line));
}
inline int __any_sync(unsigned mask, int predicate, HSTREE_LINE) {
  return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, HSTREE_LINE) {
  return __ballot_sync(mask, predicate, line) == mask;
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, HSTREE_LINE) {
  return emu::shuffle(mask, value, source & 31, line);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, HSTREE_LINE) {
  return emu::shuffle(mask, value, int(emu::lane()) ^ bits, line);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, HSTREE_LINE) {
  const unsigned source = emu::lane() + delta;
  return emu::shuffle(mask, value, int(source < 32 ? source : emu::lane()), line);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, HSTREE_LINE) {
  unsigned sum = 0;
  for (int k = 0; k < 32; ++k)
    if (mask >> k & 1u) sum += emu::shuffle(mask, value, k, line);
  return sum;
}
inline int __ffs(int bits) {
  return __builtin_ffs(bits);
}
inline int __popc(unsigned bits) {
  return __builtin_popcount(bits);
}
// sum + the products of the signed bytes of a and b.
inline int __dp4a(int a, int b, int sum) {
  for (int shift = 0; shift < 32; shift += 8) sum += int8_t(a >> shift) * int8_t(b >> shift);
  return sum;
}
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
T atomicAdd(T* address, T value) {
  const emu::Unwatched unwatched;
  emu::races.record(address, sizeof(T), emu::Access::atomic);
  const T old = *address;
  *address = old + value;
  return old;
}
template <typename T>
T atomicMax(T* address, T value) {
  const emu::Unwatched unwatched;
  emu::races.record(address, sizeof(T), emu::Access::atomic);
  const T old = *address;
  *address = std::max(old, value);
  return old;
}
template <typename T>
T atomicMin(T* address, T value) {
  const emu::Unwatched unwatched;
  emu::races.record(address, sizeof(T), emu::Access::atomic);
  const T old = *address;
  *address = std::min(old, value);
  return old;
}
