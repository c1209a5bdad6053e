#include "kernels.h"

#include <mutex>
#include <unordered_map>

#define KERNEL(name, form, dtype, out_dtype, load_library, load_to_device, launch) \
  extern "C" void load_library(void**);                                            \
  extern "C" void load_to_device(void**);                                          \
  extern "C" void launch(void**, int32_t);
#include "kernels.inc"
#undef KERNEL

// One name a line; Python reads it to see which kernels there are.
#define KERNEL(name, ...) name "\n"
extern "C" const char* const pearl_jax_kernel_names =
#include "kernels.inc"
    "";
#undef KERNEL

namespace pearl_jax {
namespace {

using xla::ffi::DataType;

Kernel kernels[] = {
#define KERNEL(name, form, dtype, out_dtype, load_library, load_to_device, launch) \
  {name, Form::form, DataType::dtype, DataType::out_dtype, load_library, load_to_device, launch},
#include "kernels.inc"
#undef KERNEL
    {}};

std::mutex load_mutex;

}  // namespace

CUresult Kernel::Load(CUdevice device) {
  constexpr int kMaxDevices = 64;
  if (device < 0 || device >= kMaxDevices) return CUDA_ERROR_NOT_SUPPORTED;
  const uint64_t bit = uint64_t{1} << device;
  if (loaded_devices.load(std::memory_order_acquire) & bit) return CUDA_SUCCESS;

  std::lock_guard<std::mutex> lock(load_mutex);
  if (loaded_devices.load(std::memory_order_relaxed) & bit) return CUDA_SUCCESS;
  CUlibrary* slot = &library;
  CUresult result = CUDA_SUCCESS;
  if (!library) {  // shared by all devices
    void* arguments[] = {&slot, &result};
    load_library(arguments);
    if (result != CUDA_SUCCESS) return result;
  }
  void* arguments[] = {&slot, &device, &result};
  load_to_device(arguments);
  if (result == CUDA_SUCCESS) loaded_devices.fetch_or(bit, std::memory_order_release);
  return result;
}

CUresult Kernel::Launch(LaunchArguments& a) const {
  CUresult result = CUDA_SUCCESS;
  void* arguments[32];
  int32_t count = 0;
  auto add = [&](auto&... fields) { ((arguments[count++] = &fields), ...); };
  add(a.lhs, a.rhs, a.group_sizes, a.group_offset, a.batch_index, a.out);
  if (form == Form::kWgrad) add(a.partial);
  add(a.m, a.n, a.k, a.num_groups, a.num_sizes, a.num_batches, a.lhs_batches, a.rhs_batches);
  if (form == Form::kWgrad) add(a.reduced, a.accumulate);
  add(a.num_sms, a.stream, result);
  launch(arguments, count);
  return result;
}

Kernel* FindKernel(std::string_view name) {
  static const auto* const by_name = [] {
    auto* map = new std::unordered_map<std::string_view, Kernel*>;
    for (Kernel& kernel : kernels) {
      if (!kernel.name.empty()) map->emplace(kernel.name, &kernel);
    }
    return map;
  }();
  auto found = by_name->find(name);
  return found == by_name->end() ? nullptr : found->second;
}

}  // namespace pearl_jax
