// The asynchronous copies: tensor and plain bulk copies, and what a CTA must finish before it
// exits.
#include <cmath>
#include <cstring>

#include "machine.h"
#include "numbers.h"

namespace emu {

u64 Machine::uniform(Warp& w, const Operand& o, u32 lanes, const char* what) {
  u64 value = lane(w, o, first_lane(lanes)) + o.displace;
  for (u32 rest = lanes & (lanes - 1); rest; rest &= rest - 1) {
    if (lane(w, o, first_lane(rest)) + o.displace != value) {
      throw Fault("divergent",
                  text("%s: lanes disagree on an operand of %s", w.name().c_str(), what));
    }
  }
  return value;
}

u32 Machine::uniform_shared(Warp& w, const Operand& o, u32 lanes, const char* what) {
  u64 address = uniform(w, o, lanes, what);
  u64 aperture = address & kApertureMask;
  if (o.bits == 64 && aperture && aperture != kSharedAperture) {
    throw Fault("out-of-bounds", text("%s: %s needs a shared address", w.name().c_str(), what));
  }
  return u32(address);
}

namespace {

// One box of a tensor: where it begins, and the bytes of it in shared memory.
struct Box {
  TensorMap map;
  i64 at[5] = {};
  u32 smem;  // offset in the CTA

  // Calls f(smem offset, global address or 0 if out of bounds, bytes) for each 16-byte chunk.
  // A chunk that straddles the end of the tensor's first dimension has fewer valid bytes.
  template <class F>
  void each_chunk(F f) const {
    u32 inner = map.box[0] * map.element_bytes;
    u64 rows = map.box_bytes() / inner;
    for (u64 row = 0; row < rows; row++) {
      u64 rest = row, address = map.base;
      bool inside = true;
      for (u32 d = 1; d < map.rank; d++) {
        i64 index = at[d] + i64(rest % map.box[d]);
        rest /= map.box[d];
        inside &= index >= 0 && u64(index) < map.size[d];
        address += u64(index) * map.stride[d];
      }
      for (u32 byte = 0; byte < inner; byte += 16) {
        i64 element = at[0] + i64(byte / map.element_bytes);
        i64 end = std::min<i64>(element + 16 / map.element_bytes, i64(map.size[0]));
        i64 begin = std::max<i64>(element, 0);
        u32 skip = inside && end > begin ? u32(begin - element) * map.element_bytes : 0;
        u32 valid = inside && end > begin ? u32(end - begin) * map.element_bytes : 0;
        u32 where = swizzle_address(smem + u32(row) * inner + byte, map.swizzle);
        f(where, address + u64(begin) * map.element_bytes, skip, valid);
      }
    }
  }
};

Box read_box(Machine& m, Warp& w, const Instr& in, int first, u32 lanes, u32 smem) {
  u64 where = m.uniform(w, m.operand(in, first), lanes, "a tensor copy");
  if (where % 64) throw Fault("tensor-map", w.name() + ": tensor map not aligned to 64 bytes");
  bool param =
      where >= (u64)m.params.data() && where + 128 <= (u64)m.params.data() + m.params.size();
  if (!param) m.global(where, 128, false, &w);
  Box box;
  box.map = decode_tensor_map((const u8*)where);
  box.smem = smem & kOffsetMask;
  u32 dims = in.mod[0];
  std::string fault = tensor_map_fault(box.map);
  if (box.map.rank != dims) fault = text("rank %u used as %u", box.map.rank, dims);
  if (!fault.empty()) throw Fault("tensor-map", w.name() + ": " + fault);
  for (u32 d = 0; d < dims; d++) {
    const char* what = "a tensor copy's coordinates";
    box.at[d] = i32(m.uniform(w, m.operand(in, first + 1 + d), lanes, what));
  }
  if (smem % 128) throw Fault("misaligned", text("%s: box at 0x%x", w.name().c_str(), smem));
  return box;
}

void fill(u8* to, const TensorMap& map) {
  memset(to, 0, 16);
  if (!map.fill_nan) return;
  for (int i = 0; i < 16; i += map.element_bytes) to[i + map.element_bytes - 1] = 0x7F;
  for (int i = 0; i < 16; i += map.element_bytes) to[i + map.element_bytes - 2] = 0xFF;
}

void load_box(Machine& m, const Box& box, Cta& to) {
  box.each_chunk([&](u32 where, u64 address, u32 skip, u32 valid) {
    u8* out = to.smem.data() + where;
    if (valid < 16) fill(out, box.map);
    if (valid) memcpy(out + skip, m.global(address, valid, false, nullptr), valid);
  });
}

// A pending copy into shared memory: nobody may touch it until it is complete.
void mark(Cta& cta, const Box& box, int delta) {
  box.each_chunk([&](u32 where, u64, u32, u32) { cta.shadow.set_pending(where / 16, delta); });
}

void check_dependency(Machine& m, Warp& w) {
  if (m.launch.pdl && w.know.seen.of(0) == 0) {
    m.hazard("grid-dependency", w.name() + ": global memory before griddepcontrol.wait");
  }
}

float reduce(float a, float b, int op) {
  return op == 0 ? a + b : op == 1 ? std::min(a, b) : std::max(a, b);
}

void reduce_chunk(u8* to, const u8* from, u32 bytes, const TensorMap& map, int op) {
  if (op > 2) throw Fault("unknown", "reduction of a tensor copy");
  for (u32 i = 0; i < bytes; i += map.element_bytes) {
    if (map.dtype == 7 || map.dtype == 10) {
      float a, b;
      memcpy(&a, to + i, 4), memcpy(&b, from + i, 4);
      a = reduce(a, b, op);
      memcpy(to + i, &a, 4);
    } else if (map.dtype == 6 || map.dtype == 9) {
      u16 a, b;
      memcpy(&a, to + i, 2), memcpy(&b, from + i, 2);
      bool half = map.dtype == 6;
      float sum =
          reduce(half ? from_half(a) : from_bf16(a), half ? from_half(b) : from_bf16(b), op);
      a = half ? to_half(sum) : to_bf16(sum);
      memcpy(to + i, &a, 2);
    } else if (map.dtype == 2 || map.dtype == 3) {
      i32 a, b;
      memcpy(&a, to + i, 4), memcpy(&b, from + i, 4);
      a = op == 0 ? i32(u32(a) + u32(b)) : op == 1 ? std::min(a, b) : std::max(a, b);
      memcpy(to + i, &a, 4);
    } else {
      throw Fault("unknown", text("reduction of tensor map type %u", map.dtype));
    }
  }
}

// The CTAs of a multicast mask.
std::vector<Cta*> targets(Machine& m, Warp& w, u32 mask, const char* what) {
  std::vector<Cta*> found;
  for (u32 rank = 0; rank < 16; rank++) {
    if (mask >> rank & 1) found.push_back(&m.cta_at(*w.cta, rank << kRankShift, what));
  }
  if (found.empty()) throw Fault("multicast", text("%s: %s to no CTA", w.name().c_str(), what));
  return found;
}

struct Landing {
  Cta* cta;      // where the bytes go
  Cta* barrier;  // whose mbarrier learns of them
};

std::vector<Landing> landings(Machine& m, Warp& w, const Instr& in, u32 to, u32 barrier, u32 mask) {
  bool multicast = in.mod[1], pair = in.mod[2];
  std::vector<Landing> list;
  if (!multicast) {
    Cta& cta = m.cta_at(*w.cta, to, "tensor copy");
    Cta& owner = m.cta_at(*w.cta, barrier, "tensor copy");
    bool same = pair ? cta.rank / 2 == owner.rank / 2 : cta.rank == owner.rank;
    if (!same || (!in.mod[3] && &cta != w.cta)) {
      throw Fault("mbarrier", text("%s: copy to CTA %u signals an mbarrier of CTA %u",
                                   w.name().c_str(), cta.rank, owner.rank));
    }
    return {{&cta, &owner}};
  }
  for (Cta* cta : targets(m, w, mask, "multicast copy")) {
    // With a CTA pair, the barrier of the pair member that the given address belongs to.
    u32 owner = pair ? (cta->rank & ~1u) | (barrier >> kRankShift & 1) : cta->rank;
    list.push_back({cta, &m.cta_at(*w.cta, owner << kRankShift, "multicast copy")});
  }
  return list;
}

}  // namespace

static void tensor_load(Machine& m, Warp& w, const Instr& in, u32 lanes) {
  check_dependency(m, w);
  u32 to = m.uniform_shared(w, m.operand(in, 0), lanes, "tensor copy");
  u32 barrier = m.uniform_shared(w, m.operand(in, 1), lanes, "tensor copy");
  Box box = read_box(m, w, in, 2, lanes, to);
  u32 dims = in.mod[0];
  u32 mask = in.mod[1] ? u32(m.uniform(w, m.operand(in, 3 + dims), lanes, "multicast mask")) : 0;
  u32 offset = barrier & kOffsetMask, bytes = box.map.box_bytes();
  auto list = landings(m, w, in, to, barrier, mask & 0xFFFF);
  for (const Landing& l : list) {
    m.check_shared(*l.cta, box.smem, bytes, w.name().c_str());
    m.async_use(*l.barrier, offset, w.name().c_str(), w);
    Mbarrier& b = m.mbarrier(*l.barrier, offset, "tensor copy");
    std::string what = "tensor copy of " + w.name();
    box.each_chunk([&](u32 where, u64, u32, u32) {
      m.async_access(*l.cta, where, 16, true, b.agent, b.phase + 1, w.know, what.c_str());
    });
    mark(*l.cta, box, 1);
    // The bytes may land long before the barrier learns of them.
    bool early = m.options.mode == u32(Mode::kRandom) && m.random() % 2;
    if (early) load_box(m, box, *l.cta);
    Machine* machine = &m;
    m.issue({what, w.cta->cluster, 0, kCopyIn, [=] {
               if (l.cta->exited) throw Fault("exited-cta", what + " lands in an exited CTA");
               if (!early) load_box(*machine, box, *l.cta);
               mark(*l.cta, box, -1);
               if (l.barrier->exited) throw Fault("exited-cta", what + " signals an exited CTA");
               machine->mbarrier_complete_tx(*l.barrier, offset, bytes);
             }});
  }
}

// Reads shared memory at one time and writes global memory at a later one.
static void copy_out(Machine& m, Warp& w, const std::string& what, Cta& from,
                     std::function<std::vector<u8>()> read,
                     std::function<void(const std::vector<u8>&)> write) {
  if (w.bulk.empty() || w.bulk_open_ops == 0) w.bulk.push_back(std::make_shared<BulkGroup>());
  w.bulk_open_ops++;
  std::shared_ptr<BulkGroup> group = w.bulk.back();
  group->reading++;
  group->writing++;
  Cluster* cluster = w.cta->cluster;
  Machine* machine = &m;
  Cta* source = &from;
  m.issue({what, cluster, 0, kCopyOut, [=] {
             if (source->exited) throw Fault("exited-cta", what + " reads an exited CTA");
             auto bytes = std::make_shared<std::vector<u8>>(read());
             group->reading--;
             machine->issue({what, cluster, 0, kCopyOut, [=] {
                               write(*bytes);
                               group->writing--;
                             }});
           }});
}

static void tensor_store(Machine& m, Warp& w, const Instr& in, u32 lanes) {
  check_dependency(m, w);
  u32 from = m.uniform_shared(w, m.operand(in, 0), lanes, "tensor store");
  Box box = read_box(m, w, in, 1, lanes, from);
  Cta& cta = m.cta_at(*w.cta, from, "tensor store");
  if (&cta != w.cta) throw Fault("out-of-bounds", w.name() + ": stores another CTA's memory");
  std::string what = "tensor store of " + w.name();
  m.check_shared(cta, box.smem, box.map.box_bytes(), what.c_str());
  box.each_chunk([&](u32 where, u64, u32 skip, u32 valid) {
    if (valid) {
      m.async_access(cta, where + skip, valid, false, w.bulk_reads, w.bulk_committed + 1, w.know,
                     what.c_str());
    }
  });
  bool reduces = Op(in.op) == Op::TMA_REDUCE;
  int op = in.mod[1];
  Machine* machine = &m;
  Cta* source = &cta;
  copy_out(
      m, w, what, cta,
      [=] {
        std::vector<u8> bytes;
        box.each_chunk([&](u32 where, u64, u32, u32) {
          bytes.insert(bytes.end(), source->smem.data() + where, source->smem.data() + where + 16);
        });
        return bytes;
      },
      [=](const std::vector<u8>& bytes) {
        size_t at = 0;
        box.each_chunk([&](u32, u64 address, u32 skip, u32 valid) {
          if (valid) {
            u8* to = machine->global(address, valid, true, nullptr);
            if (reduces) reduce_chunk(to, bytes.data() + at + skip, valid, box.map, op);
            if (!reduces) memcpy(to, bytes.data() + at + skip, valid);
          }
          at += 16;
        });
      });
}

static void bulk_copy(Machine& m, Warp& w, const Instr& in, u32 lanes) {
  bool store = Op(in.op) == Op::BULK_STORE, load = Op(in.op) == Op::BULK_LOAD;
  u32 size = u32(m.uniform(w, m.operand(in, store ? 2 : 3), lanes, "bulk copy"));
  if (size % 16)
    throw Fault("misaligned", text("%s: bulk copy of %u bytes", w.name().c_str(), size));
  if (store || load) check_dependency(m, w);
  std::string what = "bulk copy of " + w.name();
  Machine* machine = &m;
  if (store) {
    u32 from = m.uniform_shared(w, m.operand(in, 0), lanes, "bulk copy");
    u64 to = m.uniform(w, m.operand(in, 1), lanes, "bulk copy");
    if (from % 16 || to % 16) throw Fault("misaligned", what);
    u32 offset = from & kOffsetMask;
    Cta* cta = w.cta;
    m.async_access(*cta, offset, size, false, w.bulk_reads, w.bulk_committed + 1, w.know,
                   what.c_str());
    copy_out(
        m, w, what, *cta,
        [=] { return std::vector<u8>(&cta->smem[offset], &cta->smem[offset] + size); },
        [=](const std::vector<u8>& bytes) {
          memcpy(machine->global(to, size, true, nullptr), bytes.data(), size);
        });
    return;
  }
  u32 to = m.uniform_shared(w, m.operand(in, 0), lanes, "bulk copy");
  u32 barrier = m.uniform_shared(w, m.operand(in, 1), lanes, "bulk copy");
  u64 from = m.uniform(w, m.operand(in, 2), lanes, "bulk copy");
  if (to % 16 || from % 16) throw Fault("misaligned", what);
  std::vector<Cta*> list;
  if (in.mod[0]) {
    u32 mask = u32(m.uniform(w, m.operand(in, 4), lanes, "multicast mask"));
    list = targets(m, w, mask, "bulk copy");
  } else {
    list = {&m.cta_at(*w.cta, to, "bulk copy")};
    if (barrier >> kRankShift != list[0]->rank) throw Fault("mbarrier", what + ": other CTA");
  }
  for (Cta* cta : list) {
    u32 offset = barrier & kOffsetMask, where = to & kOffsetMask;
    m.async_use(*cta, offset, what.c_str(), w);
    Mbarrier& b = m.mbarrier(*cta, offset, what.c_str());
    m.async_access(*cta, where, size, true, b.agent, b.phase + 1, w.know, what.c_str());
    Cta* own = w.cta;
    if (!load) {
      m.async_access(*own, u32(from) & kOffsetMask, size, false, b.agent, b.phase + 1, w.know,
                     what.c_str());
    }
    m.issue({what, w.cta->cluster, 0, kCopyIn, [=] {
               if (cta->exited) throw Fault("exited-cta", what + " lands in an exited CTA");
               const u8* source = load ? machine->global(from, size, false, nullptr)
                                       : &own->smem[u32(from) & kOffsetMask];
               memcpy(&cta->smem[where], source, size);
               machine->mbarrier_complete_tx(*cta, offset, size);
             }});
  }
}

static void store_async(Machine& m, Warp& w, const Instr& in, u32 lanes) {
  u32 bytes = kTypeBits[in.type] / 8, count = in.count - 2;
  std::string what = "st.async of " + w.name();
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    u32 to = u32(m.address(w, m.operand(in, 0), l));
    u32 barrier = u32(m.address(w, m.operand(in, 1), l));
    Cta* cta = &m.cta_at(*w.cta, to, what.c_str());
    if (barrier >> kRankShift != cta->rank) throw Fault("mbarrier", what + ": other CTA");
    if (to % (bytes * count)) throw Fault("misaligned", what);
    u32 offset = barrier & kOffsetMask, where = to & kOffsetMask;
    Mbarrier& b = m.mbarrier(*cta, offset, what.c_str());
    m.async_access(*cta, where, bytes * count, true, b.agent, b.phase + 1, w.know, what.c_str());
    std::vector<u8> data(bytes * count);
    for (u32 i = 0; i < count; i++) {
      u64 value = m.lane(w, m.operand(in, 2 + i), l);
      memcpy(&data[i * bytes], &value, bytes);
    }
    Machine* machine = &m;
    m.issue({what, w.cta->cluster, 0, kCopyIn, [=] {
               if (cta->exited) throw Fault("exited-cta", what + " lands in an exited CTA");
               memcpy(&cta->smem[where], data.data(), data.size());
               machine->mbarrier_complete_tx(*cta, offset, data.size());
             }});
  }
}

// Asks for the work of a cluster that has not started; the answer is 16 bytes in shared memory:
// whether there was one, and the coordinates of its first CTA.
static void try_cancel(Machine& m, Warp& w, const Instr& in, u32 lanes) {
  u32 to = m.uniform_shared(w, m.operand(in, 0), lanes, "try_cancel") & kOffsetMask;
  u32 barrier = m.uniform_shared(w, m.operand(in, 1), lanes, "try_cancel") & kOffsetMask;
  if (to % 16) throw Fault("misaligned", w.name() + ": try_cancel");
  std::vector<Cta*> list{w.cta};
  if (in.mod[0]) {
    list.clear();
    for (auto& cta : w.cta->cluster->ctas) list.push_back(cta.get());
  }
  const LaunchConfig& c = m.launch;
  u32 answer[4] = {};
  if (m.next_cluster < m.total_clusters) {
    u64 index = m.next_cluster++;
    u32 wide = c.grid[0] / c.cluster[0], high = c.grid[1] / c.cluster[1];
    answer[0] = u32(index % wide) * c.cluster[0];
    answer[1] = u32(index / wide % high) * c.cluster[1];
    answer[2] = u32(index / (u64(wide) * high)) * c.cluster[2];
    answer[3] = 1;
  }
  std::string what = "try_cancel of " + w.name();
  for (Cta* cta : list) {
    m.async_use(*cta, barrier, what.c_str(), w);
    Mbarrier& b = m.mbarrier(*cta, barrier, what.c_str());
    m.async_access(*cta, to, 16, true, b.agent, b.phase + 1, w.know, what.c_str());
    Machine* machine = &m;
    std::array<u32, 4> bytes{answer[0], answer[1], answer[2], answer[3]};
    m.issue({what, w.cta->cluster, 0, kCopyIn, [=] {
               if (cta->exited) throw Fault("exited-cta", what + " answers an exited CTA");
               memcpy(&cta->smem[to], bytes.data(), 16);
               machine->mbarrier_complete_tx(*cta, barrier, 16);
             }});
  }
}

bool Machine::bulk_wait(Warp& w, const Instr& in) {
  u32 keep = in.mod[0];
  u32 committed = w.bulk.size() - (w.bulk_open_ops ? 1 : 0);
  bool read = Op(in.op) == Op::BULK_WAIT_READ;
  for (u32 i = 0; i + keep < committed; i++) {
    const BulkGroup& g = *w.bulk[i];
    if (g.reading || (!read && g.writing)) {
      w.waiting = text("bulk copies (%u groups committed, %u may stay)", committed, keep);
      return false;
    }
  }
  u32 done = w.bulk_committed > keep ? w.bulk_committed - keep : 0;
  w.know.seen.raise(w.bulk_reads, done);
  while (w.bulk.size() > (w.bulk_open_ops ? 1u : 0u) && !w.bulk.front()->reading &&
         !w.bulk.front()->writing && committed-- > keep) {
    w.bulk.pop_front();
  }
  return true;
}

void Machine::execute_copy(Warp& w, const Instr& in, u32 lanes) {
  switch (Op(in.op)) {
    case Op::TMA_LOAD:
      return tensor_load(*this, w, in, lanes);
    case Op::TMA_STORE:
    case Op::TMA_REDUCE:
      return tensor_store(*this, w, in, lanes);
    case Op::BULK_LOAD:
    case Op::BULK_STORE:
    case Op::BULK_COPY_CLUSTER:
      return bulk_copy(*this, w, in, lanes);
    case Op::ST_ASYNC:
      return store_async(*this, w, in, lanes);
    case Op::CLC_TRY_CANCEL:
      return try_cancel(*this, w, in, lanes);
    case Op::BULK_COMMIT:
      if (!w.bulk_open_ops) w.bulk.push_back(std::make_shared<BulkGroup>());
      w.bulk_open_ops = 0;
      w.bulk_committed++;
      return;
    case Op::CLC_IS_CANCELED: {
      u32& dest = *(u32*)at(w, operand(in, 0));
      const u32* handle = (const u32*)at(w, operand(in, 1));
      for (u32 rest = lanes; rest; rest &= rest - 1) {
        u32 bit = 1u << first_lane(rest);
        dest = handle[4 * first_lane(rest) + 3] ? dest | bit : dest & ~bit;
      }
      return;
    }
    case Op::CLC_FIRST_CTAID: {
      const u32* handle = (const u32*)at(w, operand(in, 0));
      for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        for (int i = 0; i < 4; i++) {
          const Operand& dest = operand(in, 1 + i);
          if (dest.bits) ((u32*)at(w, dest))[l] = handle[4 * l + i];
        }
      }
      return;
    }
    default:
      throw Fault("unknown", w.name() + ": operation without an implementation");
  }
}

// Nothing may be left to do to a CTA's memory once it has exited.
void Machine::cta_exit(Cta& cta) {
  cta.exited = true;
  std::string name = text("CTA (%u,%u,%u)", cta.id[0], cta.id[1], cta.id[2]);
  for (auto& w : cta.warps) {
    if (w->know.seen.of(w->bulk_reads) < w->bulk_committed) {
      hazard("bulk-group", text("%s warp %d: exits without waiting for its bulk stores to have "
                                "read shared memory",
                                name.c_str(), w->id));
    }
  }
  if (cta.tmem.allocations) {
    hazard("tmem",
           text("%s: exits with %d tensor memory allocations", name.c_str(), cta.tmem.allocations));
  }
  for (auto& [offset, b] : cta.mbarriers) {
    if (b.tx) {
      hazard("transaction", text("%s: exits while mbarrier 0x%x waits for %lld bytes", name.c_str(),
                                 offset, (long long)b.tx));
    }
  }
}

}  // namespace emu
