"""Ways in which tokens spread over experts, and small versions of real shapes."""

from __future__ import annotations

import numpy as np

from pearl_jax.model_shapes import MODELS as MODELS
from pearl_jax.model_shapes import PROJECTIONS as PROJECTIONS
from pearl_jax.model_shapes import Case as Case
from pearl_jax.model_shapes import Model as Model
from pearl_jax.model_shapes import Shape as Shape
from pearl_jax.model_shapes import select as select


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
