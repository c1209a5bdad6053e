"""Grouped matmuls on a CPU, beside jax.lax's ragged dot and the dense einsum."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import pearl_jax
from benchmarks import peers, protocol, shapes

HEADLINE = "headline"
HEADLINE_SHAPE = shapes.Shape(g=32, k=1024, n=1024)
HEADLINE_ROWS = 512
MEAN_ROWS = 32  # of a group, in the other cases
GROUPINGS = ("uniform", "zipf")
# Largest relative error of a group between two ways to compute it.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


def _split(x, g):
    """(m, k) -> (g, m / g, k)"""
    return x.reshape(g, x.shape[0] // g, x.shape[1])


def _dense_matmul(equation, lhs, rhs, group_sizes):
    out = jnp.einsum(equation, _split(lhs, rhs.shape[0]), rhs)
    return out.reshape(lhs.shape[0], out.shape[-1])


def _dense_outer(lhs, rhs, group_sizes):
    g = group_sizes.shape[0]
    return jnp.einsum("gmk,gmn->gkn", _split(lhs, g), _split(rhs, g))


# op -> candidate -> function (lhs, rhs, group_sizes); compiled once for each shape.
OPS = {
    "matmul (g,k,n)": {
        "pearl": pearl_jax.grouped_matmul,
        "lax": jax.lax.ragged_dot,
        "dense": functools.partial(_dense_matmul, "gmk,gkn->gmn"),
    },
    "matmul (g,n,k)": {
        "pearl": functools.partial(pearl_jax.grouped_matmul, transpose_rhs=True),
        "lax": functools.partial(
            jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=_TRANSPOSED
        ),
        "dense": functools.partial(_dense_matmul, "gmk,gnk->gmn"),
    },
    "outer": {
        "pearl": pearl_jax.grouped_outer,
        "lax": peers.lax_outer,
        "dense": _dense_outer,
    },
}
OPS = {op: {name: jax.jit(f) for name, f in fs.items()} for op, fs in OPS.items()}


def operands(op, shape, m, dtype):
    """Random lhs and rhs of an op."""
    g, k, n = shape.g, shape.k, shape.n
    rhs = {"matmul (g,k,n)": (g, k, n), "matmul (g,n,k)": (g, n, k), "outer": (m, n)}[op]
    return protocol.random_array(1, (m, k), dtype), protocol.random_array(2, rhs, dtype)


def check(op, results, group_sizes, dtype):
    """Raises RuntimeError where a candidate's result is not lax's."""
    for name, result in results.items():
        sizes = None if op == "outer" else group_sizes
        error = protocol.worst_group_error(result, results["lax"], sizes)
        if not error <= TOLERANCES[dtype]:
            raise RuntimeError(
                f"{op}: {name} and lax differ, relative error {error:.1e} in one group is above "
                f"{TOLERANCES[dtype]:.0e} (group_sizes {group_sizes.tolist()})"
            )


def run_shape(label, shape, m, groupings, dtype, rounds, peaks):
    """Checks and times every op of one shape, printing a line for each."""
    itemsize = jnp.dtype(dtype).itemsize
    for op, functions in OPS.items():
        inputs = protocol.cold_copies(operands(op, shape, m, dtype))
        for grouping in groupings:
            group_sizes = shapes.GROUPINGS[grouping](m, shape.g)
            candidates = dict(functions)
            if np.any(group_sizes != group_sizes[0]):
                del candidates["dense"]
            on_device = jnp.asarray(group_sizes)
            timing = protocol.measure(
                candidates,
                [(*arrays, on_device) for arrays in inputs],
                rounds,
                check=lambda results: check(op, results, group_sizes, dtype),
            )
            floor_of = (
                protocol.grouped_outer_floor if op == "outer" else protocol.grouped_matmul_floor
            )
            floor = floor_of(shape.k, shape.n, group_sizes, itemsize, peaks)
            dense = f"{timing.ratios['dense']:.2f}" if "dense" in timing.ratios else "-"
            print(
                f"{label:<24}{shape.g:>4}{m:>7}{shape.k:>6}{shape.n:>6}  {op:<15}{grouping:<12}"
                f"{1e3 * timing.seconds['pearl']:>8.2f}{timing.ratios['lax']:>8.2f}{dense:>8}"
                f"{timing.seconds['pearl'] / floor.seconds:>8.1f}  {floor.bound}",
                flush=True,
            )


def run(cases, dtype, rounds):
    """Times cases (name -> shape), scaled down but for the headline."""
    # Otherwise float32 would mean fewer bits, and candidates would not agree.
    jax.config.update("jax_default_matmul_precision", "highest")
    start = time.perf_counter()
    peaks = protocol.measure_peaks(dtype)
    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {dtype}, "
        f"{rounds} rounds; measured peaks: {peaks.bandwidth / 1e9:.1f} GB/s, "
        f"{peaks.flops / 1e9:.0f} Gflop/s\n"
    )
    print(
        f"{'case':<24}{'g':>4}{'m':>7}{'k':>6}{'n':>6}  {'op':<15}{'groups':<12}{'pearl ms':>8}"
        f"{'lax x':>8}{'dense x':>8}{'floor x':>8}  bound",
        flush=True,
    )
    for case, shape in cases.items():
        if case == HEADLINE:
            run_shape(case, shape, HEADLINE_ROWS, GROUPINGS[:1], dtype, rounds, peaks)
        else:
            shape = shapes.scale_down(shape)
            run_shape(case, shape, shape.g * MEAN_ROWS, GROUPINGS, dtype, rounds, peaks)
    print(f"\n{time.perf_counter() - start:.0f} s")
