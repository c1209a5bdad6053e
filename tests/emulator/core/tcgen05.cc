// Blackwell's tensor core and tensor memory.
#include <cstring>

#include "matmul.h"
#include "numbers.h"

namespace emu {

namespace {

u32* tmem_row(Cta& cta, u32 lane) {
  Tmem& t = cta.tmem;
  if (t.data.empty()) {
    // NaN, so that the use of what was never written shows.
    t.data.assign(kTmemLanes * kTmemColumns, ~0u);
    t.shadow.reset(kTmemLanes / 16 * kTmemColumns);
  }
  return t.data.data() + lane * kTmemColumns;
}

size_t tmem_cell(u32 lane, u32 column) { return lane / 16 * kTmemColumns + column; }

void check_allocated(Cta& cta, u32 column, u32 count, const std::string& what) {
  for (u32 c = column; c < column + count; c++) {
    if (c >= kTmemColumns || cta.tmem.owner[c] < 0) {
      throw Fault("tmem", text("%s: column %u of tensor memory of CTA %u is not allocated",
                               what.c_str(), c, cta.rank));
    }
  }
}

// Accesses to `columns` columns of the 16 lanes from `lane` on.
void tmem_access(Machine& m, Cta& cta, u32 lane, u32 column, u32 columns, bool write, Agent who,
                 u32 time, const Knowledge& know, const std::string& what) {
  for (u32 c = column; c < column + columns; c++) {
    size_t cell = tmem_cell(lane, c);
    Shadow& s = cta.tmem.shadow;
    Conflict conflict = write ? s.write(cell, 1, 1, who, time, know, Proxy::kGeneric)
                              : s.read(cell, 1, 1, who, time, know, Proxy::kGeneric);
    if (conflict.kind) {
      m.report(conflict, *cta.cluster, what + (write ? ": write" : ": read"),
               text(" of tensor memory lane %u column %u of CTA %u", lane, c, cta.rank));
    }
  }
}

Cta* peer_of(Cta& cta) {
  u32 rank = cta.rank ^ 1;
  if (rank >= cta.cluster->ctas.size()) throw Fault("tmem", "cta_group::2 without a pair of CTAs");
  return cta.cluster->ctas[rank].get();
}

bool allocate(Machine& m, Warp& w, const Instr& in) {
  Cta& cta = *w.cta;
  Tmem& t = cta.tmem;
  bool pair = in.mod[0];
  if (!w.awaited_alloc) {
    u32 columns = u32(m.uniform(w, m.operand(in, 1), w.live, "tcgen05.alloc"));
    u32 to = m.uniform_shared(w, m.operand(in, 0), w.live, "tcgen05.alloc");
    if (columns < 32 || columns > kTmemColumns || columns & (columns - 1)) {
      throw Fault("tmem", text("%s: allocates %u columns", w.name().c_str(), columns));
    }
    if (!t.may_allocate) throw Fault("tmem", w.name() + ": allocates after giving up the permit");
    u32 start = 0;
    while (start < kTmemColumns) {
      u32 run = 0;
      while (run < columns && t.owner[start + run] < 0) run++;
      if (run == columns) break;
      start += columns;
    }
    if (start >= kTmemColumns) {
      w.waiting = text("%u columns of tensor memory", columns);
      return false;
    }
    for (u32 c = start; c < start + columns; c++) {
      t.owner[c] = start;
      tmem_row(cta, 0);
      for (u32 lane = 0; lane < kTmemLanes; lane += 16) t.shadow.forget(tmem_cell(lane, c));
    }
    t.allocations++;
    memcpy(m.shared(w, to, 4, true), &start, 4);
    w.awaited_alloc = ++t.calls;
    m.progress++;
  }
  if (pair && peer_of(cta)->tmem.calls < w.awaited_alloc) {
    w.waiting = "the peer CTA to allocate tensor memory";
    return false;
  }
  w.awaited_alloc = 0;
  return true;
}

void deallocate(Machine& m, Warp& w, const Instr& in) {
  Cta& cta = *w.cta;
  u32 start = u32(m.uniform(w, m.operand(in, 0), w.live, "tcgen05.dealloc"));
  u32 columns = u32(m.uniform(w, m.operand(in, 1), w.live, "tcgen05.dealloc"));
  std::string what = "dealloc of " + w.name();
  u32 count = 0;
  for (int owner : cta.tmem.owner) count += owner >= 0 && u32(owner) == start;
  if (count != columns) {
    throw Fault("tmem", text("%s: %u columns at %u, where %u are allocated", what.c_str(), columns,
                             start, count));
  }
  for (u32 lane = 0; lane < kTmemLanes; lane += 16) {
    // All use must be ordered before, as if this were a write.
    tmem_access(m, cta, lane, start, columns, true, w.agent, w.next_time(), w.know, what);
  }
  for (u32 c = start; c < start + columns; c++) cta.tmem.owner[c] = -1;
  cta.tmem.allocations--;
  m.progress++;
}

enum Shape { k32x32b, k16x64b, k16x128b, k16x256b, k16x32bx2 };

// Calls f(register index, thread, lane of the warp's quarter, column) for each element.
template <class F>
void each_element(int shape, u32 count, u32 split, F f) {
  for (u32 r = 0; r < count; r++) {
    for (u32 t = 0; t < 32; t++) {
      switch (shape) {
        case k32x32b:
          f(r, t, t, r);
          break;
        case k16x64b:
          f(r, t, t / 4 + 8 * (t % 4 / 2), 2 * r + t % 2);
          break;
        case k16x128b:
          for (u32 i = 0; i < 2; i++) f(2 * r + i, t, t / 4 + 8 * i, 4 * r + t % 4);
          break;
        case k16x256b:
          for (u32 i = 0; i < 4; i++) {
            f(4 * r + i, t, t / 4 + 8 * (i / 2), 8 * r + 2 * (t % 4) + i % 2);
          }
          break;
        default:
          f(r, t, t % 16, r + (t / 16) * split);
      }
    }
  }
}

void load_store(Machine& m, Warp& w, const Instr& in) {
  bool is_load = Op(in.op) == Op::TMEM_LD;
  int shape = in.mod[0];
  if (shape == k16x64b) throw Fault("unknown", "tcgen05.ld and st of shape 16x64b");
  if (in.mod[2]) throw Fault("unknown", "tcgen05.ld and st that pack 16-bit values");
  Cta& cta = *w.cta;
  u32 address = u32(m.uniform(w, m.operand(in, 0), w.live, "tcgen05.ld or st"));
  u32 lane = address >> 16, column = address & 0xFFFF, quarter = w.id % 4;
  std::string what = w.name();
  bool half = shape != k32x32b;
  // A warp reaches its own quarter of the lanes, which the address names or leaves at 0.
  if ((lane / 32 != quarter && lane / 32 != 0) || lane % (half ? 16 : 32)) {
    throw Fault("tmem", text("%s: tcgen05.ld or st at lane %u; the warp reaches lanes %u to %u",
                             what.c_str(), lane, 32 * quarter, 32 * quarter + 31));
  }
  lane = 32 * quarter + lane % 32;
  u32 wide = 0;
  each_element(shape, in.mod[1], in.mod[3],
               [&](u32, u32, u32, u32 c) { wide = std::max(wide, c + 1); });
  check_allocated(cta, column, wide, what);
  bool strict = m.options.strict_tmem;
  Agent who = is_load ? (strict ? w.tmem_loads : w.agent) : w.tmem_stores;
  u32 time = is_load ? (strict ? w.load_time : w.next_time()) : w.store_time;
  tmem_row(cta, 0);
  std::set<std::pair<u32, u32>> touched;
  each_element(shape, in.mod[1], in.mod[3],
               [&](u32, u32, u32 l, u32 c) { touched.insert({(lane + l) / 16 * 16, column + c}); });
  for (auto [l, c] : touched) tmem_access(m, cta, l, c, 1, !is_load, who, time, w.know, what);
  each_element(shape, in.mod[1], in.mod[3], [&](u32 r, u32 t, u32 l, u32 c) {
    u32& value = tmem_row(cta, lane + l)[column + c];
    const Operand& reg = m.operand(in, 1 + r);
    if (is_load && reg.bits) ((u32*)m.at(w, reg))[t] = value;
    if (!is_load) value = u32(m.lane(w, reg, t));
  });
  if (is_load && strict) {
    for (int i = 1; i < in.count; i++) w.loading.push_back(m.operand(in, i).offset);
  }
  m.progress++;
}

struct Mma {
  Machine* m;
  Cta* cta[2];
  u32 group;  // CTAs: 1 or 2
  u32 rows, n, deep;
  Type a_type, b_type;
  bool a_mn_major, b_mn_major, negate_a, negate_b, a_in_tmem, accumulate;
  u32 d_lane, d_column, a_column, scale;
  u64 a, b;
  u32 masked[8];  // lanes not to write
  std::string what;

  u32 rows_each() const { return rows / group; }
  MatrixSource source_a(int c) const {
    return {cta[c], decode_tcgen05_descriptor(a), rows_each(), a_mn_major, a_type};
  }
  MatrixSource source_b(int c) const {
    return {cta[c], decode_tcgen05_descriptor(b), n / group, b_mn_major, b_type};
  }

  // Where row `r` of a CTA's part of the result is: its lane, and for each half of the columns.
  bool split() const { return group == 2 && rows == 128; }
  u32 lane_of(u32 r, u32 half) const {
    if (split()) return r + 64 * half;
    if (rows == 64) return d_lane + 32 * (r / 16) + r % 16;
    return r;
  }
  u32 columns() const { return split() ? n / 2 : n; }

  void check(const Warp& w) const;
  void run() const;
};

Type mma_element(int kind, u32 code) {
  if (kind == 0 && code < 2) return code == 0 ? Type::F16 : Type::BF16;
  if (kind == 1 && code == 2) return Type::TF32;
  if (kind == 2 && code < 2) return code == 0 ? Type::E4M3 : Type::E5M2;
  throw Fault("descriptor", text("element format %u in the instruction descriptor", code));
}

void Mma::check(const Warp& w) const {
  Agent who = w.mma;
  u32 time = w.mma_time;
  for (u32 c = 0; c < group; c++) {
    auto operand = [&](const MatrixSource& s) {
      each_chunk(s, [&](u32 at, u32, u32) {
        m->async_access(*cta[c], at, 16, false, who, time, w.know, what.c_str(),
                        !m->options.allow_unwritten);
      });
    };
    check_allocated(*cta[c], d_column, columns(), what);
    tmem_row(*cta[c], 0);
    if (a_in_tmem) {
      u32 wide = 8;  // 32 bytes along K
      check_allocated(*cta[c], a_column, wide, what);
      for (u32 r = 0; r < rows_each(); r += 16) {
        tmem_access(*m, *cta[c], r, a_column, wide, false, who, time, w.know, what);
      }
    } else {
      operand(source_a(c));
    }
    operand(source_b(c));
    for (u32 r = 0; r < rows_each(); r += 16) {
      for (u32 half = 0; half <= u32(split()); half++) {
        u32 lane = lane_of(r, half);
        if (accumulate) {
          tmem_access(*m, *cta[c], lane, d_column, columns(), false, who, time, w.know, what);
        }
        tmem_access(*m, *cta[c], lane, d_column, columns(), true, who, time, w.know, what);
      }
    }
  }
}

void Mma::run() const {
  std::vector<float> a_values(rows_each() * deep), b_values(deep * n), d(n);
  for (u32 c = 0; c < group; c++) {
    if (cta[c]->exited) throw Fault("exited-cta", what + " uses an exited CTA");
    read_matrix(source_b(c), true, n, b_values.data() + c * (n / group));
  }
  if (negate_b)
    for (float& v : b_values) v = -v;
  ProductBlock block(a_type, std::move(b_values), n);
  for (u32 c = 0; c < group; c++) {
    if (a_in_tmem) {
      u32 e = element_bytes(a_type);
      for (u32 r = 0; r < rows_each(); r++) {
        const u8* row = (const u8*)(tmem_row(*cta[c], r) + a_column);
        for (u32 k = 0; k < deep; k++) a_values[r * deep + k] = element_value(a_type, row + k * e);
      }
    } else {
      read_matrix(source_a(c), false, deep, a_values.data());
    }
    if (negate_a)
      for (float& v : a_values) v = -v;
    for (u32 r = 0; r < rows_each(); r++) {
      u32 halves = split() ? 2 : 1, wide = columns();
      for (u32 half = 0; half < halves; half++) {
        float* row = (float*)(tmem_row(*cta[c], lane_of(r, half)) + d_column);
        if (accumulate)
          memcpy(&d[half * wide], row, 4 * wide);
        else
          std::fill_n(&d[half * wide], wide, 0.0f);
      }
      if (scale)
        for (float& v : d) v = std::ldexp(v, -int(scale));
      block.accumulate(d.data(), &a_values[r * deep]);
      for (u32 half = 0; half < halves; half++) {
        u32 lane = lane_of(r, half);
        if (masked[4 * c + lane / 32] >> (lane % 32) & 1) continue;
        memcpy(tmem_row(*cta[c], lane) + d_column, &d[half * wide], 4 * wide);
      }
    }
  }
}

void issue_mma(Machine& m, Warp& w, const Instr& in, u32 lanes) {
  Cta& cta = *w.cta;
  Mma op{};
  op.m = &m;
  op.what = "tcgen05.mma of " + w.name();
  op.group = in.mod[1] ? 2 : 1;
  op.cta[0] = &cta;
  if (op.group == 2) {
    if (cta.rank % 2) throw Fault("tcgen05", op.what + ": issued by the odd CTA of a pair");
    op.cta[1] = peer_of(cta);
    if (op.cta[1]->exited) throw Fault("exited-cta", op.what + ": its peer has exited");
  }
  u32 d = u32(m.uniform(w, m.operand(in, 0), lanes, "tcgen05.mma"));
  op.d_lane = d >> 16;
  op.d_column = d & 0xFFFF;
  op.a_in_tmem = in.mod[2];
  op.a = m.uniform(w, m.operand(in, 1), lanes, "tcgen05.mma");
  op.a_column = u32(op.a) & 0xFFFF;
  op.b = m.uniform(w, m.operand(in, 2), lanes, "tcgen05.mma");
  u32 idesc = u32(m.uniform(w, m.operand(in, 3), lanes, "tcgen05.mma"));
  op.accumulate = m.predicate(w, m.operand(in, 4)) >> first_lane(lanes) & 1;
  op.scale = in.mod[3];
  for (int i = 5; i < in.count; i++) {
    op.masked[i - 5] = u32(m.uniform(w, m.operand(in, i), lanes, "tcgen05.mma"));
  }
  int kind = in.mod[0];
  op.a_type = mma_element(kind, idesc >> 7 & 7);
  op.b_type = mma_element(kind, idesc >> 10 & 7);
  op.negate_a = idesc >> 13 & 1;
  op.negate_b = idesc >> 14 & 1;
  op.a_mn_major = idesc >> 15 & 1;
  op.b_mn_major = idesc >> 16 & 1;
  op.n = (idesc >> 17 & 63) * 8;
  op.rows = (idesc >> 24 & 31) * 16;
  op.deep = 32 / element_bytes(op.a_type);
  if ((idesc >> 4 & 3) != 1) throw Fault("descriptor", "accumulators other than float32");
  if (idesc & 7) throw Fault("descriptor", "sparse products are not modelled");
  bool good_rows =
      op.group == 1 ? op.rows == 64 || op.rows == 128 : op.rows == 128 || op.rows == 256;
  u32 step = op.rows == 64 ? 8 : op.group == 2 && op.rows == 256 ? 32 : 16;
  if (op.group == 2 && op.rows == 256) step = 16;
  if (!good_rows || op.n < 8 || op.n > 256 || op.n % step) {
    throw Fault("descriptor", text("%s: shape %u x %u", op.what.c_str(), op.rows, op.n));
  }
  if (op.d_lane && !(op.rows == 64 && op.d_lane == 16)) {
    throw Fault("tmem", text("%s: result at lane %u", op.what.c_str(), op.d_lane));
  }
  if (op.a_in_tmem && op.rows / op.group != 128) {
    throw Fault("unknown", op.what + ": A in tensor memory of 64 rows");
  }
  op.check(w);
  if (!cta.tmem.queue) cta.tmem.queue = m.next_queue++;
  m.issue({op.what, cta.cluster, cta.tmem.queue, kTensorCore, [op] { op.run(); }});
}

void commit(Machine& m, Warp& w, const Instr& in, u32 lanes) {
  Cta& cta = *w.cta;
  bool multicast = in.mod[1];
  u32 address = m.uniform_shared(w, m.operand(in, 0), lanes, "tcgen05.commit");
  std::string what = "tcgen05.commit of " + w.name();
  std::vector<Cta*> list;
  if (multicast) {
    u32 mask = u32(m.uniform(w, m.operand(in, 1), lanes, "tcgen05.commit")) & 0xFFFF;
    if (!mask) throw Fault("multicast", what + " to no CTA");
    for (u32 rank = 0; rank < 16; rank++) {
      if (mask >> rank & 1) list.push_back(&m.cta_at(cta, rank << kRankShift, what.c_str()));
    }
  } else {
    list.push_back(&m.cta_at(cta, address, what.c_str()));
  }
  u32 offset = address & kOffsetMask;
  Knowledge know = w.know;
  know.seen.raise(w.mma, w.mma_time++);
  w.release();
  if (!cta.tmem.queue) cta.tmem.queue = m.next_queue++;
  Machine* machine = &m;
  for (Cta* target : list) m.async_use(*target, offset, what.c_str(), w);
  m.issue({what, cta.cluster, cta.tmem.queue, kSignal, [=] {
             for (Cta* target : list) {
               if (target->exited) throw Fault("exited-cta", what + " signals an exited CTA");
               machine->mbarrier_arrive(*target, offset, 1, know);
             }
           }});
}

}  // namespace

bool Machine::execute_tmem(Warp& w, const Instr& in, u32 lanes) {
  switch (Op(in.op)) {
    case Op::TMEM_ALLOC:
      return allocate(*this, w, in);
    case Op::TMEM_DEALLOC:
      deallocate(*this, w, in);
      return true;
    case Op::TMEM_RELINQUISH:
      w.cta->tmem.may_allocate = false;
      return true;
    case Op::TMEM_LD:
    case Op::TMEM_ST:
      load_store(*this, w, in);
      return true;
    case Op::TMEM_WAIT_LD:
      w.know.seen.raise(w.tmem_loads, w.load_time++);
      w.loading.clear();
      return true;
    case Op::TMEM_WAIT_ST:
      w.know.seen.raise(w.tmem_stores, w.store_time++);
      return true;
    case Op::TMEM_FENCE:
      return true;
    case Op::TMEM_MMA:
      issue_mma(*this, w, in, lanes);
      return true;
    case Op::TMEM_COMMIT:
      commit(*this, w, in, lanes);
      return true;
    default:
      throw Fault("unknown", "tensor memory operation");
  }
}

}  // namespace emu
