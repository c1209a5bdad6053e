"""The mainloop for sm_90a, and how a CTA's warps, registers and shared memory serve it.

384 threads, one CTA on each multiprocessor: a warpgroup of producers and two of consumers.
The M operand of wgmma ("weights") and its N operand ("tokens") come through a ring each;
every consumer warpgroup has half of the columns.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from pearl_jax import tiling
from pearl_jax.kernels.launcher import DTYPES
from pearl_jax.kernels.pipeline import Ring
from pearl_jax.tiling import K_TILE, STAGE_COLUMNS, KernelSpec

WARPGROUP = 128
CONSUMERS = 2  # warpgroups
THREADS = (1 + CONSUMERS) * WARPGROUP
# Registers of a thread: the CTA has 65536, and the consumers' share must not exceed what
# the producers give back, or the increase waits for ever.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
assert STAGE_COLUMNS == CONSUMERS * 64
assert WARPGROUP * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <= 65536


@dataclasses.dataclass(frozen=True)
class Mainloop:
    """Rings (arrivals of one phase):

    weights  full: 1 and the bytes of the stage   empty: 8, one of each consumer warp
    tokens   full: 1 and the bytes of the rows    empty: 8 of each CTA that shares them
    """

    spec: KernelSpec
    weights_major: OperandMajorMode
    tokens_major: OperandMajorMode
    sharing: int = 1  # CTAs for which a copy of tokens is

    @property
    def dtype(self):
        return DTYPES[self.spec.dtype]

    @property
    def stages(self):
        """Of weights and of tokens."""
        return tiling.stages(self.spec.arch, self.spec.tile)

    @property
    def blocks(self):
        """Stages of weights side by side in a work tile, of 64 columns for each consumer."""
        return self.spec.tile.n // STAGE_COLUMNS

    def rings(self, allocator, weights_smem, tokens_smem):
        """The rings of weights and of tokens, in shared memory of these layouts."""
        weights_stages, tokens_stages = self.stages

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * (weights_stages + tokens_stages)]
            weights: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(weights_smem)], 1024
            ]
            tokens: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(tokens_smem)], 1024
            ]

        storage = allocator.allocate(Storage)
        barriers = storage.barriers.data_ptr()
        weights = Ring(
            barriers,
            storage.weights.get_tensor(weights_smem.outer, swizzle=weights_smem.inner),
            weights_stages,
        )
        tokens = Ring(
            barriers + 2 * weights_stages,
            storage.tokens.get_tensor(tokens_smem.outer, swizzle=tokens_smem.inner),
            tokens_stages,
            self.sharing,
        )
        return weights, tokens

    @cute.jit
    def start(self, rings, atoms):
        """The prologue of all threads; before its end nothing the kernel before wrote is read."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for ring in rings:
                    ring.init(CONSUMERS * WARPGROUP // 32)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.spec.tile.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if cutlass.const_expr(self.spec.tile.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def multiply(
        self,
        extent: cutlass.Constexpr[int],
        num_blocks: cutlass.Constexpr[int],
        weights_ring,
        tokens_ring,
        tokens,
        weights_state,
        tokens_state,
        k_tiles,
    ):
        """The accumulators of one work tile, and the rings' next positions; consumers only.

        It has num_blocks of columns, which are stages of weights side by side, and extent rows:
        tokens is the operand in the stages of tokens_ring, (extent, K_TILE, stages).
        """
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        tile = self.spec.tile
        mma = make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            self.weights_major,
            self.tokens_major,
            Float32,
            (CONSUMERS, 1, 1),
            (64, extent),
        )
        warpgroup_mma = mma.get_slice(cute.arch.make_warp_uniform(thread // WARPGROUP) * WARPGROUP)
        a = mma.make_fragment_A(warpgroup_mma.partition_A(weights_ring.smem))
        b = mma.make_fragment_B(warpgroup_mma.partition_B(tokens))
        accumulators = cute.make_rmem_tensor(
            mma.partition_shape_C((num_blocks * STAGE_COLUMNS, extent)), Float32
        )
        accumulators.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        steps = K_TILE // 16  # instructions along a K tile
        k_ratio = tile.k // K_TILE  # K tiles of a stage of weights

        blocks = cute.logical_divide(accumulators, (None, 1, None))
        weights_done, tokens_done = weights_state.clone(), tokens_state.clone()
        for i in range(k_tiles):
            tokens_ring.wait(tokens_state)
            state = weights_state.clone()
            for block in cutlass.range_constexpr(num_blocks):
                weights_ring.wait(state)
                c = blocks[None, (None, block), None]
                for step in cutlass.range_constexpr(steps):
                    cute.gemm(
                        mma,
                        c,
                        a[None, None, i % k_ratio * steps + step, state.index],
                        b[None, None, step, tokens_state.index],
                        c,
                    )
                state.advance()
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            # Done with K tile i - 1: with its tokens, and if it was their last with its weights.
            if i > 0:
                tokens_ring.release(tokens_done)
                tokens_done.advance()
                if i % k_ratio == 0:
                    for _ in cutlass.range_constexpr(num_blocks):
                        weights_ring.release(weights_done)
                        weights_done.advance()
            tokens_state.advance()
            if i % k_ratio == k_ratio - 1:
                for _ in cutlass.range_constexpr(num_blocks):
                    weights_state.advance()
        warpgroup.wait_group(0)
        if k_tiles > 0:
            tokens_ring.release(tokens_done)
            for _ in cutlass.range_constexpr(num_blocks):
                weights_ring.release(weights_done)
                weights_done.advance()
        if k_tiles % k_ratio != 0:
            for _ in cutlass.range_constexpr(num_blocks):
                weights_state.advance()
        return accumulators, weights_state, tokens_state
