// The CUDA driver, opened at run time: no CUDA toolkit is needed to build or to import.
#pragma once

#include <string>

// The parts of cuda.h in use. Results, device handles and attributes are ints there too.
using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUfunction = struct CUfunc_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
struct CUlaunchConfig;

inline constexpr CUresult CUDA_SUCCESS = 0;
inline constexpr CUresult CUDA_ERROR_NOT_SUPPORTED = 801;
inline constexpr int CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
inline constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
inline constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;

namespace pearl_jax {

// Every driver function in use, with its parameters; all exist since CUDA 12.0.
#define PEARL_JAX_CUDA_DRIVER(FUNCTION)                                                      \
  FUNCTION(cuGetErrorName, CUresult, const char**)                                           \
  FUNCTION(cuGetErrorString, CUresult, const char**)                                         \
  FUNCTION(cuStreamGetCtx, CUstream, CUcontext*)                                             \
  FUNCTION(cuCtxPushCurrent_v2, CUcontext)                                                   \
  FUNCTION(cuCtxPopCurrent_v2, CUcontext*)                                                   \
  FUNCTION(cuCtxGetDevice, CUdevice*)                                                        \
  FUNCTION(cuDeviceGetAttribute, int*, int, CUdevice)                                        \
  FUNCTION(cuLibraryLoadData, CUlibrary*, const void*, int*, void**, unsigned, int*, void**, \
           unsigned)                                                                         \
  FUNCTION(cuLibraryGetKernel, CUkernel*, CUlibrary, const char*)                            \
  FUNCTION(cuKernelGetFunction, CUfunction*, CUkernel)                                       \
  FUNCTION(cuKernelGetAttribute, int*, int, CUkernel, CUdevice)                              \
  FUNCTION(cuKernelSetAttribute, int, int, CUkernel, CUdevice)                               \
  FUNCTION(cuLaunchKernelEx, const CUlaunchConfig*, CUkernel, void**, void**)

struct CudaDriver {
#define MEMBER(name, ...) CUresult (*name)(__VA_ARGS__);
  PEARL_JAX_CUDA_DRIVER(MEMBER)
#undef MEMBER
  std::string error;  // why the driver cannot be used; empty if it can
};

// Opens libcuda.so.1 at the first call. Thread-safe.
const CudaDriver& Driver();

// "CUDA_ERROR_NOT_FOUND (named symbol not found)".
std::string ResultText(CUresult result);

}  // namespace pearl_jax
