"""The expert matmuls of real MoE models."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Shape:
    """One grouped matmul: (m, k) rows, (g, k, n) weights -> (m, n)."""

    g: int
    k: int
    n: int


@dataclasses.dataclass(frozen=True)
class Model:
    """The routed experts of one MoE layer.

    Attributes:
      width: columns of what enters and leaves an expert.
      intermediate: columns between the two matmuls of an expert.
      num_experts, top_k: experts of the layer, and how many each token is sent to.
      expert_parallel: devices that the experts are spread over, if not said otherwise.
    """

    width: int
    intermediate: int
    num_experts: int
    top_k: int
    expert_parallel: int

    @property
    def gate_up(self) -> Shape:
        """Gate and up projection as one matmul, for the experts of one device."""
        return Shape(self.num_experts // self.expert_parallel, self.width, 2 * self.intermediate)

    @property
    def down(self) -> Shape:
        """The projection back, for the experts of one device."""
        return Shape(self.num_experts // self.expert_parallel, self.intermediate, self.width)


# Widths are the hidden sizes of the models' published configurations, but for Kimi-K3,
# whose experts work in a latent space of 3584 columns (the hidden size is 7168).
MODELS = {
    "GLM-5.3": Model(6144, 2048, 256, 8, expert_parallel=8),
    "DeepSeek-V4-Pro": Model(7168, 3072, 384, 6, expert_parallel=8),
    "Kimi-K3": Model(3584, 3072, 896, 16, expert_parallel=8),
    "Qwen3-235B": Model(4096, 1536, 128, 8, expert_parallel=8),
    "Qwen3-30B-A3B": Model(2048, 768, 128, 8, expert_parallel=1),
    "Mixtral-8x7B": Model(4096, 14336, 8, 2, expert_parallel=1),
    "gpt-oss-120b": Model(2880, 2880, 128, 4, expert_parallel=8),
    "Llama-4-Maverick": Model(5120, 8192, 128, 1, expert_parallel=8),
    "Llama-4-Scout": Model(5120, 8192, 16, 1, expert_parallel=1),
}

PROJECTIONS = ("gate_up", "down")


class Case(NamedTuple):
    """The shape of one projection, for the experts that one of several devices has."""

    name: str  # such as "GLM-5.3 down"
    expert_parallel: int
    shape: Shape


def select(models, projections=PROJECTIONS, expert_parallel=None) -> list[Case]:
    """Cases of models by name, each over every number of devices that divides its experts.

    Without numbers, over the model's own.
    """
    found = []
    for name in models:
        for devices in expert_parallel or (MODELS[name].expert_parallel,):
            model = dataclasses.replace(MODELS[name], expert_parallel=devices)
            if model.num_experts % devices == 0:
                found += [Case(f"{name} {p}", devices, getattr(model, p)) for p in projections]
    return found
