"""What a call costs the host, beside jax.lax.ragged_dot."""

from __future__ import annotations

import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp

import pearl_jax
from pearl_jax import timing

FUNCTIONS = {"pearl": pearl_jax.grouped_matmul, "lax": jax.lax.ragged_dot}
CALLS = 64  # of one program

# Run in a fresh process. The first of the times is what any use of JAX costs.
_FIRST_CALL = """
import time
times = [time.perf_counter()]
import jax, jax.numpy as jnp
operands = jnp.ones((64, 128), "{dtype}"), jnp.ones((8, 128, 128), "{dtype}"), jnp.full(8, 8)
jax.block_until_ready(operands)
times.append(time.perf_counter())
from {module} import {name} as function
times.append(time.perf_counter())
jax.block_until_ready(jax.jit(function)(*operands))
times.append(time.perf_counter())
print(*(b - a for a, b in zip(times, times[1:])))
"""
_IMPORTS = {"pearl": ("pearl_jax", "grouped_matmul"), "lax": ("jax.lax", "ragged_dot")}


def first_call(candidate, dtype) -> list[float]:
    """Seconds of a fresh process: JAX and its device, the import, the first call."""
    module, name = _IMPORTS[candidate]
    script = _FIRST_CALL.format(module=module, name=name, dtype=dtype)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{candidate}: the first call failed\n{done.stderr}")
    return [float(seconds) for seconds in done.stdout.split()]


def measure_calls(dtype, rounds):
    """Candidate -> microseconds of one tiny call: a program each, and CALLS in one program."""
    lhs, rhs = jnp.ones((64, 128), dtype), jnp.ones((8, 128, 128), dtype)
    all_sizes = [jnp.full(8, 8) for _ in range(CALLS)]
    each, together = {}, {}
    for name, function in FUNCTIONS.items():
        one = jax.jit(function)
        many = jax.jit(lambda lhs, rhs, all_sizes, f=one: [f(lhs, rhs, s) for s in all_sizes])
        each[name] = timing.jax_burst(one, (lhs, rhs, all_sizes[0]))
        together[name] = timing.jax_burst(many, (lhs, rhs, all_sizes), CALLS)
    found = []
    for bursts in each, together:
        for burst in bursts.values():
            burst.wait(burst.start(1))
        found.append(timing.measure_bursts(bursts, rounds))
    return {name: [1e6 * timings[name].seconds for timings in found] for name in FUNCTIONS}


def run(dtype, rounds):
    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {dtype}, {rounds} rounds, "
        f"g=8 m=64 k=n=128\n\n{'':<8}{'us, a jitted call':>20}{f'us, one of {CALLS} in a jit':>24}"
    )
    for name, (each, together) in measure_calls(dtype, rounds).items():
        print(f"{name:<8}{each:>20.1f}{together:>24.1f}", flush=True)
    print(f"\n{'':<8}{'s, jax and device':>22}{'s, import':>12}{'s, first call':>16}")
    samples = {name: [] for name in FUNCTIONS}
    for _ in range(rounds):
        for name, taken in samples.items():
            taken.append(first_call(name, dtype))
    for name, taken in samples.items():
        started, imported, called = (statistics.median(column) for column in zip(*taken))
        print(f"{name:<8}{started:>22.2f}{imported:>12.2f}{called:>16.2f}", flush=True)
