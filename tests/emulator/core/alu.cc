// Arithmetic and logic: each lane by itself.
#include <cmath>
#include <cstring>

#include "lanes.h"

namespace emu {

namespace {

template <class T>
T high_product(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return T((Wide(a) * Wide(b)) >> (8 * sizeof(T)));
}

// Twice-as-wide type.
template <class T>
struct Wider {
  using type = u64;
};
template <>
struct Wider<u16> {
  using type = u32;
};
template <>
struct Wider<int16_t> {
  using type = i32;
};
template <>
struct Wider<i32> {
  using type = i64;
};

void integer(const Lanes& x, Type type) {
  const Instr& in = x.in;
  bool done = with_integer(type, [&](auto zero) {
    using T = decltype(zero);
    using U = std::make_unsigned_t<T>;
    using W = typename Wider<T>::type;
    constexpr u32 kBits = 8 * sizeof(T);
    switch (Op(in.op)) {
      case Op::ADD:
        if (in.mod[0]) unknown(in, "saturating add");
        return x.map<T>([](T a, T b) { return T(U(a) + U(b)); });
      case Op::SUB:
        return x.map<T>([](T a, T b) { return T(U(a) - U(b)); });
      case Op::MUL:
        return x.map<T>([](T a, T b) { return T(u64(a) * u64(b)); });
      case Op::MUL_HI:
        return x.map<T>([](T a, T b) { return high_product(a, b); });
      case Op::MUL_WIDE:
        return x.map<T, W>([](T a, T b) { return W(W(a) * W(b)); });
      case Op::MAD:
        return x.map<T>([](T a, T b, T c) { return T(u64(a) * u64(b) + u64(c)); });
      case Op::MAD_HI:
        return x.map<T>([](T a, T b, T c) { return T(U(high_product(a, b)) + U(c)); });
      case Op::MAD_WIDE:
        return x.map<T, W>([](T a, T b, W c) { return W(u64(W(a) * W(b)) + u64(c)); });
      case Op::DIV:
        return x.map<T>([](T a, T b) { return b ? T(a / b) : T(-1); });
      case Op::REM:
        return x.map<T>([](T a, T b) { return b ? T(a % b) : a; });
      case Op::MIN:
        return x.map<T>([](T a, T b) { return std::min(a, b); });
      case Op::MAX:
        return x.map<T>([](T a, T b) { return std::max(a, b); });
      case Op::NEG:
        return x.map<T>([](T a) { return T(-U(a)); });
      case Op::ABS:
        return x.map<T>([](T a) { return T(a < T(0) ? T(-U(a)) : a); });
      case Op::AND:
        return x.map<T>([](T a, T b) { return T(a & b); });
      case Op::OR:
        return x.map<T>([](T a, T b) { return T(a | b); });
      case Op::XOR:
        return x.map<T>([](T a, T b) { return T(a ^ b); });
      case Op::NOT:
        return x.map<T>([](T a) { return T(~a); });
      case Op::BREV:
        return x.map<T>([](T a) {
          U r = 0;
          for (u32 i = 0; i < kBits; i++) r |= U(U(a) >> i & 1) << (kBits - 1 - i);
          return T(r);
        });
      case Op::SHL:
      case Op::SHR: {
        // The shift count is 32 bits whatever the type.
        u8* d = x.m.at(x.w, x.op(0));
        const u8 *a = x.m.at(x.w, x.op(1)), *b = x.m.at(x.w, x.op(2));
        bool left = Op(in.op) == Op::SHL;
        return x.each([&](int l) {
          T value = get<T>(a, x.op(1).bits, l);
          u32 n = get<u32>(b, x.op(2).bits, l);
          T r = left ? (n >= kBits ? T(0) : T(U(value) << n))
                     : (n >= kBits ? T(value < T(0) ? -1 : 0) : T(value >> n));
          put<T>(d, x.op(0).bits, l, r);
        });
      }
      case Op::POPC:
      case Op::CLZ:
      case Op::BFIND: {
        u8* d = x.m.at(x.w, x.op(0));
        const u8* a = x.m.at(x.w, x.op(1));
        return x.each([&](int l) {
          T s = get<T>(a, x.op(1).bits, l);
          U v = U(s < T(0) && Op(in.op) == Op::BFIND ? ~s : s);
          u32 r = Op(in.op) == Op::POPC  ? std::popcount(v)
                  : Op(in.op) == Op::CLZ ? std::countl_zero(v)
                                         : kBits - 1 - std::countl_zero(v);
          if (Op(in.op) == Op::BFIND && v == 0)
            r = ~0u;
          else if (Op(in.op) == Op::BFIND && in.mod[0])
            r = kBits - 1 - r;
          put<u32>(d, 32, l, r);
        });
      }
      case Op::BFE:
      case Op::BFI: {
        u8* d = x.m.at(x.w, x.op(0));
        bool insert = Op(in.op) == Op::BFI;
        int at = insert ? 3 : 2;
        return x.each([&](int l) {
          T a = get<T>(x.m.at(x.w, x.op(1)), x.op(1).bits, l);
          u32 pos = get<u32>(x.m.at(x.w, x.op(at)), 32, l) & 255;
          u32 len = get<u32>(x.m.at(x.w, x.op(at + 1)), 32, l) & 255;
          U field = len >= kBits ? U(~U(0)) : U((U(1) << len) - 1);
          U r;
          if (insert) {
            U b = get<U>(x.m.at(x.w, x.op(2)), x.op(2).bits, l);
            r = pos >= kBits ? b : U((b & U(~U(field << pos))) | U((U(a) & field) << pos));
          } else {
            r = pos >= kBits ? 0 : U(U(a) >> pos) & field;
            u32 top = std::min(pos + len, kBits) - 1;
            if (std::is_signed_v<T> && len && (U(a) >> top & 1)) {
              u32 have = pos >= kBits ? 0 : std::min(len, kBits - pos);
              r |= have >= kBits ? U(0) : U(~U(0)) << have;
            }
          }
          put<T>(d, x.op(0).bits, l, T(r));
        });
      }
      default:
        unknown(in, "integer operation");
    }
  });
  if (!done) unknown(in, "operation");
}

template <class T>
T least(T a, T b) {
  return a != a ? b : b != b ? a : std::min(a, b);
}
template <class T>
T greatest(T a, T b) {
  return a != a ? b : b != b ? a : std::max(a, b);
}

template <class T>
void floating(const Lanes& x) {
  auto clamp = [sat = x.in.mod[0]](T v) { return sat ? greatest(T(0), least(T(1), v)) : v; };
  switch (Op(x.in.op)) {
    case Op::ADD:
      return x.map<T>([&](T a, T b) { return clamp(a + b); });
    case Op::SUB:
      return x.map<T>([&](T a, T b) { return clamp(a - b); });
    case Op::MUL:
      return x.map<T>([&](T a, T b) { return clamp(a * b); });
    case Op::DIV:
      return x.map<T>([](T a, T b) { return a / b; });
    case Op::FMA:
      return x.map<T>([&](T a, T b, T c) { return clamp(std::fma(a, b, c)); });
    case Op::MIN:
      return x.map<T>([](T a, T b) { return least(a, b); });
    case Op::MAX:
      return x.map<T>([](T a, T b) { return greatest(a, b); });
    case Op::NEG:
      return x.map<T>([](T a) { return -a; });
    case Op::ABS:
      return x.map<T>([](T a) { return std::fabs(a); });
    case Op::RCP:
      return x.map<T>([](T a) { return T(1) / a; });
    case Op::SQRT:
      return x.map<T>([](T a) { return std::sqrt(a); });
    case Op::RSQRT:
      return x.map<T>([](T a) { return T(1) / std::sqrt(a); });
    case Op::EX2:
      return x.map<T>([](T a) { return std::exp2(a); });
    case Op::LG2:
      return x.map<T>([](T a) { return std::log2(a); });
    case Op::TANH:
      return x.map<T>([](T a) { return std::tanh(a); });
    case Op::SIN:
      return x.map<T>([](T a) { return std::sin(a); });
    case Op::COS:
      return x.map<T>([](T a) { return std::cos(a); });
    default:
      unknown(x.in, "floating-point operation");
  }
}

float narrow_op(const Instr& in, float a, float b, float c) {
  switch (Op(in.op)) {
    case Op::ADD:
      return a + b;
    case Op::SUB:
      return a - b;
    case Op::MUL:
      return a * b;
    case Op::FMA:
      return float(double(a) * b + c);
    case Op::MIN:
      return least(a, b);
    case Op::MAX:
      return greatest(a, b);
    case Op::NEG:
      return -a;
    case Op::ABS:
      return std::fabs(a);
    default:
      unknown(in, "16-bit floating-point operation");
  }
}

// f16, bf16 and their pairs: computed in float32, rounded once (the products are exact).
void narrow(const Lanes& x, Type element, int parts) {
  u8* d = x.m.at(x.w, x.op(0));
  const u8* s[3] = {};
  for (int i = 1; i < x.in.count; i++) s[i - 1] = x.m.at(x.w, x.op(i));
  x.each([&](int l) {
    u32 r = 0;
    for (int p = 0; p < parts; p++) {
      float v[3] = {};
      for (int i = 0; i + 1 < x.in.count; i++) {
        v[i] = narrow_in(element, u16(((const u32*)s[i])[l] >> (16 * p)));
      }
      r |= u32(narrow_out(element, narrow_op(x.in, v[0], v[1], v[2]))) << (16 * p);
    }
    ((u32*)d)[l] = r;
  });
}

// f32x2: two float32 in a 64-bit register.
void pair(const Lanes& x) {
  u64* d = (u64*)x.m.at(x.w, x.op(0));
  const u64* s[3] = {};
  for (int i = 1; i < x.in.count; i++) s[i - 1] = (const u64*)x.m.at(x.w, x.op(i));
  x.each([&](int l) {
    u64 r = 0;
    for (int p = 0; p < 64; p += 32) {
      float a = as_float(u32(s[0][l] >> p)), b = as_float(u32(s[1][l] >> p));
      float c = s[2] ? as_float(u32(s[2][l] >> p)) : 0, v;
      switch (Op(x.in.op)) {
        case Op::ADD:
          v = a + b;
          break;
        case Op::SUB:
          v = a - b;
          break;
        case Op::MUL:
          v = a * b;
          break;
        case Op::FMA:
          v = std::fma(a, b, c);
          break;
        default:
          unknown(x.in, "f32x2 operation");
      }
      r |= u64(as_bits(v)) << p;
    }
    d[l] = r;
  });
}

template <class T>
bool compare(int how, T a, T b) {
  enum { kEq, kNe, kLt, kLe, kGt, kGe, kLo, kLs, kHi, kHs, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu };
  bool nan = a != a || b != b;
  switch (how) {
    case kEq:
      return a == b;
    case kNe:
      return !nan && a != b;
    case kLt:
    case kLo:
      return a < b;
    case kLe:
    case kLs:
      return a <= b;
    case kGt:
    case kHi:
      return a > b;
    case kGe:
    case kHs:
      return a >= b;
    case kEqu:
      return nan || a == b;
    case kNeu:
      return nan || a != b;
    case kLtu:
      return nan || a < b;
    case kLeu:
      return nan || a <= b;
    case kGtu:
      return nan || a > b;
    case kGeu:
      return nan || a >= b;
    case 16:
      return !nan;
    default:
      return nan;
  }
}

void set_predicate(const Lanes& x) {
  const Instr& in = x.in;
  const u8 *a = x.m.at(x.w, x.op(2)), *b = x.m.at(x.w, x.op(3));
  u32 ab = x.op(2).bits, bb = x.op(3).bits, result = 0;
  int how = in.mod[0];
  auto scan = [&](auto zero) {
    using T = decltype(zero);
    x.each([&](int l) { result |= u32(compare(how, get<T>(a, ab, l), get<T>(b, bb, l))) << l; });
  };
  Type type = Type(in.type);
  if (type == Type::F32) {
    scan(float{});
  } else if (type == Type::F64) {
    scan(double{});
  } else if (type == Type::F16 || type == Type::BF16) {
    x.each([&](int l) {
      float fa = narrow_in(type, get<u16>(a, ab, l)), fb = narrow_in(type, get<u16>(b, bb, l));
      result |= u32(compare(how, fa, fb)) << l;
    });
  } else if (!with_integer(type, scan)) {
    unknown(in, "setp");
  }
  u32 inverse = ~result;
  if (in.mod[1]) {
    u32 c = x.m.predicate(x.w, x.op(4));
    auto combine = [&](u32 r) { return in.mod[1] == 1 ? r & c : in.mod[1] == 2 ? r | c : r ^ c; };
    result = combine(result);
    inverse = combine(inverse);
  }
  u32* p = (u32*)x.m.at(x.w, x.op(0));
  if (x.op(0).bits) *p = (*p & ~x.lanes) | (result & x.lanes);
  if (x.op(1).bits) {
    u32* q = (u32*)x.m.at(x.w, x.op(1));
    *q = (*q & ~x.lanes) | (inverse & x.lanes);
  }
}

// Predicates are masks: logic on them is logic on words.
void on_predicates(const Lanes& x) {
  u32 a = x.m.predicate(x.w, x.op(1));
  u32 b = x.in.count > 2 ? x.m.predicate(x.w, x.op(2)) : 0, r;
  switch (Op(x.in.op)) {
    case Op::MOV:
      r = a;
      break;
    case Op::NOT:
      r = ~a;
      break;
    case Op::AND:
      r = a & b;
      break;
    case Op::OR:
      r = a | b;
      break;
    case Op::XOR:
      r = a ^ b;
      break;
    default:
      unknown(x.in, "predicate operation");
  }
  u32* d = (u32*)x.m.at(x.w, x.op(0));
  *d = (*d & ~x.lanes) | (r & x.lanes);
}

u32 permute(u32 a, u32 b, u32 selector) {
  u64 bytes = u64(b) << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 s = selector >> (4 * i) & 15;
    u32 byte = u32(bytes >> (8 * (s & 7))) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << (8 * i);
  }
  return r;
}

u32 lookup(u32 a, u32 b, u32 c, u32 table) {
  u32 r = 0;
  for (u32 i = 0; i < 8; i++) {
    if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return r;
}

}  // namespace

bool Machine::execute_alu(Warp& w, const Instr& in, u32 lanes) {
  Lanes x{*this, w, in, lanes};
  Type type = Type(in.type);
  switch (Op(in.op)) {
    case Op::SETP:
      set_predicate(x);
      return true;
    case Op::CVT:
      convert(x);
      return true;
    case Op::CVT_PACK:
      convert_pack(x);
      return true;
    case Op::SELP:
      select(x);
      return true;
    case Op::PACK:
      pack(x, false);
      return true;
    case Op::UNPACK:
      pack(x, true);
      return true;
    case Op::CVTA:
    case Op::CVTA_TO:
    case Op::MAPA:
      addresses(x);
      return true;
    case Op::PRMT:
      x.map<u32>([](u32 a, u32 b, u32 c) { return permute(a, b, c); });
      return true;
    case Op::LOP3:
      x.map<u32>([&](u32 a, u32 b, u32 c) { return lookup(a, b, c, in.mod[0]); });
      return true;
    case Op::SHF:
      x.map<u32>([&](u32 a, u32 b, u32 c) {
        u32 n = in.mod[1] ? c & 31 : std::min(c, 32u);
        u64 both = u64(b) << 32 | a;
        return in.mod[0] ? u32(both >> n) : u32(both << n >> 32);
      });
      return true;
    case Op::CLOCK: {
      const Operand& d = operand(in, 0);
      for (int l = 0; l < 32; l++) put<u64>(at(w, d), d.bits, l, instructions);
      return true;
    }
    case Op::ISSPACEP: {
      u32 mask = 0;
      for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u64 aperture = lane(w, operand(in, 1), l) & kApertureMask;
        u32 space = in.mod[0];
        bool is = space == kSharedCta || space == kSharedCluster ? aperture == kSharedAperture
                  : space == kLocal                              ? aperture == kLocalAperture
                                                                 : aperture == 0;
        mask |= u32(is) << l;
      }
      u32* d = (u32*)at(w, operand(in, 0));
      *d = (*d & ~lanes) | mask;
      return true;
    }
    default:
      break;
  }
  if (type == Type::PRED) {
    on_predicates(x);
  } else if (Op(in.op) == Op::MOV) {
    move(x);
  } else if (type == Type::F32) {
    floating<float>(x);
  } else if (type == Type::F64) {
    floating<double>(x);
  } else if (type == Type::F16 || type == Type::BF16) {
    narrow(x, type, 1);
  } else if (type == Type::F16X2 || type == Type::BF16X2) {
    narrow(x, type == Type::F16X2 ? Type::F16 : Type::BF16, 2);
  } else if (type == Type::F32X2) {
    pair(x);
  } else {
    integer(x, type);
  }
  return true;
}

}  // namespace emu
