// The C interface that the Python front end calls.
#include <cstring>

#include "machine.h"

using namespace emu;

extern "C" {

struct ProgramView {
  const Instr* code;
  u64 code_count;
  const Operand* operands;
  u64 operand_count;
  const u8* constants;
  u64 constant_bytes;
  const Special* specials;
  u64 special_count;
  u32 register_bytes, local_bytes, static_smem;
};

struct Result {
  u64 instructions, busiest, async_operations, barrier_phases;
  u32 hazards;
  u32 report_bytes;
};

// Runs a launch to its end. Parameters are aligned to 64 bytes, for tensor maps. The report is
// lines of "kind<TAB>text<NUL>"; at most `room` bytes.
void emulator_run(const ProgramView* p, const LaunchConfig* launch, const Options* options,
                  const u8* params, u64 param_bytes, const Region* regions, u64 region_count,
                  Result* result, char* report, u64 room) {
  Machine m;
  m.code.assign(p->code, p->code + p->code_count);
  m.operands.assign(p->operands, p->operands + p->operand_count);
  m.constants.assign(p->constants, p->constants + p->constant_bytes);
  m.specials.assign(p->specials, p->specials + p->special_count);
  m.register_bytes = p->register_bytes;
  m.local_bytes = p->local_bytes;
  m.static_smem = p->static_smem;
  m.launch = *launch;
  m.options = *options;
  m.params = {params, param_bytes};
  m.regions.assign(regions, regions + region_count);
  m.total_clusters = 1;
  for (int i = 0; i < 3; i++) m.total_clusters *= launch->grid[i] / launch->cluster[i];
  try {
    m.run();
  } catch (const Fault& fault) {
    m.hazards.push_back({fault.kind, fault.what()});
  } catch (const std::exception& error) {
    m.hazards.push_back({"internal", error.what()});
  }
  result->instructions = m.instructions;
  result->busiest = m.busiest;
  result->async_operations = m.async_count;
  result->barrier_phases = m.barrier_phases;
  result->hazards = m.hazards.size();
  std::string all;
  for (const Hazard& h : m.hazards) all += h.kind + "\t" + h.what + '\0';
  result->report_bytes = std::min<u64>(all.size(), room);
  memcpy(report, all.data(), result->report_bytes);
}

struct TensorMapView {
  u64 base, size[5], stride[5];
  u32 rank, dtype, element_bytes, box[5], element_stride[5], interleave, swizzle, l2, fill_nan;
};

void emulator_decode_tensor_map(const u8* map, TensorMapView* out) {
  TensorMap t = decode_tensor_map(map);
  *out = {};
  out->base = t.base;
  out->rank = t.rank;
  out->dtype = t.dtype;
  out->element_bytes = t.element_bytes;
  out->interleave = t.interleave;
  out->swizzle = t.swizzle;
  out->l2 = t.l2_promotion;
  out->fill_nan = t.fill_nan;
  memcpy(out->size, t.size, sizeof t.size);
  memcpy(out->stride, t.stride, sizeof t.stride);
  memcpy(out->box, t.box, sizeof t.box);
  memcpy(out->element_stride, t.element_stride, sizeof t.element_stride);
}

}  // extern "C"
