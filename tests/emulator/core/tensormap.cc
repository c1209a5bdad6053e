#include "tensormap.h"

#include <cstring>

namespace emu {

namespace {
// By CUtensorMapDataType: u8 u16 u32 s32 u64 s64 f16 f32 f64 bf16 f32-ftz tf32 tf32-ftz.
constexpr u32 kMapTypeOfCode[16] = {0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15};
constexpr u32 kMapTypeBytes[16] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4, 1, 1, 1};
}  // namespace

TensorMap decode_tensor_map(const u8* map) {
  u64 w[16];
  memcpy(w, map, sizeof w);
  TensorMap t{};
  u32 flags = u32(w[1]);
  t.base = w[0];
  t.rank = ((flags >> 4) & 7) + 1;
  u32 code = (flags >> 7) & 15;
  t.dtype = kMapTypeOfCode[code];
  // Bit 16 makes tf32 of the two f32 kinds.
  if (flags >> 16 & 1) t.dtype = t.dtype == 10 ? 12 : 11;
  t.element_bytes = kMapTypeBytes[t.dtype];
  t.interleave = flags >> 11 & 3;
  t.swizzle = (flags >> 13 & 3) ? 16u << (flags >> 13 & 3) : 0;
  t.fill_nan = flags >> 15 & 1;
  t.l2_promotion = flags >> 17 & 3;
  u32 low[5] = {0, u32(w[1] >> 32), u32(w[2]), u32(w[2] >> 32), u32(w[3])};
  t.stride[0] = t.element_bytes;
  for (int i = 1; i < 5; i++) {
    u64 high = w[3] >> (32 + 4 * (i - 1)) & 15;
    t.stride[i] = (high << 32 | low[i]) << 4;
  }
  u32 sizes[5] = {u32(w[4]), u32(w[4] >> 32), u32(w[5]), u32(w[5] >> 32), u32(w[6])};
  for (u32 i = 0; i < 5; i++) {
    t.size[i] = u64(sizes[i]) + 1;
    t.element_stride[i] = u32(w[6] >> (32 + 3 * i) & 7) + 1;
    t.box[i] = (i == 0 ? u32(w[6] >> 56) : u32(w[7] >> (8 * (i - 1)) & 255)) + 1;
  }
  return t;
}

std::string tensor_map_fault(const TensorMap& t) {
  if (t.rank < 1 || t.rank > 5) return "rank " + std::to_string(t.rank);
  if (t.base % 16) return "base address not a multiple of 16";
  if (t.interleave) return "interleaved layouts are not modelled";
  for (u32 i = 0; i < t.rank; i++) {
    if (t.element_stride[i] != 1) return "element strides are not modelled";
  }
  u32 inner = t.box[0] * t.element_bytes;
  if (inner % 16) return "inner box of " + std::to_string(inner) + " bytes, not a multiple of 16";
  if (t.swizzle && inner > t.swizzle) {
    return "inner box of " + std::to_string(inner) + " bytes exceeds the " +
           std::to_string(t.swizzle) + "-byte swizzle span";
  }
  if (t.swizzle && inner < t.swizzle && t.rank > 1) {
    return "inner box narrower than the swizzle span is not modelled";
  }
  return "";
}

}  // namespace emu
