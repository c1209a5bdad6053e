// A driver that records: the symbols that the host code of a compiled kernel calls. It is linked
// with that host code into a library of its own, so that its state belongs to one kernel.
#include <cstdint>
#include <cstring>

extern "C" {

struct Attribute {
  uint32_t id;
  uint32_t padding;
  uint32_t value[16];
};

struct Config {
  uint32_t grid[3], block[3];
  uint64_t dynamic_smem;
  void* stream;
  const Attribute* attributes;
  uint32_t attribute_count;
};

// Called for each launch with the kernel's name, its configuration and its arguments.
using Launched = int (*)(const char* kernel, const Config*, void** arguments);

static Launched on_launch;
static int32_t multiprocessors = 132;
static const void* image;
static char names[64][2048];
static int name_count;

void recorder_reset(Launched launched, int32_t count) {
  on_launch = launched;
  multiprocessors = count;
}

// The cubin that the host code loaded.
const void* recorder_image() { return image; }

int _cudaLibraryLoadData(void** library, const void* code, void*, void*, uint32_t, void*, void*,
                         uint32_t) {
  image = code;
  *library = &image;
  return 0;
}

int _cudaLibraryGetKernel(void** kernel, void*, const char* name) {
  for (int i = 0; i < name_count; i++) {
    if (!strcmp(names[i], name)) {
      *kernel = names[i];
      return 0;
    }
  }
  if (name_count == 64 || strlen(name) >= sizeof names[0]) return 1;
  strcpy(names[name_count], name);
  *kernel = names[name_count++];
  return 0;
}

int _cudaKernelSetAttributeForDevice(void*, int, int, int) { return 0; }
int _cudaFuncSetAttribute(void*, int, int) { return 0; }

int _cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;
  return 0;
}

int _cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}

int _cudaDeviceGetAttribute(int* value, int attribute, int) {
  enum { kMultiProcessorCount = 16, kMaxSharedMemoryPerBlockOptin = 97 };
  *value = attribute == kMultiProcessorCount            ? multiprocessors
           : attribute == kMaxSharedMemoryPerBlockOptin ? 232448
                                                        : 0;
  return 0;
}

int _cudaLaunchKernelEx(const Config* config, void* kernel, void** arguments) {
  return on_launch((const char*)kernel, config, arguments);
}

}  // extern "C"
