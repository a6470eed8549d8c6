// Small kernels for the tests of the emulation itself (tests/kernels/test_emulation.py), most of them faulty.

#include <map>
#include <string>

#include "kernels/async_copy.cuh"
#include "kernels/mma.cuh"

namespace {

// Sums in pairs through shared memory, with or without the barrier between the steps.
template <bool Barrier>
__global__ void __launch_bounds__(64) block_sum(const float* input, float* output) {
  float* partial = reinterpret_cast<float*>(HSTREE_SHARED_MEMORY);
  partial[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    float sum = 0;
    if (threadIdx.x < half) sum = partial[threadIdx.x] + partial[threadIdx.x + half];
    if (Barrier) __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] = sum;
    if (Barrier) __syncthreads();
  }
  if (threadIdx.x == 0) *output = partial[0];
}
__global__ void __launch_bounds__(64) divergent(const float*, float*) {
  if (threadIdx.x < 32) __syncthreads();
}
__global__ void __launch_bounds__(64) two_barriers(const float*, float*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void __launch_bounds__(64) outside_mask(const float* input, float* output) {
  if (threadIdx.x < 16) output[0] = __shfl_sync(0xffffu, input[threadIdx.x], 16);
}
__global__ void __launch_bounds__(64) absent_lane(const float* input, float* output) {
  if (threadIdx.x < 16) output[0] = __shfl_xor_sync(0xffffffffu, input[threadIdx.x], 1);
}
__global__ void __launch_bounds__(64) past_shared(const float*, float*) {
  float* shared = reinterpret_cast<float*>(HSTREE_SHARED_MEMORY);
  shared[threadIdx.x + 1] = 0;
}
__global__ void __launch_bounds__(64) past_global(const float* input, float* output) {
  output[0] = input[64 + threadIdx.x];
}
__global__ void __launch_bounds__(64) misaligned(const float* input, float* output) {
  const uint4 raw = *reinterpret_cast<const uint4*>(input + 1);
  output[0] = float(raw.x);
}
__global__ void __launch_bounds__(64) warp_functions(const float*, float* output) {
  const unsigned lane = threadIdx.x % 32;
  const bool votes = __ballot_sync(0xffffffffu, lane % 3 == 0) == 0x49249249u &&
                     __any_sync(0xffffffffu, lane == 7) && !__all_sync(0xffffffffu, lane == 7) &&
                     __reduce_add_sync(0xffffffffu, lane) == 496u;
  const double up = __shfl_down_sync(0xffffffffu, double(lane), 3);
  const int swapped = __shfl_xor_sync(0xffffffffu, int(lane), 5);
  __syncwarp();
  const bool moved = up == (lane + 3 < 32 ? lane + 3 : lane) && swapped == int(lane ^ 5);
  atomicAdd(output, votes && moved ? 1.0f : 0.0f);
}

// output [16, 8] = a b for a [16, 16], b [16, 8] of small integers, which are exact in bfloat16.
__global__ void __launch_bounds__(64) matrix_product(const float*, float* output) {
  if (threadIdx.x >= 32) return;
  const auto element = [](unsigned row, unsigned column, int kind) {
    return kind == 0 ? float(row) - 2.0f * float(column) : float(row * column % 7);
  };
  const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t a[4], b[2];
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
    a[i] = hstree::pack(__float2bfloat16_rn(element(row, column, 0)),
                        __float2bfloat16_rn(element(row, column + 1, 0)));
  }
  for (unsigned i = 0; i < 2; ++i) {
    const unsigned row = 2 * t + i * 8;
    b[i] = hstree::pack(__float2bfloat16_rn(element(row, g, 1)), __float2bfloat16_rn(element(row + 1, g, 1)));
  }
  float c[4] = {1, 1, 1, 1};
  hstree::mma<__nv_bfloat16>(c, a, b);
  for (unsigned i = 0; i < 4; ++i) output[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

// output[t] = input[63 - t] through shared memory; what is left out of the sequence that this takes.
enum Flaw { none, wait, barrier, commit, early_read, early_write, source_write };
template <Flaw flaw>
__global__ void __launch_bounds__(64) reverse(const float* input, float* output) {
  float* shared = reinterpret_cast<float*>(HSTREE_SHARED_MEMORY);
  const unsigned t = threadIdx.x;
  hstree::async_copy<4>(shared + t, input + t);
  if (flaw == early_write) shared[t] = 1;
  if (flaw == source_write) const_cast<float*>(input)[t] += 1;
  if (flaw == early_read) output[64 + t] = shared[t];
  if (flaw != commit) hstree::async_copy_commit();
  if (flaw != wait) hstree::async_copy_wait<0>();
  if (flaw != barrier) __syncthreads();
  output[t] = shared[63 - t];
}
// output[t] is the value of the first of two groups, output[64 + t] of the second; Pending: of the first wait.
template <int Pending>
__global__ void __launch_bounds__(64) two_groups(const float* input, float* output) {
  float* shared = reinterpret_cast<float*>(HSTREE_SHARED_MEMORY) + threadIdx.x;
  hstree::async_copy<4>(shared, input + threadIdx.x);
  hstree::async_copy_commit();
  hstree::async_copy<4>(shared + 64, input + threadIdx.x);
  hstree::async_copy_commit();
  hstree::async_copy_wait<Pending>();
  output[threadIdx.x] = shared[0];
  output[64 + threadIdx.x] = shared[64];
  hstree::async_copy_wait<0>();
}
// 16 threads copy Bytes each and 16 write zeros, from and to addresses that are off by so many floats.
template <int Bytes, int FromOff = 0, int ToOff = 0>
__global__ void __launch_bounds__(64) blocks_of(const float* input, float* output) {
  constexpr int floats = Bytes / 4;
  float* shared = reinterpret_cast<float*>(HSTREE_SHARED_MEMORY) + ToOff;
  const unsigned first = threadIdx.x % 16 * floats;
  if (threadIdx.x < 32) {
    float* to = shared + threadIdx.x * floats;
    hstree::async_copy_or_zero<Bytes>(to, input + FromOff + first, threadIdx.x < 16);
    hstree::async_copy_commit();
    hstree::async_copy_wait<0>();
    for (int k = 0; k < floats; ++k) output[threadIdx.x * floats + k] = to[k];
  }
}
__global__ void __launch_bounds__(64) zeros_from_outside(const float* input, float*) {
  hstree::async_copy_or_zero<16>(HSTREE_SHARED_MEMORY + 16 * threadIdx.x, input + 64, false);
  hstree::async_copy_commit();
  hstree::async_copy_wait<0>();
}

// 24,000 bytes of static shared memory, none that is defined from the start.
__global__ void __launch_bounds__(96) much_static(const float* input, float* output) {
  __shared__ float values[5000];
  __shared__ double more[500];
  if (input[0] != 0) values[0] = float(more[0] = 1);  // never: g++ makes constants of what is only read
  output[threadIdx.x] = values[threadIdx.x];
  output[64 + threadIdx.x % 64] = float(more[threadIdx.x]);
}
// 256 bytes, and up to 1024 threads in each direction.
__global__ void __launch_bounds__(1024) any_shape(const float* input, float* output) {
  __shared__ char values[256];
  values[threadIdx.x % 256] = char(input[0]);
  __syncthreads();
  if (values[(threadIdx.x + 1) % 256] == 1) *output = 1;
}

// What neighbors tell each other in memory, with or without what orders it.
enum Between { block_barrier, warp_barrier, shuffle, nothing };
template <Between between>
__global__ void __launch_bounds__(64) told(const float* input, float* output) {
  float* memory = between == block_barrier ? output + 64 : reinterpret_cast<float*>(HSTREE_SHARED_MEMORY);
  memory[threadIdx.x] = input[threadIdx.x];
  if (between == block_barrier) __syncthreads();
  if (between == warp_barrier) __syncwarp();
  if (between == shuffle) __shfl_xor_sync(0xffffffffu, input[0], 1);
  output[threadIdx.x] = memory[threadIdx.x ^ 1];
}
// Of all threads in one place; the first stores what it starts from, if it does, before a barrier or not.
enum Start { none_stored, stored, stored_without_barrier };
template <Start start>
__global__ void __launch_bounds__(64) counted(const float*, float* output) {
  if (start != none_stored && threadIdx.x == 0) output[0] = 0;
  if (start == stored) __syncthreads();
  atomicAdd(output, 1.0f);
}
template <typename Flag>
__global__ void __launch_bounds__(64) flagged(const float*, float* output) {
  *reinterpret_cast<Flag*>(output) = 1;
}

using Kernel = void (*)(const float*, float*);
const std::map<std::string, Kernel> kernels = {
    {"block_sum", block_sum<true>},
    {"missing_barrier", block_sum<false>},
    {"divergent", divergent},
    {"two_barriers", two_barriers},
    {"outside_mask", outside_mask},
    {"absent_lane", absent_lane},
    {"past_shared", past_shared},
    {"past_global", past_global},
    {"misaligned", misaligned},
    {"matrix_product", matrix_product},
    {"warp_functions", warp_functions},
    {"reverse", reverse<none>},
    {"reverse_without_wait", reverse<wait>},
    {"reverse_without_barrier", reverse<barrier>},
    {"reverse_without_commit", reverse<commit>},
    {"reverse_early_read", reverse<early_read>},
    {"reverse_early_write", reverse<early_write>},
    {"reverse_source_write", reverse<source_write>},
    {"two_groups_wait_0", two_groups<0>},
    {"two_groups_wait_1", two_groups<1>},
    {"blocks_of_4", blocks_of<4>},
    {"blocks_of_8", blocks_of<8>},
    {"blocks_of_16", blocks_of<16>},
    {"blocks_of_8_from_misaligned", blocks_of<8, 1, 0>},
    {"blocks_of_8_to_misaligned", blocks_of<8, 0, 1>},
    {"blocks_of_16_from_misaligned", blocks_of<16, 2, 0>},
    {"blocks_of_16_to_misaligned", blocks_of<16, 0, 2>},
    {"much_static", much_static},
    {"any_shape", any_shape},
    {"zeros_from_outside", zeros_from_outside},
    {"told_past_a_block_barrier", told<block_barrier>},
    {"told_past_a_warp_barrier", told<warp_barrier>},
    {"told_past_a_shuffle", told<shuffle>},
    {"told_past_nothing", told<nothing>},
    {"counted", counted<none_stored>},
    {"counted_from_0", counted<stored>},
    {"counted_from_0_without_barrier", counted<stored_without_barrier>},
    {"flagged", flagged<float>},
    {"flagged_volatile", flagged<volatile float>},
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
const char* run(const char* name, const unsigned* grid, const unsigned* block, size_t shared_bytes,
                const float* input, float* output, bool on_stream, bool guarded) {
  static std::string error;
  const auto stream = on_stream ? reinterpret_cast<cudaStream_t>(&emu::current_stream) : nullptr;
  emu::device_guards = guarded;
  try {
    hstree::launch(kernels.at(name), dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]),
                   shared_bytes, stream, input, output);
  } catch (const std::exception& caught) {
    error = caught.what();
    return error.c_str();
  }
  return "";
}
}
#pragma GCC visibility pop
