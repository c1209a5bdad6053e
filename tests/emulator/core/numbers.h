// Conversions between float32 and the narrow formats, rounding to nearest even.
#pragma once
#include <cmath>
#include <cstring>
#include <vector>

#include "program.h"

namespace emu {

inline float as_float(u32 bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline u32 as_bits(float f) {
  u32 bits;
  memcpy(&bits, &f, 4);
  return bits;
}

inline float from_bf16(u16 bits) { return as_float(u32(bits) << 16); }

inline u16 to_bf16(float f) {
  u32 bits = as_bits(f);
  if (f != f) return 0x7FFF;
  return u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// A format of sign, `exponent` and `mantissa` bits, with or without infinities.
inline float from_small(u32 bits, int exponent, int mantissa, bool ieee) {
  u32 sign = bits >> (exponent + mantissa) & 1, e = bits >> mantissa & ((1u << exponent) - 1);
  u32 m = bits & ((1u << mantissa) - 1);
  int bias = (1 << (exponent - 1)) - 1;
  float value;
  bool top = e == (1u << exponent) - 1;
  if (top && ieee) {
    value = m ? NAN : INFINITY;
  } else if (top && m == (1u << mantissa) - 1) {
    value = NAN;
  } else if (e == 0) {
    value = std::ldexp(float(m), 1 - bias - mantissa);
  } else {
    value = std::ldexp(float(m | 1u << mantissa), int(e) - bias - mantissa);
  }
  return sign ? -value : value;
}

inline u32 to_small(float f, int exponent, int mantissa, bool ieee, bool saturate) {
  u32 sign = as_bits(f) >> 31 << (exponent + mantissa);
  u32 top = (1u << exponent) - 1;
  u32 nan = top << mantissa | (ieee ? 1u << (mantissa - 1) : (1u << mantissa) - 1);
  u32 largest = ieee ? ((top - 1) << mantissa | ((1u << mantissa) - 1)) : nan - 1;
  u32 infinity = ieee ? top << mantissa : nan;
  if (f != f) return ieee ? nan : sign | nan;
  int bias = (1 << (exponent - 1)) - 1;
  float magnitude = std::fabs(f);
  if (std::isinf(magnitude)) return sign | (saturate ? largest : infinity);
  int e;
  std::frexp(magnitude, &e);
  e = std::max(e - 1, 1 - bias);
  // Rounded in units of the last place, to nearest even.
  u64 units = u64(std::nearbyint(std::ldexp(double(magnitude), mantissa - e)));
  u32 bits;
  if (units == 0) {
    bits = 0;
  } else {
    if (units >= 2u << mantissa) units >>= 1, e++;
    bits = units < 1u << mantissa
               ? u32(units)
               : u32(e + bias) << mantissa | (u32(units) & ((1u << mantissa) - 1));
  }
  if (bits > largest) bits = saturate ? largest : infinity;
  return sign | bits;
}

// All values of a narrow format.
template <int kExponent, int kMantissa, bool kIeee>
inline float from_table(u32 bits) {
  static const std::vector<float> table = [] {
    std::vector<float> t(2u << (kExponent + kMantissa));
    for (u32 i = 0; i < t.size(); i++) t[i] = from_small(i, kExponent, kMantissa, kIeee);
    return t;
  }();
  return table[bits];
}

inline float from_half(u16 bits) { return from_table<5, 10, true>(bits); }
inline u16 to_half(float f) { return u16(to_small(f, 5, 10, true, false)); }
inline float from_e4m3(u8 bits) { return from_table<4, 3, false>(bits); }
inline float from_e5m2(u8 bits) { return from_table<5, 2, true>(bits); }
inline u8 to_e4m3(float f) { return u8(to_small(f, 4, 3, false, true)); }
inline u8 to_e5m2(float f) { return u8(to_small(f, 5, 2, true, true)); }
inline float from_tf32(u32 bits) { return as_float(bits & 0xFFFFE000); }

}  // namespace emu
