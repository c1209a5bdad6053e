"""The grouped matmul for sm_100f."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.common import OperandMajorMode

from pearl_jax import tiling
from pearl_jax.kernels import epilogue, forms, tcgen05
from pearl_jax.kernels.blackwell_mainloop import (
    COPY_WARP,
    EPILOGUE_WARPS,
    MULTIPLY_WARP,
    Mainloop,
    Products,
)
from pearl_jax.kernels.blackwell_outer import BlackwellGroupedOuter
from pearl_jax.kernels.launcher import DTYPES, compile_launcher
from pearl_jax.kernels.scheduler import Scheduler
from pearl_jax.tiling import K_TILE, KernelSpec

_ZERO_WARP = 6
_WARPS = 8


class BlackwellGroupedMatmul:
    """out rows of group i = lhs rows of group i times rhs[i], as a persistent kernel.

    A work tile is up to tile.m rows ("tokens") of one group by tile.n columns, on one CTA
    or on a pair. With tile.rows_on_m tokens are the M operand of the tensor core, else
    weights are, and each work tile picks the instruction's N by its rows. With a cluster,
    its CTAs (or pairs) work on neighbouring columns of the same tokens; each copies a part
    of the tokens to all.

    256 threads: the warps and rings of the mainloop, and
      warps 6, 7  write zeros to the rows that no group of rhs owns

    Timeline of a work tile: for each K tile the copying warp waits for room for the tokens,
    and where the K tile opens a new stage of weights for room for those, then announces the
    bytes of both. It walks on as far as there is room, into the next work tiles. The
    multiplying warp waits for an accumulator, for each K tile issues its four products and
    a commit that frees the tokens when they are done, and the weights too with the last K
    tile of their stage or of the work tile. After the last one it turns to the other
    accumulator, while the epilogue moves the finished one to registers and, when it has it
    all, frees it before the last stores.
    """

    def __init__(self, spec: KernelSpec):
        valid, reason = tiling.is_valid(spec.arch, spec.tile)
        if not valid:
            raise ValueError(reason)
        tile = self.tile = spec.tile
        self.spec = spec
        self.dtype, self.out_dtype = DTYPES[spec.dtype], DTYPES[spec.out_dtype]
        self.mainloop = Mainloop(spec, forms.weights_major(spec), OperandMajorMode.K)
        size = self.dtype.width // 8
        # Tokens of one request. On M all are copied, by each CTA of a cluster its part;
        # on N only as many boxes, of up to 4, as the rows need.
        tokens = self.mainloop.tokens
        self.box_rows = tokens // tile.cluster if tile.rows_on_m else 16 * -(-tokens // 64)
        self.box_bytes = self.box_rows * K_TILE * size
        self.weights_bytes = self.mainloop.columns * tile.k * size

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
        weights_stages, tokens_stages = self.mainloop.stages
        load = cpasync.CopyBulkTensorTileG2SOp(self.mainloop.group)
        weights = forms.weights_map(
            self.spec,
            rhs,
            (n, k, rhs_batches * num_groups),
            self.mainloop.box_columns,
            self.mainloop.halves * weights_stages,
            load,
        )
        if cutlass.const_expr(self.tile.cluster > 1):
            load = cpasync.CopyBulkTensorTileG2SMulticastOp(self.mainloop.group)
        tokens = forms.tokens_map(
            lhs,
            (lhs_batches * m, k),
            self.box_rows,
            self.mainloop.tokens // self.box_rows,
            tokens_stages,
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
        self.kernel(
            *weights,
            *tokens,
            scheduler,
            out,
            k,
        ).launch(
            grid=[num_sms // self.mainloop.cluster_ctas * self.mainloop.cluster_ctas, 1, 1],
            cluster=[self.mainloop.cluster_ctas, 1, 1],
            block=[_WARPS * 32, 1, 1],
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
        k: Int32,
    ):
        memory = self.mainloop.start(weights_smem, tokens_smem, (weights_atom, tokens_atom))
        k_tiles = cute.ceil_div(k, K_TILE)
        output = epilogue.Output(out, self.out_dtype, scheduler.n, 8 if self.spec.wide else 4)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < EPILOGUE_WARPS:
            self.store(scheduler, memory, output)
        elif warp == MULTIPLY_WARP:
            if self.mainloop.rank_in_pair() == 0:
                self.multiply(scheduler, memory, k_tiles)
        elif warp == COPY_WARP:
            self.copy(
                scheduler,
                memory,
                tokens_atom,
                tokens,
                weights_atom,
                weights,
                weights_tiler,
                k_tiles,
            )
        else:
            epilogue.write_zeros(scheduler, output, warp - _ZERO_WARP, _WARPS - _ZERO_WARP)
        self.mainloop.finish(memory)

    def extent(self, rows):
        """Tokens that the instructions of a work tile with so many rows multiply."""
        if cutlass.const_expr(self.tile.rows_on_m):
            return Int32(self.tile.m)
        return cute.round_up(rows, 16 * self.tile.ctas)

    @cute.jit
    def copy(
        self,
        scheduler,
        memory,
        tokens_atom,
        tokens,
        weights_atom,
        weights,
        weights_tiler,
        k_tiles,
    ):
        tokens_ring, weights_ring, mainloop = memory.tokens, memory.weights, self.mainloop
        multicast = {}
        if cutlass.const_expr(self.tile.cluster > 1):
            peers = sum(1 << (self.tile.ctas * i) for i in range(self.tile.cluster))
            multicast["mcast_mask"] = cutlass.Int16(peers << mainloop.rank_in_pair())
        k_ratio = self.tile.k // K_TILE  # K tiles of a stage of weights
        # (box, column tile, stage of k, group)
        weights_boxes = cute.local_tile(weights, weights_tiler, (None, None, None))
        weights_smem, weights_gmem = cpasync.tma_partition(
            weights_atom,
            0,
            cute.make_layout(1),
            cute.group_modes(weights_ring.smem, 0, 2),
            cute.group_modes(weights_boxes, 0, 2),
        )
        tokens_state = tokens_ring.producer_state()
        weights_state = weights_ring.producer_state()
        chunk, tile, step = scheduler.start()
        chunk, work = scheduler.find(chunk, tile)
        while work.valid:
            tokens_of_cta = self.extent(work.rows) // self.tile.ctas
            first = (
                work.lhs_batch * scheduler.m + work.row + mainloop.rank_in_pair() * tokens_of_cta
            )
            # (box, box of rows, K tile)
            boxes = cute.local_tile(
                cute.domain_offset((first, 0), tokens), (self.box_rows, K_TILE), (None, None)
            )
            tokens_smem, tokens_gmem = cpasync.tma_partition(
                tokens_atom,
                0,
                cute.make_layout(1),
                cute.group_modes(tokens_ring.smem, 0, 2),
                cute.group_modes(boxes, 0, 2),
            )
            num_boxes = cute.ceil_div(tokens_of_cta, self.box_rows)
            tokens_bytes = self.tile.ctas * num_boxes * self.box_bytes
            column_box = work.column // mainloop.box_columns + mainloop.rank_in_pair()
            for i in cutlass.range(k_tiles, unroll=1):
                opens = i % k_ratio == 0
                num_bytes = tokens_bytes
                if opens:
                    weights_ring.wait_empty(weights_state)
                    num_bytes += self.tile.ctas * self.weights_bytes
                if cutlass.const_expr(self.tile.cluster == 1 or self.tile.ctas == 1):
                    tokens_ring.wait_empty(tokens_state)
                else:
                    # A CTA without a part in this K tile must not wait: nobody waits for it
                    # either, so the barrier may be two phases on when it looks.
                    copies = opens or scheduler.rank() < num_boxes
                    if copies or mainloop.rank_in_pair() == 0:
                        tokens_ring.wait_empty(tokens_state)
                if mainloop.rank_in_pair() == 0:
                    tokens_ring.announce(tokens_state, num_bytes)
                full = tokens_ring.full_barrier(tokens_state)
                # The CTAs of a cluster take turns; what one copies lands in all of them.
                for box in cutlass.range(scheduler.rank(), num_boxes, self.tile.cluster, unroll=1):
                    cute.copy(
                        tokens_atom,
                        tokens_gmem[None, box, i],
                        tokens_smem[None, box, tokens_state.index],
                        tma_bar_ptr=full,
                        **multicast,
                    )
                if opens:
                    for half in cutlass.range_constexpr(mainloop.halves):
                        cute.copy(
                            weights_atom,
                            weights_gmem[
                                None,
                                column_box + half * self.tile.ctas,
                                i // k_ratio,
                                work.group,
                            ],
                            weights_smem[None, mainloop.halves * weights_state.index + half],
                            tma_bar_ptr=full,
                            **forms.cache_policy(self.tile.evict_first),
                        )
                    weights_state.advance()
                tokens_state.advance()
            tile += step
            chunk, work = scheduler.find(chunk, tile)
        tokens_ring.drain(tokens_state)
        weights_ring.drain(weights_state)

    @cute.jit
    def multiply(self, scheduler, memory, k_tiles):
        operands = self.mainloop.operands(memory)
        tokens_state = memory.tokens.consumer_state()
        weights_state = memory.weights.consumer_state()
        state = memory.accumulators.producer_state()
        chunk, tile, step = scheduler.start()
        chunk, work = scheduler.find(chunk, tile)
        while work.valid:
            products = Products(*operands, self.mainloop.instruction(self.extent(work.rows)))
            tokens_state, weights_state, state = self.mainloop.multiply(
                memory, products, tokens_state, weights_state, state, k_tiles
            )
            tile += step
            chunk, work = scheduler.find(chunk, tile)

    @cute.jit
    def store(self, scheduler, memory, out):
        state = memory.accumulators.consumer_state()
        chunk, tile, step = scheduler.start()
        chunk, work = scheduler.find(chunk, tile)
        while work.valid:
            first_row = Int64(work.out_batch) * scheduler.m + work.row
            for half in cutlass.range_constexpr(self.mainloop.halves):
                if cutlass.const_expr(self.tile.rows_on_m):
                    column = work.column + half * (self.tile.n // self.mainloop.halves)
                    self.mainloop.store_tokens_along_m(
                        memory, state, out, first_row, work.rows, column
                    )
                else:
                    self.store_tokens_along_n(memory, state, out, first_row, work.rows, work.column)
                state.advance()
            tile += step
            chunk, work = scheduler.find(chunk, tile)

    @cute.jit
    def store_tokens_along_n(self, memory, state, out, first_row, rows, column):
        self.mainloop.wait(memory, state)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        accumulator = self.mainloop.accumulator(memory, state) + (warp << 21)
        column += self.mainloop.rank_in_pair() * self.mainloop.columns + 32 * warp
        num_blocks = cute.ceil_div(rows, epilogue.TOKENS)
        for i in cutlass.range(num_blocks, unroll=1):
            at = epilogue.TOKENS * i
            values = tcgen05.load([accumulator + at, accumulator + (1 << 20) + at], 2)
            if i == num_blocks - 1:
                self.mainloop.release(memory, state)
            epilogue.store_tokens_along_n(out, values, first_row + at, rows - at, column)


def compile_kernel(spec: KernelSpec):
    """The compiled kernel, to be exported as an object file."""
    if spec.form == "wgrad":
        return compile_launcher(BlackwellGroupedOuter(spec), spec, out_align=32)
    return compile_launcher(BlackwellGroupedMatmul(spec), spec, out_align=32)
