"""How everything here is timed, and how fast the machine could have been.

Candidates are timed in turn, round after round in one process, so that whatever else the
machine does hits all of them; what counts is the median of each, and the ratios. Operands
are random, never zeros: zeros use less power and flatter a GPU. Calls walk through several
copies of the operands, unless one is larger than any cache, so that weights are cold.

On a CPU (measure_waited) a sample is as many calls as take MIN_SAMPLE_SECONDS, each waited
for, as independent calls would run side by side.

On a GPU (measure_bursts) a sample is two bursts of back-to-back calls, one three times as
long as the other; their difference is GPU time without the host's fixed cost. Bursts are
short and start after a pause, so that the power limit meets all candidates alike.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MIN_SAMPLE_SECONDS = 0.01
COLD_BYTES = 2**29  # more than a last-level cache holds
BURST_SECONDS = 0.004  # of the shorter burst: far longer than the host's jitter
PAUSE_SECONDS = 0.02
HOST_BOUND = 0.9  # share of a call's time that starting it may take


def cold_copies(operands, most):
    """Copies of a tuple of arrays, together COLD_BYTES or more (but at most that many copies)."""
    size = sum(x.nbytes for x in operands)
    copies = min(math.ceil(COLD_BYTES / max(size, 1)), most)
    return [operands] + [tuple(jnp.copy(x) for x in operands) for _ in range(copies - 1)]


@dataclasses.dataclass(frozen=True)
class Burst:
    """A program of one or more independent calls, to be run many times.

    Attributes:
      start: starts that many programs one after the other, waits for none, and returns
        what wait takes.
      wait: waits for them.
      calls: calls in one program.
    """

    start: Callable[[int], Any]
    wait: Callable[[Any], Any]
    calls: int = 1


def jax_burst(program, operands, calls=1) -> Burst:
    """A burst of a compiled JAX function."""

    def start(count):
        out = None
        for _ in range(count):
            out = program(*operands)
        return out

    return Burst(start, jax.block_until_ready, calls)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
      samples: one of each round.
      host_bound: whether starting calls took so long that the GPU may have waited.
    """

    samples: list[float]
    host_bound: bool = False

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.samples)


def slope(short, long, count, calls) -> float:
    """Seconds of one call, from those of count and of 3 * count programs of several calls."""
    return (long - short) / (2 * count * calls)


def measure(bursts, rounds) -> dict[Any, Timing]:
    """Times bursts (name -> Burst) that have run before, as the platform asks for."""
    on_gpu = jax.default_backend() == "gpu"
    return (measure_bursts if on_gpu else measure_waited)(bursts, rounds)


def measure_waited(bursts, rounds) -> dict[Any, Timing]:
    """Times bursts by waiting for each program."""
    counts = {
        name: max(1, math.ceil(MIN_SAMPLE_SECONDS / _time_burst(burst, 1)[0]))
        for name, burst in bursts.items()
    }

    def sample(name):
        begin = time.perf_counter()
        for _ in range(counts[name]):
            bursts[name].wait(bursts[name].start(1))
        return (time.perf_counter() - begin) / (counts[name] * bursts[name].calls)

    return {name: Timing(taken) for name, taken in _in_turn(sample, bursts, rounds).items()}


def measure_bursts(bursts, rounds) -> dict[Any, Timing]:
    """Times bursts by the difference of a long and a short one."""
    counts, starting = {}, {}
    for name, burst in bursts.items():
        one = min(_time_burst(burst, 1)[0] for _ in range(2))
        counts[name] = max(1, round(BURST_SECONDS / one))
        # Few programs: with many in flight, starting one waits for another to end.
        few = min(counts[name], 8)
        starting[name] = _time_burst(burst, few)[1] / (few * burst.calls)

    def sample(name):
        burst, count = bursts[name], counts[name]
        time.sleep(PAUSE_SECONDS)
        short, _ = _time_burst(burst, count)
        time.sleep(PAUSE_SECONDS)
        long, _ = _time_burst(burst, 3 * count)
        return slope(short, long, count, burst.calls)

    found = {name: Timing(taken) for name, taken in _in_turn(sample, bursts, rounds).items()}
    return {
        name: dataclasses.replace(t, host_bound=starting[name] > HOST_BOUND * t.seconds)
        for name, t in found.items()
    }


def _in_turn(sample, names, rounds):
    """name -> sample(name) of each round. The order rotates: none always follows the same one."""
    names = list(names)
    if not names or rounds < 1:
        raise ValueError(f"measure: needs a burst and a round, got {len(names)}, {rounds=}")
    samples = {name: [] for name in names}
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            samples[name].append(sample(name))
    return samples


def _time_burst(burst, count):
    """Seconds until count programs are done, and until they were started."""
    begin = time.perf_counter()
    out = burst.start(count)
    started = time.perf_counter()
    burst.wait(out)
    return time.perf_counter() - begin, started - begin


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


def grouped_matmul_floor(k, n, group_sizes, peaks, itemsize=2, out_itemsize=2) -> Floor:
    """(m, k), (g, k, n) -> (m, n): owned rows and weights of groups with rows, once each."""
    rows, groups = int(np.sum(group_sizes)), int(np.count_nonzero(group_sizes))
    operands, result = rows * k + groups * k * n, rows * n
    num_bytes = operands * itemsize + result * out_itemsize
    return _floor(num_bytes, 2 * rows * k * n, peaks)


def grouped_outer_floor(k, n, group_sizes, peaks, itemsize=2, out_itemsize=2) -> Floor:
    """(m, k), (m, n) -> (g, k, n): owned rows once each; every group is written, empty or not."""
    rows, groups = int(np.sum(group_sizes)), len(group_sizes)
    operands, result = rows * (k + n), groups * k * n
    num_bytes = operands * itemsize + result * out_itemsize
    return _floor(num_bytes, 2 * rows * k * n, peaks)


def _floor(num_bytes, flops, peaks):
    memory, arithmetic = num_bytes / peaks.bandwidth, flops / peaks.flops
    bound = "bytes" if memory > arithmetic else "flops"
    return Floor(num_bytes, flops, max(memory, arithmetic), bound)


def measure_peaks(dtype, size=2048, rounds=5) -> Peaks:
    """The best of several rounds: a pass over COLD_BYTES in place, a (size, size) matmul in dtype.

    The pass donates its operand: fresh memory would cost a CPU several times as much. The
    outputs of what is timed here do pay for that, so a CPU stays some way above its floors.
    """
    x = jax.random.normal(jax.random.key(0), (COLD_BYTES // 4,), jnp.float32)
    num_bytes = 2 * x.nbytes
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
    a = jax.random.normal(jax.random.key(1), (size, size), dtype)
    matmul = jax.jit(jnp.matmul)
    bandwidth = flops = 0.0
    for r in range(rounds + 1):
        start = time.perf_counter()
        x = jax.block_until_ready(add_one(x))
        middle = time.perf_counter()
        jax.block_until_ready(matmul(a, a))
        end = time.perf_counter()
        if r:  # the first round compiles
            bandwidth = max(bandwidth, num_bytes / (middle - start))
            flops = max(flops, 2 * size**3 / (end - middle))
    return Peaks(bandwidth, flops)


# Streamed weights, and bf16 matmuls under the power limit, as measured on an H200 (its data
# sheet says 4.8 TB/s and 990 Tflop/s).
GPU_PEAKS = {"NVIDIA H200": Peaks(bandwidth=4.40e12, flops=790e12)}


def measure_gpu_peaks(size=8192, rounds=5) -> Peaks:
    """The best of several rounds: reading 2 GiB, a (size, size) matmul in bfloat16."""
    x = jax.random.normal(jax.random.key(0), (2**29,), jnp.float32)
    a = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16)
    bursts = {
        "read": jax_burst(jax.jit(jnp.sum), (x,)),
        "matmul": jax_burst(jax.jit(jnp.matmul), (a, a)),
    }
    for burst in bursts.values():
        burst.wait(burst.start(1))
    best = {name: min(t.samples) for name, t in measure_bursts(bursts, rounds).items()}
    return Peaks(x.nbytes / best["read"], 2 * size**3 / best["matmul"])


# Agreement.


def worst_group_error(got, want, group_sizes=None):
    """Largest relative error of any group: norm of the difference over the norm of want.

    Groups are consecutive rows by group_sizes, and the rows past the last one; or the
    entries of the first axis where group_sizes is None. Where want is 0, got must be too.
    """
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        raise ValueError(f"worst_group_error: shapes {got.shape} and {want.shape} differ")
    if group_sizes is not None:
        ends = np.cumsum(group_sizes)
        got, want = np.split(got, ends), np.split(want, ends)
    worst = 0.0
    for g, w in zip(got, want):
        g, w = g.astype(np.float64), w.astype(np.float64)
        difference, norm = np.linalg.norm(g - w), np.linalg.norm(w)
        if norm == 0:
            error = 0.0 if difference == 0 else math.inf
        else:
            error = difference / norm
        worst = float(np.maximum(worst, error))  # unlike max(), keeps a NaN
    return worst


@jax.jit
def worst_group_error_on_device(got, want, group_sizes=None):
    """worst_group_error for arrays too large to fetch; no rows may lie past the last group."""
    if got.shape != want.shape:
        raise ValueError(f"worst_group_error: shapes {got.shape} and {want.shape} differ")

    def squares(x):
        found = jnp.sum(x * x, axis=range(1, x.ndim))
        if group_sizes is None:
            return found
        m, g = x.shape[0], group_sizes.shape[0]
        group = jnp.repeat(jnp.arange(g), group_sizes, total_repeat_length=m)
        return jax.ops.segment_sum(found, group, g)

    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    difference, norm = squares(got - want), squares(want)
    error = jnp.where(norm > 0, jnp.sqrt(difference / norm), jnp.where(difference > 0, jnp.inf, 0))
    return jnp.max(jnp.where(jnp.isnan(difference), jnp.nan, error))
