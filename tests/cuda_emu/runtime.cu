// What the emulated library has in addition to the CUDA sources: the parts of torch's CUDA runtime that a build of
// torch for the CPU lacks, and what the tests set and read.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

#define HSTREE_EXPORT extern "C" __attribute__((visibility("default")))

// One device, on which everything runs at once. Tensors of the CPU have device index -1.
extern "C" {
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = &emu::current_stream;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  ++emu::device_guards;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) {
  --emu::device_guards;
  return AOTI_TORCH_SUCCESS;
}
}

// Which thread and which block goes first from now on.
HSTREE_EXPORT void emu_order(int order, unsigned seed) {
  emu::order = static_cast<emu::Order>(order);
  emu::seed = seed;
}
// Largest shared memory of a block, in bytes.
HSTREE_EXPORT void emu_shared_limit(size_t bytes) {
  emu::shared_limit = bytes;
}
// Whether launches fail at races from now on; unordered: FILE:LINE of a barrier that orders nothing, or empty.
HSTREE_EXPORT void emu_races(bool wanted, const char* unordered) {
  emu::races.wanted = wanted;
  emu::races.unordered = unordered;
}
// What launches that fail at races have called since this was asked for, line by line: kernels, mangled, and FILE:LINE
// of barriers.
HSTREE_EXPORT const char* emu_seen() {
  static std::string text;
  text.clear();
  for (const std::string& name : std::exchange(emu::races.seen, {})) text += name + "\n";
  return text.c_str();
}

HSTREE_EXPORT float emu_half_to_float(uint16_t bits) {
  return __half2float({bits});
}
HSTREE_EXPORT uint16_t emu_float_to_half(float value) {
  return __float2half_rn(value).bits;
}
HSTREE_EXPORT float emu_bfloat16_to_float(uint16_t bits) {
  return __bfloat162float({bits});
}
HSTREE_EXPORT uint16_t emu_float_to_bfloat16(float value) {
  return __float2bfloat16_rn(value).bits;
}
