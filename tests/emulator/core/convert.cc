// Conversions between types, moves of bits between registers, and addresses.
#include <cmath>
#include <cstring>
#include <limits>

#include "lanes.h"

namespace emu {

namespace {

double float_in(Type t, const u8* row, u32 bits, int l) {
  switch (t) {
    case Type::F32:
      return get<float>(row, bits, l);
    case Type::F64:
      return get<double>(row, bits, l);
    case Type::F16:
    case Type::BF16:
      return narrow_in(t, get<u16>(row, bits, l));
    default:
      return NAN;
  }
}

bool is_float(Type t) {
  return t == Type::F16 || t == Type::BF16 || t == Type::F32 || t == Type::F64;
}

}  // namespace

void convert(const Lanes& x) {
  enum { kNone, kRn, kRz, kRm, kRp, kRni, kRzi, kRmi, kRpi, kRna };
  const Instr& in = x.in;
  Type to = Type(in.type), from = Type(in.type2);
  u8* d = x.m.at(x.w, x.op(0));
  const u8* s = x.m.at(x.w, x.op(1));
  u32 db = x.op(0).bits, sb = x.op(1).bits;
  int round = in.mod[0];
  bool saturate = in.mod[1];
  auto integral = [&](double v) {
    switch (round) {
      case kRni:
        return std::nearbyint(v);
      case kRzi:
        return std::trunc(v);
      case kRmi:
        return std::floor(v);
      case kRpi:
        return std::ceil(v);
      default:
        return v;
    }
  };
  if (is_float(from) && is_float(to)) {
    if (round > kRn && round < kRni) unknown(in, "directed rounding");
    return x.each([&](int l) {
      double v = integral(float_in(from, s, sb, l));
      if (in.mod[2] && v < 0) v = 0;
      if (saturate) v = v != v ? 0 : std::min(1.0, std::max(0.0, v));
      if (to == Type::F64)
        put<double>(d, db, l, v);
      else if (to == Type::F32)
        put<float>(d, db, l, float(v));
      else
        put<u16>(d, db, l, narrow_out(to, float(v)));
    });
  }
  if (to == Type::TF32) {
    return x.each([&](int l) {
      u32 bits = ((const u32*)s)[l];
      bits += round == kRna ? 0x1000 : 0xFFF + (bits >> 13 & 1);
      ((u32*)d)[l] = bits & 0xFFFFE000;
    });
  }
  if (is_float(from)) {
    bool ok = with_integer(to, [&](auto zero) {
      using T = decltype(zero);
      double low = double(std::numeric_limits<T>::min()),
             high = double(std::numeric_limits<T>::max());
      x.each([&](int l) {
        double v = integral(float_in(from, s, sb, l));
        T r = v != v      ? T(0)
              : v <= low  ? std::numeric_limits<T>::min()
              : v >= high ? std::numeric_limits<T>::max()
                          : T(v);
        put<T>(d, db, l, r);
      });
    });
    if (!ok) unknown(in, "cvt");
    return;
  }
  bool ok = with_integer(from, [&](auto zero) {
    using S = decltype(zero);
    if (is_float(to)) {
      return x.each([&](int l) {
        S v = get<S>(s, sb, l);
        if (to == Type::F64)
          put<double>(d, db, l, double(v));
        else if (to == Type::F32)
          put<float>(d, db, l, float(v));
        else
          put<u16>(d, db, l, narrow_out(to, float(v)));
      });
    }
    bool fine = with_integer(to, [&](auto target) {
      using T = decltype(target);
      x.each([&](int l) {
        S v = get<S>(s, sb, l);
        if (saturate) {
          __int128 wide = v;
          wide = std::max<__int128>(wide, std::numeric_limits<T>::min());
          wide = std::min<__int128>(wide, std::numeric_limits<T>::max());
          put<T>(d, db, l, T(wide));
        } else {
          put<T>(d, db, l, T(v));
        }
      });
    });
    if (!fine) unknown(in, "cvt");
  });
  if (!ok) unknown(in, "cvt");
}

// Two float32 to a pair of narrow floats; the first source goes to the high half.
void convert_pack(const Lanes& x) {
  const Instr& in = x.in;
  u32* d = (u32*)x.m.at(x.w, x.op(0));
  const u8 *a = x.m.at(x.w, x.op(1)), *b = x.m.at(x.w, x.op(2));
  if (in.mod[0] != 1) unknown(in, "directed rounding");
  x.each([&](int l) {
    float high = get<float>(a, 32, l), low = get<float>(b, 32, l);
    if (in.mod[2]) high = std::fmax(high, 0.0f), low = std::fmax(low, 0.0f);
    switch (Type(in.type)) {
      case Type::F16X2:
        d[l] = u32(to_half(high)) << 16 | to_half(low);
        break;
      case Type::BF16X2:
        d[l] = u32(to_bf16(high)) << 16 | to_bf16(low);
        break;
      case Type::E4M3X2:
        d[l] = u32(to_e4m3(high)) << 8 | to_e4m3(low);
        break;
      case Type::E5M2X2:
        d[l] = u32(to_e5m2(high)) << 8 | to_e5m2(low);
        break;
      default:
        unknown(in, "cvt");
    }
  });
}

// Parts of a register, the first in the low bits.
void pack(const Lanes& x, bool unpack) {
  u32 part = x.in.mod[0], count = x.in.count - 1;
  u32 whole_bits = x.op(0).bits;
  x.each([&](int l) {
    u64 word[2] = {};
    if (unpack) {
      const u8* row = x.m.at(x.w, x.op(0));
      if (whole_bits == 128)
        memcpy(word, row + 16 * l, 16);
      else
        word[0] = get<u64>(row, whole_bits, l);
    }
    u64 mask = part == 64 ? ~0ull : (1ull << part) - 1;
    for (u32 i = 0; i < count; i++) {
      const Operand& o = x.op(1 + i);
      u64& target = word[i * part / 64];
      u32 shift = i * part % 64;
      if (!unpack) {
        target |= (get<u64>(x.m.at(x.w, o), o.bits, l) & mask) << shift;
      } else if (o.bits) {
        put<u64>(x.m.at(x.w, o), o.bits, l, target >> shift & mask);
      }
    }
    if (!unpack) {
      u8* row = x.m.at(x.w, x.op(0));
      if (whole_bits == 128)
        memcpy(row + 16 * l, word, 16);
      else
        put<u64>(row, whole_bits, l, word[0]);
    }
  });
}

void select(const Lanes& x) {
  u32 choose = x.m.predicate(x.w, x.op(3));
  u8* d = x.m.at(x.w, x.op(0));
  const u8 *a = x.m.at(x.w, x.op(1)), *b = x.m.at(x.w, x.op(2));
  u32 bits = x.op(0).bits;
  x.each([&](int l) {
    bool first = choose >> l & 1;
    put<u64>(d, bits, l, first ? get<u64>(a, x.op(1).bits, l) : get<u64>(b, x.op(2).bits, l));
  });
}

void move(const Lanes& x) {
  u8* d = x.m.at(x.w, x.op(0));
  const u8* s = x.m.at(x.w, x.op(1));
  u32 bits = x.op(0).bits, from = x.op(1).bits;
  if (bits == 128) {
    x.each([&](int l) { memmove(d + 16 * l, s + 16 * l, 16); });
  } else {
    x.each([&](int l) { put<u64>(d, bits, l, get<u64>(s, from, l)); });
  }
}

void addresses(const Lanes& x) {
  const Instr& in = x.in;
  u32 space = in.mod[0];
  u64 aperture = space == kSharedCta || space == kSharedCluster ? kSharedAperture
                 : space == kLocal                              ? kLocalAperture
                                                                : 0;
  u8* d = x.m.at(x.w, x.op(0));
  const u8* s = x.m.at(x.w, x.op(1));
  u32 from = x.op(1).bits, to = x.op(0).bits;
  x.each([&](int l) {
    u64 a = get<u64>(s, from, l);
    switch (Op(in.op)) {
      case Op::CVTA:
        put<u64>(d, to, l, a | aperture);
        break;
      case Op::CVTA_TO:
        put<u64>(d, to, l, space == kLocal ? a : a & ~aperture);
        break;
      default: {  // MAPA: of a CTA that is not there an error only once it is used
        u64 rank = x.m.lane(x.w, x.op(2), l) & 0xFF;
        put<u64>(d, to, l, (a & ~u64(0xFF000000)) | rank << kRankShift);
      }
    }
  });
}

}  // namespace emu
