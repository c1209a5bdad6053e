// Loads, stores and atomics of threads; who may touch which bytes.
#include <cstring>

#include "machine.h"

namespace emu {

namespace {

// What came before a conflict, for a report.
std::string explain(const Conflict& c, Cluster& cluster) {
  const std::string& other = cluster.agent_names[c.other];
  const char* did = c.other_wrote ? "written" : "read";
  switch (c.kind) {
    case Conflict::kUnwritten:
      return "which nothing wrote";
    case Conflict::kUnordered:
      return text("still being %s by %s", did, other.c_str());
    case Conflict::kUnfenced:
      return "written by " + other + " without a proxy fence since";
    case Conflict::kPending:
      return "which an unfinished copy may still write";
    default:
      return "";
  }
}

const char* kKinds[] = {"", "unwritten", "race", "proxy-fence", "race"};

u16 byte_mask(u32 first, u32 count) { return u16(((1u << count) - 1) << first); }

u8 word_mask(u32 first, u32 count) {
  u32 low = first / 4, high = (first + count - 1) / 4;
  return u8(((2u << high) - 1) & ~((1u << low) - 1));
}

}  // namespace

void Machine::hazard(const std::string& kind, const std::string& what, const std::string& where) {
  // One report for each instruction of a warp, however many addresses are concerned.
  if (!reported.insert(kind + what).second) return;
  hazards.push_back({kind, what + where});
  if (hazards.size() > 20) throw Fault("too-many", "more than 20 hazards");
}

void Machine::report(const Conflict& c, Cluster& cluster, const std::string& what,
                     const std::string& where) {
  if (c.kind) hazard(kKinds[c.kind], what, where + " " + explain(c, cluster));
}

u8* Machine::global_quiet(u64 address, u64 bytes, bool write) {
  auto holds = [&](const Region& r) {
    return address >= r.begin && address + bytes <= r.end && (!write || r.writable);
  };
  if (last_region && holds(*last_region)) return (u8*)address;
  for (const Region& r : regions) {
    if (!holds(r)) continue;
    last_region = &r;
    return (u8*)address;
  }
  return nullptr;
}

u8* Machine::global(u64 address, u64 bytes, bool write, Warp* w) {
  if (u8* p = global_quiet(address, bytes, write)) return p;
  std::string near;
  for (const Region& r : regions) {
    i64 before = i64(r.begin - address), after = i64(address - r.end);
    if (std::abs(before) < 4096 || std::abs(after) < 4096) {
      near = text(", %lld bytes from the start of argument %u of %llu bytes",
                  (long long)(address - r.begin), r.index, (unsigned long long)(r.end - r.begin));
    }
  }
  throw Fault("out-of-bounds",
              text("%s: %s of %llu bytes of global memory at 0x%llx%s",
                   w ? w->name().c_str() : "a copy", write ? "write" : "read",
                   (unsigned long long)bytes, (unsigned long long)address, near.c_str()));
}

Cta& Machine::cta_at(Cta& from, u32 address, const char* what) {
  u32 rank = address >> kRankShift;
  if (rank >= from.cluster->ctas.size()) {
    throw Fault("out-of-bounds", text("%s: shared address 0x%x names CTA %u of a cluster of %zu",
                                      what, address, rank, from.cluster->ctas.size()));
  }
  Cta& cta = *from.cluster->ctas[rank];
  if (cta.exited) {
    throw Fault("exited-cta", text("%s: shared memory of CTA %u, which has exited", what, rank));
  }
  return cta;
}

void Machine::check_shared(Cta& cta, u32 offset, u32 bytes, const char* what) {
  if (offset < kReservedSmem || offset + u64(bytes) > cta.smem.size()) {
    throw Fault("out-of-bounds", text("%s: %u bytes of shared memory at 0x%x of %zu", what, bytes,
                                      offset, cta.smem.size()));
  }
}

u8* Machine::shared(Warp& w, u32 address, u32 bytes, bool write, bool atomic) {
  Cta& cta = cta_at(*w.cta, address, w.name().c_str());
  u32 offset = address & kOffsetMask;
  check_shared(cta, offset, bytes, w.name().c_str());
  for (u32 done = 0; done < bytes;) {
    u32 first = (offset + done) % 16, count = std::min(16 - first, bytes - done);
    u8 words = word_mask(first, count);
    u16 mask = byte_mask(first, count);
    size_t cell = (offset + done) / 16;
    Conflict c =
        write ? cta.shadow.write(cell, words, mask, w.agent, w.next_time(), w.know, Proxy::kGeneric,
                                 atomic)
              : cta.shadow.read(cell, words, mask, w.agent, w.next_time(), w.know, Proxy::kGeneric);
    if (c.kind) {
      report(c, *cta.cluster, w.name() + (write ? ": write" : ": read"),
             text(" of shared memory 0x%x", address + done));
    }
    done += count;
  }
  if (write) {
    auto it = cta.mbarriers.lower_bound(offset >= 7 ? offset - 7 : 0);
    if (it != cta.mbarriers.end() && it->first < offset + bytes) {
      hazard("mbarrier", text("%s: store into the mbarrier at 0x%x", w.name().c_str(), it->first));
    }
  }
  return cta.smem.data() + offset;
}

void Machine::async_access(Cta& cta, u32 offset, u32 bytes, bool write, Agent who, u32 time,
                           const Knowledge& know, const char* what, bool check_written) {
  check_shared(cta, offset, bytes, what);
  for (u32 done = 0; done < bytes;) {
    u32 first = (offset + done) % 16, count = std::min(16 - first, bytes - done);
    u8 words = word_mask(first, count);
    u16 mask = byte_mask(first, count);
    size_t cell = (offset + done) / 16;
    Conflict c =
        write ? cta.shadow.write(cell, words, mask, who, time, know, Proxy::kAsync)
              : cta.shadow.read(cell, words, mask, who, time, know, Proxy::kAsync, check_written);
    if (c.kind) {
      report(c, *cta.cluster, std::string(what) + (write ? ": write" : ": read"),
             text(" of shared memory 0x%x of CTA %u", offset + done, cta.rank));
    }
    done += count;
  }
}

namespace {

// The memory behind an address of one lane.
u8* locate(Machine& m, Warp& w, u32 space, u64 address, u32 bytes, bool write, int lane,
           bool atomic = false) {
  if (address % bytes) {
    throw Fault("misaligned", text("%s: %u bytes at address 0x%llx", w.name().c_str(), bytes,
                                   (unsigned long long)address));
  }
  u64 aperture = address & kApertureMask;
  if (space == kGeneric) {
    space = aperture == kSharedAperture  ? kSharedCluster
            : aperture == kLocalAperture ? kLocal
                                         : kGlobal;
  }
  switch (space) {
    case kSharedCta:
    case kSharedCluster:
      return m.shared(w, u32(address), bytes, write, atomic);
    case kLocal: {
      u64 offset = address & ~kApertureMask;
      if (offset + bytes > m.local_bytes) throw Fault("out-of-bounds", w.name() + ": local memory");
      if (w.local.empty()) w.local.assign(32, std::vector<u8>(m.local_bytes));
      return w.local[lane].data() + offset;
    }
    default: {
      bool param = address >= (u64)m.params.data() &&
                   address + bytes <= (u64)m.params.data() + m.params.size();
      if (param && !write) return (u8*)address;
      u8* p = m.global(address, bytes, write, &w);
      if (m.launch.pdl && space != kConst && w.know.seen.of(0) == 0) {
        m.hazard("grid-dependency", w.name() + ": global memory before griddepcontrol.wait");
      }
      return p;
    }
  }
}

// A vector is one access and is aligned as a whole.
void require_aligned(Warp& w, u64 where, u32 bytes) {
  if (where % bytes) {
    throw Fault("misaligned", text("%s: vector of %u bytes at 0x%llx", w.name().c_str(), bytes,
                                   (unsigned long long)where));
  }
}

}  // namespace

void Machine::load(Warp& w, const Instr& in, u32 lanes) {
  u32 bytes = kTypeBits[in.type] / 8, count = in.count - 1;
  const Operand& base = operand(in, 0);
  bool sign = Type(in.type) == Type::S8 || Type(in.type) == Type::S16;
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    u64 where = address(w, base, l);
    require_aligned(w, where, bytes * count);
    for (u32 i = 0; i < count; i++) {
      const u8* p = locate(*this, w, in.mod[0], where + i * bytes, bytes, false, l);
      const Operand& dest = operand(in, 1 + i);
      if (!dest.bits) continue;
      u64 value = 0;
      memcpy(&value, p, std::min(bytes, 8u));
      if (sign) value = u64(bytes == 1 ? i64(int8_t(value)) : i64(int16_t(value)));
      if (Type(in.type) == Type::S32 && dest.bits == 64) value = u64(i64(i32(value)));
      if (dest.bits == 128) {
        memcpy(at(w, dest) + 16 * l, p, 16);
      } else if (dest.bits == 64) {
        ((u64*)at(w, dest))[l] = value;
      } else {
        ((u32*)at(w, dest))[l] = u32(value);
      }
    }
  }
}

void Machine::store(Warp& w, const Instr& in, u32 lanes) {
  u32 bytes = kTypeBits[in.type] / 8, count = in.count - 1;
  const Operand& base = operand(in, 0);
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    u64 where = address(w, base, l);
    require_aligned(w, where, bytes * count);
    for (u32 i = 0; i < count; i++) {
      u8* p = locate(*this, w, in.mod[0], where + i * bytes, bytes, true, l);
      const Operand& source = operand(in, 1 + i);
      if (source.bits == 128) {
        memcpy(p, at(w, source) + 16 * l, 16);
      } else {
        u64 value = lane(w, source, l);
        memcpy(p, &value, bytes);
      }
    }
  }
  progress++;
}

void Machine::atomic(Warp& w, const Instr& in, u32 lanes) {
  enum { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kCas, kInc, kDec };
  Type type = Type(in.type);
  u32 bytes = kTypeBits[in.type] / 8;
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    u8* p = locate(*this, w, in.mod[0], address(w, operand(in, 1), l), bytes, true, l, true);
    u64 old = 0;
    memcpy(&old, p, bytes);
    u64 x = lane(w, operand(in, 2), l), next = old;
    bool is_signed = type == Type::S32 || type == Type::S64;
    i64 so = bytes == 4 ? i64(i32(old)) : i64(old), sx = bytes == 4 ? i64(i32(x)) : i64(x);
    switch (in.mod[1]) {
      case kAdd:
        if (type == Type::F32) {
          float f, g;
          u32 fb = u32(old), gb = u32(x);
          memcpy(&f, &fb, 4), memcpy(&g, &gb, 4);
          f += g;
          memcpy(&fb, &f, 4);
          next = fb;
        } else if (kTypeBits[in.type] >= 32 && type != Type::F64) {
          next = old + x;
        } else {
          throw Fault("unknown", "atom.add of this type is not modelled");
        }
        break;
      case kMin:
        next = is_signed ? u64(std::min(so, sx)) : std::min(old, x);
        break;
      case kMax:
        next = is_signed ? u64(std::max(so, sx)) : std::max(old, x);
        break;
      case kAnd:
        next = old & x;
        break;
      case kOr:
        next = old | x;
        break;
      case kXor:
        next = old ^ x;
        break;
      case kExch:
        next = x;
        break;
      case kCas:
        next = old == x ? lane(w, operand(in, 3), l) : old;
        break;
      case kInc:
        next = old >= x ? 0 : old + 1;
        break;
      case kDec:
        next = old == 0 || old > x ? x : old - 1;
        break;
    }
    memcpy(p, &next, bytes);
    const Operand& dest = operand(in, 0);
    if (dest.bits == 64) ((u64*)at(w, dest))[l] = old;
    if (dest.bits == 32) ((u32*)at(w, dest))[l] = u32(old);
  }
  progress++;
}

}  // namespace emu
