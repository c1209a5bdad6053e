"""The grouped matmul for sm_90a."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
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
from pearl_jax.kernels.hopper_outer import HopperGroupedOuter
from pearl_jax.kernels.launcher import DTYPES, compile_launcher
from pearl_jax.kernels.scheduler import Scheduler
from pearl_jax.tiling import K_TILE, STAGE_COLUMNS, KernelSpec


class HopperGroupedMatmul:
    """out rows of group i = lhs rows of group i times rhs[i], as a persistent kernel.

    A work tile is up to tile.m rows ("tokens") of one group by tile.n columns, or by half of
    256 where there are few. Weights are the M operand of wgmma, tokens the N operand, and each
    work tile picks the instruction's N by its rows. With a cluster, its CTAs work on
    neighbouring columns of the same tokens; each copies a part of the tokens to all.

    Warps (384 threads, one CTA on each multiprocessor):
      warp 0      copies weights: stages of (STAGE_COLUMNS, tile.k)
      warp 1      copies tokens: stages of (tile.m, one K tile), only the rows there are
      warps 2, 3  write zeros to the rows that no group of rhs owns
      warps 4-11  two consumer warpgroups, half of the columns each

    Timeline of a work tile: both producers walk on as far as their rings have room, past
    the end of the tile and into the next ones. A consumer waits for the stages of
    a K tile, issues its wgmmas, and when those of the K tile before have finished
    releases that one's stages, so one K tile is always in flight. After the last one it
    stores its accumulators while the rings fill for the next tile: straight from registers,
    or where they are staged by way of shared memory, which takes less of its time and more
    of the rings' room. The two warpgroups do not wait for each other, so one can store while
    the other multiplies.
    """

    def __init__(self, spec: KernelSpec):
        valid, reason = tiling.is_valid(spec.arch, spec.tile)
        if not valid:
            raise ValueError(reason)
        self.spec, self.tile = spec, spec.tile
        self.dtype, self.out_dtype = DTYPES[spec.dtype], DTYPES[spec.out_dtype]
        self.mainloop = Mainloop(
            spec, forms.weights_major(spec), OperandMajorMode.K, spec.tile.cluster
        )
        self.box_rows = max(16, spec.tile.m // 4)  # tokens of one request of the copy engine
        # The blocks of a work tile, above how many rows and up to how many it has.
        self.variants = []
        blocks = self.mainloop.blocks
        for num_blocks in range(blocks, 0, -1):
            least = 0
            for extent in (e for e in tiling.EXTENTS if e <= spec.tile.m):
                # Of a narrow tile one for each number of requests, to make less code.
                if num_blocks == blocks or extent % self.box_rows == 0:
                    self.variants.append((num_blocks, least, extent))
                    # An instruction reads no token that was not copied.
                    assert -(-(least + 1) // self.box_rows) * self.box_rows >= extent
                    least = extent

        size = self.dtype.width // 8
        self.weights_bytes = STAGE_COLUMNS * spec.tile.k * size
        self.box_bytes = self.box_rows * K_TILE * size
        self.weights_stages, self.tokens_stages = self.mainloop.stages
        self.box = epilogue.StagedOutput.box(self.out_dtype)[::-1]  # (columns, rows)

    @cute.jit
    def __call__(
        self,
        lhs: cute.Pointer,
        rhs: cute.Pointer,
        group_sizes: cute.Pointer,
        group_offset: cute.Pointer,
        batch_index: cute.Pointer,
        out: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        num_groups: Int32,
        num_sizes: Int32,
        num_batches: Int32,
        lhs_batches: Int32,
        rhs_batches: Int32,
        num_sms: Int32,
        stream: cuda.CUstream,
    ):
        load = cpasync.CopyBulkTensorTileG2SOp()
        weights = forms.weights_map(
            self.spec,
            rhs,
            (n, k, rhs_batches * num_groups),
            STAGE_COLUMNS,
            self.weights_stages,
            load,
        )
        if cutlass.const_expr(self.tile.cluster > 1):
            load = cpasync.CopyBulkTensorTileG2SMulticastOp()
        tokens = forms.tokens_map(
            lhs,
            (lhs_batches * m, k),
            self.box_rows,
            self.tile.m // self.box_rows,
            self.tokens_stages,
            load,
        )
        scheduler = Scheduler(
            group_sizes,
            group_offset,
            batch_index,
            m,
            n,
            num_groups,
            num_sizes,
            num_batches,
            self.tile,
            tiling.narrow_columns(self.spec.arch, self.tile),
        )
        out_map = []
        if cutlass.const_expr(self.tile.staged):
            *out_map, _ = forms.ragged_map(
                out,
                (num_batches * m, n),
                False,
                self.box,
                2 * CONSUMERS,
                cpasync.CopyBulkTensorTileS2GOp(),
            )
        self.kernel(
            *weights,
            *tokens,
            scheduler,
            out,
            out_map,
            k,
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
        weights_atom: cute.CopyAtom,
        weights: cute.Tensor,
        weights_smem: cute.ComposedLayout,
        weights_tiler: cutlass.Constexpr,
        tokens_atom: cute.CopyAtom,
        tokens: cute.Tensor,
        tokens_smem: cute.ComposedLayout,
        scheduler: Scheduler,
        out: cute.Pointer,
        out_map: list,
        k: Int32,
    ):
        allocator = cutlass.memory.SmemAllocator()
        weights_ring, tokens_ring = self.mainloop.rings(allocator, weights_smem, tokens_smem)
        staged = None
        if cutlass.const_expr(self.tile.staged):
            out_atom, out_tensor, out_smem = out_map
            staging = allocator.allocate_tensor(
                self.out_dtype, out_smem.outer, byte_alignment=1024, swizzle=out_smem.inner
            )
            staged = epilogue.StagedOutput(out_atom, None, out_tensor, staging, self.out_dtype)
        self.mainloop.start((weights_ring, tokens_ring), (weights_atom, tokens_atom, *out_map[:1]))
        k_tiles = cute.ceil_div(k, K_TILE)
        output = epilogue.Output(out, self.out_dtype, scheduler.n)

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.copy_weights(
                    scheduler, weights_ring, weights_atom, weights, weights_tiler, k_tiles
                )
            elif warp == 1:
                self.copy_tokens(scheduler, tokens_ring, tokens_atom, tokens, k_tiles)
            else:
                epilogue.write_zeros(scheduler, output, warp - 2, 2)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.multiply(scheduler, weights_ring, tokens_ring, output, staged, k_tiles)

    @cute.jit
    def copy_weights(self, scheduler, ring, atom, weights, tiler, k_tiles):
        num_stages = cute.ceil_div(k_tiles, self.tile.k // K_TILE)
        # (box, column tile, stage of k, group)
        tiles = cute.local_tile(weights, tiler, (None, None, None))
        smem, gmem = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(ring.smem, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        state = ring.producer_state()
        chunk, tile, step = scheduler.start()
        chunk, work = scheduler.find(chunk, tile)
        while work.valid:
            column_tile = work.column // STAGE_COLUMNS
            for i in range(num_stages):
                for block in range(work.columns // STAGE_COLUMNS):
                    ring.acquire(state, self.weights_bytes)
                    cute.copy(
                        atom,
                        gmem[None, column_tile + block, i, work.group],
                        smem[None, state.index],
                        tma_bar_ptr=ring.full_barrier(state),
                        **forms.cache_policy(self.tile.evict_first),
                    )
                    state.advance()
            tile += step
            chunk, work = scheduler.find(chunk, tile)
        ring.drain(state)

    @cute.jit
    def copy_tokens(self, scheduler, ring, atom, tokens, k_tiles):
        multicast = {}
        if cutlass.const_expr(self.tile.cluster > 1):
            multicast["mcast_mask"] = cutlass.Int16((1 << self.tile.cluster) - 1)
        state = ring.producer_state()
        chunk, tile, step = scheduler.start()
        chunk, work = scheduler.find(chunk, tile)
        while work.valid:
            first = work.lhs_batch * scheduler.m + work.row
            # (box, box of rows, K tile)
            boxes = cute.local_tile(
                cute.domain_offset((first, 0), tokens), (self.box_rows, K_TILE), (None, None)
            )
            smem, gmem = cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(ring.smem, 0, 2),
                cute.group_modes(boxes, 0, 2),
            )
            num_boxes = cute.ceil_div(work.rows, self.box_rows)
            for i in range(k_tiles):
                ring.acquire(state, num_boxes * self.box_bytes)
                # The CTAs of a cluster take turns; what one copies lands in all of them.
                for box in range(scheduler.rank(), num_boxes, self.tile.cluster):
                    cute.copy(
                        atom,
                        gmem[None, box, i],
                        smem[None, box, state.index],
                        tma_bar_ptr=ring.full_barrier(state),
                        **multicast,
                    )
                state.advance()
            tile += step
            chunk, work = scheduler.find(chunk, tile)
        ring.drain(state)

    @cute.jit
    def multiply(self, scheduler, weights_ring, tokens_ring, out, staged, k_tiles):
        weights_state = weights_ring.consumer_state()
        tokens_state = tokens_ring.consumer_state()
        warp = cute.arch.warp_idx() - WARPGROUP // 32
        chunk, tile, step = scheduler.start()
        chunk, work = scheduler.find(chunk, tile)
        while work.valid:
            out_row = Int64(work.out_batch) * scheduler.m + work.row
            column = work.column + warp * 16
            for i in cutlass.range_constexpr(len(self.variants)):
                num_blocks, least, extent = self.variants[i]
                columns = num_blocks * STAGE_COLUMNS
                if work.columns == columns and work.rows > least and work.rows <= extent:
                    accumulators, weights_state, tokens_state = self.mainloop.multiply(
                        extent,
                        num_blocks,
                        weights_ring,
                        tokens_ring,
                        self.tokens_operand(tokens_ring.smem, extent),
                        weights_state,
                        tokens_state,
                        k_tiles,
                    )
                    if cutlass.const_expr(self.tile.staged):

                        def place(i, j, work=work):
                            first = i * self.box[1]
                            return forms.ragged_tile(
                                staged.tensor,
                                (self.box[0], (self.box[1], 1, 1)),
                                work.column // self.box[0] + j,
                                work.out_batch * scheduler.m + work.row + first,
                                work.rows - first,
                            )

                        staged.store(accumulators, warp // 4, place, 0)
                    else:
                        epilogue.store_accumulators(out, accumulators, out_row, work.rows, column)
            tile += step
            chunk, work = scheduler.find(chunk, tile)
        if cutlass.const_expr(self.tile.staged):
            staged.finish()

    def tokens_operand(self, smem, extent):
        """The first extent tokens of each stage, (extent, K_TILE, stages)."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        layout = cute.tile_to_shape(atom, (extent, K_TILE), order=(0, 1))
        stages = cute.make_layout(self.tokens_stages, stride=self.tile.m * K_TILE)
        return cute.make_tensor(smem.iterator, cute.append(layout.outer, stages))


def compile_kernel(spec: KernelSpec):
    """The compiled kernel, to be exported as an object file."""
    if spec.form == "wgrad":
        return compile_launcher(HopperGroupedOuter(spec), spec)
    return compile_launcher(HopperGroupedMatmul(spec), spec)
