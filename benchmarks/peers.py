"""pearl_jax and its peers on a GPU, each as a program of several independent calls.

All get the same operands: those of torch are the JAX arrays, passed by DLPack. Each is
optional but pearl_jax: what cannot run raises, and Absent says why.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pearl_jax
from benchmarks import protocol, shapes

MAX_CALLS = 4  # of one program: from 5 on XLA makes a graph, whose calls may overlap
MAX_OUTPUT_BYTES = 2**31  # of one program
LAX_MAX_SECONDS = 0.05
LAX_MAX_BYTES = 2**33
ASSUMED = protocol.GPU_PEAKS["NVIDIA H200"]  # only to choose numbers of calls


class Absent(Exception):
    """Why a peer does not run."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What every candidate multiplies: lhs (m, k), and weights in both layouts."""

    shape: shapes.Shape
    lhs: jax.Array
    weights: dict[str, jax.Array]  # "gnk": (g, n, k), "gkn": (g, k, n)

    @property
    def m(self):
        return self.lhs.shape[0]

    @property
    def flops(self):
        return 2 * self.m * self.shape.k * self.shape.n

    def calls(self) -> int:
        """Calls of one program: enough to hide its start, but with room for all outputs."""
        sizes = shapes.uniform(self.m, self.shape.g)
        floor = protocol.grouped_matmul_floor(self.shape.k, self.shape.n, sizes, 2, ASSUMED)
        enough = math.ceil(protocol.BURST_SECONDS / floor.seconds)
        room = MAX_OUTPUT_BYTES // (2 * self.m * self.shape.n)
        return max(1, min(enough, room, MAX_CALLS))


@functools.partial(jax.jit, static_argnums=0)
def random_weights(shape) -> dict[str, jax.Array]:
    """The same bfloat16 weights in both layouts, of variance 1 / k."""

    def one_group(key):
        w = jax.random.normal(key, (shape.n, shape.k)) / math.sqrt(shape.k)
        w = w.astype(jnp.bfloat16)
        return {"gnk": w, "gkn": w.T}

    # Group by group: all at once would take several times the memory.
    return jax.lax.map(one_group, jax.random.split(jax.random.key(0), shape.g))


def random_lhs(m, k) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (m, k)).astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Ready:
    """A candidate with its group sizes: what is timed, and the (m, n) result of one call."""

    burst: protocol.Burst
    result: Callable[[], jax.Array]


# A candidate: called with group sizes (a numpy array), it gives a Ready.


def jax_candidate(function, problem, layout, calls):
    """function (lhs, rhs, group_sizes) -> (m, n); one program for all group sizes."""
    one = jax.jit(function)
    program = jax.jit(lambda lhs, rhs, all_sizes: [one(lhs, rhs, sizes) for sizes in all_sizes])

    def bind(group_sizes):
        # A buffer for each call, or XLA would make equal calls only once.
        all_sizes = [jnp.array(group_sizes) for _ in range(calls)]
        operands = problem.lhs, problem.weights[layout], all_sizes
        return Ready(protocol.jax_burst(program, operands, calls), lambda: program(*operands)[0])

    return bind


def torch_candidate(make_call, problem, layout, calls):
    """make_call(torch, lhs, rhs, group_sizes) -> function without arguments."""
    torch = import_peer("torch")
    if not torch.cuda.is_available():
        raise Absent("torch sees no GPU")
    lhs, rhs = (
        torch.from_dlpack(jax.block_until_ready(x)) for x in (problem.lhs, problem.weights[layout])
    )

    def bind(group_sizes):
        call = make_call(torch, lhs, rhs, group_sizes)
        graph, out = _capture(torch, call, calls)

        def start(count, _alive=call):  # the graph reads tensors that only the call holds
            for _ in range(count):
                graph.replay()

        def wait(_):
            torch.cuda.synchronize()

        def result():
            wait(start(1))
            return jnp.from_dlpack(out.reshape(problem.m, -1))

        return Ready(protocol.Burst(start, wait, calls), result)

    return bind


def _capture(torch, call, calls):
    """A CUDA graph of independent calls, and the output of the last one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = call()  # allocates and tunes what must not be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # JAX's threads may use the GPU meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            out = call()
    return graph, out


def import_peer(name) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # also what fails while being imported
        raise Absent(f"{name} cannot be imported: {reason(error)}") from error


def reason(error) -> str:
    """An exception in one short line."""
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, Absent) else f"{type(error).__name__}: {text}"


# Peers: problem -> {variant: candidate}; of several variants the fastest counts.


@dataclasses.dataclass(frozen=True)
class Peer:
    """What pearl_jax is compared with: the layout of weights it takes, and how it is made."""

    layout: str
    make: Callable[[Problem], dict[str, Callable]]
    uniform_only: bool = False


def pearl(problem, layout, tile=None):
    function = functools.partial(
        pearl_jax.grouped_matmul, transpose_rhs=layout == "gnk", implementation="cuda", tile=tile
    )
    return jax_candidate(function, problem, layout, problem.calls())


def _lax(problem):
    """By default a dense matmul with every group's weights, of rows masked for each group."""
    shape = problem.shape
    seconds = shape.g * problem.flops / ASSUMED.flops
    masked_bytes = 2 * problem.m * shape.k * shape.g
    if seconds > LAX_MAX_SECONDS:
        raise Absent(f"skipped, {shape.g} times the arithmetic would take {1e3 * seconds:.0f} ms")
    if masked_bytes > LAX_MAX_BYTES:
        raise Absent(f"skipped, would need {masked_bytes / 2**30:.0f} GiB")
    # One call: XLA merges matmuls that share an operand.
    return {"": jax_candidate(jax.lax.ragged_dot, problem, "gkn", 1)}


# What does well on an H200, for few and for many rows per group.
_MOSAIC_COMMON = {"block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 4}
MOSAIC_FEW = {"block_m": 64, "block_n": 256, **_MOSAIC_COMMON}
MOSAIC_MANY = {"block_m": 128, "block_n": 128, **_MOSAIC_COMMON}


def _mosaic(problem):
    ragged_dot = import_peer("jax.experimental.pallas.ops.gpu.ragged_dot_mgpu").ragged_dot
    rows = problem.m / problem.shape.g
    configs = [MOSAIC_FEW] * (rows <= 64) + [MOSAIC_MANY] * (rows >= 64)

    def candidate(config):
        def function(lhs, rhs, group_sizes):
            return ragged_dot(lhs, rhs, group_sizes=group_sizes, **config)

        return jax_candidate(function, problem, "gkn", problem.calls())

    return {f"{c['block_m']}x{c['block_n']}": candidate(c) for c in configs}


def _tokamax(problem):
    function = functools.partial(import_peer("tokamax").ragged_dot, implementation="mosaic")
    return {"": jax_candidate(function, problem, "gkn", problem.calls())}


def _on_torch(make_call):
    return lambda problem: {"": torch_candidate(make_call, problem, "gnk", problem.calls())}


def _torch_grouped_mm(torch, lhs, rhs, group_sizes):
    ends = torch.tensor(np.cumsum(group_sizes).tolist(), dtype=torch.int32, device=lhs.device)
    return lambda: torch._grouped_mm(lhs, rhs.transpose(1, 2), offs=ends)


def _torch_bmm(torch, lhs, rhs, group_sizes):
    lhs = lhs.reshape(len(group_sizes), -1, lhs.shape[1])
    return lambda: torch.bmm(lhs, rhs.transpose(1, 2))


# A selection of its tuner's configurations: that compiles every one of them.
_QUACK_TILES = ((128, 128, True), (128, 192, True), (128, 256, False), (256, 128, False))


def _quack(problem):
    gemm_tuned = import_peer("quack.gemm_interface").gemm_tuned
    config_type = import_peer("quack.gemm_config").GemmConfig

    def candidate(tile_m, tile_n, pingpong):
        config = config_type(
            tile_m=tile_m, tile_n=tile_n, pingpong=pingpong, is_dynamic_persistent=False
        )

        def make_call(torch, lhs, rhs, group_sizes):
            bounds = np.cumsum([0, *group_sizes]).tolist()
            bounds = torch.tensor(bounds, dtype=torch.int32, device=lhs.device)
            out = torch.empty(len(lhs), rhs.shape[1], dtype=lhs.dtype, device=lhs.device)

            def call():
                gemm_tuned.fn(lhs, rhs.transpose(1, 2), out, cu_seqlens_m=bounds, config=config)
                return out

            return call

        return torch_candidate(make_call, problem, "gnk", problem.calls())

    return {f"{m}x{n}": candidate(m, n, pingpong) for m, n, pingpong in _QUACK_TILES}


PEERS = {
    "lax": Peer("gkn", _lax),
    "mosaic": Peer("gkn", _mosaic),
    "torch": Peer("gnk", _on_torch(_torch_grouped_mm)),
    "bmm": Peer("gnk", _on_torch(_torch_bmm), uniform_only=True),
    "quack": Peer("gnk", _quack),
    "tokamax": Peer("gkn", _tokamax),
}
