"""What everything here is measured on, and how fast the machine could have been.

Operands are random, never zeros: zeros use less power and flatter a GPU. Calls walk through
several copies of the operands, unless one is larger than any cache, so that weights are
cold. How calls are timed is in pearl_jax/timing.py.
"""

from __future__ import annotations

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from pearl_jax import timing

COLD_BYTES = 2**29  # more than a last-level cache holds


def cold_copies(operands, most):
    """Copies of a tuple of arrays, together COLD_BYTES or more (but at most that many copies)."""
    size = sum(x.nbytes for x in operands)
    copies = min(math.ceil(COLD_BYTES / max(size, 1)), most)
    return [operands] + [tuple(jnp.copy(x) for x in operands) for _ in range(copies - 1)]


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
        "read": timing.jax_burst(jax.jit(jnp.sum), (x,)),
        "matmul": timing.jax_burst(jax.jit(jnp.matmul), (a, a)),
    }
    for burst in bursts.values():
        burst.wait(burst.start(1))
    best = {name: min(t.samples) for name, t in timing.measure_bursts(bursts, rounds).items()}
    return Peaks(x.nbytes / best["read"], 2 * size**3 / best["matmul"])


# Agreement.


@jax.jit
def worst_group_error(got, want, group_sizes=None):
    """Largest relative error of any group: norm of the difference over the norm of want.

    Groups are consecutive rows by group_sizes, and no rows may lie past the last one; or
    the entries of the first axis where group_sizes is None. Where want is 0, got must be
    too. On the device, for arrays too large to fetch.
    """
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
