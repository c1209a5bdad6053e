// A driver that records: the symbols that the host code of a compiled kernel calls. It is linked
// with that host code into a library of its own, so that its state belongs to one kernel.
#include <cstdint>
#include <cstdlib>
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

// A tensor map as a driver encodes it; core/tensormap.cc reads it back.
int _cuTensorMapEncodeTiled(uint64_t* map, int dtype, uint32_t rank, void* address,
                            const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                            const uint32_t* element_strides, int interleave, int swizzle,
                            int l2_promotion, int fill) {
  // By CUtensorMapDataType, from u8 to tf32-ftz: the type's code and its bytes.
  static const uint32_t kCode[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 7, 8};
  static const uint32_t kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if (dtype < 0 || dtype > 12 || rank < 1 || rank > 5 || swizzle < 0 || swizzle > 3) return 1;
  uint32_t inner = kBytes[dtype] * box[0], span = swizzle ? 16u << swizzle : ~0u;
  if ((uint64_t)address % 16 || inner % 16 || inner > span) return 1;
  for (uint32_t i = 0; i < rank; i++) {
    if (sizes[i] - 1 >= 1ull << 32 || box[i] - 1 >= 256 || element_strides[i] - 1 >= 8) return 1;
    if (i && (strides[i - 1] % 16 || strides[i - 1] >> 40)) return 1;
  }
  memset(map, 0, 128);
  uint64_t size[5] = {}, stride[4] = {}, edge[5] = {}, bytes = kBytes[dtype];
  map[0] = (uint64_t)address;
  map[1] = (rank - 1) << 4 | kCode[dtype] << 7 | interleave << 11 | swizzle << 13 | fill << 15 |
           (dtype > 10) << 16 | l2_promotion << 17;
  for (uint32_t i = 0; i < rank; i++) {
    size[i] = sizes[i] - 1;
    edge[i] = box[i] - 1;
    bytes *= box[i] / element_strides[i];
    if (i) stride[i - 1] = strides[i - 1] >> 4;
    map[6] |= (uint64_t)(element_strides[i] - 1) << (32 + 3 * i);
  }
  for (int i = 0; i < 4; i++) {
    map[3] |= (stride[i] >> 32) << (32 + 4 * i);
    map[7] |= edge[i + 1] << (8 * i);
    stride[i] &= 0xFFFFFFFF;
  }
  map[1] |= stride[0] << 32;
  map[2] |= stride[1] | stride[2] << 32;
  map[3] |= stride[3];
  map[4] = size[0] | size[1] << 32;
  map[5] = size[2] | size[3] << 32;
  map[6] |= size[4] | edge[0] << 56;
  map[8] = bytes;
  map[9] = swizzle ? 128u << swizzle : 16;
  return 0;
}

void cuda_dialect_assert_success(int error) {
  if (error) abort();
}

}  // extern "C"
