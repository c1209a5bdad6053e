#include "matmul.h"

#include <cstring>

#include "numbers.h"

namespace emu {

MatrixDescriptor decode_wgmma_descriptor(u64 bits) {
  static const u32 kSpans[] = {16, 128, 64, 32};
  if (bits >> 49 & 7) throw Fault("descriptor", "matrix base offsets are not modelled");
  return {u32(bits & 0x3FFF) << 4, u32(bits >> 16 & 0x3FFF) << 4, u32(bits >> 32 & 0x3FFF) << 4,
          kSpans[bits >> 62]};
}

MatrixDescriptor decode_tcgen05_descriptor(u64 bits) {
  // Of the eight layouts, 1 is 128 bytes with 32-byte atoms.
  static const u32 kSpans[] = {16, 0, 128, 0, 64, 0, 32, 0};
  u32 span = kSpans[bits >> 61];
  if (!span) throw Fault("descriptor", text("swizzle mode %u is not modelled", u32(bits >> 61)));
  if ((bits >> 46 & 7) != 1) throw Fault("descriptor", "descriptor version is not 1");
  if (bits >> 49 & 7) throw Fault("descriptor", "matrix base offsets are not modelled");
  return {u32(bits & 0x3FFF) << 4, u32(bits >> 16 & 0x3FFF) << 4, u32(bits >> 32 & 0x3FFF) << 4,
          span};
}

u32 element_bytes(Type t) { return kTypeBits[int(t)] / 8; }

float element_value(Type t, const u8* bytes) {
  u32 v = 0;
  memcpy(&v, bytes, element_bytes(t));
  switch (t) {
    case Type::BF16:
      return from_bf16(u16(v));
    case Type::F16:
      return from_half(u16(v));
    case Type::TF32:
      return from_tf32(v);
    case Type::E4M3:
      return from_e4m3(u8(v));
    case Type::E5M2:
      return from_e5m2(u8(v));
    case Type::S8:
      return float(int8_t(v));
    case Type::U8:
      return float(u8(v));
    default:
      throw Fault("unknown", "matrix element type");
  }
}

void read_matrix(const MatrixSource& s, bool transposed, u32 stride, float* out) {
  u32 e = element_bytes(s.type), per_chunk = 16 / e;
  each_chunk(s, [&](u32 at, u32 row, u32 k) {
    const u8* bytes = s.cta->smem.data() + at;
    for (u32 i = 0; i < per_chunk; i++) {
      u32 r = s.mn_major ? row + i : row, kk = s.mn_major ? k : k + i;
      // A chunk of the last columns may reach past the rows asked for.
      if (r >= s.rows) continue;
      out[transposed ? kk * stride + r : r * stride + kk] = element_value(s.type, bytes + i * e);
    }
  });
}

void multiply_accumulate(float* d, const float* a, const float* b, u32 n, u32 k) {
  for (u32 kk = 0; kk < k; kk++) {
    float x = a[kk];
    const float* row = b + kk * n;
    for (u32 i = 0; i < n; i++) d[i] += x * row[i];
  }
}

}  // namespace emu
