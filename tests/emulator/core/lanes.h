// Lane-wise access to operands, for the arithmetic.
#pragma once
#include <bit>
#include <type_traits>

#include "machine.h"
#include "numbers.h"

namespace emu {

// Lane values of one operand, as T. Narrow integers live in the low bits of a 32-bit lane.
template <class T>
T get(const u8* row, u32 bits, int lane) {
  if constexpr (std::is_same_v<T, float>) {
    return as_float(((const u32*)row)[lane]);
  } else if constexpr (std::is_same_v<T, double>) {
    return std::bit_cast<double>(((const u64*)row)[lane]);
  } else {
    return bits == 64 ? T(((const u64*)row)[lane]) : T(((const u32*)row)[lane]);
  }
}

template <class T>
void put(u8* row, u32 bits, int lane, T value) {
  if constexpr (std::is_same_v<T, float>) {
    ((u32*)row)[lane] = as_bits(value);
  } else if constexpr (std::is_same_v<T, double>) {
    ((u64*)row)[lane] = std::bit_cast<u64>(value);
  } else if (bits == 64) {
    ((u64*)row)[lane] = u64(std::make_unsigned_t<T>(value));
  } else {
    ((u32*)row)[lane] = u32(std::make_unsigned_t<T>(value));
  }
}

struct Lanes {
  Machine& m;
  Warp& w;
  const Instr& in;
  u32 lanes;

  const Operand& op(int i) const { return m.operand(in, i); }

  template <class F>
  void each(F f) const {
    if (lanes == ~0u) {
      for (int l = 0; l < 32; l++) f(l);
    } else {
      for (u32 rest = lanes; rest; rest &= rest - 1) f(first_lane(rest));
    }
  }

  // d = f(a), f(a, b) or f(a, b, c) in each lane; operand 0 is the destination.
  template <class T, class R = T, class F>
  void map(F f) const {
    if (!op(0).bits) return;
    u8* d = m.at(w, op(0));
    const u32 bits = op(0).bits;
    const u8* s[3] = {};
    u32 sb[3] = {};
    for (int i = 1; i < in.count; i++) s[i - 1] = m.at(w, op(i)), sb[i - 1] = op(i).bits;
    each([&](int l) {
      if constexpr (std::is_invocable_v<F, T>) {
        put<R>(d, bits, l, f(get<T>(s[0], sb[0], l)));
      } else if constexpr (std::is_invocable_v<F, T, T>) {
        put<R>(d, bits, l, f(get<T>(s[0], sb[0], l), get<T>(s[1], sb[1], l)));
      } else {
        put<R>(d, bits, l,
               f(get<T>(s[0], sb[0], l), get<T>(s[1], sb[1], l), get<R>(s[2], sb[2], l)));
      }
    });
  }
};

// Calls f with a value of the C++ type of an integer PTX type.
template <class F>
bool with_integer(Type t, F f) {
  switch (t) {
    case Type::B8:
    case Type::U8:
      f(u8{});
      return true;
    case Type::B16:
    case Type::U16:
      f(u16{});
      return true;
    case Type::B32:
    case Type::U32:
      f(u32{});
      return true;
    case Type::B64:
    case Type::U64:
      f(u64{});
      return true;
    case Type::S8:
      f(int8_t{});
      return true;
    case Type::S16:
      f(int16_t{});
      return true;
    case Type::S32:
      f(i32{});
      return true;
    case Type::S64:
      f(i64{});
      return true;
    default:
      return false;
  }
}

[[noreturn]] inline void unknown(const Instr& in, const char* what) {
  throw Fault("unknown", text("line %d: %s of this type is not modelled", in.line, what));
}

inline float narrow_in(Type t, u16 bits) {
  return t == Type::F16 ? from_half(bits) : from_bf16(bits);
}
inline u16 narrow_out(Type t, float f) { return t == Type::F16 ? to_half(f) : to_bf16(f); }

// Conversions, moves and addresses (convert.cc).
void convert(const Lanes& x);
void convert_pack(const Lanes& x);
void pack(const Lanes& x, bool unpack);
void select(const Lanes& x);
void move(const Lanes& x);
void addresses(const Lanes& x);

}  // namespace emu
