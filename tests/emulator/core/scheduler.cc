// Which warp runs next, when what is in flight completes, and when nothing can.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emu {

std::string Warp::name() const {
  std::string where = text("CTA (%u,%u,%u) warp %d", cta->id[0], cta->id[1], cta->id[2], id);
  if (groups.empty()) return where;
  return where + text(" at line %d", cta->cluster->machine->code[groups[0].pc].line);
}

namespace {

void fill_specials(Machine& m, Warp& w) {
  const LaunchConfig& c = m.launch;
  Cta& cta = *w.cta;
  u32 cluster_ctaid[3] = {cta.rank % c.cluster[0], cta.rank / c.cluster[0] % c.cluster[1],
                          cta.rank / (c.cluster[0] * c.cluster[1])};
  for (const Special& s : m.specials) {
    u32* out = (u32*)(w.registers.data() + s.offset);
    u64* wide = (u64*)out;
    for (u32 l = 0; l < 32; l++) {
      u32 tid = w.id * 32 + l, plane = c.block[0] * c.block[1];
      u32 axis_value[3] = {tid % c.block[0], tid / c.block[0] % c.block[1], tid / plane};
      auto axis = [&](SpecialKind base) { return s.kind - base; };
      auto in = [&](SpecialKind base) { return s.kind >= base && s.kind < base + 3; };
      u32 v = 0;
      if (in(kTidX))
        v = axis_value[axis(kTidX)];
      else if (in(kNtidX))
        v = c.block[axis(kNtidX)];
      else if (in(kCtaidX))
        v = cta.id[axis(kCtaidX)];
      else if (in(kNctaidX))
        v = c.grid[axis(kNctaidX)];
      else if (in(kClusterIdX))
        v = cta.id[axis(kClusterIdX)] / c.cluster[axis(kClusterIdX)];
      else if (in(kNClusterIdX))
        v = c.grid[axis(kNClusterIdX)] / c.cluster[axis(kNClusterIdX)];
      else if (in(kClusterCtaidX))
        v = cluster_ctaid[axis(kClusterCtaidX)];
      else if (in(kClusterNctaidX))
        v = c.cluster[axis(kClusterNctaidX)];
      switch (s.kind) {
        case kClusterCtarank:
          v = cta.rank;
          break;
        case kClusterNctarank:
          v = cta.cluster->ctas.size();
          break;
        case kLaneid:
          v = l;
          break;
        case kWarpid:
          v = w.id;
          break;
        case kNwarpid:
          v = cta.warps.size();
          break;
        case kSmid:
          v = 0;
          break;
        case kNsmid:
          v = 1;
          break;
        case kLanemaskEq:
          v = 1u << l;
          break;
        case kLanemaskLt:
          v = (1u << l) - 1;
          break;
        case kLanemaskLe:
          v = (2u << l) - 1;
          break;
        case kLanemaskGt:
          v = ~((2u << l) - 1);
          break;
        case kLanemaskGe:
          v = ~((1u << l) - 1);
          break;
        case kDynamicSmemSize:
          v = c.dynamic_smem;
          break;
        case kTotalSmemSize:
          v = cta.smem.size() - kReservedSmem;
          break;
        case kIsExplicitCluster:
          v = cta.cluster->ctas.size() > 1;
          break;
        case kSharedAddress:
          v = cta.rank << kRankShift | u32(s.value);
          break;
      }
      switch (s.kind) {
        case kParamAddress:
          wide[l] = u64(m.params.data()) + s.value;
          break;
        case kLocalAddress:
          wide[l] = kLocalAperture | s.value;
          break;
        case kGlobalAddress:
          wide[l] = s.value;
          break;
        default:
          out[l] = v;
      }
    }
  }
}

}  // namespace

void Machine::start_cluster() {
  const LaunchConfig& c = launch;
  auto cluster = std::make_unique<Cluster>();
  cluster->machine = this;
  u64 index = next_cluster++;
  u32 wide = c.grid[0] / c.cluster[0], high = c.grid[1] / c.cluster[1];
  u32 at[3] = {u32(index % wide), u32(index / wide % high), u32(index / (u64(wide) * high))};
  u32 threads = c.block[0] * c.block[1] * c.block[2];
  for (int i = 0; i < 3; i++) cluster->first[i] = at[i] * c.cluster[i];
  for (u32 rank = 0; rank < c.cluster[0] * c.cluster[1] * c.cluster[2]; rank++) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = cluster.get();
    cta->rank = rank;
    cta->id[0] = cluster->first[0] + rank % c.cluster[0];
    cta->id[1] = cluster->first[1] + rank / c.cluster[0] % c.cluster[1];
    cta->id[2] = cluster->first[2] + rank / (c.cluster[0] * c.cluster[1]);
    // Unwritten memory holds NaN in every float format, so that its use shows in the results.
    cta->smem.assign((static_smem + c.dynamic_smem + 15) / 16 * 16, 0xFF);
    cta->shadow.reset(cta->smem.size() / 16);
    cta->tmem.owner.assign(kTmemColumns, -1);
    u32 warps = (threads + 31) / 32;
    cta->live_warps = warps;
    cta->wgmma.resize((warps + 3) / 4);
    cta->wgmma_base.assign((warps + 3) / 4, 0);
    for (u32 i = 0; i < warps; i++) {
      auto w = std::make_unique<Warp>();
      w->cta = cta.get();
      w->id = i;
      w->lanes = threads - i * 32 >= 32 ? ~0u : (1u << (threads - i * 32)) - 1;
      w->live = w->lanes;
      w->groups.push_back({0, w->live, {}});
      w->registers.assign(register_bytes + 512, 0xFF);
      std::string name = text("CTA %u warp %u", rank, i);
      w->agent = cluster->new_agent(name);
      w->bulk_reads = cluster->new_agent("bulk stores of " + name);
      w->wgmma = cluster->new_agent("wgmma of " + name);
      w->mma = cluster->new_agent("tcgen05 operations of " + name);
      w->tmem_stores = cluster->new_agent("tcgen05.st of " + name);
      w->tmem_loads = cluster->new_agent("tcgen05.ld of " + name);
      w->know.seen.raise(w->agent, 1);
      w->register_count = options.entry_registers;
      cta->warps.push_back(std::move(w));
    }
    cluster->ctas.push_back(std::move(cta));
  }
  for (auto& cta : cluster->ctas) {
    for (auto& w : cta->warps) fill_specials(*this, *w);
  }
  clusters.push_back(std::move(cluster));
}

void Machine::issue(Async a) {
  async_count++;
  if (Mode(options.mode) == Mode::kInOrder) {
    a.complete();
    progress++;
    return;
  }
  in_flight.push_back(std::move(a));
}

// Lanes may go on only when all that the instruction needs have arrived.
bool Machine::converged(Warp& w, const Instr& in, u32 lanes) {
  u32 need = lanes;
  if (in.flags & kAligned) need = w.live;
  if (in.flags & kMembers) {
    need = u32(lane(w, operand(in, in.count - 1), first_lane(lanes)));
    need &= w.lanes;
    if (need & ~w.live) {
      throw Fault("convergence", w.name() + ": names lanes that have exited");
    }
    if (lanes & ~need)
      throw Fault("convergence", w.name() + ": executed by lanes it does not name");
  }
  return (need & ~lanes) == 0;
}

// Whether the options hold the warp back at this instruction.
bool Machine::held(Warp& w, u32 pc) {
  const Hold& hold = options.hold;
  if (pc != hold.held || w.times_held >= hold.times) return false;
  if (w.cta->cluster->times_awaited > hold.ratio * (w.times_held + 1)) return false;
  w.waiting = text("line %d, as it is told to", code[hold.awaited].line);
  return true;
}

void Machine::note(Warp& w, u32 pc) {
  if (pc == options.hold.held) w.times_held++;
  if (pc == options.hold.awaited) {
    w.cta->cluster->times_awaited++;
    progress++;
  }
}

void Machine::exit_lanes(Warp& w, u32 lanes) {
  w.live &= ~lanes;
  progress++;
  if (w.live) return;
  Cta& cta = *w.cta;
  if (w.bulk_open_ops) hazard("bulk-group", w.name() + ": exits with bulk copies not committed");
  if (w.wgmma_open) hazard("wgmma", w.name() + ": exits with wgmma not committed");
  if (--cta.live_warps == 0) cta_exit(cta);
}

bool Machine::execute(Warp& w, Group& g, const Instr& in, u32 lanes) {
  switch (Op(in.op)) {
    case Op::NOP:
    case Op::PREFETCH:
      return true;
    case Op::TRAP:
      throw Fault("trap", w.name() + ": trap");
    case Op::LD:
      load(w, in, lanes);
      return true;
    case Op::ST:
      store(w, in, lanes);
      return true;
    case Op::ATOM:
      atomic(w, in, lanes);
      return true;
    case Op::GRID_WAIT:
      w.know.seen.raise(0, 1);
      return true;
    case Op::GRID_LAUNCH:
      return true;
    case Op::SETMAXNREG_DEC:
    case Op::SETMAXNREG_INC: {
      u32 want = in.mod[0];
      if (want < 24 || want > 256 || want % 8) {
        throw Fault("setmaxnreg", text("%s: %u registers", w.name().c_str(), want));
      }
      if (!options.entry_registers) return true;
      i64 more = (i64(want) - i64(w.register_count)) * 32;
      bool increase = Op(in.op) == Op::SETMAXNREG_INC;
      if (increase != (more >= 0) && more != 0) {
        throw Fault("setmaxnreg",
                    text("%s: from %u to %u registers", w.name().c_str(), w.register_count, want));
      }
      if (more > w.cta->register_pool) {
        w.waiting = text("setmaxnreg.inc to %u: the pool holds %lld registers, needs %lld", want,
                         (long long)w.cta->register_pool, (long long)more);
        return false;
      }
      w.cta->register_pool -= more;
      w.register_count = want;
      progress++;
      return true;
    }
    case Op::BULK_WAIT:
    case Op::BULK_WAIT_READ:
      return bulk_wait(w, in);
    default:
      break;
  }
  Op op = Op(in.op);
  // Each thread that executes one of these issues it; a warp must elect one.
  bool once = op == Op::TMA_LOAD || op == Op::BULK_LOAD || op == Op::TMEM_MMA ||
              op == Op::TMEM_COMMIT || op == Op::CLC_TRY_CANCEL;
  if (once && lanes & (lanes - 1)) {
    hazard("multi-issue", text("%s: issued by lanes 0x%08x", w.name().c_str(), lanes));
  }
  if (op >= Op::BAR_SYNC && op <= Op::MBAR_TRY_PARITY) return execute_barrier(w, g, in, lanes);
  if (op >= Op::ELECT && op <= Op::MOVMATRIX) return execute_warp_wide(w, in, lanes);
  if (op >= Op::WGMMA && op <= Op::WGMMA_WAIT) return execute_wgmma(w, in);
  if (op >= Op::TMEM_ALLOC && op <= Op::TMEM_FENCE) return execute_tmem(w, in, lanes);
  if (op < Op::BRA || (op >= Op::MAPA && op <= Op::ISSPACEP)) return execute_alu(w, in, lanes);
  execute_copy(w, in, lanes);
  return true;
}

// Runs a warp for up to `budget` instructions, or until it must wait.
void Machine::step(Warp& w, u32 budget) {
  w.waiting.clear();
  while (budget-- && !w.groups.empty()) {
    // The lanes that are furthest behind go first; those that wait for others stand back.
    std::vector<Group>& groups = w.groups;
    if (groups.size() > 1) {
      std::sort(groups.begin(), groups.end(),
                [](const Group& a, const Group& b) { return a.pc < b.pc; });
      for (size_t i = 0; i + 1 < groups.size();) {
        if (groups[i].pc == groups[i + 1].pc) {
          groups[i].lanes |= groups[i + 1].lanes;
          groups.erase(groups.begin() + i + 1);
        } else {
          i++;
        }
      }
    }
    bool ran = false, stuck = true;
    std::string first_wait;
    for (size_t i = 0; i < groups.size() && !ran; i++) {
      if (i) std::swap(groups[0], groups[i]);
      Group& g = groups[0];
      const Instr& in = code[g.pc];
      u32 lanes = g.lanes;
      if (in.guard >= 0) {
        u32 mask = *(const u32*)(w.registers.data() + in.guard);
        lanes &= in.guard_negate ? ~mask : mask;
      }
      if (lanes == 0) {
        g.pc++;
        ran = true;
      } else if (Op(in.op) == Op::BRA) {
        if (lanes == g.lanes) {
          g.pc = in.target;
        } else {
          g.lanes &= ~lanes;
          g.pc++;
          groups.push_back({u32(in.target), lanes, {}});
        }
        ran = true;
      } else if (Op(in.op) == Op::EXIT) {
        exit_lanes(w, lanes);
        g.lanes &= ~lanes;
        g.pc++;
        if (!g.lanes) groups.erase(groups.begin());
        ran = true;
      } else if (!converged(w, in, lanes)) {
        w.waiting = text("the other lanes of the warp at line %d (has 0x%08x)", in.line, lanes);
      } else {
        if (!w.in_flight.empty() || !w.loading.empty()) check_registers(w, in);
        stuck = false;
        if (!held(w, g.pc) && execute(w, g, in, lanes)) {
          if (options.hold.times) note(w, groups[0].pc);
          groups[0].pc++;
          ran = true;
        }
      }
      if (ran) {
        w.instructions++;
        instructions++;
      } else if (i == 0) {
        first_wait = w.waiting;
      }
    }
    if (!ran) {
      if (!first_wait.empty()) w.waiting = first_wait;
      if (stuck) throw Fault("convergence", w.name() + ": waits for " + w.waiting);
      w.blocked_at = progress;
      return;
    }
    w.waiting.clear();
    w.timed_wait = false;
  }
}

std::string Machine::who_waits() {
  std::string report;
  int shown = 0;
  for (auto& cluster : clusters) {
    for (auto& cta : cluster->ctas) {
      for (auto& w : cta->warps) {
        if (w->live && shown++ < 40) report += "\n  " + w->name() + " waits for " + w->waiting;
      }
    }
  }
  return report;
}

void Machine::run() {
  const Mode mode = Mode(options.mode);
  random.seed(options.seed * 2654435761u + 12345);
  // Each seed of the random modes may starve one kind of asynchronous work and one warp.
  int starved_kind = mode == Mode::kInOrder ? -1 : int(random() % (2 * kAsyncKinds));
  int starved_warp = mode == Mode::kInOrder || options.seed % 2 == 0 ? -1 : int(random() % 8);
  u64 last_stall = 0;
  int stalls = 0;
  std::vector<Warp*> ready;
  std::vector<std::list<Async>::iterator> able;
  size_t turn = 0;

  while (true) {
    while (clusters.size() < options.resident && next_cluster < total_clusters) start_cluster();
    if (clusters.empty() && in_flight.empty()) return;

    ready.clear();
    for (auto& cluster : clusters) {
      for (auto& cta : cluster->ctas) {
        for (auto& w : cta->warps) {
          if (w->live && (w->waiting.empty() || w->blocked_at != progress || w->give_up)) {
            ready.push_back(w.get());
          }
        }
      }
    }
    able.clear();
    if (!in_flight.empty()) {
      std::set<u32> seen;
      for (auto it = in_flight.begin(); it != in_flight.end(); ++it) {
        if (it->queue == 0 || seen.insert(it->queue).second) able.push_back(it);
      }
    }

    bool complete =
        !able.empty() && (ready.empty() || (mode == Mode::kRandom && random() % 4 == 0));
    if (complete) {
      // Late: the newest first, and the starved kind last.
      size_t pick =
          mode == Mode::kAdversarial && random() % 2 ? able.size() - 1 : random() % able.size();
      for (size_t tries = 0; tries < able.size() && able[pick]->kind == starved_kind; tries++) {
        pick = (pick + 1) % able.size();
      }
      bool hold = able[pick]->kind == starved_kind && !ready.empty();
      if (!hold) {
        Async a = std::move(*able[pick]);
        in_flight.erase(able[pick]);
        a.complete();
        progress++;
      }
    } else if (!ready.empty()) {
      Warp* w;
      if (mode == Mode::kInOrder) {
        w = ready[turn++ % ready.size()];
        step(*w, 100000);
      } else {
        w = ready[random() % ready.size()];
        if (w->id == starved_warp && ready.size() > 1 && random() % 16) {
          w = ready[random() % ready.size()];
        }
        step(*w, 1 + random() % 64);
      }
    } else {
      // Nothing can run: waits that may give up do, and if that changes nothing it is a deadlock.
      stalls = last_stall == progress ? stalls + 1 : 0;
      last_stall = progress;
      bool any = false;
      for (auto& cluster : clusters) {
        for (auto& cta : cluster->ctas) {
          for (auto& w : cta->warps) {
            if (w->live && w->timed_wait) w->give_up = any = true;
          }
        }
      }
      if (!any || stalls > 64) throw Fault("deadlock", "nothing can run:" + who_waits());
    }
    if (instructions > options.max_instructions) {
      throw Fault("livelock", "too many instructions:" + who_waits());
    }

    for (auto it = clusters.begin(); it != clusters.end();) {
      bool done = true;
      for (auto& cta : (*it)->ctas) done &= cta->exited;
      // What is still in flight may yet touch this cluster.
      if (done && std::none_of(in_flight.begin(), in_flight.end(),
                               [&](const Async& a) { return a.cluster == it->get(); })) {
        for (auto& cta : (*it)->ctas) {
          u64 executed = 0;
          for (auto& w : cta->warps) executed += w->instructions;
          busiest = std::max(busiest, executed);
        }
        it = clusters.erase(it);
      } else {
        ++it;
      }
    }
  }
}

}  // namespace emu
