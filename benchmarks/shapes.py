"""The expert matmuls of real MoE models, and ways in which tokens spread over experts."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np


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


def cases(models, projections=PROJECTIONS) -> dict[str, Shape]:
    """Shapes by name, such as "GLM-5.3 down"."""
    return {f"{m} {p}": getattr(MODELS[m], p) for m in models for p in projections}


def scale_down(shape, max_groups=32, max_weights=2**18) -> Shape:
    """A shape of the same proportions that a CPU finishes in milliseconds.

    Groups are divided by the smallest power of two that leaves at most max_groups; k and
    n both by the smallest one that leaves at most max_weights weights in each group.
    """
    if max_groups < 1 or max_weights < 1:
        raise ValueError(
            f"scale_down: max_groups and max_weights must be at least 1, got {max_groups} and "
            f"{max_weights}"
        )
    g, k, n = shape.g, shape.k, shape.n
    while g > max_groups:
        g //= 2
    while k * n > max_weights and min(k, n) > 1:
        k, n = k // 2, n // 2
    return Shape(g, k, n)


# Group sizes: (m, g, seed) -> (g,) int32 that sum to m. The same seed, the same sizes.


def uniform(m, g, seed=0):
    """Every group gets m / g rows, the first m % g groups one more. The seed has no effect."""
    _require_rows_and_groups(m, g)
    return (m // g + (np.arange(g) < m % g)).astype(np.int32)


def multinomial(m, g, seed=0):
    """Every row picks a group, all equally likely: a router in perfect balance."""
    _require_rows_and_groups(m, g)
    return _draw(np.random.default_rng(seed), m, np.full(g, 1 / g))


def zipf(m, g, seed=0, exponent=1.0):
    """Every row picks a group, the r-th most popular with probability ~ r**-exponent."""
    _require_rows_and_groups(m, g)
    rng = np.random.default_rng(seed)
    popularity = rng.permutation(np.arange(1, g + 1) ** -float(exponent))
    return _draw(rng, m, popularity / popularity.sum())


def one_hot(m, g, seed=0):
    """One group, picked at random, gets every row."""
    _require_rows_and_groups(m, g)
    sizes = np.zeros(g, np.int32)
    sizes[np.random.default_rng(seed).integers(g)] = m
    return sizes


def half_empty(m, g, seed=0):
    """Half of the groups (rounded down), picked at random, are empty; the others multinomial."""
    _require_rows_and_groups(m, g)
    rng = np.random.default_rng(seed)
    sizes = np.zeros(g, np.int32)
    used = rng.permutation(g)[g // 2 :]
    sizes[used] = _draw(rng, m, np.full(len(used), 1 / len(used)))
    return sizes


def hot(m, g, seed=0):
    """One group, picked at random, gets half of the rows (rounded up), the others multinomial.

    The worst of both: a group bound by arithmetic among many bound by their weights.
    """
    _require_rows_and_groups(m, g)
    rng = np.random.default_rng(seed)
    chosen, few = rng.integers(g), m // 2 if g > 1 else 0
    others = np.full(g, 1 / max(g - 1, 1))
    others[chosen] = 0 if g > 1 else 1
    sizes = _draw(rng, few, others)
    sizes[chosen] += m - few
    return sizes


GROUPINGS = {f.__name__: f for f in (uniform, multinomial, zipf, hot, one_hot, half_empty)}


def _draw(rng, m, probabilities):
    return rng.multinomial(m, probabilities).astype(np.int32)


def _require_rows_and_groups(m, g):
    if not 0 <= m < 2**31 or g < 1:
        raise ValueError(f"group sizes: need 0 <= m < 2**31 rows and g >= 1 groups, got {m=}, {g=}")
