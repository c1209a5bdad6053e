"""The mainloop for sm_100f, and how a CTA's warps, shared and tensor memory serve it.

One CTA on each multiprocessor. It works on a tile alone, or as one of a pair, whose first
CTA, the leader, issues the products of both. Rows of the result ("tokens") or its columns
("weights") are the M operand of the tensor core, by tile.rows_on_m.

Warps:
  warps 0-3   epilogue; warp 0 also allocates tensor memory
  warp 4      issues products, in the leader of a pair only
  warp 5      copies both operands

Rings (arrivals of one phase; those of a pair are in its leader):
  tokens        full: 1 and the bytes of the tokens, and of the weights that this K tile is
                the first to use          empty: 1 of each CTA or pair of the cluster
  weights       no full barrier, see tokens                                     empty: 1
  accumulators  full: 1                   empty: 4, one of each epilogue warp, of each CTA

A tile of 512 columns fills tensor memory: instead of two accumulators it has two halves,
each with its own barriers. The epilogue frees the left one first, so that the next tile
begins with that, while the right one is still being stored.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.cute.nvgpu.tcgen05 import CtaGroup, commit

from pearl_jax import tiling
from pearl_jax.kernels import epilogue, tcgen05
from pearl_jax.kernels.launcher import DTYPES
from pearl_jax.kernels.pipeline import Ring
from pearl_jax.tiling import K_TILE, KernelSpec

EPILOGUE_WARPS = 4  # each reads its quarter of the lanes of tensor memory
MULTIPLY_WARP, COPY_WARP = 4, 5


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the warps of a CTA share."""

    tokens: Ring
    weights: Ring
    accumulators: Ring
    tensor_memory: Int32  # address of the first accumulator


@dataclasses.dataclass(frozen=True)
class Products:
    """The products of one work tile: stages as operands, and the extents."""

    tokens: tcgen05.Operand
    weights: tcgen05.Operand
    instruction: Int32


@dataclasses.dataclass(frozen=True)
class Mainloop:
    """The mainloop of a kernel, by its spec and which axis of its operands is contiguous."""

    spec: KernelSpec
    weights_major: OperandMajorMode
    tokens_major: OperandMajorMode

    @property
    def tile(self):
        return self.spec.tile

    @property
    def dtype(self):
        return DTYPES[self.spec.dtype]

    @property
    def pair(self):
        return self.tile.ctas == 2

    @property
    def group(self):
        return CtaGroup.TWO if self.pair else CtaGroup.ONE

    @property
    def cluster_ctas(self):
        return self.tile.cluster * self.tile.ctas

    @property
    def stages(self):
        """Of weights and of tokens."""
        return tiling.stages(self.spec.arch, self.tile)

    @property
    def tokens(self):
        """Of one CTA."""
        return self.tile.m // self.tile.ctas

    @property
    def columns(self):
        """Of one CTA."""
        return self.tile.n // self.tile.ctas

    @property
    def halves(self):
        """An instruction has at most 256 columns: wider tiles have two halves.

        Each has boxes of weights and an accumulator of its own.
        """
        return 2 if self.tile.rows_on_m and self.tile.n > 256 else 1

    @property
    def box_columns(self):
        return self.columns // self.halves

    def rank_in_pair(self):
        return cute.arch.block_idx_in_cluster() % 2 if self.pair else 0

    def leader(self):
        """Rank in the cluster of the leader of this CTA's pair."""
        return cute.arch.block_idx_in_cluster() // 2 * 2

    def sync(self):
        """All threads of the cluster."""
        if cutlass.const_expr(self.cluster_ctas > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def start(self, weights_smem, tokens_smem, atoms) -> Memory:
        """The prologue of all threads; before its end nothing the kernel before wrote is read."""
        weights_stages, tokens_stages = self.stages
        stages = tokens_stages + weights_stages + tiling.ACCUMULATORS

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
        tokens = Ring(
            barriers,
            storage.tokens.get_tensor(tokens_smem.outer, swizzle=tokens_smem.inner),
            tokens_stages,
            self.tile.cluster,
        )
        weights = Ring(
            barriers + 2 * tokens_stages,
            storage.weights.get_tensor(weights_smem.outer, swizzle=weights_smem.inner),
            weights_stages,
        )
        accumulators = Ring(
            barriers + 2 * (tokens_stages + weights_stages), None, tiling.ACCUMULATORS
        )

        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                tokens.init(1)
                weights.init(1)
                accumulators.init(EPILOGUE_WARPS * self.tile.ctas)
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
        if cutlass.const_expr(self.tile.pdl):
            # All before this line may run while the kernel before this one still does.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        return Memory(tokens, weights, accumulators, tensor_memory)

    @cute.jit
    def finish(self, memory):
        """The end of all threads.

        No CTA may leave while its peer still signals its barriers, nor tensor memory be
        freed while a warp still reads it.
        """
        tcgen05.fence_before_sync()
        self.sync()
        tcgen05.fence_after_sync()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            cute.arch.inline_ptx(
                f"tcgen05.dealloc.cta_group::{self.tile.ctas}.sync.aligned.b32 {{$r0}}, {{$r1}};",
                read_only_args=[
                    memory.tensor_memory,
                    Int32(tiling.tensor_memory_columns(self.tile)),
                ],
            )

    def operands(self, memory):
        """Stages of tokens and of weights, as operands."""
        k_major = OperandMajorMode.K
        return (
            tcgen05.operand(memory.tokens.smem, self.tokens, K_TILE, self.tokens_major == k_major),
            tcgen05.operand(
                memory.weights.smem, self.box_columns, self.tile.k, self.weights_major == k_major
            ),
        )

    def instruction(self, extent):
        """The descriptor of products that cover so many tokens."""
        tile = self.tile
        tokens, weights = (x == OperandMajorMode.K for x in (self.tokens_major, self.weights_major))
        if tile.rows_on_m:
            return tcgen05.instruction_descriptor(
                self.dtype, tile.m, tile.n // self.halves, tokens, weights
            )
        return tcgen05.instruction_descriptor(self.dtype, tile.n, extent, weights, tokens)

    @cute.jit
    def multiply(self, memory, products, tokens_state, weights_state, state, k_tiles):
        """One work tile into the accumulators from state on; returns the next positions."""
        self._wait_for_accumulator(memory, state)
        if cutlass.const_expr(self.halves == 1):
            tokens_state, weights_state = self._multiply_k_tiles(
                memory, products, tokens_state, weights_state, {0: state}, 0, k_tiles, k_tiles
            )
            state.advance()
        else:
            # While the right half of the tile before is still being stored, the left half
            # starts with the K tiles of half a ring and holds their stages.
            other = state.clone()
            other.advance()
            held = cutlass.min(k_tiles, memory.tokens.stages // 2)
            self._multiply_k_tiles(
                memory,
                products,
                tokens_state.clone(),
                weights_state.clone(),
                {0: state},
                0,
                held,
                k_tiles,
                hold=True,
            )
            self._wait_for_accumulator(memory, other)
            tokens_state, weights_state = self._multiply_k_tiles(
                memory, products, tokens_state, weights_state, {1: other}, 0, held, k_tiles
            )
            tokens_state, weights_state = self._multiply_k_tiles(
                memory,
                products,
                tokens_state,
                weights_state,
                {0: state, 1: other},
                held,
                k_tiles,
                k_tiles,
            )
            state.advance()
            state.advance()
        return tokens_state, weights_state, state

    def _wait_for_accumulator(self, memory, state):
        memory.accumulators.wait_empty(state)
        tcgen05.fence_after_sync()

    @cute.jit
    def _multiply_k_tiles(
        self,
        memory,
        products,
        tokens_state,
        weights_state,
        accumulators: cutlass.Constexpr,
        first,
        last,
        k_tiles,
        hold: cutlass.Constexpr = False,
    ):
        """Products of K tiles [first, last) of k_tiles, into accumulators {half: state}.

        hold: the stages are not released, as another half still needs them.
        """
        k_ratio = self.tile.k // K_TILE  # K tiles of a stage of weights
        for i in cutlass.range(first, last, unroll=1):
            memory.tokens.wait(tokens_state)
            closes = i % k_ratio == k_ratio - 1 or i == k_tiles - 1
            with cute.arch.elect_one():
                for half, state in accumulators.items():
                    for j in range(K_TILE * self.dtype.width // 8 // tcgen05.INSTRUCTION_BYTES):
                        t = products.tokens.descriptor(tokens_state.index, 0, j)
                        w = products.weights.descriptor(
                            self.halves * weights_state.index + half, i % k_ratio, j
                        )
                        a, b = (t, w) if self.tile.rows_on_m else (w, t)
                        tcgen05.multiply(
                            self.dtype,
                            self.tile.ctas,
                            self.accumulator(memory, state),
                            a,
                            b,
                            products.instruction,
                            Boolean(i > 0) if j == 0 else Boolean(True),
                        )
                    if i == k_tiles - 1:
                        self._commit_to_pair(memory.accumulators.full_barrier(state))
                if cutlass.const_expr(not hold):
                    self._commit_to_cluster(memory.tokens.empty_barrier(tokens_state))
                    if closes:
                        self._commit_to_pair(memory.weights.empty_barrier(weights_state))
            tokens_state.advance()
            if closes:
                weights_state.advance()
        return tokens_state, weights_state

    def _commit_to_pair(self, barrier):
        """Signals the barrier of each CTA of the pair when all products so far are done."""
        if cutlass.const_expr(self.pair):
            commit(barrier, 3 << self.leader(), self.group)
        else:
            commit(barrier, None, self.group)

    def _commit_to_cluster(self, barrier):
        if cutlass.const_expr(self.tile.cluster > 1):
            commit(barrier, (1 << self.cluster_ctas) - 1, self.group)
        else:
            self._commit_to_pair(barrier)

    def accumulator(self, memory, state):
        """Its address in tensor memory: columns, and lanes in the upper 16 bits."""
        step = tiling.accumulator_columns(self.tile)
        if tiling.lanes(self.tile) == 64:
            step = 16 << 16  # each takes 16 of every 32 lanes
        return memory.tensor_memory + state.index * step

    def wait(self, memory, state):
        """Epilogue warp: waits until the accumulator is complete."""
        memory.accumulators.wait(state)
        tcgen05.fence_after_sync()

    def release(self, memory, state):
        """Epilogue warp: gives the accumulator back."""
        tcgen05.fence_before_sync()
        with cute.arch.elect_one():
            barrier = memory.accumulators.empty_barrier(state)
            if cutlass.const_expr(self.pair):
                cute.arch.mbarrier_arrive(barrier, self.leader())
            else:
                cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def store_tokens_along_m(
        self, memory, state, out, first_row, rows, column, add: cutlass.Constexpr = False
    ):
        """Epilogue warp: stores an accumulator, tokens on M, from (first_row, column) on.

        rows: of the result from first_row on; add: to what is there.
        """
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
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
        old = [None] * groups
        if cutlass.const_expr(add):
            old = self._load(out, first_row + token, rows - token, column)
        self.wait(memory, state)
        accumulator = self.accumulator(memory, state) + (warp << 21)
        for i in cutlass.range(num_blocks, unroll=1):
            if cutlass.const_expr(add):
                # In flight while this block is stored; there are none after the last.
                left = cutlass.select_(i + 1 < num_blocks, rows - token, Int32(0))
                ahead = self._load(out, first_row + token, left, column + 64 * (i + 1))
            values = tcgen05.load([accumulator + (g << 20) + 64 * i for g in range(groups)], 8)
            if i == num_blocks - 1:
                self.release(memory, state)
            for g in cutlass.range_constexpr(groups):
                at = token + 16 * g
                epilogue.store_tokens_along_m(
                    out, values[g], first_row + at, rows - at, column + 64 * i, old[g]
                )
            if cutlass.const_expr(add):
                old = ahead

    def _load(self, out, first_row, rows, column):
        """What 64 columns of a warp's tokens are added to, for each 16 lanes."""
        groups = 1 if tiling.lanes(self.tile) == 64 else 2
        return [
            epilogue.load_tokens_along_m(out, first_row + at, rows - at, column)
            for at in range(0, 16 * groups, 16)
        ]
