// Hopper's tensor core: warpgroup-wide products into registers.
#include <cstring>

#include "matmul.h"

namespace emu {

namespace {

enum Mod { kN, kACount, kTranspose, kNegate };

// The four warps of a warpgroup must issue the same wgmma in the same order.
void join_warpgroup(Warp& w, const Instr& in, u64 a, u64 b) {
  Cta& cta = *w.cta;
  u32 group = w.id / 4;
  auto& queue = cta.wgmma[group];
  u64& base = cta.wgmma_base[group];
  size_t at = w.wgmma_issued++ - base;
  if (at == queue.size()) queue.push_back({a, b, u32(in.line), u32(in.mod[kN]), 0});
  WgmmaIssue& issue = queue[at];
  if (issue.a != a || issue.b != b || issue.code != u32(in.line)) {
    throw Fault("wgmma", w.name() + ": the warps of a warpgroup issue different wgmma");
  }
  issue.joined++;
  while (!queue.empty() && queue.front().joined == 4) {
    queue.pop_front();
    base++;
  }
}

void multiply(Machine& m, Warp& w, const Instr& in) {
  u32 n = in.mod[kN], a_count = in.mod[kACount];
  Type a_type = Type(in.type), b_type = Type(in.type2);
  u32 deep = 32 / element_bytes(a_type);
  int quarter = w.id % 4;
  u64 b_bits = m.uniform(w, m.operand(in, 1), w.live, "wgmma");
  u64 a_bits = a_count == 1 ? m.uniform(w, m.operand(in, 2), w.live, "wgmma") : 0;
  join_warpgroup(w, in, a_bits, b_bits);

  auto source = [&](u64 bits, u32 rows, bool mn_major, Type type) {
    MatrixSource s{w.cta, decode_wgmma_descriptor(bits), rows, mn_major, type};
    std::string what = "wgmma of " + w.name();
    each_chunk(s, [&](u32 at, u32 row, u32) {
      // Each warp reads only its own 16 rows of A.
      if (rows == 64 && bits == a_bits && a_count == 1 && int(row / 16) != quarter) return;
      m.async_access(*w.cta, at, 16, false, w.wgmma, w.wgmma_committed + 1, w.know, what.c_str(),
                     !m.options.allow_unwritten);
    });
    return s;
  };
  std::vector<float> a(64 * deep), b(deep * n);
  bool a_transpose = in.mod[kTranspose] & 1, b_transpose = in.mod[kTranspose] >> 1 & 1;
  read_matrix(source(b_bits, n, b_transpose, b_type), true, n, b.data());
  if (a_count == 1) {
    read_matrix(source(a_bits, 64, a_transpose, a_type), false, deep, a.data());
  } else {
    // A in registers: the fragment layout of mma.m16n8k16, by warp.
    u32 e = element_bytes(a_type), per = 4 / e;
    for (u32 i = 0; i < a_count; i++) {
      const u32* row = (const u32*)m.at(w, m.operand(in, 2 + i));
      for (int l = 0; l < 32; l++) {
        u32 r = 16 * quarter + l / 4 + 8 * (i % 2), k = l % 4 * per + (i / 2) * 4 * per;
        for (u32 j = 0; j < per; j++) {
          u32 bits = row[l] >> (8 * e * j);
          a[r * deep + k + j] = element_value(a_type, (const u8*)&bits);
        }
      }
    }
  }
  if (in.mod[kNegate] & 1)
    for (float& v : a) v = -v;
  if (in.mod[kNegate] & 2)
    for (float& v : b) v = -v;

  u32 keep = m.predicate(w, m.operand(in, 0));
  u32 first = 2 + a_count;
  std::vector<float> d(16 * n);
  // Lane l holds, in registers 4i to 4i+3, rows l/4 and l/4+8, columns 8i+2(l%4) and the next.
  auto each_accumulator = [&](auto f) {
    for (u32 i = 0; i < n / 2; i++) {
      u32* row = (u32*)m.at(w, m.operand(in, first + i));
      for (int l = 0; l < 32; l++) {
        f(row[l], d[(l / 4 + 8 * (i / 2 % 2)) * n + 8 * (i / 4) + 2 * (l % 4) + i % 2], l);
      }
    }
  };
  each_accumulator([&](u32 bits, float& v, int l) {
    if (keep >> l & 1) memcpy(&v, &bits, 4);
  });
  ProductBlock block(a_type, std::move(b), n);
  for (u32 r = 0; r < 16; r++) block.accumulate(&d[r * n], &a[(16 * quarter + r) * deep]);
  each_accumulator([&](u32& bits, float v, int) { memcpy(&bits, &v, 4); });

  for (u32 i = 0; i < n / 2; i++) {
    u32 offset = m.operand(in, first + i).offset;
    bool known = false;
    for (auto& [o, group] : w.in_flight) {
      if (o == offset) group = w.wgmma_committed + 1, known = true;
    }
    if (!known) w.in_flight.push_back({offset, w.wgmma_committed + 1});
  }
  for (u32 i = 0; a_count > 1 && i < a_count; i++) {
    w.in_flight.push_back({m.operand(in, 2 + i).offset, w.wgmma_committed + 1});
  }
  w.wgmma_open = true;
  m.async_count++;
  m.progress++;
}

}  // namespace

bool Machine::execute_wgmma(Warp& w, const Instr& in) {
  switch (Op(in.op)) {
    case Op::WGMMA:
      multiply(*this, w, in);
      return true;
    case Op::WGMMA_FENCE:
      return true;
    case Op::WGMMA_COMMIT:
      w.wgmma_committed++;
      w.wgmma_open = false;
      return true;
    case Op::WGMMA_WAIT: {
      Cta& cta = *w.cta;
      if (w.wgmma_issued > cta.wgmma_base[w.id / 4]) {
        w.waiting = "the other warps of its warpgroup to issue wgmma";
        return false;
      }
      u32 keep = in.mod[0];
      u32 done = w.wgmma_committed > keep ? w.wgmma_committed - keep : 0;
      w.wgmma_waited = std::max(w.wgmma_waited, done);
      w.know.seen.raise(w.wgmma, w.wgmma_waited);
      std::erase_if(w.in_flight, [&](auto& f) { return f.second <= w.wgmma_waited; });
      return true;
    }
    default:
      throw Fault("unknown", "wgmma operation");
  }
}

}  // namespace emu
