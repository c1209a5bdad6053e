// mbarriers, named barriers, cluster barriers and fences; what a thread learns at each.
#include "machine.h"

namespace emu {

void Warp::release() { know.seen.raise(agent, know.seen.of(agent) + 1); }

Mbarrier& Machine::mbarrier(Cta& cta, u32 offset, const char* what) {
  if (offset % 8) throw Fault("misaligned", text("%s: mbarrier at 0x%x", what, offset));
  auto it = cta.mbarriers.find(offset);
  if (it == cta.mbarriers.end()) {
    throw Fault("mbarrier",
                text("%s: no mbarrier at 0x%x of CTA %u was initialised", what, offset, cta.rank));
  }
  return it->second;
}

void Machine::mbarrier_init(Warp& w, u32 address, u32 count) {
  if (address >> kRankShift != w.cta->rank) throw Fault("mbarrier", "init in another CTA");
  u32 offset = address & kOffsetMask;
  shared(w, address, 8, true);
  if (offset % 8) throw Fault("misaligned", text("mbarrier.init at 0x%x", offset));
  if (count == 0 || count >= 1u << 20) throw Fault("mbarrier", text("init with count %u", count));
  Mbarrier& b = w.cta->mbarriers[offset];
  Agent agent = b.agent ? b.agent
                        : w.cta->cluster->new_agent(
                              text("copies of mbarrier 0x%x of CTA %u", offset, w.cta->rank));
  b = Mbarrier{};
  b.count = count;
  b.pending = count;
  b.agent = agent;
  b.initialiser = &w;
  b.init_time = w.next_time();
}

// A thread that uses an mbarrier must know that it has been initialised.
static void check_known(Machine& m, Warp& w, Cta& cta, u32 offset, Mbarrier& b) {
  if (w.know.seen.of(b.initialiser->agent) < b.init_time) {
    m.hazard("mbarrier", text("%s: use of mbarrier 0x%x of CTA %u, not ordered after its init",
                              w.name().c_str(), offset, cta.rank));
  }
  if (&cta != w.cta && !b.fenced) {
    m.hazard("mbarrier", text("%s: mbarrier 0x%x of CTA %u lacks fence.mbarrier_init",
                              w.name().c_str(), offset, cta.rank));
  }
}

void Machine::async_use(Cta& cta, u32 offset, const char* what, Warp& w) {
  Mbarrier& b = mbarrier(cta, offset, what);
  check_known(*this, w, cta, offset, b);
  bool fenced = b.fenced || w.know.fenced.of(b.initialiser->agent) >= b.init_time;
  if (!fenced) {
    hazard("mbarrier", text("%s: mbarrier 0x%x of CTA %u is used by the async proxy without "
                            "fence.mbarrier_init",
                            what, offset, cta.rank));
  }
}

void Machine::mbarrier_check_phase(Mbarrier& b) {
  if (b.pending != 0 || b.tx != 0) return;
  b.phase++;
  b.pending = b.count;
  b.completed.join(b.arrived);
  b.completed.seen.raise(b.agent, b.phase);
  b.completed.fenced.raise(b.agent, b.phase);
  progress++;
  barrier_phases++;
}

void Machine::mbarrier_arrive(Cta& cta, u32 offset, u32 count, const Knowledge& from) {
  Mbarrier& b = mbarrier(cta, offset, "arrive");
  if (count == 0 || count > b.pending) {
    throw Fault("over-arrive",
                text("mbarrier 0x%x of CTA %u: %u arrivals where phase %u waits for %lld of %u",
                     offset, cta.rank, count, b.phase, (long long)b.pending, b.count));
  }
  b.arrived.join(from);
  b.pending -= count;
  progress++;
  mbarrier_check_phase(b);
}

void Machine::mbarrier_expect(Cta& cta, u32 offset, i64 bytes) {
  Mbarrier& b = mbarrier(cta, offset, "expect_tx");
  b.tx += bytes;
  progress++;
  if (std::abs(b.tx) >= 1 << 20) {
    throw Fault("transaction", text("mbarrier 0x%x of CTA %u: %lld bytes expected", offset,
                                    cta.rank, (long long)b.tx));
  }
}

void Machine::mbarrier_complete_tx(Cta& cta, u32 offset, i64 bytes) {
  Mbarrier& b = mbarrier(cta, offset, "complete_tx");
  b.tx -= bytes;
  progress++;
  if (std::abs(b.tx) >= 1 << 20) {
    throw Fault("transaction", text("mbarrier 0x%x of CTA %u: %lld bytes outstanding", offset,
                                    cta.rank, (long long)b.tx));
  }
  mbarrier_check_phase(b);
}

namespace {

// Counts a warp in and wakes everyone when the barrier is full. True once the warp may leave.
bool gather(Machine& m, NamedBarrier& b, Warp& w, Ticket& g, u32 expected, bool wait) {
  if (!g.arrived) {
    if (b.arrived && b.expected != expected) {
      throw Fault("barrier", text("%s: barrier for %u threads, but others expect %u",
                                  w.name().c_str(), expected, b.expected));
    }
    b.expected = expected;
    b.arrived += 32;
    b.gathering.join(w.know);
    w.release();
    g.generation = b.generation;
    m.progress++;
    if (b.arrived > b.expected) {
      throw Fault("over-arrive", text("%s: %u threads at a barrier for %u", w.name().c_str(),
                                      b.arrived, b.expected));
    }
    if (b.arrived == b.expected) {
      b.released.join(b.gathering);
      b.gathering = Knowledge{};
      b.arrived = 0;
      b.generation++;
    }
    if (!wait) return true;
    g.arrived = true;
  }
  if (b.generation == g.generation) return false;
  g.arrived = false;
  w.know.join(b.released);
  return true;
}

u32 cluster_threads(const Cluster& c) {
  u32 warps = 0;
  for (const auto& cta : c.ctas) warps += cta->warps.size();
  return warps * 32;
}

}  // namespace

bool Machine::execute_barrier(Warp& w, Group& g, const Instr& in, u32 lanes) {
  Cta& cta = *w.cta;
  int first = first_lane(lanes);
  switch (Op(in.op)) {
    case Op::BAR_SYNC:
    case Op::BAR_ARRIVE: {
      u32 id = u32(lane(w, operand(in, 0), first));
      u32 threads = in.count > 1 ? u32(lane(w, operand(in, 1), first)) : cta.warps.size() * 32;
      if (id >= 16 || threads % 32 || threads == 0) {
        throw Fault("barrier",
                    text("%s: barrier %u for %u threads", w.name().c_str(), id, threads));
      }
      bool wait = Op(in.op) == Op::BAR_SYNC;
      if (gather(*this, cta.named[id], w, g.ticket, threads, wait)) return true;
      w.waiting = text("barrier %u (%u of %u threads)", id, cta.named[id].arrived, threads);
      return false;
    }
    case Op::CLUSTER_ARRIVE:
      if (w.cluster_ticket.arrived)
        throw Fault("barrier", w.name() + ": arrives at the cluster twice");
      gather(*this, cta.cluster->barrier, w, w.cluster_ticket, cluster_threads(*cta.cluster),
             false);
      w.cluster_ticket.arrived = true;
      return true;
    case Op::CLUSTER_WAIT: {
      NamedBarrier& b = cta.cluster->barrier;
      if (!w.cluster_ticket.arrived) throw Fault("barrier", w.name() + ": waits without an arrive");
      if (b.generation == w.cluster_ticket.generation) {
        w.waiting = text("the cluster barrier (%u of %u threads)", b.arrived, b.expected);
        return false;
      }
      w.cluster_ticket.arrived = false;
      w.know.join(b.released);
      return true;
    }
    case Op::FENCE:
    case Op::TMEM_FENCE:
      return true;
    case Op::FENCE_PROXY_ASYNC:
      w.know.fenced.join(w.know.seen);
      return true;
    case Op::FENCE_MBARRIER_INIT:
      for (auto& [offset, b] : cta.mbarriers) {
        if (w.know.seen.of(b.initialiser->agent) >= b.init_time) b.fenced = true;
      }
      return true;
    case Op::MBAR_INIT:
      for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        mbarrier_init(w, u32(address(w, operand(in, 0), l)), u32(lane(w, operand(in, 1), l)));
      }
      return true;
    case Op::MBAR_INVAL: {
      u32 address = uniform_shared(w, operand(in, 0), lanes, "mbarrier.inval");
      mbarrier(cta, address & kOffsetMask, "inval");
      cta.mbarriers.erase(address & kOffsetMask);
      return true;
    }
    case Op::MBAR_ARRIVE:
    case Op::MBAR_ARRIVE_TX:
    case Op::MBAR_EXPECT_TX:
    case Op::MBAR_COMPLETE_TX: {
      Op op = Op(in.op);
      bool arrives = op == Op::MBAR_ARRIVE || op == Op::MBAR_ARRIVE_TX;
      const Operand& where = operand(in, arrives ? 1 : 0);
      // Every active lane arrives.
      for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u32 address = u32(this->address(w, where, l));
        Cta& target = cta_at(cta, address, w.name().c_str());
        u32 offset = address & kOffsetMask;
        Mbarrier& b = mbarrier(target, offset, w.name().c_str());
        check_known(*this, w, target, offset, b);
        u32 phase = b.phase;
        u32 value =
            in.count > (arrives ? 2u : 1u) ? u32(lane(w, operand(in, arrives ? 2 : 1), l)) : 1;
        if (op == Op::MBAR_ARRIVE_TX || op == Op::MBAR_EXPECT_TX) {
          mbarrier_expect(target, offset, value);
        }
        if (op == Op::MBAR_COMPLETE_TX) mbarrier_complete_tx(target, offset, value);
        if (arrives) {
          u32 count = op == Op::MBAR_ARRIVE ? value : 1;
          mbarrier_arrive(target, offset, count, w.know);
          const Operand& state = operand(in, 0);
          if (state.bits == 64) ((u64*)at(w, state))[l] = phase;
        }
      }
      w.release();
      return true;
    }
    case Op::MBAR_TEST:
    case Op::MBAR_TRY:
    case Op::MBAR_TEST_PARITY:
    case Op::MBAR_TRY_PARITY: {
      bool parity = Op(in.op) == Op::MBAR_TEST_PARITY || Op(in.op) == Op::MBAR_TRY_PARITY;
      u32 finished = 0;
      std::string waiting;
      const Mbarrier* last = nullptr;
      for (u32 rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        u32 at = u32(address(w, operand(in, 1), l)), offset = at & kOffsetMask;
        if (at >> kRankShift != cta.rank) {
          throw Fault("mbarrier", w.name() + ": waits on another CTA's mbarrier");
        }
        Mbarrier& b = mbarrier(cta, offset, w.name().c_str());
        u64 phase = lane(w, operand(in, 2), l);
        if (parity && phase > 1) throw Fault("mbarrier", text("parity %llu", (long long)phase));
        if (rest == lanes) check_known(*this, w, cta, offset, b);
        if (parity ? (b.phase & 1) != phase : b.phase > phase) {
          // What one lane learns the warp knows: lanes are not told apart.
          if (last != &b) w.know.join(b.completed);
          last = &b;
          finished |= 1u << l;
        } else if (waiting.empty()) {
          waiting = text("mbarrier 0x%x parity %llu (phase %u, pending %lld of %u, %lld bytes)",
                         offset, (unsigned long long)phase, b.phase, (long long)b.pending, b.count,
                         (long long)b.tx);
        }
      }
      // A try may block and may give up; both happen, by the scheduler's choice. A test blocks
      // here too, until something changes, so that polling is no endless loop.
      bool spurious = options.mode != u32(Mode::kInOrder) && random() % 4 == 0;
      if (!finished && !w.give_up && !spurious) {
        w.waiting = waiting;
        w.timed_wait = true;
        return false;
      }
      w.give_up = false;
      u32* dest = (u32*)this->at(w, operand(in, 0));
      *dest = (*dest & ~lanes) | finished;
      return true;
    }
    default:
      throw Fault("unknown", "barrier operation");
  }
}

}  // namespace emu
