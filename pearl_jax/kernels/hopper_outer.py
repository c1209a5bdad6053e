"""The outer product of groups for sm_90a: the gradient of a grouped matmul's weights."""

from __future__ import annotations

import dataclasses

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.common import OperandMajorMode

from pearl_jax import tiling
from pearl_jax.kernels import epilogue, forms
from pearl_jax.kernels.hopper_mainloop import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    THREADS,
    WARPGROUP,
    Mainloop,
)
from pearl_jax.kernels.launcher import DTYPES
from pearl_jax.kernels.scheduler import OuterScheduler
from pearl_jax.tiling import K_TILE, STAGE_COLUMNS, KernelSpec

_BLOCKS = 4  # of the result, that are read at once to be added to
_VECTOR = 4  # sums that a thread writes or reads at once, when a tile is shared


@dataclasses.dataclass(frozen=True)
class Share:
    """How the second CTA of a cluster gives its sums of a tile to the first, once in a launch."""

    # A row for every _VECTOR registers of a fragment, in it those of one thread after another.
    partial: epilogue.Output
    given: cute.Pointer  # barrier, of each warp of the other CTA

    @cute.jit
    def init(self):
        """Called by one warp, before the barriers' fence."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(self.given, CONSUMERS * WARPGROUP // 32)

    @cute.jit
    def give_or_take(self, accumulators, give):
        """Writes the fragment, or adds what the other CTA wrote; consumers only."""
        column = (cute.arch.thread_idx()[0] - WARPGROUP) * _VECTOR
        vectors = cute.size(accumulators) // _VECTOR
        row = Int64(cute.arch.block_idx()[0] // 2 * vectors)
        if give:
            for i in cutlass.range_constexpr(vectors):
                values = [accumulators[_VECTOR * i + j] for j in range(_VECTOR)]
                self.partial.store(row + i, column, values, Boolean(True))
            cute.arch.fence_acq_rel_cluster()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.given, 0, scope=MemScopeKind.CLUSTER)
        else:
            cute.arch.mbarrier_wait(self.given, 0)
            cute.arch.fence_acq_rel_cluster()
            for i in cutlass.range_constexpr(vectors):
                values = self.partial.load(row + i, column, _VECTOR, Boolean(True))
                for j in cutlass.range_constexpr(_VECTOR):
                    accumulators[_VECTOR * i + j] += values[j].bitcast(Float32)


class HopperGroupedOuter:
    """out[i] (k, n) = lhs rows of group i, transposed, times rhs rows of group i.

    A work tile is tile.m rows (columns of lhs) by tile.n columns (columns of rhs) of one
    group's result; its sum runs over the rows of the group, a K tile of 64 at a time. To
    the tensor core columns of rhs are "weights" and those of lhs "tokens", and both lie
    MN-major as they are, so nothing is transposed. Rows past the end of a group arrive as
    zeros (forms.ragged_tensor): not even NaN in a neighbour's rows reaches a sum.

    Warps (384 threads, one CTA on each multiprocessor):
      warp 0      copies rhs: stages of (STAGE_COLUMNS, 64)
      warp 1      copies lhs: stages of (tile.m, 64)
      warps 2, 3  do nothing
      warps 4-11  two consumer warpgroups, half of the columns each

    The rings are the mainloop's. Timeline of a work tile: as in the matmul, with as many K
    tiles as the group has; none if it is empty, and then zeros are stored. The two CTAs of a
    cluster have nothing in common but a tile that they share: the second writes its sums to
    memory, and the first adds them to its own and stores the result.
    """

    def __init__(self, spec: KernelSpec):
        valid, reason = tiling.is_valid(spec.arch, spec.tile, spec.form)
        if not valid:
            raise ValueError(reason)
        self.spec, self.tile = spec, spec.tile
        self.dtype, self.out_dtype = DTYPES[spec.dtype], DTYPES[spec.out_dtype]
        self.store_ops = [cpasync.CopyBulkTensorTileS2GOp()]
        if spec.out_dtype == "float32":
            self.store_ops.append(cpasync.CopyReduceBulkTensorTileS2GOp())  # adds
        self.mainloop = Mainloop(spec, OperandMajorMode.MN, OperandMajorMode.MN)

    @cute.jit
    def __call__(
        self,
        lhs: cute.Pointer,
        rhs: cute.Pointer,
        group_sizes: cute.Pointer,
        group_offset: cute.Pointer,
        batch_index: cute.Pointer,
        out: cute.Pointer,
        partial: cute.Pointer,
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
        load = cpasync.CopyBulkTensorTileG2SOp()
        rhs_stages, lhs_stages = self.mainloop.stages
        maps = [
            *forms.ragged_map(
                rhs,
                (rhs_batches * m, n),
                self.spec.wide,
                (STAGE_COLUMNS, K_TILE),
                rhs_stages,
                load,
            ),
            *forms.ragged_map(
                lhs,
                (lhs_batches * m, k),
                self.spec.wide,
                (self.tile.m, K_TILE),
                lhs_stages,
                load,
            ),
        ]
        box = epilogue.StagedOutput.box(self.out_dtype)
        result = cute.make_tensor(
            out,
            cute.make_layout(
                (k, n, num_batches * num_groups), stride=(Int64(n), 1, Int64(n) * Int64(k))
            ),
        )
        out_smem = forms.smem_layout(OperandMajorMode.K, self.out_dtype, (*box, 2 * CONSUMERS))
        out_maps = [
            cpasync.make_tiled_tma_atom(op, result, cute.slice_(out_smem, (None, None, 0)), box)
            for op in self.store_ops
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
        self.kernel(
            *maps,
            [atom for atom, _ in out_maps],
            out_maps[0][1],
            out_smem,
            scheduler,
            out,
            partial,
            accumulate,
        ).launch(
            grid=[num_sms // self.tile.cluster * self.tile.cluster, 1, 1],
            cluster=[self.tile.cluster, 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            use_pdl=self.tile.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        rhs_atom: cute.CopyAtom,
        rhs: cute.Tensor,
        rhs_smem: cute.ComposedLayout,
        rhs_tiler: cutlass.Constexpr,
        lhs_atom: cute.CopyAtom,
        lhs: cute.Tensor,
        lhs_smem: cute.ComposedLayout,
        lhs_tiler: cutlass.Constexpr,
        out_atoms: list,
        out_tensor: cute.Tensor,
        out_smem: cute.ComposedLayout,
        scheduler: OuterScheduler,
        out: cute.Pointer,
        partial: cute.Pointer,
        accumulate: Int32,
    ):
        allocator = cutlass.memory.SmemAllocator()
        rhs_ring, lhs_ring = self.mainloop.rings(allocator, rhs_smem, lhs_smem)
        staging = allocator.allocate_tensor(
            self.out_dtype, out_smem.outer, byte_alignment=1024, swizzle=out_smem.inner
        )
        share = Share(
            epilogue.Output(partial, Float32, _VECTOR * CONSUMERS * WARPGROUP),
            allocator.allocate_array(Int64, 1),
        )
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            share.init()
        self.mainloop.start((rhs_ring, lhs_ring), (rhs_atom, lhs_atom, *out_atoms))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.copy(scheduler, rhs_ring, rhs_atom, rhs, rhs_tiler, False)
            elif warp == 1:
                self.copy(scheduler, lhs_ring, lhs_atom, lhs, lhs_tiler, True)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            output = epilogue.Output(out, self.out_dtype, scheduler.n)
            staged = epilogue.StagedOutput(
                out_atoms[0],
                out_atoms[1] if len(out_atoms) > 1 else None,
                out_tensor,
                staging,
                self.out_dtype,
                evict_first=True,
            )
            self.multiply(scheduler, rhs_ring, lhs_ring, output, staged, share, accumulate)

    @cute.jit
    def copy(self, scheduler, ring, atom, tensor, tiler, is_lhs: cutlass.Constexpr[bool]):
        extent = self.tile.m if is_lhs else STAGE_COLUMNS
        stages = 1 if is_lhs else self.mainloop.blocks  # of a K tile
        num_bytes = extent * K_TILE * (self.dtype.width // 8)
        state = ring.producer_state()
        ends, order = scheduler.start()
        turn, tile = Int32(0), scheduler.nth(order, Int32(0))
        while tile < scheduler.num_tiles():
            work = scheduler.find(order, tile)
            column_tile = (work.row if is_lhs else work.column) // extent
            for part in range(scheduler.reduced):
                ends, rows = scheduler.rows(ends, work, part)
                first = rows.lhs_first if is_lhs else rows.rhs_first
                for i in range(cute.ceil_div(rows.count, K_TILE) * stages):
                    row = i // stages * K_TILE
                    stage = forms.ragged_tile(
                        tensor,
                        tiler,
                        column_tile + i % stages,
                        first + row,
                        rows.count - row,
                    )
                    smem, gmem = cpasync.tma_partition(
                        atom,
                        0,
                        cute.make_layout(1),
                        cute.group_modes(ring.smem, 0, 2),
                        cute.group_modes(stage, 0, 2),
                    )
                    ring.acquire(state, num_bytes)
                    cute.copy(
                        atom,
                        gmem,
                        smem[None, state.index],
                        tma_bar_ptr=ring.full_barrier(state),
                    )
                    state.advance()
            turn += 1
            tile = scheduler.nth(order, turn)
        ring.drain(state)

    @cute.jit
    def multiply(self, scheduler, rhs_ring, lhs_ring, out, staged, share, accumulate):
        rhs_state, lhs_state = rhs_ring.consumer_state(), lhs_ring.consumer_state()
        ends, order = scheduler.start()
        turn, tile = Int32(0), scheduler.nth(order, Int32(0))
        while tile < scheduler.num_tiles():
            work = scheduler.find(order, tile)
            ends, k_tiles = scheduler.k_tiles(ends, work)
            accumulators, rhs_state, lhs_state = self.mainloop.multiply(
                self.tile.m,
                self.mainloop.blocks,
                rhs_ring,
                lhs_ring,
                lhs_ring.smem,
                rhs_state,
                lhs_state,
                k_tiles,
            )
            given = Boolean(False)
            if work.shared:
                given = scheduler.share() == 1
                share.give_or_take(accumulators, given)
            if not given:
                self.store(scheduler, work, accumulators, out, staged, accumulate)
            turn += 1
            tile = scheduler.nth(order, turn)
        staged.finish()

    @cute.jit
    def store(self, scheduler, work, accumulators, out, staged, accumulate):
        warp = cute.arch.warp_idx() - WARPGROUP // 32
        box = staged.box(self.out_dtype)
        group = work.out_batch * scheduler.num_groups + work.group
        if cutlass.const_expr(staged.adding_atom is None):
            first_row = Int64(group) * scheduler.k + work.row
            # A few at a time, as what is read takes registers too.
            blocks = epilogue.blocks(accumulators)
            for i in cutlass.range_constexpr(0, len(blocks), _BLOCKS):
                if accumulate != 0:
                    epilogue.add_stored(
                        out,
                        accumulators,
                        first_row,
                        scheduler.k - work.row,
                        work.column + warp * 16,
                        blocks[i : i + _BLOCKS],
                    )

        def place(i, j):
            first = work.row // box[0], work.column // box[1]
            return cute.local_tile(staged.tensor, box, (first[0] + i, first[1] + j, group))

        staged.store(accumulators, warp // 4, place, accumulate)
