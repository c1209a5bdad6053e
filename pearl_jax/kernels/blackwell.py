"""The grouped matmul for sm_100f."""

from __future__ import annotations

import dataclasses

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.cute.nvgpu.tcgen05 import CtaGroup, commit

from pearl_jax import tiling
from pearl_jax.kernels import epilogue, forms, tcgen05
from pearl_jax.kernels.launcher import DTYPES, compile_launcher
from pearl_jax.kernels.pipeline import Ring
from pearl_jax.kernels.scheduler import Scheduler
from pearl_jax.tiling import K_TILE, KernelSpec

_EPILOGUE_WARPS = 4  # each reads its quarter of the lanes of tensor memory
_MULTIPLY_WARP, _COPY_WARP, _ZERO_WARP = 4, 5, 6
_WARPS = 8


@dataclasses.dataclass(frozen=True)
class _Memory:
    """What the products read and write: the rings, and their stages as operands."""

    tokens_ring: Ring
    weights_ring: Ring
    accumulator_ring: Ring
    tokens: tcgen05.Operand
    weights: tcgen05.Operand
    tensor_memory: Int32  # address of the first accumulator


class BlackwellGroupedMatmul:
    """out rows of group i = lhs rows of group i times rhs[i], as a persistent kernel.

    A work tile is up to tile.m rows ("tokens") of one group by tile.n columns, on one CTA
    or on a pair. With tile.rows_on_m tokens are the M operand of the tensor core, else
    weights are, and each work tile picks the instruction's N by its rows. With a cluster,
    its CTAs (or pairs) work on neighbouring columns of the same tokens; each copies a part
    of the tokens to all.

    Warps (256 threads, one CTA on each multiprocessor):
      warps 0-3   epilogue; warp 0 also allocates tensor memory
      warp 4      issues products, in the leader (the first) CTA of a pair only
      warp 5      copies both operands
      warps 6, 7  write zeros to the rows that no group of rhs owns

    Rings (arrivals of one phase; those of a pair are in its leader):
      tokens       full: 1 and the bytes of the rows, and of the weights that this K tile
                   is the first to use        empty: 1 of each CTA or pair of the cluster
      weights      no full barrier, see tokens                              empty: 1
      accumulator  full: 1                    empty: 4, one of each epilogue warp, of each CTA

    Timeline of a work tile: for each K tile the copying warp waits for room for the tokens,
    and where the K tile opens a new stage of weights for room for those, then announces the
    bytes of both. It walks on as far as there is room, into the next work tiles. The
    multiplying warp waits for an accumulator, for each K tile issues its four products and
    a commit that frees the tokens when they are done, and the weights too with the last K
    tile of their stage or of the work tile. After the last one it turns to the other
    accumulator, while the epilogue moves the finished one to registers and, when it has it
    all, frees it before the last stores.

    A tile of 512 columns fills tensor memory: instead of two accumulators it has two halves,
    each with its own barriers. The epilogue frees the left one first, so that the next tile
    begins with that, while the right one is still being stored.
    """

    def __init__(self, spec: KernelSpec):
        valid, reason = tiling.is_valid(spec.arch, spec.tile)
        if not valid:
            raise ValueError(reason)
        tile = self.tile = spec.tile
        self.spec = spec
        self.dtype, self.out_dtype = DTYPES[spec.dtype], DTYPES[spec.out_dtype]
        self.k_major = forms.weights_major(spec) == OperandMajorMode.K
        self.pair = tile.ctas == 2
        self.group = CtaGroup.TWO if self.pair else CtaGroup.ONE
        self.cluster_ctas = tile.cluster * tile.ctas
        self.weights_stages, self.tokens_stages = tiling.stages(spec.arch, tile)

        size = self.dtype.width // 8
        self.tokens, self.columns = tile.m // tile.ctas, tile.n // tile.ctas  # of one CTA
        # An instruction has at most 256 columns: wider tiles have two halves, with boxes of
        # weights and an accumulator for each.
        self.halves = 2 if tile.rows_on_m and tile.n > 256 else 1
        self.box_columns = self.columns // self.halves
        # Tokens of one request. On M all are copied, by each CTA of a cluster its part;
        # on N only as many boxes as the rows need.
        self.box_rows = self.tokens // tile.cluster if tile.rows_on_m else max(16, self.tokens // 4)
        self.box_bytes = self.box_rows * K_TILE * size
        self.weights_bytes = self.columns * tile.k * size

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
        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        weights = forms.weights_map(
            self.spec,
            rhs,
            (n, k, rhs_batches * num_groups),
            self.box_columns,
            self.halves * self.weights_stages,
            load,
        )
        if cutlass.const_expr(self.tile.cluster > 1):
            load = cpasync.CopyBulkTensorTileG2SMulticastOp(self.group)
        tokens = forms.tokens_map(
            lhs,
            (lhs_batches * m, k),
            self.box_rows,
            self.tokens // self.box_rows,
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
        )
        self.kernel(
            *weights,
            *tokens,
            scheduler,
            out,
            k,
        ).launch(
            grid=[num_sms // self.cluster_ctas * self.cluster_ctas, 1, 1],
            cluster=[self.cluster_ctas, 1, 1],
            block=[_WARPS * 32, 1, 1],
            min_blocks_per_mp=1,
            use_pdl=True,
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
        stages = self.tokens_stages + self.weights_stages + tiling.ACCUMULATORS

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            tensor_memory: Int32
            weights: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(weights_smem)], 1024
            ]
            tokens: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(tokens_smem)], 1024
            ]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        barriers = storage.barriers.data_ptr()
        tokens_ring = Ring(
            barriers,
            storage.tokens.get_tensor(tokens_smem.outer, swizzle=tokens_smem.inner),
            self.tokens_stages,
            self.tile.cluster,
        )
        weights_ring = Ring(
            barriers + 2 * self.tokens_stages,
            storage.weights.get_tensor(weights_smem.outer, swizzle=weights_smem.inner),
            self.weights_stages,
        )
        accumulator_ring = Ring(
            barriers + 2 * (self.tokens_stages + self.weights_stages), None, tiling.ACCUMULATORS
        )

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            cpasync.prefetch_descriptor(weights_atom)
            cpasync.prefetch_descriptor(tokens_atom)
            with cute.arch.elect_one():
                tokens_ring.init(1)
                weights_ring.init(1)
                accumulator_ring.init(_EPILOGUE_WARPS * self.tile.ctas)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(
                tiling.tensor_memory_columns(self.tile),
                storage.tensor_memory.ptr,
                is_two_cta=self.pair,
            )
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.pair)
        tcgen05.fence_before_sync()
        self.sync()
        tcgen05.fence_after_sync()
        tensor_memory = storage.tensor_memory.ptr.load()

        # All before this line may run while the kernel before this one still does.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        k_tiles = cute.ceil_div(k, K_TILE)
        output = epilogue.Output(out, self.out_dtype, scheduler.n, 8 if self.spec.wide else 4)

        if warp < _EPILOGUE_WARPS:
            self.store(scheduler, accumulator_ring, tensor_memory, output, warp)
        elif warp == _MULTIPLY_WARP:
            if self.rank_in_pair() == 0:
                memory = _Memory(
                    tokens_ring,
                    weights_ring,
                    accumulator_ring,
                    tcgen05.operand(tokens_ring.smem, self.tokens, K_TILE, True),
                    tcgen05.operand(weights_ring.smem, self.box_columns, self.tile.k, self.k_major),
                    tensor_memory,
                )
                self.multiply(scheduler, memory, k_tiles)
        elif warp == _COPY_WARP:
            self.copy(
                scheduler,
                tokens_ring,
                weights_ring,
                tokens_atom,
                tokens,
                weights_atom,
                weights,
                weights_tiler,
                k_tiles,
            )
        else:
            epilogue.write_zeros(scheduler, output, warp - _ZERO_WARP, _WARPS - _ZERO_WARP)

        # No CTA may leave while its peer still signals its barriers, nor tensor memory be
        # freed while a warp still reads it.
        tcgen05.fence_before_sync()
        self.sync()
        tcgen05.fence_after_sync()
        if warp == 0:
            cute.arch.inline_ptx(
                f"tcgen05.dealloc.cta_group::{self.tile.ctas}.sync.aligned.b32 {{$r0}}, {{$r1}};",
                read_only_args=[tensor_memory, Int32(tiling.tensor_memory_columns(self.tile))],
            )

    def sync(self):
        """All threads of the cluster."""
        if cutlass.const_expr(self.cluster_ctas > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def rank_in_pair(self):
        return cute.arch.block_idx_in_cluster() % 2 if self.pair else 0

    def leader(self):
        """Rank in the cluster of the leader of this CTA's pair."""
        return cute.arch.block_idx_in_cluster() // 2 * 2

    def extent(self, rows):
        """Tokens that the instructions of a work tile with so many rows multiply."""
        if cutlass.const_expr(self.tile.rows_on_m):
            return Int32(self.tile.m)
        return cute.round_up(rows, 16 * self.tile.ctas)

    @cute.jit
    def copy(
        self,
        scheduler,
        tokens_ring,
        weights_ring,
        tokens_atom,
        tokens,
        weights_atom,
        weights,
        weights_tiler,
        k_tiles,
    ):
        multicast = {}
        if cutlass.const_expr(self.tile.cluster > 1):
            peers = sum(1 << (self.tile.ctas * i) for i in range(self.tile.cluster))
            multicast["mcast_mask"] = cutlass.Int16(peers << self.rank_in_pair())
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
            first = work.lhs_batch * scheduler.m + work.row + self.rank_in_pair() * tokens_of_cta
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
            column_box = work.column // self.box_columns + self.rank_in_pair()
            for i in cutlass.range(k_tiles, unroll=1):
                opens = i % k_ratio == 0
                num_bytes = tokens_bytes
                if opens:
                    weights_ring.wait_empty(weights_state)
                    num_bytes += self.tile.ctas * self.weights_bytes
                tokens_ring.wait_empty(tokens_state)
                if self.rank_in_pair() == 0:
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
                    for half in cutlass.range_constexpr(self.halves):
                        cute.copy(
                            weights_atom,
                            weights_gmem[
                                None,
                                column_box + half * self.tile.ctas,
                                i // k_ratio,
                                work.group,
                            ],
                            weights_smem[None, self.halves * weights_state.index + half],
                            tma_bar_ptr=full,
                        )
                    weights_state.advance()
                tokens_state.advance()
            tile += step
            chunk, work = scheduler.find(chunk, tile)
        tokens_ring.drain(tokens_state)
        weights_ring.drain(weights_state)

    @cute.jit
    def multiply(self, scheduler, memory, k_tiles):
        tokens_state = memory.tokens_ring.consumer_state()
        weights_state = memory.weights_ring.consumer_state()
        state = memory.accumulator_ring.producer_state()
        chunk, tile, step = scheduler.start()
        chunk, work = scheduler.find(chunk, tile)
        while work.valid:
            instruction = self.instruction(self.extent(work.rows))
            self.wait_for_accumulator(memory, state)
            if cutlass.const_expr(self.halves == 1):
                tokens_state, weights_state = self.multiply_k_tiles(
                    memory,
                    tokens_state,
                    weights_state,
                    {0: state},
                    instruction,
                    0,
                    k_tiles,
                    k_tiles,
                )
                state.advance()
            else:
                # While the right half of the tile before is still being stored, the left
                # half starts with the K tiles of half a ring and holds their stages.
                other = state.clone()
                other.advance()
                held = cutlass.min(k_tiles, self.tokens_stages // 2)
                self.multiply_k_tiles(
                    memory,
                    tokens_state.clone(),
                    weights_state.clone(),
                    {0: state},
                    instruction,
                    0,
                    held,
                    k_tiles,
                    hold=True,
                )
                self.wait_for_accumulator(memory, other)
                tokens_state, weights_state = self.multiply_k_tiles(
                    memory, tokens_state, weights_state, {1: other}, instruction, 0, held, k_tiles
                )
                tokens_state, weights_state = self.multiply_k_tiles(
                    memory,
                    tokens_state,
                    weights_state,
                    {0: state, 1: other},
                    instruction,
                    held,
                    k_tiles,
                    k_tiles,
                )
                state.advance()
                state.advance()
            tile += step
            chunk, work = scheduler.find(chunk, tile)

    def wait_for_accumulator(self, memory, state):
        memory.accumulator_ring.wait_empty(state)
        tcgen05.fence_after_sync()

    @cute.jit
    def multiply_k_tiles(
        self,
        memory,
        tokens_state,
        weights_state,
        accumulators: cutlass.Constexpr,
        instruction,
        first,
        last,
        k_tiles,
        hold: cutlass.Constexpr = False,
    ):
        """Products of K tiles [first, last) of k_tiles, into accumulators {half: state}.

        hold: the stages are not released, as another half still needs them.
        """
        tokens_ring, weights_ring = memory.tokens_ring, memory.weights_ring
        k_ratio = self.tile.k // K_TILE
        for i in cutlass.range(first, last, unroll=1):
            tokens_ring.wait(tokens_state)
            closes = i % k_ratio == k_ratio - 1 or i == k_tiles - 1
            with cute.arch.elect_one():
                for half, state in accumulators.items():
                    for j in range(K_TILE * self.dtype.width // 8 // tcgen05.INSTRUCTION_BYTES):
                        t = memory.tokens.descriptor(tokens_state.index, 0, j)
                        w = memory.weights.descriptor(
                            self.halves * weights_state.index + half, i % k_ratio, j
                        )
                        a, b = (t, w) if self.tile.rows_on_m else (w, t)
                        tcgen05.multiply(
                            self.dtype,
                            self.tile.ctas,
                            memory.tensor_memory + state.index * self.accumulator_step(),
                            a,
                            b,
                            instruction,
                            Boolean(i > 0) if j == 0 else Boolean(True),
                        )
                    if i == k_tiles - 1:
                        self.commit_to_pair(memory.accumulator_ring.full_barrier(state))
                if cutlass.const_expr(not hold):
                    self.commit_to_cluster(tokens_ring.empty_barrier(tokens_state))
                    if closes:
                        self.commit_to_pair(weights_ring.empty_barrier(weights_state))
            tokens_state.advance()
            if closes:
                weights_state.advance()
        return tokens_state, weights_state

    def instruction(self, extent):
        """The descriptor of products that cover so many tokens."""
        tile, k_major = self.tile, self.k_major
        if tile.rows_on_m:
            return tcgen05.instruction_descriptor(
                self.dtype, tile.m, tile.n // self.halves, True, k_major
            )
        return tcgen05.instruction_descriptor(self.dtype, tile.n, extent, k_major, True)

    def commit_to_pair(self, barrier):
        """Signals the barrier of each CTA of the pair when all products so far are done."""
        if cutlass.const_expr(self.pair):
            commit(barrier, 3 << self.leader(), self.group)
        else:
            commit(barrier, None, self.group)

    def commit_to_cluster(self, barrier):
        if cutlass.const_expr(self.tile.cluster > 1):
            commit(barrier, (1 << self.cluster_ctas) - 1, self.group)
        else:
            self.commit_to_pair(barrier)

    def accumulator_step(self):
        """From one accumulator to the other: columns, or lanes in the upper 16 bits."""
        if tiling.lanes(self.tile) == 64:
            return 16 << 16  # each takes 16 of every 32 lanes
        return tiling.accumulator_columns(self.tile)

    @cute.jit
    def store(self, scheduler, ring, tensor_memory, out, warp):
        state = ring.consumer_state()
        chunk, tile, step = scheduler.start()
        chunk, work = scheduler.find(chunk, tile)
        while work.valid:
            first_row = Int64(work.out_batch) * scheduler.m + work.row
            for half in cutlass.range_constexpr(self.halves):
                ring.wait(state)
                tcgen05.fence_after_sync()
                accumulator = tensor_memory + state.index * self.accumulator_step() + (warp << 21)
                if cutlass.const_expr(self.tile.rows_on_m):
                    column = work.column + half * (self.tile.n // self.halves)
                    self.store_tokens_along_m(
                        ring, state, accumulator, out, first_row, work.rows, column, warp
                    )
                else:
                    self.store_tokens_along_n(
                        ring, state, accumulator, out, first_row, work.rows, work.column, warp
                    )
                state.advance()
            tile += step
            chunk, work = scheduler.find(chunk, tile)

    @cute.jit
    def store_tokens_along_m(self, ring, state, accumulator, out, first_row, rows, column, warp):
        # 16 lanes at a time; a warp has 32, or 16 of an accumulator of 64 lanes.
        lanes = tiling.lanes(self.tile)
        groups = 1 if lanes == 64 else 2
        columns = tiling.accumulator_columns(self.tile)
        token = 16 * groups * warp + self.rank_in_pair() * self.tokens
        if cutlass.const_expr(columns < self.tile.n // self.halves):
            # 64 tokens of each CTA: the right half of the columns is in lanes 64 to 127.
            token = 32 * (warp % 2) + self.rank_in_pair() * self.tokens
            column += warp // 2 * columns
        num_blocks = columns // 64
        for i in cutlass.range(num_blocks, unroll=1):
            values = tcgen05.load([accumulator + (g << 20) + 64 * i for g in range(groups)], 8)
            if i == num_blocks - 1:
                self.release_accumulator(ring, state)
            for g in cutlass.range_constexpr(groups):
                at = token + 16 * g
                epilogue.store_tokens_along_m(
                    out, values[g], first_row + at, rows - at, column + 64 * i
                )

    @cute.jit
    def store_tokens_along_n(self, ring, state, accumulator, out, first_row, rows, column, warp):
        column += self.rank_in_pair() * self.columns + 32 * warp
        num_blocks = cute.ceil_div(rows, epilogue.TOKENS)
        for i in cutlass.range(num_blocks, unroll=1):
            at = epilogue.TOKENS * i
            values = tcgen05.load([accumulator + at, accumulator + (1 << 20) + at], 2)
            if i == num_blocks - 1:
                self.release_accumulator(ring, state)
            epilogue.store_tokens_along_n(out, values, first_row + at, rows - at, column)

    def release_accumulator(self, ring, state):
        tcgen05.fence_before_sync()
        with cute.arch.elect_one():
            barrier = ring.empty_barrier(state)
            if cutlass.const_expr(self.pair):
                cute.arch.mbarrier_arrive(barrier, self.leader())
            else:
                cute.arch.mbarrier_arrive(barrier)


def compile_kernel(spec: KernelSpec):
    """The compiled kernel, to be exported as an object file."""
    return compile_launcher(BlackwellGroupedMatmul(spec), spec, num_sizes=9, out_align=32)
