#include "matmul.h"

#include <algorithm>
#include <array>
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

namespace {

// Exponents of zeros are too small to matter; those of infinities and NaN too large.
constexpr i32 kZero = -10000, kSafe = 90;

i32 exponent_of(float f) {
  u32 bits = as_bits(f) & 0x7FFFFFFF;
  return bits == 0 ? kZero : i32(bits >> 23) - 127;
}

// float32 cut off towards zero.
float cut_off(double value, int bits) {
  u64 word;
  memcpy(&word, &value, 8);
  word &= ~0ull << (52 - bits);
  memcpy(&value, &word, 8);
  return float(value);
}

}  // namespace

ProductBlock::ProductBlock(Type element, std::vector<float> b, u32 columns)
    : columns_(columns), depth_(b.size() / columns), special_(false), b_(std::move(b)) {
  bool narrow = element_bytes(element) == 1;
  kept_ = narrow ? 13 : 25;
  result_bits_ = narrow ? 13 : 23;
  exponent_.resize(b_.size());
  for (size_t i = 0; i < b_.size(); i++) {
    exponent_[i] = exponent_of(b_[i]);
    special_ |= exponent_[i] > kSafe || (exponent_[i] < -kSafe && exponent_[i] != kZero);
  }
  scale_.resize(columns);
  largest_.resize(columns);
  low_.resize(columns);
  high_.resize(columns);
}

void ProductBlock::accumulate_plainly(float* d, const float* a) {
  for (u32 k = 0; k < depth_; k++) {
    for (u32 i = 0; i < columns_; i++) d[i] += a[k] * b_[k * columns_ + i];
  }
}

void ProductBlock::accumulate(float* d, const float* a) {
  const u32 n = columns_;
  i32* largest = largest_.data();
  bool special = special_;
  for (u32 i = 0; i < n; i++) {
    largest[i] = exponent_of(d[i]);
    special |= largest[i] > kSafe || (largest[i] < -kSafe && largest[i] != kZero);
  }
  std::array<i32, 32> exponents;
  for (u32 k = 0; k < depth_; k++) {
    i32 e = exponents[k] = exponent_of(a[k]);
    special |= e > kSafe / 2 || (e < -kSafe / 2 && e != kZero);
  }
  if (special) return accumulate_plainly(d, a);
  for (u32 k = 0; k < depth_; k++) {
    const i32* e = &exponent_[k * n];
    for (u32 i = 0; i < n; i++) largest[i] = std::max(largest[i], exponents[k] + e[i]);
  }
  float* scale = scale_.data();
  i32 *low = low_.data(), *high = high_.data();
  for (u32 i = 0; i < n; i++) {
    // Where all is zero any scale will do.
    i32 e = std::max(largest[i], -kSafe);
    scale[i] = as_float(u32(127 + kept_ - e) << 23);
    low[i] = i32(d[i] * scale[i]);
    high[i] = 0;
  }
  // Each product is below 2^(kept + 2): half of a block fits into 32 bits.
  for (u32 k = 0; k < depth_; k++) {
    i32* sum = k < depth_ / 2 ? low : high;
    const float *b = &b_[k * n], x = a[k];
    for (u32 i = 0; i < n; i++) sum[i] += i32(x * b[i] * scale[i]);
  }
  for (u32 i = 0; i < n; i++) {
    d[i] = cut_off(double(i64(low[i]) + high[i]) / scale[i], result_bits_);
  }
}

}  // namespace emu
