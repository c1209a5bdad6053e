#include "cuda_driver.h"

#include <dlfcn.h>

namespace pearl_jax {
namespace {

CudaDriver Open() {
  CudaDriver driver{};
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    driver.error = std::string("the CUDA driver cannot be opened: ") + dlerror();
    return driver;
  }
#define RESOLVE(name, ...)                                                          \
  driver.name = reinterpret_cast<CUresult (*)(__VA_ARGS__)>(dlsym(library, #name)); \
  if (!driver.name) driver.error = "the CUDA driver is too old: it has no function " #name;
  PEARL_JAX_CUDA_DRIVER(RESOLVE)
#undef RESOLVE
  return driver;
}

}  // namespace

const CudaDriver& Driver() {
  static const CudaDriver driver = Open();
  return driver;
}

std::string ResultText(CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  Driver().cuGetErrorName(result, &name);
  Driver().cuGetErrorString(result, &text);
  if (!name) return "CUDA error " + std::to_string(result);
  return text ? std::string(name) + " (" + text + ")" : name;
}

}  // namespace pearl_jax

// What compiled kernels call: the CUDA runtime's functions with an underscore in front. The
// runtime's handles, results and attributes have the driver's values, so each is one driver call.

using pearl_jax::Driver;

extern "C" {

CUresult _cudaLibraryLoadData(CUlibrary* library, const void* code, int* jit_options,
                              void** jit_values, unsigned num_jit_options, int* library_options,
                              void** library_values, unsigned num_library_options) {
  return Driver().cuLibraryLoadData(library, code, jit_options, jit_values, num_jit_options,
                                    library_options, library_values, num_library_options);
}

// `kernel` is a global of the compiled kernel. A launch on another device may be reading it, so
// the one handle that all devices share is written once.
CUresult _cudaLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  CUkernel found = nullptr;
  CUresult result = Driver().cuLibraryGetKernel(&found, library, name);
  if (result != CUDA_SUCCESS) return result;
  if (*kernel != found) *kernel = found;
  // The driver would load the code into the context at the first launch, which is not allowed
  // while a stream is being captured.
  CUfunction function = nullptr;
  return Driver().cuKernelGetFunction(&function, found);
}

CUresult _cudaKernelSetAttributeForDevice(CUkernel kernel, int attribute, int value,
                                          CUdevice device) {
  return Driver().cuKernelSetAttribute(attribute, value, kernel, device);
}

CUresult _cuKernelGetAttribute(int* value, int attribute, CUkernel kernel, CUdevice device) {
  return Driver().cuKernelGetAttribute(value, attribute, kernel, device);
}

CUresult _cudaDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  return Driver().cuDeviceGetAttribute(value, attribute, device);
}

// cudaLaunchConfig_t and CUlaunchConfig, launch attributes included, are the same bytes on a
// little-endian machine: they differ in the width of the dynamic shared memory's size, 8 against
// 4 bytes and 4 of padding.
CUresult _cudaLaunchKernelEx(const CUlaunchConfig* config, CUkernel kernel, void** arguments) {
  return Driver().cuLaunchKernelEx(config, kernel, arguments, nullptr);
}

// Only the loader for "the current device" calls these two, and kernels.cc never calls that one.
CUresult _cudaGetDevice(CUdevice*) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult _cudaFuncSetAttribute(CUkernel, int, int) { return CUDA_ERROR_NOT_SUPPORTED; }

}  // extern "C"
