// A CUDA driver without a GPU, to be found as libcuda.so.1, and the part of XLA that calls
// handlers. fake_gpu.py drives both. Device i has context 0x1000 + i; stream s is on device
// s / 100.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace {

std::mutex mutex;
std::string calls;                    // one a line: the function, then key=value
std::vector<int> capabilities;        // of each device: 90 is 9.0
std::map<std::string, int> failures;  // result by function
std::map<std::pair<const void*, std::string>, const void*> kernels;
thread_local std::vector<uintptr_t> contexts;

constexpr uintptr_t kFirstContext = 0x1000;

// Records a call and gives its result.
int Call(const char* function, const std::string& arguments = "") {
  std::lock_guard<std::mutex> lock(mutex);
  std::string context = contexts.empty() ? "-1" : std::to_string(contexts.back() - kFirstContext);
  calls += std::string(function) + " current=" + context + arguments + "\n";
  auto failure = failures.find(function);
  return failure == failures.end() ? 0 : failure->second;
}

template <typename T>
std::string Field(const char* key, T value) {
  return std::string(" ") + key + "=" + std::to_string(value);
}

}  // namespace

// The driver. Signatures as in cuda.h, with handles as integers.
extern "C" {

int cuGetErrorName(int result, const char** name) {
  *name = result == 2     ? "CUDA_ERROR_OUT_OF_MEMORY"
          : result == 701 ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
                          : nullptr;
  return *name ? 0 : 1;
}

int cuGetErrorString(int result, const char** text) {
  *text = result == 2 ? "out of memory" : nullptr;
  return *text ? 0 : 1;
}

int cuDriverGetVersion(int* version) {
  *version = 12080;
  return 0;
}

int cuStreamGetCtx(uintptr_t stream, uintptr_t* context) {
  *context = kFirstContext + stream / 100;
  return Call("cuStreamGetCtx");
}

int cuCtxPushCurrent_v2(uintptr_t context) {
  contexts.push_back(context);
  return 0;
}

int cuCtxPopCurrent_v2(uintptr_t* context) {
  if (contexts.empty()) return 201;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}

int cuCtxGetDevice(int* device) {
  if (contexts.empty()) return 201;
  *device = static_cast<int>(contexts.back() - kFirstContext);
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 16:
      *value = 100 + device;
      return 0;  // multiprocessors
    case 75:
      *value = capabilities.at(device) / 10;
      return 0;
    case 76:
      *value = capabilities.at(device) % 10;
      return 0;
    case 97:
      *value = 232448;
      return 0;  // shared memory of a block, opt-in
  }
  return 1;
}

int cuLibraryLoadData(const void** library, const void* code, int*, void**, unsigned, int*, void**,
                      unsigned) {
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // for other threads to get in
  int result = Call("cuLibraryLoadData", Field("code", reinterpret_cast<uintptr_t>(code)));
  if (result == 0) *library = code;
  return result;
}

int cuLibraryGetKernel(const void** kernel, const void* library, const char* name) {
  int result = Call("cuLibraryGetKernel");
  std::lock_guard<std::mutex> lock(mutex);
  auto [entry, added] = kernels.try_emplace({library, name});
  if (added) entry->second = new int;
  *kernel = entry->second;
  return result;
}

int cuKernelGetFunction(const void** function, const void* kernel) {
  *function = kernel;
  return Call("cuKernelGetFunction");
}

int cuKernelGetAttribute(int* value, int attribute, const void*, int) {
  *value = attribute == 1 ? 1024 : 0;  // static shared memory
  return 0;
}

int cuKernelSetAttribute(int attribute, int value, const void*, int device) {
  return Call("cuKernelSetAttribute",
              Field("attribute", attribute) + Field("value", value) + Field("device", device));
}

struct LaunchAttribute {
  int id;
  int padding;
  unsigned value[16];
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_memory;
  uintptr_t stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
};

int cuLaunchKernelEx(const LaunchConfig* config, const void* kernel, void**, void**) {
  std::string arguments = Field("kernel", reinterpret_cast<uintptr_t>(kernel));
  for (int i = 0; i < 3; ++i) {
    arguments += Field(("grid" + std::to_string(i)).c_str(), config->grid[i]);
    arguments += Field(("block" + std::to_string(i)).c_str(), config->block[i]);
  }
  arguments += Field("shared_memory", config->shared_memory) + Field("stream", config->stream);
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    const LaunchAttribute& attribute = config->attributes[i];
    if (attribute.id == 4) arguments += Field("cluster", attribute.value[0] * attribute.value[1]);
    if (attribute.id == 6) arguments += Field("overlap", attribute.value[0]);
  }
  return Call("cuLaunchKernelEx", arguments);
}

// For fake_gpu.py.

void fake_devices(const int* values, int count) { capabilities.assign(values, values + count); }

void fake_failure(const char* function, int result) {
  std::lock_guard<std::mutex> lock(mutex);
  failures.clear();
  if (result) failures[function] = result;
}

// The calls since the last time.
const char* fake_calls() {
  static std::string taken;
  std::lock_guard<std::mutex> lock(mutex);
  taken.swap(calls);
  calls.clear();
  return taken.c_str();
}

}  // extern "C"

// XLA.

#define MAKE(type)                          \
  [] {                                      \
    type value{};                           \
    value.struct_size = type##_STRUCT_SIZE; \
    return value;                           \
  }()

struct XLA_FFI_Error {
  std::string message;
};

namespace {

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{std::to_string(args->errc) + " " + args->message};
}

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = reinterpret_cast<void*>(args->ctx);  // the stream is all there is in a context
  return nullptr;
}

XLA_FFI_Api MakeApi() {
  auto api = MAKE(XLA_FFI_Api);
  api.api_version = MAKE(XLA_FFI_Api_Version);
  api.api_version.major_version = XLA_FFI_API_MAJOR;
  api.api_version.minor_version = XLA_FFI_API_MINOR;
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Stream_Get = GetStream;
  return api;
}

const XLA_FFI_Api api = MakeApi();

}  // namespace

extern "C" {

struct Array {
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

// Calls a handler with some operands, then some results. Returns the error, or null.
const char* xla_call(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), int stage, uintptr_t stream,
                     const char* sm_90, const char* sm_100, const Array* arrays, int num_args,
                     int num_rets) {
  std::vector<XLA_FFI_Buffer> buffers;
  for (int i = 0; i < num_args + num_rets; ++i) {
    buffers.push_back(MAKE(XLA_FFI_Buffer));
    buffers.back().dtype = static_cast<XLA_FFI_DataType>(arrays[i].dtype);
    buffers.back().data = arrays[i].data;
    buffers.back().rank = arrays[i].rank;
    buffers.back().dims = arrays[i].dims;
  }
  std::vector<XLA_FFI_ArgType> arg_types(num_args, XLA_FFI_ArgType_BUFFER);
  std::vector<void*> args;
  for (int i = 0; i < num_args; ++i) args.push_back(&buffers[i]);
  std::vector<XLA_FFI_RetType> ret_types(num_rets, XLA_FFI_RetType_BUFFER);
  std::vector<void*> rets;
  for (int i = 0; i < num_rets; ++i) rets.push_back(&buffers[num_args + i]);

  auto span = [](const char* text) { return XLA_FFI_ByteSpan{text, std::strlen(text)}; };
  XLA_FFI_ByteSpan member_names[] = {span("sm_100"), span("sm_90")};  // attributes are sorted
  XLA_FFI_ByteSpan member_values[] = {span(sm_100), span(sm_90)};
  XLA_FFI_ByteSpan* member_name_pointers[] = {&member_names[0], &member_names[1]};
  void* member_value_pointers[] = {&member_values[0], &member_values[1]};
  XLA_FFI_AttrType member_types[] = {XLA_FFI_AttrType_STRING, XLA_FFI_AttrType_STRING};
  auto members = MAKE(XLA_FFI_Attrs);
  members.size = 2;
  members.types = member_types;
  members.names = member_name_pointers;
  members.attrs = member_value_pointers;

  XLA_FFI_ByteSpan name = span("kernels");
  XLA_FFI_ByteSpan* name_pointer = &name;
  void* value = &members;
  XLA_FFI_AttrType type = XLA_FFI_AttrType_DICTIONARY;

  auto frame = MAKE(XLA_FFI_CallFrame);
  frame.api = &api;
  frame.ctx = reinterpret_cast<decltype(frame.ctx)>(stream);
  frame.stage = static_cast<XLA_FFI_ExecutionStage>(stage);
  frame.args = MAKE(XLA_FFI_Args);
  frame.args.size = num_args;
  frame.args.types = arg_types.data();
  frame.args.args = args.data();
  frame.rets = MAKE(XLA_FFI_Rets);
  frame.rets.size = num_rets;
  frame.rets.types = ret_types.data();
  frame.rets.rets = rets.data();
  frame.attrs = MAKE(XLA_FFI_Attrs);
  frame.attrs.size = 1;
  frame.attrs.types = &type;
  frame.attrs.names = &name_pointer;
  frame.attrs.attrs = &value;

  thread_local std::string message;
  XLA_FFI_Error* error = handler(&frame);
  if (!contexts.empty()) return "the handler left a context current";
  if (!error) return nullptr;
  message = error->message;
  delete error;
  return message.c_str();
}

// Asks a handler for {major version, minor version, traits}.
void xla_metadata(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), int* values) {
  auto metadata = MAKE(XLA_FFI_Metadata);
  metadata.api_version = MAKE(XLA_FFI_Api_Version);
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base.struct_size = sizeof(extension);
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  auto frame = MAKE(XLA_FFI_CallFrame);
  frame.api = &api;
  frame.extension_start = &extension.extension_base;
  delete handler(&frame);
  values[0] = metadata.api_version.major_version;
  values[1] = metadata.api_version.minor_version;
  values[2] = metadata.traits;
}

}  // extern "C"
