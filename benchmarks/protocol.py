"""How everything here is timed, and how fast the machine could have been.

Candidates are timed in turn, round after round in one process, so that whatever else the
machine does hits all of them; what counts is the median of each, and the ratios. Every
sample dispatches calls back to back for at least MIN_SAMPLE_SECONDS and waits once. The
calls walk through several copies of the operands, so that weights are not found in a
cache. Operands are random, never zeros: zeros use less power and flatter a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

MIN_SAMPLE_SECONDS = 0.01
COLD_BYTES = 2**27  # more than the last-level cache of the machines at hand
_MAX_COPIES = 8


def random_array(seed, shape, dtype):
    """Normal values of variance 1 / shape[-2], which keeps a matmul's result near 1."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values / math.sqrt(max(shape[-2], 1)), dtype)


def cold_copies(operands):
    """Copies of a tuple of arrays, together COLD_BYTES or more (but at most 8 copies)."""
    size = sum(x.nbytes for x in operands)
    copies = min(max(math.ceil(COLD_BYTES / max(size, 1)), 1), _MAX_COPIES)
    return [operands] + [tuple(jnp.copy(x) for x in operands) for _ in range(copies - 1)]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians of one run.

    Attributes:
      seconds: candidate -> median seconds of one call.
      ratios: candidate -> its median over that of the first candidate.
    """

    seconds: dict[str, float]
    ratios: dict[str, float]


def measure(candidates, inputs, rounds) -> Timing:
    """Times candidates (name -> function) on inputs, a list of argument tuples used in turn.

    All functions are called once before, to compile. The order within a round rotates,
    so that no candidate always follows the same other one.
    """
    if not candidates or not inputs or rounds < 1:
        raise ValueError(
            f"measure: needs a candidate, an input and a round, got {len(candidates)} "
            f"candidates, {len(inputs)} inputs, {rounds=}"
        )
    calls, turns, samples = {}, {}, {}
    for name, function in candidates.items():
        jax.block_until_ready(function(*inputs[0]))
        turns[name] = itertools.cycle(inputs)
        once = _sample(function, turns[name], 1)
        calls[name] = max(1, math.ceil(MIN_SAMPLE_SECONDS / once))
        samples[name] = []
    names = list(candidates)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            samples[name].append(_sample(candidates[name], turns[name], calls[name]))
    seconds = {name: statistics.median(taken) for name, taken in samples.items()}
    return Timing(seconds, {name: s / seconds[names[0]] for name, s in seconds.items()})


def _sample(function, turns, calls):
    """Seconds of one call, out of several dispatched back to back."""
    start = time.perf_counter()
    results = [function(*next(turns)) for _ in range(calls)]
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / calls


# Floors.


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What the machine can do at most: bytes per second, and flops per second in one dtype."""

    bandwidth: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Floor:
    """Bytes that must move and flops that must be done, and the seconds these take at least."""

    num_bytes: int
    flops: int
    seconds: float
    bound: str  # "bytes" or "flops", whichever takes longer


def grouped_matmul_floor(k, n, group_sizes, itemsize, peaks) -> Floor:
    """(m, k), (g, k, n) -> (m, n): owned rows and weights of groups with rows, once each."""
    rows, groups = int(np.sum(group_sizes)), int(np.count_nonzero(group_sizes))
    return _floor((rows * (k + n) + groups * k * n) * itemsize, 2 * rows * k * n, peaks)


def grouped_outer_floor(k, n, group_sizes, itemsize, peaks) -> Floor:
    """(m, k), (m, n) -> (g, k, n): owned rows once each; every group is written, empty or not."""
    rows, groups = int(np.sum(group_sizes)), len(group_sizes)
    return _floor((rows * (k + n) + groups * k * n) * itemsize, 2 * rows * k * n, peaks)


def _floor(num_bytes, flops, peaks):
    memory, arithmetic = num_bytes / peaks.bandwidth, flops / peaks.flops
    bound = "bytes" if memory > arithmetic else "flops"
    return Floor(num_bytes, flops, max(memory, arithmetic), bound)


def measure_peaks(dtype, size=2048, rounds=5) -> Peaks:
    """The best of several rounds: a pass over 128 MiB, and a (size, size) matmul in dtype."""
    x = jax.block_until_ready(jnp.asarray(np.random.default_rng(0).random(2**25, np.float32)))
    add_one = jax.jit(lambda x: x + 1)
    a, b = (random_array(seed, (size, size), dtype) for seed in (1, 2))
    matmul = jax.jit(jnp.matmul)
    jax.block_until_ready((add_one(x), matmul(a, b)))
    best = [math.inf, math.inf]
    for _ in range(rounds):
        for i, (function, args) in enumerate(((add_one, (x,)), (matmul, (a, b)))):
            best[i] = min(best[i], _sample(function, itertools.repeat(args), 1))
    return Peaks(bandwidth=2 * x.nbytes / best[0], flops=2 * size**3 / best[1])


# Agreement.


def worst_group_error(got, want, group_sizes=None):
    """Largest relative error of any group: norm of the difference over the norm of want.

    Groups are consecutive rows by group_sizes, and the rows past the last one; or the
    entries of the first axis where group_sizes is None. Where want is 0, got must be too.
    """
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    if got.shape != want.shape:
        raise ValueError(f"worst_group_error: shapes {got.shape} and {want.shape} differ")
    if group_sizes is not None:
        ends = np.cumsum(group_sizes)
        got, want = np.split(got, ends), np.split(want, ends)
    worst = 0.0
    for g, w in zip(got, want):
        difference, norm = np.linalg.norm(g - w), np.linalg.norm(w)
        if norm == 0:
            error = 0.0 if difference == 0 else math.inf
        else:
            error = difference / norm
        worst = float(np.maximum(worst, error))  # unlike max(), keeps a NaN
    return worst
