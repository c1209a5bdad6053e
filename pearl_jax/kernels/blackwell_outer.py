"""The outer product of groups for sm_100f: the gradient of a grouped matmul's weights."""

from __future__ import annotations

import dataclasses

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.common import OperandMajorMode

from pearl_jax import tiling
from pearl_jax.kernels import epilogue, forms
from pearl_jax.kernels.blackwell_mainloop import (
    COPY_WARP,
    EPILOGUE_WARPS,
    MULTIPLY_WARP,
    Mainloop,
    Products,
)
from pearl_jax.kernels.launcher import DTYPES
from pearl_jax.kernels.scheduler import OuterScheduler
from pearl_jax.tiling import K_TILE, KernelSpec

_WARPS = 6


@dataclasses.dataclass(frozen=True)
class _Map:
    """How the copy engine reads one operand."""

    atom: cute.CopyAtom
    tensor: cute.Tensor
    tiler: cutlass.Constexpr


class BlackwellGroupedOuter:
    """out[i] (k, n) = lhs rows of group i, transposed, times rhs rows of group i.

    A work tile is tile.m rows (columns of lhs) by tile.n columns (columns of rhs) of one
    group's result, on one CTA or on a pair; its sum runs over the rows of the group, a K
    tile of 64 at a time. To the mainloop columns of lhs are "tokens", on M, and those of
    rhs "weights". Both lie MN-major as they are, so nothing is transposed. Rows past the
    end of a group arrive as zeros (forms.ragged_tensor): not even NaN in a neighbour's rows
    reaches a sum. For an empty group that makes one K tile of zeros, so its result is 0
    like any other sum.

    192 threads: the warps and rings of the mainloop. Timeline of a work tile: as in the
    matmul, with as many K tiles as the group has. A group has often few, so storing takes
    as long as multiplying, and the two accumulators let both go on at once.
    """

    def __init__(self, spec: KernelSpec):
        valid, reason = tiling.is_valid(spec.arch, spec.tile, spec.form)
        if not valid:
            raise ValueError(reason)
        self.spec, self.tile = spec, spec.tile
        self.dtype, self.out_dtype = DTYPES[spec.dtype], DTYPES[spec.out_dtype]
        self.mainloop = Mainloop(spec, OperandMajorMode.MN, OperandMajorMode.MN)
        # Of a K tile, in both CTAs of a pair.
        self.num_bytes = (self.tile.m + self.tile.n) * K_TILE * (self.dtype.width // 8)

    @cute.jit
    def __call__(
        self,
        lhs: cute.Pointer,
        rhs: cute.Pointer,
        group_sizes: cute.Pointer,
        group_offset: cute.Pointer,
        batch_index: cute.Pointer,
        out: cute.Pointer,
        partial: cute.Pointer,  # not used: no tile is shared
        m: Int32,
        n: Int32,
        k: Int32,
        num_groups: Int32,
        num_sizes: Int32,
        num_batches: Int32,
        lhs_batches: Int32,
        rhs_batches: Int32,
        reduced: Int32,
        accumulate: Int32,
        num_sms: Int32,
        stream: cuda.CUstream,
    ):
        load = cpasync.CopyBulkTensorTileG2SOp(self.mainloop.group)
        rhs_stages, lhs_stages = self.mainloop.stages
        maps = [
            *forms.ragged_map(
                lhs,
                (lhs_batches * m, k),
                self.spec.wide,
                (self.mainloop.tokens, K_TILE),
                lhs_stages,
                load,
            ),
            *forms.ragged_map(
                rhs,
                (rhs_batches * m, n),
                self.spec.wide,
                (self.mainloop.columns, K_TILE),
                rhs_stages,
                load,
            ),
        ]
        scheduler = OuterScheduler(
            group_sizes,
            group_offset,
            batch_index,
            m,
            n,
            num_groups,
            num_sizes,
            num_batches,
            self.tile,
            k,
            reduced,
        )
        self.kernel(*maps, scheduler, out, accumulate).launch(
            grid=[num_sms // self.tile.ctas * self.tile.ctas, 1, 1],
            cluster=[self.tile.ctas, 1, 1],
            block=[_WARPS * 32, 1, 1],
            min_blocks_per_mp=1,
            use_pdl=self.tile.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        lhs_atom: cute.CopyAtom,
        lhs: cute.Tensor,
        lhs_smem: cute.ComposedLayout,
        lhs_tiler: cutlass.Constexpr,
        rhs_atom: cute.CopyAtom,
        rhs: cute.Tensor,
        rhs_smem: cute.ComposedLayout,
        rhs_tiler: cutlass.Constexpr,
        scheduler: OuterScheduler,
        out: cute.Pointer,
        accumulate: Int32,
    ):
        memory = self.mainloop.start(rhs_smem, lhs_smem, (lhs_atom, rhs_atom))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < EPILOGUE_WARPS:
            output = epilogue.Output(out, self.out_dtype, scheduler.n, 8 if self.spec.wide else 4)
            self.store(scheduler, memory, output, accumulate)
        elif warp == MULTIPLY_WARP:
            if self.mainloop.rank_in_pair() == 0:
                self.multiply(scheduler, memory)
        elif warp == COPY_WARP:
            self.copy(
                scheduler,
                memory,
                _Map(lhs_atom, lhs, lhs_tiler),
                _Map(rhs_atom, rhs, rhs_tiler),
            )
        self.mainloop.finish(memory)

    @cute.jit
    def copy(self, scheduler, memory, lhs, rhs):
        tokens_state = memory.tokens.producer_state()
        weights_state = memory.weights.producer_state()
        rank = self.mainloop.rank_in_pair()
        ends, order = scheduler.start()
        turn, tile = Int32(0), scheduler.nth(order, Int32(0))
        while tile < scheduler.num_tiles():
            work = scheduler.find(order, tile)
            lhs_tile = work.row // self.mainloop.tokens + rank
            rhs_tile = work.column // self.mainloop.columns + rank
            copied = Int32(0)
            for part in range(scheduler.reduced):
                ends, rows = scheduler.rows(ends, work, part)
                k_tiles = cute.ceil_div(rows.count, K_TILE)
                if copied == 0 and part == scheduler.reduced - 1:  # the zeros of no rows
                    k_tiles = cutlass.max(k_tiles, 1)
                copied += k_tiles
                for i in cutlass.range(k_tiles, unroll=1):
                    row = i * K_TILE
                    left = rows.count - row
                    memory.weights.wait_empty(weights_state)
                    memory.tokens.wait_empty(tokens_state)
                    if rank == 0:
                        memory.tokens.announce(tokens_state, self.num_bytes)
                    full = memory.tokens.full_barrier(tokens_state)
                    self.copy_stage(
                        lhs, lhs_tile, rows.lhs_first + row, left, memory.tokens, tokens_state, full
                    )
                    self.copy_stage(
                        rhs,
                        rhs_tile,
                        rows.rhs_first + row,
                        left,
                        memory.weights,
                        weights_state,
                        full,
                    )
                    tokens_state.advance()
                    weights_state.advance()
            turn += 1
            tile = scheduler.nth(order, turn)
        memory.tokens.drain(tokens_state)
        memory.weights.drain(weights_state)

    def copy_stage(self, operand, column_tile, first, left, ring, state, barrier):
        """Rows first on, of which so many are left, of one tile of columns."""
        stage = forms.ragged_tile(operand.tensor, operand.tiler, column_tile, first, left)
        smem, gmem = cpasync.tma_partition(
            operand.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(ring.smem, 0, 2),
            cute.group_modes(stage, 0, 2),
        )
        cute.copy(operand.atom, gmem, smem[None, state.index], tma_bar_ptr=barrier)

    @cute.jit
    def multiply(self, scheduler, memory):
        products = Products(
            *self.mainloop.operands(memory), self.mainloop.instruction(Int32(self.tile.m))
        )
        tokens_state = memory.tokens.consumer_state()
        weights_state = memory.weights.consumer_state()
        state = memory.accumulators.producer_state()
        ends, order = scheduler.start()
        turn, tile = Int32(0), scheduler.nth(order, Int32(0))
        while tile < scheduler.num_tiles():
            ends, k_tiles = scheduler.k_tiles(ends, scheduler.find(order, tile))
            k_tiles = cutlass.max(k_tiles, 1)
            tokens_state, weights_state, state = self.mainloop.multiply(
                memory, products, tokens_state, weights_state, state, k_tiles
            )
            turn += 1
            tile = scheduler.nth(order, turn)

    @cute.jit
    def store(self, scheduler, memory, out, accumulate):
        state = memory.accumulators.consumer_state()
        _, order = scheduler.start()
        turn, tile = Int32(0), scheduler.nth(order, Int32(0))
        while tile < scheduler.num_tiles():
            work = scheduler.find(order, tile)
            group = work.out_batch * scheduler.num_groups + work.group
            first_row = Int64(group) * scheduler.k + work.row
            rows = scheduler.k - work.row
            if accumulate != 0:
                self.mainloop.store_tokens_along_m(
                    memory, state, out, first_row, rows, work.column, add=True
                )
            else:
                self.mainloop.store_tokens_along_m(memory, state, out, first_row, rows, work.column)
            state.advance()
            turn += 1
            tile = scheduler.nth(order, turn)
