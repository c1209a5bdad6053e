"""From accumulators to global memory, and rows of zeros.

The tensor core leaves a thread with a fragment (PTX ISA, wgmma, fragment of D; tcgen05.ld,
shape .16x256b): for each block of 8 along N, by 16 along M,

  value (c, h, block):  8 * h + lane // 4 along M,  8 * block + 2 * (lane % 4) + c along N

Either rows of the result ("tokens") lie along N and its columns along M, or the other way
round. In memory the columns of one row are contiguous. So values move between lanes until
each lane holds one vector of one row, and neighbouring lanes fill whole 32-byte sectors;
nothing goes through shared memory.
"""

from __future__ import annotations

import dataclasses

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


def _transpose(dtype, values, lane, distance):
    """Square transpose of registers by the lanes that differ in as many bits of their index.

    distance is the lowest of these bits, as a number of lanes: value q of the lane
    with bits r becomes value r of the lane with bits q.
    """
    values, bit = list(values), 1
    while bit < len(values):
        odd = (lane & (distance * bit)) != 0
        for q in (q for q in range(len(values)) if not q & bit):
            low, high = values[q], values[q + bit]
            sent = dtype(cutlass.select_(odd, low, high))
            got = cute.arch.shuffle_sync_bfly(sent, distance * bit)
            values[q] = dtype(cutlass.select_(odd, got, low))
            values[q + bit] = dtype(cutlass.select_(odd, high, got))
        bit *= 2
    return values


@dataclasses.dataclass(frozen=True)
class Output:
    """The result (.., n), written in vectors of 4 or 8 registers."""

    pointer: cute.Pointer
    dtype: cutlass.Constexpr
    n: Int32  # a multiple of what a vector holds
    vector: cutlass.Constexpr = 4

    def store(self, row, column, values, inside):
        """Registers that lie side by side from (row, column) on, as far as there are columns."""
        for first in range(0, len(values), self.vector):
            at = column + first * (32 // self.dtype.width)
            offset = (row * Int64(self.n) + at) * (self.dtype.width // 8)
            part = values[first : first + self.vector]
            self._store(self.pointer.toint() + offset, part, inside & (at < self.n))

    def _store(self, address, values, predicate):
        letter = "f" if isinstance(values[0], Float32) else "b"
        operands = ", ".join(f"{{$r{i + 1}}}" for i in range(self.vector))
        cute.arch.inline_ptx(
            f"st.global.v{self.vector}.{letter}32 [{{$r0}}], {{{operands}}};",
            read_only_args=[address, *values],
            predicate=predicate,
        )

    @cute.jit
    def store_zero_row(self, row: Int64):
        """One row becomes 0; one warp."""
        row_bytes = self.n * (self.dtype.width // 8)
        start = self.pointer.toint() + row * row_bytes
        step = self.vector * 4
        for column in cutlass.range(cute.arch.lane_idx() * step, row_bytes, 32 * step, unroll=1):
            self._store(start + column, [Uint32(0)] * self.vector, None)


@cute.jit
def write_zeros(scheduler, out, warp, num_warps: cutlass.Constexpr):
    """Zeros in the rows that no group of rhs owns; warp is one of num_warps of each CTA."""
    m = scheduler.m
    step = num_warps * cute.arch.grid_dim()[0]
    first = num_warps * cute.arch.block_idx()[0] + warp
    for batch in range(scheduler.num_batches):
        bounds = scheduler.bounds(batch)
        # Row i of those without a group: the owned rows in the middle are left out.
        i = first
        while i < m - (bounds.last - bounds.first):
            row = i if i < bounds.first else i + (bounds.last - bounds.first)
            out.store_zero_row(Int64(batch) * m + row)
            i += step


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
    store(token, column, _transpose(Uint32, pairs, lane, 1))


def _store_float32(value, lane, store):
    """value(c, h, block) -> two stores of 4 columns of one of 16 tokens."""
    quad = (lane // 4) % 4
    token, column = 8 * (quad // 2) + 2 * (lane % 4) + quad % 2, 4 * (lane // 16)
    for h in range(2):
        values = [value(c, h, block) for block in range(2) for c in range(2)]
        store(token, 8 * h + column, _transpose(Float32, values, lane, 4))


def store_accumulators(out, accumulators, first_row, rows, first_column):
    """Writes the fragment of one warp, tokens along N: tokens [0, rows) from first_row on.

    accumulators: ((2, 2, blocks of 8 tokens), blocks of 128 columns, 1), float32;
    first_column: the warp's first column of block 0.
    """
    lane = cute.arch.lane_idx()
    for i in range(cute.size(accumulators, mode=[1])):
        for unit in range(cute.size(accumulators, mode=[0]) // 8):

            def value(c, h, block):
                return accumulators[((c, h, 2 * unit + block), i, 0)]

            def store(token, column, values):
                token = TOKENS * unit + token
                column = first_column + 128 * i + column
                out.store(first_row + Int64(token), column, values, token < rows)

            if out.dtype is Float32:
                _store_float32(value, lane, store)
            else:
                _store_16bit(out.dtype, value, lane, store)


def store_tokens_along_n(out, groups, first_row, rows, first_column):
    """Writes 16 tokens, of which there are rows, by 32 columns; one warp.

    groups: the fragments of the first and of the other 16 columns, 2 blocks of tokens each,
    as lists of [4 * block + 2 * h + c].
    """
    lane = cute.arch.lane_idx()
    dtype = out.dtype
    if dtype is Float32:
        # Lane q of the 8 that hold the 8 columns of a block takes the q-th of 8 values.
        block, h, c = lane // 16, lane // 8 % 2, lane // 4 % 2
        token = 8 * block + 2 * (lane % 4) + c
        for g, values in enumerate(groups):
            out.store(
                first_row + Int64(token),
                first_column + 16 * g + 8 * h,
                _transpose(Float32, values, lane, 4),
                token < rows,
            )
    else:
        columns = []
        for h in range(2):
            # Each pair is two columns of token lane // 4; the quad shares blocks and groups.
            pairs = [
                _transpose8(_pack(dtype, *values[4 * block + 2 * h : 4 * block + 2 * h + 2]))
                for block in range(2)
                for values in groups
            ]
            columns += _transpose(Uint32, pairs, lane, 1)
        block, g = lane % 4 // 2, lane % 2
        token = 8 * block + lane // 4
        out.store(first_row + Int64(token), first_column + 16 * g, columns, token < rows)


def store_tokens_along_m(out, values, first_row, rows, first_column):
    """Writes 16 tokens, of which there are rows, by 64 columns: 128 bytes or more of a row.

    values: the fragment of 8 blocks of columns, as a list of [4 * block + 2 * h + c].
    """
    lane = cute.arch.lane_idx()
    quad = lane % 4
    for h in range(2):
        token = 8 * h + lane // 4
        row, inside = first_row + Int64(token), token < rows

        def pair(block):
            return values[4 * block + 2 * h : 4 * block + 2 * h + 2]

        if out.dtype is Float32:
            for half in (0, 4):  # lane q of the quad takes block q of this half
                low, high = (
                    _transpose(Float32, [pair(half + q)[c] for q in range(4)], lane, 1)
                    for c in range(2)
                )
                columns = [x for both in zip(low, high) for x in both]
                out.store(row, first_column + 8 * (half + quad), columns, inside)
        else:  # blocks 2 q and 2 q + 1
            columns = []
            for odd in range(2):
                packed = [_pack(out.dtype, *pair(2 * q + odd)) for q in range(4)]
                columns += _transpose(Uint32, packed, lane, 1)
            out.store(row, first_column + 16 * quad, columns, inside)
