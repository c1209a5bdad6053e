// The machine: clusters of CTAs of warps, their memories and barriers, and what is in flight.
#pragma once
#include <array>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"
#include "program.h"
#include "tensormap.h"

namespace emu {

constexpr u64 kSharedAperture = 1ull << 56;
constexpr u64 kLocalAperture = 2ull << 56;
constexpr u64 kApertureMask = 0xFFull << 56;
// A shared address: the rank of the CTA in its cluster above an offset of 24 bits.
constexpr u32 kRankShift = 24;
constexpr u32 kOffsetMask = (1u << kRankShift) - 1;
constexpr u32 kReservedSmem = 1024;
constexpr u32 kTmemLanes = 128, kTmemColumns = 512;

// Stops the run: the program did what has no meaning.
struct Fault : std::runtime_error {
  std::string kind;
  Fault(std::string kind, const std::string& what) : std::runtime_error(what), kind(kind) {}
};

template <class... Args>
std::string text(const char* format, Args... args) {
  char buffer[512];
  snprintf(buffer, sizeof buffer, format, args...);
  return buffer;
}

enum class Mode : u32 { kInOrder, kRandom, kAdversarial };

// A warp executes instruction `held` for the nth time, n <= times, only when its cluster has
// executed instruction `awaited` more than n * ratio times.
struct Hold {
  u32 held, awaited, ratio, times;
};

struct Options {
  u32 mode;
  u32 seed;
  u32 resident;         // clusters that run at once
  u32 strict_tmem;      // tcgen05.wait::ld is needed before registers are used
  u32 allow_unwritten;  // the tensor core may read shared memory that nothing wrote
  u32 entry_registers;  // of a thread, from the cubin; 0: the register pool is not checked
  u64 max_instructions;
  Hold hold;
};

struct LaunchConfig {
  u32 grid[3], block[3], cluster[3];
  u32 dynamic_smem;
  u32 pdl;  // launched with programmatic stream serialization
};

struct Region {
  u64 begin, end;
  u32 writable;
  u32 index;
};

struct Warp;
struct Cta;
struct Cluster;
struct Machine;

struct Mbarrier {
  u32 count = 0;        // arrivals of each phase
  i64 pending = 0;      // arrivals this phase still waits for
  i64 tx = 0;           // bytes this phase still waits for
  u32 phase = 0;        // phases completed
  bool fenced = false;  // its initialisation is visible to the cluster and the async proxy
  Agent agent = 0;      // of the transactions that complete here
  Warp* initialiser = nullptr;
  u32 init_time = 0;
  Knowledge arrived, completed;
};

struct NamedBarrier {
  u32 arrived = 0, expected = 0, generation = 0;
  Knowledge gathering, released;
};

// The generation of a barrier at which a warp has arrived and not yet left.
struct Ticket {
  bool arrived = false;
  u32 generation = 0;
};

// Lanes of a warp that are at the same instruction.
struct Group {
  u32 pc = 0;
  u32 lanes = 0;
  Ticket ticket;
};

struct BulkGroup {
  int reading = 0, writing = 0;
};

struct Warp {
  Cta* cta = nullptr;
  int id = 0;
  Agent agent = 0;
  u32 lanes = 0;  // that there are: a block need not be a multiple of 32 threads
  u32 live = 0;   // of those, that have not exited
  std::vector<Group> groups;
  std::vector<u8> registers;
  std::vector<std::vector<u8>> local;  // by lane
  Knowledge know;
  Ticket cluster_ticket;
  std::string waiting;      // what a blocked warp waits for; "" when it can run
  u64 blocked_at = 0;       // machine.progress when it blocked
  bool timed_wait = false;  // the wait may give up: mbarrier.try_wait
  bool give_up = false;
  u32 register_count = 0;  // of a thread, after setmaxnreg
  u32 times_held = 0;      // how often it executed options.hold.held
  u64 instructions = 0;

  // Bulk copies: groups committed and not waited for; the last one is open.
  std::deque<std::shared_ptr<BulkGroup>> bulk;
  Agent bulk_reads = 0;
  u32 bulk_committed = 0, bulk_open_ops = 0;

  // wgmma groups.
  Agent wgmma = 0;
  u32 wgmma_committed = 0, wgmma_waited = 0, wgmma_issued = 0;
  bool wgmma_open = false;
  std::vector<std::pair<u32, u32>> in_flight;  // register offset, group that writes it

  // tcgen05: operations issued since the last commit complete together.
  Agent mma = 0, tmem_stores = 0, tmem_loads = 0;
  u32 mma_time = 1, store_time = 1, load_time = 1;
  std::vector<u32> loading;  // registers that tcgen05.ld may still write
  u32 awaited_alloc = 0;     // the call of tcgen05.alloc whose peer it waits for

  std::string name() const;
  u32 next_time() const { return know.seen.of(agent); }
  void release();  // later accesses are not covered by what was released before
};

struct Tmem {
  std::vector<u32> data;   // [lane][column]
  Shadow shadow;           // cells of 16 lanes of one column
  std::vector<int> owner;  // by column: the first column of its allocation, or -1
  bool may_allocate = true;
  int allocations = 0;
  u32 calls = 0;  // allocations asked for so far: those of a CTA pair go together
  u32 queue = 0;  // of the tensor core operations that this CTA issues
};

struct WgmmaIssue {
  u64 a, b;
  u32 code, n;
  int joined = 0;
};

struct Cta {
  Cluster* cluster = nullptr;
  u32 rank = 0;
  u32 id[3] = {};
  std::vector<u8> smem;
  Shadow shadow;  // cells of 16 bytes
  std::map<u32, Mbarrier> mbarriers;
  std::array<NamedBarrier, 16> named;
  std::vector<std::unique_ptr<Warp>> warps;
  Tmem tmem;
  int live_warps = 0;
  i64 register_pool = 0;
  bool exited = false;
  std::vector<std::deque<WgmmaIssue>> wgmma;  // by warpgroup: issued by one to three warps
  std::vector<u64> wgmma_base;                // number of the first of those
};

struct Cluster {
  Machine* machine = nullptr;
  u32 first[3] = {};  // ctaid of rank 0
  std::vector<std::unique_ptr<Cta>> ctas;
  Agent agents = 1;  // agent 0: the grid that came before
  std::vector<std::string> agent_names{"the previous grid"};
  NamedBarrier barrier;
  u32 times_awaited = 0;  // how often its warps executed options.hold.awaited
  bool finished = false;

  Agent new_agent(const std::string& name) {
    agent_names.push_back(name);
    return agents++;
  }
};

// Something in flight. Operations of the same queue complete in the order they were issued.
struct Async {
  std::string what;
  Cluster* cluster;
  u32 queue;  // 0: unordered
  int kind;   // for the scheduler, which may starve one kind
  std::function<void()> complete;
};

enum AsyncKind { kCopyIn, kCopyOut, kTensorCore, kSignal, kAsyncKinds };

struct Hazard {
  std::string kind, what;
};

struct Machine {
  // The program.
  std::vector<Instr> code;
  std::vector<Operand> operands;
  std::vector<u8> constants;
  std::vector<Special> specials;
  u32 register_bytes = 0, local_bytes = 0, static_smem = 0;
  std::span<const u8> params;
  std::vector<Region> regions;
  const Region* last_region = nullptr;  // that an access was found in
  Options options{};
  LaunchConfig launch{};

  // State.
  std::list<std::unique_ptr<Cluster>> clusters;
  u64 next_cluster = 0, total_clusters = 0;
  std::list<Async> in_flight;
  u32 next_queue = 1;
  u64 progress = 1;  // grows with every change another warp may wait for
  std::mt19937 random;
  std::vector<Hazard> hazards;
  std::set<std::string> reported;
  u64 instructions = 0, async_count = 0, barrier_phases = 0;
  u64 busiest = 0;  // instructions of the CTA that executed the most

  void run();

  // Memory (memory.cc)
  u8* global(u64 address, u64 bytes, bool write, Warp* w);
  u8* global_quiet(u64 address, u64 bytes, bool write);
  Cta& cta_at(Cta& from, u32 shared_address, const char* what);
  u8* shared(Warp& w, u32 address, u32 bytes, bool write, bool atomic = false);
  void check_shared(Cta& cta, u32 offset, u32 bytes, const char* what);
  void async_access(Cta& cta, u32 offset, u32 bytes, bool write, Agent who, u32 time,
                    const Knowledge& know, const char* what, bool check_written = true);
  void load(Warp& w, const Instr& in, u32 lanes);
  void store(Warp& w, const Instr& in, u32 lanes);
  void atomic(Warp& w, const Instr& in, u32 lanes);
  void report(const Conflict& c, Cluster& cluster, const std::string& what,
              const std::string& where);
  void hazard(const std::string& kind, const std::string& what, const std::string& where = "");

  // Barriers (barriers.cc)
  Mbarrier& mbarrier(Cta& cta, u32 offset, const char* what);
  void mbarrier_init(Warp& w, u32 address, u32 count);
  void mbarrier_arrive(Cta& cta, u32 offset, u32 count, const Knowledge& from);
  void mbarrier_expect(Cta& cta, u32 offset, i64 bytes);
  void mbarrier_complete_tx(Cta& cta, u32 offset, i64 bytes);
  void mbarrier_check_phase(Mbarrier& b);
  bool execute_barrier(Warp& w, Group& g, const Instr& in, u32 lanes);
  void async_use(Cta& cta, u32 offset, const char* what, Warp& w);

  // Copies (copies.cc)
  void execute_copy(Warp& w, const Instr& in, u32 lanes);
  bool bulk_wait(Warp& w, const Instr& in);
  void cta_exit(Cta& cta);

  // Arithmetic and warp-wide operations
  bool execute_alu(Warp& w, const Instr& in, u32 lanes);
  bool execute_warp_wide(Warp& w, const Instr& in, u32 lanes);
  bool execute_wgmma(Warp& w, const Instr& in);
  bool execute_tmem(Warp& w, const Instr& in, u32 lanes);
  void check_registers(Warp& w, const Instr& in);

  // The scheduler (scheduler.cc)
  void start_cluster();
  void issue(Async a);
  void step(Warp& w, u32 budget);
  bool execute(Warp& w, Group& g, const Instr& in, u32 lanes);
  void exit_lanes(Warp& w, u32 lanes);
  bool converged(Warp& w, const Instr& in, u32 lanes);
  bool held(Warp& w, u32 pc);
  void note(Warp& w, u32 pc);
  std::string who_waits();

  // Operands
  const u8* at(const Warp& w, const Operand& o) const {
    return (o.is_const ? constants.data() : w.registers.data()) + o.offset;
  }
  u8* at(Warp& w, const Operand& o) { return const_cast<u8*>(at(std::as_const(w), o)); }
  const Operand& operand(const Instr& in, int i) const { return operands[in.first + i]; }
  u32 predicate(const Warp& w, const Operand& o) const {
    u32 mask = *(const u32*)at(w, o);
    return o.negate ? ~mask : mask;
  }
  u64 lane(const Warp& w, const Operand& o, int lane) const {
    return o.bits == 64 ? ((const u64*)at(w, o))[lane] : ((const u32*)at(w, o))[lane];
  }
  u64 address(const Warp& w, const Operand& o, int l) const { return lane(w, o, l) + o.displace; }
  // An operand that all lanes must agree on, such as a descriptor.
  u64 uniform(Warp& w, const Operand& o, u32 lanes, const char* what);
  u32 uniform_shared(Warp& w, const Operand& o, u32 lanes, const char* what);
};

inline int first_lane(u32 lanes) { return __builtin_ctz(lanes); }

}  // namespace emu
