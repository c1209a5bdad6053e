"""From accumulators to global memory, and rows of zeros.

An accumulator tile has columns of the result along the M of the tensor core and rows of
the result ("tokens") along N. The fragment of a thread (PTX ISA, wgmma, fragment of D)
holds, for each block of 8 tokens, by 16 columns of its warp,

  value (c, h):  token 2 * (lane % 4) + c, column 8 * h + lane // 4

In memory the columns of one token are contiguous. So values move between lanes until
each lane holds 16 bytes of one token, and pairs of lanes fill whole 32-byte sectors;
nothing goes through shared memory.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32

_PACK = {BFloat16: "cvt.rn.bf16x2.f32", Float16: "cvt.rn.f16x2.f32"}

# Tokens that one round of stores covers: two blocks of the fragment.
TOKENS = 16


def _pack(dtype, low, high):
    """Two float32 as 16-bit values in one register."""
    return cute.arch.inline_ptx(
        _PACK[dtype] + " {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[high, low],
    )


def _transpose8(pair):
    """8x8 transpose over the warp: lane i has columns 2 * (i % 4) and the next of row i // 4."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[pair],
    )


def _transpose4(dtype, values, lane, distance):
    """4x4 transpose of 4 registers by the 4 lanes that differ in two bits of their index.

    distance is the lower of the two bits, as a number of lanes: value q of the lane
    with bits r becomes value r of the lane with bits q.
    """
    values = list(values)
    for bit in (1, 2):
        odd = (lane & (distance * bit)) != 0
        for q in (q for q in range(4) if not q & bit):
            low, high = values[q], values[q + bit]
            sent = dtype(cutlass.select_(odd, low, high))
            got = cute.arch.shuffle_sync_bfly(sent, distance * bit)
            values[q] = dtype(cutlass.select_(odd, got, low))
            values[q + bit] = dtype(cutlass.select_(odd, high, got))
    return values


def _store16(address, values, predicate):
    """One 16-byte store of 4 registers."""
    letter = "f" if isinstance(values[0], Float32) else "b"
    cute.arch.inline_ptx(
        f"st.global.v4.{letter}32 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, *values],
        predicate=predicate,
    )


def _store_16bit(dtype, value, lane, store):
    """value(c, h, block) -> one store of 8 columns of one of 16 tokens."""
    pairs = [
        _transpose8(_pack(dtype, value(0, h, block), value(1, h, block)))
        for block in range(2)
        for h in range(2)
    ]
    # Now each pair is two columns of token lane // 4; the quad shares blocks and halves.
    quad = lane % 4
    token, column = 8 * (quad // 2) + lane // 4, 8 * (quad % 2)
    store(token, column, _transpose4(Uint32, pairs, lane, 1))


def _store_float32(value, lane, store):
    """value(c, h, block) -> two stores of 4 columns of one of 16 tokens."""
    quad = (lane // 4) % 4
    token, column = 8 * (quad // 2) + 2 * (lane % 4) + quad % 2, 4 * (lane // 16)
    for h in range(2):
        values = [value(c, h, block) for block in range(2) for c in range(2)]
        store(token, 8 * h + column, _transpose4(Float32, values, lane, 4))


def store_accumulators(dtype, accumulators, out, first_row, rows, first_column, n):
    """Writes the fragment of one warp: tokens [0, rows) to rows first_row on of out (.., n).

    accumulators: ((2, 2, blocks of 8 tokens), blocks of 128 columns, 1), float32;
    first_column: the warp's first column of block 0; out: pointer; n: its columns, a
    multiple of 8.
    """
    lane = cute.arch.lane_idx()
    size = dtype.width // 8
    for i in range(cute.size(accumulators, mode=[1])):
        for unit in range(cute.size(accumulators, mode=[0]) // 8):

            def value(c, h, block):
                return accumulators[((c, h, 2 * unit + block), i, 0)]

            def store(token, column, values):
                token = TOKENS * unit + token
                column = first_column + 128 * i + column
                offset = (first_row + Int64(token)) * Int64(n) + column
                inside = (token < rows) & (column < n)
                _store16(out.toint() + offset * size, values, inside)

            if dtype is Float32:
                _store_float32(value, lane, store)
            else:
                _store_16bit(dtype, value, lane, store)


@cute.jit
def store_zero_row(out: cute.Pointer, row_bytes: Int32, row: Int64):
    """One row of out becomes 0; one warp."""
    start = out.toint() + row * row_bytes
    for column in range(cute.arch.lane_idx() * 16, row_bytes, 32 * 16):
        _store16(start + column, [Uint32(0)] * 4, None)
