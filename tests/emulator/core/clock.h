// Who has seen what: vector clocks, and the record of accesses to shared and tensor memory.
//
// An agent is anything that touches memory in its own order: a warp, a warp's bulk-copy groups,
// its wgmma groups, its tcgen05 operations, or the transactions of one mbarrier. An access is
// stamped with its agent and that agent's time; another agent may conflict with it only once its
// own clock has reached that time, which it learns at barriers and waits.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "program.h"

namespace emu {

using Agent = u16;

struct Clock {
  std::vector<u32> time;

  u32 of(Agent a) const { return a < time.size() ? time[a] : 0; }
  void raise(Agent a, u32 t) {
    if (a >= time.size()) time.resize(a + 1, 0);
    time[a] = std::max(time[a], t);
  }
  void join(const Clock& other) {
    if (other.time.size() > time.size()) time.resize(other.time.size(), 0);
    for (size_t i = 0; i < other.time.size(); i++) time[i] = std::max(time[i], other.time[i]);
  }
};

// What a thread knows: the accesses ordered before it, and of those the ones that a proxy fence
// has made visible to the asynchronous proxy.
struct Knowledge {
  Clock seen, fenced;
  void join(const Knowledge& other) {
    seen.join(other.seen);
    fenced.join(other.fenced);
  }
};

enum class Proxy : u8 { kGeneric, kAsync };

struct Conflict {
  enum Kind { kNone, kUnwritten, kUnordered, kUnfenced, kPending } kind = kNone;
  Agent other = 0;
  bool other_wrote = false;
};

// Accesses to one memory in cells of `kCellBytes` (for tensor memory: of one 32-bit column of 16
// lanes). A cell keeps its latest accesses; conflicts are found by words of a cell.
class Shadow {
 public:
  void reset(size_t cells) {
    cells_.assign(cells, Cell{});
    written_.assign(cells, 0);
    pending_.assign(cells, 0);
  }

  // An access to the words `words` (a 4-bit mask) and bytes `bytes` (16-bit mask) of a cell.
  Conflict read(size_t cell, u8 words, u16 bytes, Agent who, u32 time, const Knowledge& know,
                Proxy proxy, bool check_written = true) {
    Cell& c = cells_[cell];
    Conflict conflict;
    if (check_written && (written_[cell] & bytes) != bytes) conflict.kind = Conflict::kUnwritten;
    if (pending_[cell]) conflict.kind = Conflict::kPending;
    Access* mine = nullptr;
    for (int i = 0; i < c.count; i++) {
      Access& a = c.access[i];
      if (!(a.words & words)) continue;
      if (a.write) {
        conflict = ordered(a, who, know, proxy, conflict);
      } else if (a.agent == who) {
        mine = &a;
      }
    }
    if (mine) {
      mine->time = std::max(mine->time, time);
      mine->words |= words;
    } else {
      c.add({who, words, 0, time, 0, 0}, know);
    }
    return conflict;
  }

  // `atomic` writes do not conflict with one another.
  Conflict write(size_t cell, u8 words, u16 bytes, Agent who, u32 time, const Knowledge& know,
                 Proxy proxy, bool atomic = false) {
    Cell& c = cells_[cell];
    Conflict conflict;
    if (pending_[cell]) conflict.kind = Conflict::kPending;
    int kept = 0;
    for (int i = 0; i < c.count; i++) {
      Access a = c.access[i];
      if (a.words & words) {
        // A write after a read needs order but no proxy fence.
        if (!(atomic && a.atomic)) {
          conflict = ordered(a, who, know, a.write ? proxy : Proxy::kGeneric, conflict);
        }
        if (!atomic || (a.atomic && a.agent == who)) a.words &= ~words;
      }
      if (a.words) c.access[kept++] = a;
    }
    c.count = kept;
    c.add({who, words, 1, time, proxy == Proxy::kAsync, atomic}, know);
    written_[cell] |= bytes;
    return conflict;
  }

  void set_pending(size_t cell, int delta) { pending_[cell] += delta; }
  void forget(size_t cell) {
    cells_[cell].count = 0;
    written_[cell] = 0;
  }

 private:
  struct Access {
    Agent agent;
    u8 words;
    u8 write;
    u32 time;
    u8 by_async;
    u8 atomic;
  };
  struct Cell {
    static constexpr int kMost = 10;
    u8 count = 0;
    Access access[kMost];

    void add(Access a, const Knowledge& know) {
      if (count == kMost) {
        // Forget a read that is already ordered, or else the oldest access.
        int victim = 0;
        for (int i = 0; i < count; i++) {
          if (know.seen.of(access[i].agent) >= access[i].time) victim = i;
        }
        std::copy(access + victim + 1, access + count, access + victim);
        count--;
      }
      access[count++] = a;
    }
  };

  static Conflict ordered(const Access& a, Agent who, const Knowledge& know, Proxy proxy,
                          Conflict before) {
    if (a.agent == who) return before;
    if (know.seen.of(a.agent) < a.time) return {Conflict::kUnordered, a.agent, bool(a.write)};
    bool crosses = proxy == Proxy::kAsync && a.write && !a.by_async;
    if (crosses && know.fenced.of(a.agent) < a.time) return {Conflict::kUnfenced, a.agent, true};
    return before;
  }

  std::vector<Cell> cells_;
  std::vector<u16> written_;
  std::vector<u16> pending_;
};

}  // namespace emu
