// The instruction stream that the Python front end hands to the machine.
#pragma once
#include <cstdint>

namespace emu {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

enum class Op : u16 {
#define OP(name) name,
#include "ops.inc"
#undef OP
};

enum class Type : u8 {
#define TYPE(name, bits) name,
#include "types.inc"
#undef TYPE
};

// Size in bits of a value of each type.
constexpr int kTypeBits[] = {
#define TYPE(name, bits) bits,
#include "types.inc"
#undef TYPE
};

enum Space : u32 { kGeneric, kGlobal, kSharedCta, kSharedCluster, kLocal, kParam, kConst };

// A register, a constant or an address. Values live in rows of 32 lanes: 4 bytes a lane up to
// 32 bits, 8 up to 64, 16 for b128; a predicate is one 32-bit mask.
struct Operand {
  u32 offset;    // bytes into the warp's register file, or into the pool of constants
  i32 displace;  // added when the operand is an address
  u8 is_const;
  u8 bits;    // of the register: 1, 32, 64 or 128; 0: nothing is written (the sink `_`)
  u8 negate;  // a negated predicate
  u8 unused;
};

struct Instr {
  u16 op;
  u8 type;     // the type of the result, or of the values moved
  u8 type2;    // the source type, where it differs
  i32 guard;   // byte offset of the guarding predicate, or -1
  u32 first;   // index of the first operand
  i32 target;  // branch target, or -1
  i32 line;    // line of the PTX text, for reports
  u16 count;   // number of operands
  u8 guard_negate;
  u8 flags;    // see below
  i32 mod[4];  // by operation
};

enum : u8 {
  kAligned = 1,  // every live lane of the warp must arrive together
  kMembers = 2,  // the last operand is the mask of lanes that must arrive together
};

// A register row filled when a warp starts: %tid.x, the address of a shared variable, ...
struct Special {
  u32 offset;
  u32 kind;
  u64 value;
};

enum SpecialKind : u32 {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kClusterIdX,
  kClusterIdY,
  kClusterIdZ,
  kNClusterIdX,
  kNClusterIdY,
  kNClusterIdZ,
  kClusterCtaidX,
  kClusterCtaidY,
  kClusterCtaidZ,
  kClusterNctaidX,
  kClusterNctaidY,
  kClusterNctaidZ,
  kClusterCtarank,
  kClusterNctarank,
  kLaneid,
  kWarpid,
  kNwarpid,
  kSmid,
  kNsmid,
  kGridid,
  kLanemaskEq,
  kLanemaskLt,
  kLanemaskLe,
  kLanemaskGt,
  kLanemaskGe,
  kDynamicSmemSize,
  kTotalSmemSize,
  kIsExplicitCluster,
  kSharedAddress,
  kParamAddress,
  kLocalAddress,
  kGlobalAddress,
};

}  // namespace emu
