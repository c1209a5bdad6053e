"""Blackwell's tensor core and its memory, as PTX: what the instructions of tcgen05 take.

Operands lie in shared memory in spans of 128 bytes, swizzled (SWIZZLE_128B), and are
named by descriptors; the extents of a product are in a descriptor too, so one instruction
serves every number of rows. PTX ISA, "Tensor Core 5th Generation": matrix descriptor,
instruction descriptor, layouts of D, and the shape .16x256b of tcgen05.ld.
"""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32

INSTRUCTION_BYTES = 32  # of k that one instruction multiplies: 16 elements of 16 bits

_SPAN = 128  # bytes of one span of the swizzle
_GROUP = 8 * _SPAN  # 8 spans, the period of the swizzle

# The upper half of a matrix descriptor: from one group to the next, version, SWIZZLE_128B.
_UPPER = _GROUP // 16 | 1 << 14 | 2 << 29

# The kind of an input type, and its code in the instruction descriptor.
_INPUTS = {Float16: ("f16", 0), BFloat16: ("f16", 1)}


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand in shared memory: where each instruction's part of it begins.

    Contiguous along k: panels of (rows, one span of k). Contiguous along its rows: panels
    of (one span of rows, k of the stage). Extents in bytes.
    """

    first: Int32  # descriptor of the first instruction's part, lower half
    stage: int
    k_tile: int
    step: int  # from one instruction to the next within a K tile

    def descriptor(self, stage, k_tile, step):
        """The lower half of a descriptor; the upper half is the same for all."""
        # The low bits are an address in units of 16 bytes; it stays below their 2**14.
        offset = stage * (self.stage // 16) + k_tile * (self.k_tile // 16)
        return self.first + offset + step * (self.step // 16)


def operand(smem, rows, k, k_major):
    """The operand whose stages (rows, k) are the last mode but for it of a tensor.

    rows, k: of a stage, in elements; k_major: contiguous along k.
    """
    element = smem.element_type.width // 8
    panel = (rows if k_major else k) * _SPAN
    # Along its contiguous axis a panel is one span wide; the leading offset leads from one
    # panel to the next, and is not used where an instruction stays within one.
    leading = 1 if k_major else panel // 16
    # The address within the CTA: in a cluster there are bits of the CTA's rank above.
    address = (Int32(smem.iterator.toint()) & 0x3FFFF) >> 4
    return Operand(
        first=address | leading << 16,
        stage=rows * k * element,
        k_tile=panel if k_major else _SPAN // element * _SPAN,
        step=INSTRUCTION_BYTES if k_major else INSTRUCTION_BYTES // element * _SPAN,
    )


def instruction_descriptor(dtype, m, n, a_k_major, b_k_major):
    """Of products m x n accumulated in float32; n may be known at run time only."""
    _, code = _INPUTS[dtype]
    constant = 1 << 4 | code << 7 | code << 10 | (not a_k_major) << 15 | (not b_k_major) << 16
    return Int32(constant | (m // 16) << 24) | (Int32(n) >> 3) << 17


def multiply(dtype, ctas, accumulator, a, b, instruction, accumulate):
    """accumulator (+)= a b; one thread, of the leader CTA of a pair.

    a, b: lower halves of descriptors.
    """
    kind, _ = _INPUTS[dtype]
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, {$r4}, 0; "
        "mov.b64 a, {{$r1}, {$r5}}; mov.b64 b, {{$r2}, {$r5}}; "
        f"tcgen05.mma.cta_group::{ctas}.kind::{kind} [{{$r0}}], a, b, {{$r3}}, p; }}",
        read_only_args=[accumulator, a, b, instruction, Int32(accumulate), Int32(_UPPER)],
    )


def load(addresses, blocks):
    """16 lanes by 8 * blocks columns of tensor memory from each address; one warp.

    Returns for each address the float32 values [4 * block + 2 * h + c] of a thread:
    lane 8 * h + thread // 4, column 8 * block + 2 * (thread % 4) + c.
    """
    count = 4 * blocks
    text = ""
    for i in range(len(addresses)):
        registers = ", ".join(f"{{$w{i * count + j}}}" for j in range(count))
        text += f"tcgen05.ld.sync.aligned.16x256b.x{blocks}.b32 {{{registers}}}, [{{$r{i}}}]; "
    # In one block with the loads: nothing may read a register before it has arrived.
    values = cute.arch.inline_ptx(
        text + "tcgen05.wait::ld.sync.aligned;",
        write_only_types=[Float32] * (count * len(addresses)),
        read_only_args=addresses,
    )
    return [values[i * count : (i + 1) * count] for i in range(len(addresses))]


def fence_before_sync():
    """What this thread did with tensor memory comes before its next arrival at a barrier."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_sync():
    """What this thread does with tensor memory comes after the barrier it waited for."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
