"""From accumulators to global memory, and rows of zeros.

The tensor core leaves a thread with a fragment (PTX ISA, wgmma, fragment of D; tcgen05.ld,
shape .16x256b): for each block of 8 along N, by 16 along M,

  value (c, h, block):  8 * h + lane // 4 along M,  8 * block + 2 * (lane % 4) + c along N

Either rows of the result ("tokens") lie along N and its columns along M, or the other way
round. In memory the columns of one row are contiguous. So values move between lanes until
each lane holds one vector of one row, and neighbouring lanes fill whole 32-byte sectors;
nothing goes through shared memory. But where a multiprocessor would wait for its stores,
they are left to the copy engine by StagedOutput, by way of shared memory.
"""

from __future__ import annotations

import dataclasses
import itertools

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from pearl_jax import tiling
from pearl_jax.kernels import forms

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


def _unpack(dtype, pair):
    """The two 16-bit values of a register as float32."""
    if dtype is BFloat16:
        parts = pair << 16, pair & Uint32(0xFFFF0000)
        return [x.bitcast(Float32) for x in parts]
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
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
            address, there = self._vector(row, column, first)
            self._store(address, values[first : first + self.vector], inside & there)

    def _vector(self, row, column, first):
        """Where the vector that begins with register first lies, and whether there are columns."""
        at = column + first * (32 // self.dtype.width)
        offset = (row * Int64(self.n) + at) * (self.dtype.width // 8)
        return self.pointer.toint() + offset, at < self.n

    def _store(self, address, values, predicate):
        letter = "f" if isinstance(values[0], Float32) else "b"
        operands = ", ".join(f"{{$r{i + 1}}}" for i in range(self.vector))
        cute.arch.inline_ptx(
            f"st.global.v{self.vector}.{letter}32 [{{$r0}}], {{{operands}}};",
            read_only_args=[address, *values],
            predicate=predicate,
        )

    def load(self, row, column, count, inside):
        """The same as store writes them, so many registers; 0 where there are none."""
        values = []
        for first in range(0, count, self.vector):
            address, there = self._vector(row, column, first)
            values += self._load(address, inside & there)
        return values

    def _load(self, address, predicate):
        zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(self.vector))
        results = ", ".join(f"{{$w{i}}}" for i in range(self.vector))
        return cute.arch.inline_ptx(
            f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {zeros} "
            f"@p ld.global.v{self.vector}.b32 {{{results}}}, [{{$r0}}]; }}",
            write_only_types=[Uint32] * self.vector,
            read_only_args=[address, Int32(predicate)],
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


def _place_16bit(lane):
    """The (token, column) of 16 x 16 whose 8 columns a lane has after the exchanges."""
    return 8 * (lane % 4 // 2) + lane // 4, 8 * (lane % 2)


def _store_16bit(dtype, value, lane, store):
    """value(c, h, block) -> one store of 8 columns of one of 16 tokens."""
    pairs = [
        _transpose8(_pack(dtype, value(0, h, block), value(1, h, block)))
        for block in range(2)
        for h in range(2)
    ]
    # Now each pair is two columns of token lane // 4; the quad shares blocks and halves.
    store(*_place_16bit(lane), _transpose(Uint32, pairs, lane, 1))


def _add_16bit(dtype, add, lane, load):
    pairs = _transpose(Uint32, load(*_place_16bit(lane)), lane, 1)
    for i, (block, h) in enumerate(itertools.product(range(2), range(2))):
        for c, old in enumerate(_unpack(dtype, _transpose8(pairs[i]))):
            add(c, h, block, old)


def _place_float32(lane):
    """The same for 4 columns, of the first 8."""
    quad = (lane // 4) % 4
    return 8 * (quad // 2) + 2 * (lane % 4) + quad % 2, 4 * (lane // 16)


def _store_float32(value, lane, store):
    """value(c, h, block) -> two stores of 4 columns of one of 16 tokens."""
    token, column = _place_float32(lane)
    for h in range(2):
        values = [value(c, h, block) for block in range(2) for c in range(2)]
        store(token, 8 * h + column, _transpose(Float32, values, lane, 4))


def blocks(accumulators):
    """The (16 tokens, 128 columns) of a fragment, as a list of (i, j): what a round covers.

    accumulators: ((2, 2, blocks of 8 tokens), blocks of 128 columns, 1), float32.
    """
    tokens, columns = (cute.size(accumulators, mode=[i]) for i in range(2))
    return [(i, j) for j in range(columns) for i in range(tokens // 8)]


def store_accumulators(out, accumulators, first_row, rows, first_column, some=None):
    """Writes the fragment of one warp, tokens along N: tokens [0, rows) from first_row on.

    first_column: the warp's first column of the first 128; some: of the blocks, or all.
    """
    lane = cute.arch.lane_idx()
    for i, j in some or blocks(accumulators):

        def value(c, h, block, i=i, j=j):
            return accumulators[(c, h, 2 * i + block), j, 0]

        def store(token, column, values, i=i, j=j):
            token, column = TOKENS * i + token, first_column + 128 * j + column
            out.store(first_row + Int64(token), column, values, token < rows)

        if out.dtype is Float32:
            _store_float32(value, lane, store)
        else:
            _store_16bit(out.dtype, value, lane, store)


def add_stored(out, accumulators, first_row, rows, first_column, some):
    """Adds to some blocks of the fragment the 16-bit values that storing it would overwrite.

    By the exchanges of a store in the other order, as each is its own inverse.
    """
    lane = cute.arch.lane_idx()
    for i, j in some:

        def add(c, h, block, old, i=i, j=j):
            accumulators[(c, h, 2 * i + block), j, 0] += old

        def load(token, column, i=i, j=j):
            token, column = TOKENS * i + token, first_column + 128 * j + column
            return out.load(first_row + Int64(token), column, 4, token < rows)

        _add_16bit(out.dtype, add, lane, load)


_SPAN_BYTES = 128  # of a row: one span of the swizzle


@dataclasses.dataclass(frozen=True)
class StagedOutput:
    """The result, stored by the copy engine from shared memory.

    Tokens along N are rows. A warpgroup lays out a box, its 64 columns of as many rows as
    fill a buffer, in spans of 128 bytes, while the copy engine reads its other buffer.
    """

    atom: cute.CopyAtom
    adding_atom: cute.CopyAtom | None  # adds to what is there; for float32 only
    tensor: cute.Tensor  # as the atoms see it
    smem: cute.Tensor  # (*box, two buffers of each warpgroup), swizzled; row or column first
    dtype: cutlass.Constexpr
    evict_first: cutlass.Constexpr = False  # from the L2 cache, so that operands stay there

    @staticmethod
    def box(dtype):
        """(rows, columns) of a buffer."""
        return tiling.STAGING_BYTES // (64 * dtype.width // 8), 64

    @cute.jit
    def store(self, accumulators, warpgroup, place: cutlass.Constexpr, add):
        """Stores the fragment of one of two warpgroups.

        place(i, j): the part of the tensor for the i-th rows and j-th columns of the tile, as
        large as a box. add: nonzero if they are added to float32 numbers that are there,
        which are rounded once.
        """
        rows, _ = self.box(self.dtype)
        places = self._places(warpgroup)
        first = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0
        blocks, parts = cute.size(accumulators, mode=[0]) // 4, cute.size(accumulators, mode=[1])
        boxes = -(-blocks * 8 // rows)
        policy = forms.cache_policy(self.evict_first)
        for i in cutlass.range_constexpr(boxes * parts):
            box, part, buffer = i % boxes, i // boxes, 2 * warpgroup + i % 2
            if first:
                cute.arch.cp_async_bulk_wait_group(1, read=True)
            self._sync(warpgroup)
            start = box * rows // 8
            for block in cutlass.range_constexpr(start, min(start + rows // 8, blocks)):
                values = [accumulators[(c, h, block), part, 0] for c in range(2) for h in range(2)]
                offset = i % 2 * tiling.STAGING_BYTES + (block - start) * 8 * _SPAN_BYTES
                self._lay_out(places, offset, values)
            cute.arch.fence_proxy("async.shared", space="cta")
            self._sync(warpgroup)
            if first:
                smem, gmem = cpasync.tma_partition(
                    self.atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(self.smem, 0, 2),
                    cute.group_modes(place(box, 2 * part + warpgroup), 0, 2),
                )
                source = smem[None, buffer]
                if cutlass.const_expr(self.adding_atom is None):
                    cute.copy(self.atom, source, gmem, **policy)
                elif add != 0:
                    cute.copy(self.adding_atom, source, gmem, **policy)
                else:
                    cute.copy(self.atom, source, gmem, **policy)
                cute.arch.cp_async_bulk_commit_group()
        # The next fragment begins with the first buffer: its wait must leave this one out.
        if boxes * parts % 2 == 1 and first:
            cute.arch.cp_async_bulk_commit_group()

    def finish(self):
        """Before a warp ends: what it stores has been read."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _sync(self, warpgroup):
        cute.arch.barrier(barrier_id=1 + warpgroup, number_of_threads=128)

    def _places(self, warpgroup):
        """Addresses in a warpgroup's first buffer, for the first 8 tokens of the fragment.

        float32: of the lane's value (c, h). Else of the row that the lane stands for, in the
        two 8x8 matrices as they are after the transpose: 8 columns of a token.
        """
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() % 4
        first = self.smem.iterator.toint() + 2 * warpgroup * tiling.STAGING_BYTES
        if self.dtype is not Float32:
            token, h = lane % 8, lane // 8 % 2
            return [first + token * _SPAN_BYTES + ((2 * warp + h) ^ token) * 16]
        first += warp // 2 * (self.box(self.dtype)[0] * _SPAN_BYTES)  # a span has 32 columns
        places = []
        for c, h in itertools.product(range(2), range(2)):
            token, column = 2 * (lane % 4) + c, 16 * (warp % 2) + 8 * h + lane // 4
            chunk = (column // 4) ^ token
            places.append(first + token * _SPAN_BYTES + chunk * 16 + column % 4 * 4)
        return places

    def _lay_out(self, places, offset, values):
        """8 tokens by the warp's 16 columns; values: [2 * c + h]."""
        if self.dtype is Float32:
            for place, value in zip(places, values):
                cute.arch.inline_ptx(
                    f"st.shared.f32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[place, value]
                )
        else:
            cute.arch.inline_ptx(
                f"stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{{$r0}}+{offset}], "
                "{{$r1}, {$r2}};",
                read_only_args=[
                    places[0],
                    *(_pack(self.dtype, values[h], values[2 + h]) for h in range(2)),
                ],
            )


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


def _places_along_m(dtype):
    """Of 16 tokens by 64 columns, the h, part, token and column of each vector of 8 registers."""
    lane = cute.arch.lane_idx()
    columns = 8 * 32 // dtype.width  # of a vector, one of four side by side
    for h in range(2):
        for part in range(16 // columns):
            yield h, part, 8 * h + lane // 4, columns * (4 * part + lane % 4)


def load_tokens_along_m(out, first_row, rows, first_column):
    """What store_tokens_along_m would overwrite, to be added by it."""
    return [
        out.load(first_row + Int64(token), first_column + column, 8, token < rows)
        for _, _, token, column in _places_along_m(out.dtype)
    ]


def store_tokens_along_m(out, values, first_row, rows, first_column, old=None):
    """Writes 16 tokens, of which there are rows, by 64 columns: 128 bytes or more of a row.

    values: the fragment of 8 blocks of columns, as a list of [4 * block + 2 * h + c];
    old: what is added, of load_tokens_along_m.
    """
    lane = cute.arch.lane_idx()
    for i, (h, part, token, column) in enumerate(_places_along_m(out.dtype)):

        def pair(block, h=h):
            return values[4 * block + 2 * h : 4 * block + 2 * h + 2]

        if out.dtype is Float32:  # lane q of the quad takes block q of this part
            low, high = (
                _transpose(Float32, [pair(4 * part + q)[c] for q in range(4)], lane, 1)
                for c in range(2)
            )
            registers = [x for both in zip(low, high) for x in both]
            if old:
                registers = [x + y.bitcast(Float32) for x, y in zip(registers, old[i])]
        else:  # lane q takes blocks 2 q and 2 q + 1
            registers = []
            for odd in range(2):
                pairs = [pair(2 * q + odd) for q in range(4)]
                if old:  # by the exchange of a store once more, as it is its own inverse
                    added = _transpose(Uint32, old[i][4 * odd : 4 * odd + 4], lane, 1)
                    pairs = [
                        [x + y for x, y in zip(pair, _unpack(out.dtype, packed))]
                        for pair, packed in zip(pairs, added)
                    ]
                registers += _transpose(Uint32, [_pack(out.dtype, *x) for x in pairs], lane, 1)
        out.store(first_row + Int64(token), first_column + column, registers, token < rows)
