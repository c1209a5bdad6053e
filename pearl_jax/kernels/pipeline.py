"""Rings of shared memory stages between a producer warp and the consumer warps.

Each stage has two barriers. "full" completes when the producer has announced the bytes
of the stage and the copy engine has written them; "empty" when every consumer warp has
released the stage. A position in the ring (cutlass.pipeline.PipelineState) is a stage
and the parity of the phase that the next wait is for; a producer starts one phase
ahead, on stages that are empty.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.pipeline import PipelineState, PipelineUserType, make_pipeline_state


@dataclasses.dataclass(frozen=True)
class Ring:
    """The stages of one operand, and their barriers: 16 bytes more for each stage."""

    barriers: cute.Pointer
    smem: cute.Tensor | None  # the last mode counts the stages
    stages: int
    cluster: int = 1  # CTAs whose consumers read the stage

    def _full(self, i):
        return self.barriers + i

    def _empty(self, i):
        return self.barriers + (self.stages + i)

    def init(self, consumer_warps: int):
        """Called by one thread of each CTA, before a barrier of all threads."""
        for i in range(self.stages):
            cute.arch.mbarrier_init(self._full(i), 1)
            cute.arch.mbarrier_init(self._empty(i), consumer_warps * self.cluster)

    def producer_state(self) -> PipelineState:
        return make_pipeline_state(PipelineUserType.Producer, self.stages)

    def consumer_state(self) -> PipelineState:
        return make_pipeline_state(PipelineUserType.Consumer, self.stages)

    def acquire(self, state, num_bytes):
        """Producer warp: waits until the stage is free, then announces num_bytes."""
        self.wait_empty(state)
        self.announce(state, num_bytes)

    def wait_empty(self, state):
        """Producer warp: waits until the stage is free."""
        cute.arch.mbarrier_wait(self._empty(state.index), state.phase)

    def announce(self, state, num_bytes):
        """Producer warp: the stage is full when so many bytes have been written."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self._full(state.index), num_bytes)

    def full_barrier(self, state) -> cute.Pointer:
        """What the copies of the stage, or the products in it, complete on."""
        return self._full(state.index)

    def empty_barrier(self, state) -> cute.Pointer:
        """What the products that read the stage complete on."""
        return self._empty(state.index)

    def wait(self, state):
        """Consumer warp: waits until the stage is full."""
        cute.arch.mbarrier_wait(self._full(state.index), state.phase)

    def release(self, state):
        """Consumer warp: gives the stage back, in each CTA that fills a part of it."""
        with cute.arch.elect_one():
            if cutlass.const_expr(self.cluster == 1):
                cute.arch.mbarrier_arrive(self._empty(state.index))
            else:
                for rank in range(self.cluster):
                    cute.arch.mbarrier_arrive(self._empty(state.index), rank)

    @cute.jit
    def drain(self, state):
        """Producer warp, at the end: waits until every stage has been released."""
        for _ in range(self.stages):
            cute.arch.mbarrier_wait(self._empty(state.index), state.phase)
            state.advance()
