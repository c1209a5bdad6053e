// The kernels that were compiled ahead of time, by name.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "cuda_driver.h"
#include "xla/ffi/api/ffi.h"

namespace pearl_jax {

enum class Form {
  kFwd,    // lhs (lhs_batches, m, k), rhs (rhs_batches, num_groups, k, n): out (num_batches, m, n)
  kDgrad,  // the same with rhs (.., n, k)
  kWgrad,  // lhs (.., m, k), rhs (rhs_batches, m, n): out (num_batches, num_groups, k, n)
};

// What a launcher takes, in its order; group_sizes (.., num_sizes).
struct LaunchArguments {
  void* lhs;
  void* rhs;
  void* group_sizes;
  void* group_offset;
  void* batch_index;
  void* out;
  void* partial;  // kWgrad only: memory of tiling.partial_sums, float32
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t num_groups;
  int32_t num_sizes;
  int32_t num_batches;
  int32_t lhs_batches;
  int32_t rhs_batches;
  int32_t reduced;     // kWgrad only: how many batches one batch of out sums over
  int32_t accumulate;  // kWgrad only: whether out is added to
  int32_t num_sms;
  CUstream stream;
};

struct Kernel {
  std::string_view name;
  Form form;
  xla::ffi::DataType dtype;  // of lhs and rhs
  xla::ffi::DataType out_dtype;

  // Exported by the compiled kernel. Each takes pointers to its arguments and, last, to a CUresult.
  void (*load_library)(void** arguments);
  void (*load_to_device)(void** arguments);
  void (*launch)(void** arguments, int32_t num_arguments);

  CUlibrary library = nullptr;
  std::atomic<uint64_t> loaded_devices{0};  // bit i: loaded to device i

  // Loads the kernel to a device whose context is current, if it is not there yet. Thread-safe.
  CUresult Load(CUdevice device);

  // Launches on a device to which the kernel is loaded.
  CUresult Launch(LaunchArguments& arguments) const;
};

// The kernel of that name, or null.
Kernel* FindKernel(std::string_view name);

}  // namespace pearl_jax
