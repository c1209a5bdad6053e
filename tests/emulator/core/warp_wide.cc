// Operations in which the lanes of a warp exchange values.
#include <cstring>

#include "machine.h"

namespace emu {

namespace {

// The lane that elect.sync picks: any, as long as it is always the same for the same members.
int leader(const Machine& m, u32 members) {
  if (Mode(m.options.mode) == Mode::kInOrder) return first_lane(members);
  u32 nth = (m.options.seed * 40503u >> 4) % u32(__builtin_popcount(members));
  while (nth--) members &= members - 1;
  return first_lane(members);
}

void elect(Machine& m, Warp& w, const Instr& in, u32 lanes) {
  u32 members = u32(m.lane(w, m.operand(in, 2), first_lane(lanes))) & w.lanes;
  int chosen = leader(m, members);
  const Operand& who = m.operand(in, 0);
  for (u32 rest = lanes; who.bits && rest; rest &= rest - 1) {
    ((u32*)m.at(w, who))[first_lane(rest)] = chosen;
  }
  u32* p = (u32*)m.at(w, m.operand(in, 1));
  *p = (*p & ~lanes) | 1u << chosen;
}

void shuffle(Machine& m, Warp& w, const Instr& in, u32 lanes) {
  enum { kIdx, kUp, kDown, kBfly };
  u32 old[32], result[32], from_inside = 0;
  for (int l = 0; l < 32; l++) old[l] = u32(m.lane(w, m.operand(in, 2), l));
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    u32 b = u32(m.lane(w, m.operand(in, 3), l)) & 31, c = u32(m.lane(w, m.operand(in, 4), l));
    int clamp = c & 31, segment = c >> 8 & 31;
    int low = l & segment, high = low | (clamp & ~segment), from = l;
    bool inside = false;
    switch (in.mod[0]) {
      case kUp:
        from = l - int(b);
        inside = from >= high;
        break;
      case kDown:
        from = l + int(b);
        inside = from <= high;
        break;
      case kBfly:
        from = l ^ int(b);
        inside = from <= high;
        break;
      default:
        from = low | (b & ~segment);
        inside = from <= high;
    }
    if (!inside) from = l;
    if (!(lanes >> from & 1)) {
      throw Fault("convergence", text("%s: shuffle reads lane %d, which is not in the mask",
                                      w.name().c_str(), from));
    }
    result[l] = old[from];
    from_inside |= u32(inside) << l;
  }
  const Operand &dest = m.operand(in, 0), &p = m.operand(in, 1);
  for (u32 rest = lanes; dest.bits && rest; rest &= rest - 1) {
    ((u32*)m.at(w, dest))[first_lane(rest)] = result[first_lane(rest)];
  }
  if (p.bits) {
    u32* mask = (u32*)m.at(w, p);
    *mask = (*mask & ~lanes) | from_inside;
  }
}

void vote(Machine& m, Warp& w, const Instr& in, u32 lanes) {
  enum { kAll, kAny, kUni, kBallot };
  u32 yes = m.predicate(w, m.operand(in, 1)) & lanes;
  const Operand& dest = m.operand(in, 0);
  if (in.mod[0] == kBallot) {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
      ((u32*)m.at(w, dest))[first_lane(rest)] = yes;
    }
    return;
  }
  bool result = in.mod[0] == kAll   ? yes == lanes
                : in.mod[0] == kAny ? yes != 0
                                    : yes == 0 || yes == lanes;
  u32* p = (u32*)m.at(w, dest);
  *p = (*p & ~lanes) | (result ? lanes : 0);
}

void match(Machine& m, Warp& w, const Instr& in, u32 lanes) {
  const Operand &dest = m.operand(in, 0), &p = m.operand(in, 1);
  u32 same[32] = {}, all = 0;
  for (u32 a = lanes; a; a &= a - 1) {
    int l = first_lane(a);
    for (u32 b = lanes; b; b &= b - 1) {
      int k = first_lane(b);
      if (m.lane(w, m.operand(in, 2), l) == m.lane(w, m.operand(in, 2), k)) same[l] |= 1u << k;
    }
    all |= u32(same[l] == lanes) << l;
  }
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    bool whole = in.mod[0];
    ((u32*)m.at(w, dest))[l] = whole ? (same[l] == lanes ? lanes : 0) : same[l];
  }
  if (p.bits) {
    u32* mask = (u32*)m.at(w, p);
    *mask = (*mask & ~lanes) | all;
  }
}

void reduce(Machine& m, Warp& w, const Instr& in, u32 lanes) {
  enum { kAdd, kMin, kMax, kAnd, kOr, kXor };
  bool is_signed = Type(in.type) == Type::S32;
  u32 r = u32(m.lane(w, m.operand(in, 1), first_lane(lanes)));
  for (u32 rest = lanes & (lanes - 1); rest; rest &= rest - 1) {
    u32 v = u32(m.lane(w, m.operand(in, 1), first_lane(rest)));
    switch (in.mod[0]) {
      case kAdd:
        r += v;
        break;
      case kMin:
        r = is_signed ? u32(std::min(i32(r), i32(v))) : std::min(r, v);
        break;
      case kMax:
        r = is_signed ? u32(std::max(i32(r), i32(v))) : std::max(r, v);
        break;
      case kAnd:
        r &= v;
        break;
      case kOr:
        r |= v;
        break;
      case kXor:
        r ^= v;
        break;
      default:
        throw Fault("unknown", "redux operation");
    }
  }
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    ((u32*)m.at(w, m.operand(in, 0)))[first_lane(rest)] = r;
  }
}

// 8x8 matrices of 16-bit elements. Lane l holds elements (l/4, 2(l%4)) and the next in its row.
// Lanes 8i to 8i+7 give the addresses of the rows of matrix i.
void matrix_memory(Machine& m, Warp& w, const Instr& in) {
  bool is_load = Op(in.op) == Op::LDMATRIX, transpose = in.mod[0];
  for (int i = 0; i + 1 < in.count; i++) {
    u16 matrix[8][8];
    u32* row = (u32*)m.at(w, m.operand(in, 1 + i));
    auto element = [&](int l, int half) -> u16& {
      int r = l / 4, c = 2 * (l % 4) + half;
      return transpose ? matrix[c][r] : matrix[r][c];
    };
    if (!is_load) {
      for (int l = 0; l < 32; l++) element(l, 0) = u16(row[l]), element(l, 1) = u16(row[l] >> 16);
    }
    for (int r = 0; r < 8; r++) {
      u32 address = u32(m.address(w, m.operand(in, 0), 8 * i + r));
      if (address % 16) {
        throw Fault("misaligned", text("%s: matrix row at 0x%x", w.name().c_str(), address));
      }
      u8* memory = m.shared(w, address, 16, !is_load);
      if (is_load) memcpy(matrix[r], memory, 16);
      if (!is_load) memcpy(memory, matrix[r], 16);
    }
    if (is_load) {
      for (int l = 0; l < 32; l++) row[l] = element(l, 0) | u32(element(l, 1)) << 16;
    }
  }
  m.progress++;
}

void transpose_matrix(Machine& m, Warp& w, const Instr& in) {
  u16 matrix[8][8];
  const u32* from = (const u32*)m.at(w, m.operand(in, 1));
  for (int l = 0; l < 32; l++) {
    matrix[l / 4][2 * (l % 4)] = u16(from[l]);
    matrix[l / 4][2 * (l % 4) + 1] = u16(from[l] >> 16);
  }
  u32* to = (u32*)m.at(w, m.operand(in, 0));
  for (int l = 0; l < 32; l++) {
    to[l] = matrix[2 * (l % 4)][l / 4] | u32(matrix[2 * (l % 4) + 1][l / 4]) << 16;
  }
}

}  // namespace

bool Machine::execute_warp_wide(Warp& w, const Instr& in, u32 lanes) {
  switch (Op(in.op)) {
    case Op::ELECT:
      elect(*this, w, in, lanes);
      break;
    case Op::SHFL:
      shuffle(*this, w, in, lanes);
      break;
    case Op::VOTE:
      vote(*this, w, in, lanes);
      break;
    case Op::MATCH:
      match(*this, w, in, lanes);
      break;
    case Op::REDUX:
      reduce(*this, w, in, lanes);
      break;
    case Op::ACTIVEMASK:
      for (u32 rest = lanes; rest; rest &= rest - 1) {
        ((u32*)at(w, operand(in, 0)))[first_lane(rest)] = lanes;
      }
      break;
    case Op::WARP_SYNC:
      break;
    case Op::LDMATRIX:
    case Op::STMATRIX:
      matrix_memory(*this, w, in);
      break;
    case Op::MOVMATRIX:
      transpose_matrix(*this, w, in);
      break;
    default:
      throw Fault("unknown", "warp-wide operation");
  }
  return true;
}

// Registers that the tensor core may still write are not to be touched.
void Machine::check_registers(Warp& w, const Instr& in) {
  if (Op(in.op) == Op::WGMMA || (Op(in.op) == Op::TMEM_LD)) return;
  for (int i = 0; i < in.count; i++) {
    const Operand& o = operand(in, i);
    if (o.is_const || o.bits == 1) continue;
    for (auto [offset, group] : w.in_flight) {
      if (offset == o.offset) {
        hazard("wgmma", w.name() + ": touches an accumulator of wgmma without wait_group");
      }
    }
    for (u32 offset : w.loading) {
      if (offset == o.offset) {
        hazard("tcgen05-wait", w.name() + ": touches a register of tcgen05.ld without wait::ld");
      }
    }
  }
}

}  // namespace emu
