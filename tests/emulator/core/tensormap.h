// The 128-byte tensor map of the tensor memory accelerator.
#pragma once
#include <string>

#include "program.h"

namespace emu {

struct TensorMap {
  u64 base;
  u32 rank;
  u32 dtype;  // CUtensorMapDataType
  u32 element_bytes;
  u64 size[5];    // elements
  u64 stride[5];  // bytes; stride[0] is the size of an element
  u32 box[5];     // elements
  u32 element_stride[5];
  u32 interleave;  // CUtensorMapInterleave
  u32 swizzle;     // CUtensorMapSwizzle: 0, 32, 64 or 128 bytes
  u32 l2_promotion;
  bool fill_nan;

  u32 box_bytes() const {
    u64 bytes = element_bytes;
    for (u32 i = 0; i < rank; i++) bytes *= box[i];
    return u32(bytes);
  }
};

TensorMap decode_tensor_map(const u8* map);

// What keeps the map from being used, or "" for a map that the hardware would accept.
std::string tensor_map_fault(const TensorMap& map);

// XORs the 16-byte chunk index of a shared memory address, as all swizzles of `span` bytes do.
inline u32 swizzle_address(u32 address, u32 span) {
  u32 mask = span == 128 ? 0x70 : span == 64 ? 0x30 : span == 32 ? 0x10 : 0;
  return address ^ ((address >> 3) & mask);
}

}  // namespace emu
