#include "matmul.h"

#include <algorithm>
#include <array>
#include <bit>
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

namespace {

// The values of a 16-byte chunk.
template <Type kType, class Bits>
void values(const u8* bytes, float* out) {
  for (u32 i = 0; i < 16 / sizeof(Bits); i++) {
    Bits v;
    memcpy(&v, bytes + i * sizeof(Bits), sizeof(Bits));
    if constexpr (kType == Type::BF16)
      out[i] = from_bf16(v);
    else if constexpr (kType == Type::F16)
      out[i] = from_half(v);
    else if constexpr (kType == Type::TF32)
      out[i] = from_tf32(v);
    else if constexpr (kType == Type::E4M3)
      out[i] = from_e4m3(v);
    else
      out[i] = from_e5m2(v);
  }
}

void chunk_values(Type t, const u8* bytes, float* out) {
  switch (t) {
    case Type::BF16:
      return values<Type::BF16, u16>(bytes, out);
    case Type::F16:
      return values<Type::F16, u16>(bytes, out);
    case Type::TF32:
      return values<Type::TF32, u32>(bytes, out);
    case Type::E4M3:
      return values<Type::E4M3, u8>(bytes, out);
    case Type::E5M2:
      return values<Type::E5M2, u8>(bytes, out);
    default:
      throw Fault("unknown", "matrix element type");
  }
}

}  // namespace

float element_value(Type t, const u8* bytes) {
  u8 chunk[16] = {};
  memcpy(chunk, bytes, element_bytes(t));
  float out[16];
  chunk_values(t, chunk, out);
  return out[0];
}

void read_matrix(const MatrixSource& s, bool transposed, u32 stride, float* out) {
  u32 per_chunk = 16 / element_bytes(s.type);
  each_chunk(s, [&](u32 at, u32 row, u32 k) {
    float chunk[16];
    chunk_values(s.type, s.cta->smem.data() + at, chunk);
    // The chunk's elements follow one another along K, or along the rows.
    u32 first = transposed ? k * stride + row : row * stride + k;
    u32 step = s.mn_major == transposed ? 1 : stride;
    // A chunk of the last columns may reach past the rows asked for.
    u32 count = s.mn_major ? std::min(per_chunk, s.rows - row) : per_chunk;
    for (u32 i = 0; i < count; i++) out[first + i * step] = chunk[i];
  });
}

namespace {

// Exponents of zeros are too small to matter; those of infinities and NaN too large.
constexpr i32 kZero = -10000, kSafe = 90;

i32 exponent_of(float f) {
  u32 bits = std::bit_cast<u32>(f) & 0x7FFFFFFF;
  return bits == 0 ? kZero : i32(bits >> 23) - 127;
}

// 1 for an exponent at the edge of float32.
i32 is_extreme(i32 exponent, i32 most) {
  return i32(exponent > most) | (i32(exponent < -most) & i32(exponent != kZero));
}

// float32 cut off towards zero.
float cut_off(double value, u64 mask) {
  return float(std::bit_cast<double>(std::bit_cast<u64>(value) & mask));
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
    special_ |= is_extreme(exponent_[i], kSafe / 2);
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
  i32 special = special_;
  for (u32 i = 0; i < n; i++) {
    largest[i] = exponent_of(d[i]);
    special |= is_extreme(largest[i], kSafe);
  }
  std::array<i32, 32> exponents;
  for (u32 k = 0; k < depth_; k++) {
    i32 e = exponents[k] = exponent_of(a[k]);
    special |= is_extreme(e, kSafe / 2);
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
    scale[i] = std::bit_cast<float>(u32(127 + kept_ - e) << 23);
    low[i] = i32(d[i] * scale[i]);
    high[i] = 0;
  }
  // Each product is below 2^(kept + 2): half of a block fits into 32 bits.
  for (u32 k = 0; k < depth_; k++) {
    i32* sum = k < depth_ / 2 ? low : high;
    const float *b = &b_[k * n], x = a[k];
    for (u32 i = 0; i < n; i++) sum[i] += i32(x * b[i] * scale[i]);
  }
  const u64 mask = ~0ull << (52 - result_bits_);
  for (u32 i = 0; i < n; i++) {
    d[i] = cut_off((double(low[i]) + double(high[i])) / double(scale[i]), mask);
  }
}

}  // namespace emu
