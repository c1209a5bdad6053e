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
UNEVEN_ROWS = (16, 64)  # for which the form fwd times all groupings by default
LAX_MAX_SECONDS = 0.05
LAX_MAX_BYTES = 2**33
ASSUMED = protocol.GPU_PEAKS["NVIDIA H200"]  # only to choose numbers of calls


class Absent(Exception):
    """Why a peer does not run."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A product of grouped matrices, how pearl_jax computes it, and what it is compared with.

    Attributes:
      columns: what is timed of pearl_jax -> dtype of the result; the operands are bfloat16.
      operands: (shape, m) -> {column: (lhs, rhs)}, with m rows in all groups together.
      result_shape: (shape, m) -> shape of the result.
      cost: one of the floors in protocol.
      pearl: (problem, column, tile=None) -> candidate.
      peers: peer by name.
      rows: means of a group that are timed by default.
      groupings: such a mean -> groupings that are timed by default.
    """

    columns: dict[str, Any]
    operands: Callable[[shapes.Shape, int], dict[str, tuple[jax.Array, jax.Array]]]
    result_shape: Callable[[shapes.Shape, int], tuple[int, ...]]
    cost: Callable[..., protocol.Floor]
    pearl: Callable[..., Callable]
    peers: dict[str, Peer]
    rows: tuple[int, ...]
    groupings: Callable[[int], tuple[str, ...]]

    def problem(self, shape, m) -> Problem:
        return Problem(self, shape, m, self.operands(shape, m))

    def floor(self, shape, group_sizes, column, peaks) -> protocol.Floor:
        out_itemsize = jnp.dtype(self.columns[column]).itemsize
        return self.cost(shape.k, shape.n, group_sizes, 2, peaks, out_itemsize)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What every candidate multiplies: column of the form -> lhs and rhs, m rows in all."""

    form: Form
    shape: shapes.Shape
    m: int
    operands: dict[str, tuple[jax.Array, jax.Array]]

    @property
    def flops(self):
        return 2 * self.m * self.shape.k * self.shape.n

    @property
    def result_shape(self):
        return self.form.result_shape(self.shape, self.m)

    def calls(self, column) -> int:
        """Calls of one program: enough to hide its start, but with room for all outputs."""
        sizes = shapes.uniform(self.m, self.shape.g)
        floor = self.form.floor(self.shape, sizes, column, ASSUMED)
        enough = math.ceil(protocol.BURST_SECONDS / floor.seconds)
        num_bytes = math.prod(self.result_shape) * jnp.dtype(self.form.columns[column]).itemsize
        return max(1, min(enough, MAX_OUTPUT_BYTES // num_bytes, MAX_CALLS))


@functools.partial(jax.jit, static_argnums=0)
def random_weights(shape) -> dict[str, jax.Array]:
    """The same bfloat16 weights in both layouts, of variance 1 / k."""

    def one_group(key):
        w = jax.random.normal(key, (shape.n, shape.k)) / math.sqrt(shape.k)
        w = w.astype(jnp.bfloat16)
        return {"gnk": w, "gkn": w.T}

    # Group by group: all at once would take several times the memory.
    return jax.lax.map(one_group, jax.random.split(jax.random.key(0), shape.g))


def random_rows(seed, m, columns) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (m, columns)).astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Ready:
    """A candidate with its group sizes: what is timed, and the result of one call."""

    burst: protocol.Burst
    result: Callable[[], jax.Array]


# A candidate: called with group sizes (a numpy array), it gives a Ready.


def jax_candidate(function, problem, column, calls=None):
    """function (lhs, rhs, group_sizes) -> result; one program for all group sizes."""
    calls = calls or problem.calls(column)
    one = jax.jit(function)
    program = jax.jit(lambda lhs, rhs, all_sizes: [one(lhs, rhs, sizes) for sizes in all_sizes])

    def bind(group_sizes):
        # A buffer for each call, or XLA would make equal calls only once.
        all_sizes = [jnp.array(group_sizes) for _ in range(calls)]
        operands = *problem.operands[column], all_sizes
        return Ready(protocol.jax_burst(program, operands, calls), lambda: program(*operands)[0])

    return bind


def torch_candidate(make_call, problem, column):
    """make_call(torch, lhs, rhs, group_sizes) -> function without arguments."""
    torch = import_peer("torch")
    if not torch.cuda.is_available():
        raise Absent("torch sees no GPU")
    lhs, rhs = map(torch.from_dlpack, jax.block_until_ready(problem.operands[column]))
    calls = problem.calls(column)

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
            return jnp.from_dlpack(out.reshape(problem.result_shape))

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


# Peers: (problem, column) -> {variant: candidate}; of several variants the fastest counts.


@dataclasses.dataclass(frozen=True)
class Peer:
    """What pearl_jax is compared with, in one column of the form."""

    column: str
    variants: Callable[[Problem, str], dict[str, Callable]]
    uniform_only: bool = False

    def make(self, problem) -> dict[str, Callable]:
        return self.variants(problem, self.column)


lax_outer = functools.partial(
    jax.lax.ragged_dot_general,
    ragged_dot_dimension_numbers=jax.lax.RaggedDotDimensionNumbers(
        (((0,), (0,)), ((), ())), [0], []
    ),
)


def _lax(function, masked):
    """By default a dense matmul of rows that are copied and masked for each group.

    masked: shape -> columns of the operands that this happens to.
    """

    def variants(problem, column):
        shape = problem.shape
        seconds = shape.g * problem.flops / ASSUMED.flops
        num_bytes = 2 * problem.m * masked(shape) * shape.g
        if seconds > LAX_MAX_SECONDS:
            ms = 1e3 * seconds
            raise Absent(f"skipped, {shape.g} times the arithmetic would take {ms:.0f} ms")
        if num_bytes > LAX_MAX_BYTES:
            raise Absent(f"skipped, would need {num_bytes / 2**30:.0f} GiB")
        # One call: XLA merges matmuls that share an operand.
        return {"": jax_candidate(function, problem, column, calls=1)}

    return variants


# What does well on an H200, for few and for many rows per group.
_MOSAIC_COMMON = {"block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 4}
MOSAIC_FEW = {"block_m": 64, "block_n": 256, **_MOSAIC_COMMON}
MOSAIC_MANY = {"block_m": 128, "block_n": 128, **_MOSAIC_COMMON}


def _mosaic(module, name, configs):
    """configs: mean rows of a group -> those to try."""

    def variants(problem, column):
        kernel = getattr(import_peer(f"jax.experimental.pallas.ops.gpu.{module}"), name)

        def candidate(config):
            def function(lhs, rhs, group_sizes):
                return kernel(lhs, rhs, group_sizes=group_sizes, **config)

            return jax_candidate(function, problem, column)

        chosen = configs(problem.m / problem.shape.g)
        return {f"{c['block_m']}x{c['block_n']}": candidate(c) for c in chosen}

    return variants


def _tokamax(name, **options):
    def variants(problem, column):
        function = getattr(import_peer("tokamax"), name)
        function = functools.partial(function, implementation="mosaic", **options)
        return {"": jax_candidate(function, problem, column)}

    return variants


def _on_torch(make_call):
    return lambda problem, column: {"": torch_candidate(make_call, problem, column)}


def _cumulative(torch, group_sizes, device):
    return torch.tensor(np.cumsum(group_sizes).tolist(), dtype=torch.int32, device=device)


def _torch_grouped_mm(torch, lhs, rhs, group_sizes):
    ends = _cumulative(torch, group_sizes, lhs.device)
    return lambda: torch._grouped_mm(lhs, rhs.transpose(1, 2), offs=ends)


def _torch_grouped_outer(torch, lhs, rhs, group_sizes):
    ends = _cumulative(torch, group_sizes, lhs.device)
    return lambda: torch._grouped_mm(lhs.t(), rhs, offs=ends)


def _by_group(x, group_sizes):
    return x.reshape(len(group_sizes), -1, x.shape[1])


def _torch_bmm(torch, lhs, rhs, group_sizes):
    lhs = _by_group(lhs, group_sizes)
    return lambda: torch.bmm(lhs, rhs.transpose(1, 2))


def _torch_bmm_outer(torch, lhs, rhs, group_sizes):
    lhs, rhs = _by_group(lhs, group_sizes), _by_group(rhs, group_sizes)
    return lambda: torch.bmm(lhs.transpose(1, 2), rhs)


# A selection of its tuner's configurations: that compiles every one of them.
_QUACK_TILES = ((128, 128, True), (128, 192, True), (128, 256, False), (256, 128, False))


def _quack(problem, column):
    gemm_tuned = import_peer("quack.gemm_interface").gemm_tuned
    config_type = import_peer("quack.gemm_config").GemmConfig

    def candidate(tile_m, tile_n, pingpong):
        config = config_type(
            tile_m=tile_m, tile_n=tile_n, pingpong=pingpong, is_dynamic_persistent=False
        )

        def make_call(torch, lhs, rhs, group_sizes):
            bounds = _cumulative(torch, [0, *group_sizes], lhs.device)
            out = torch.empty(len(lhs), rhs.shape[1], dtype=lhs.dtype, device=lhs.device)

            def call():
                gemm_tuned.fn(lhs, rhs.transpose(1, 2), out, cu_seqlens_m=bounds, config=config)
                return out

            return call

        return torch_candidate(make_call, problem, column)

    return {f"{m}x{n}": candidate(m, n, pingpong) for m, n, pingpong in _QUACK_TILES}


# Forms.


def _fwd_operands(shape, m):
    lhs = random_rows(1, m, shape.k)
    return {layout: (lhs, weights) for layout, weights in random_weights(shape).items()}


def _fwd_pearl(problem, column, tile=None, implementation="cuda"):
    function = functools.partial(
        pearl_jax.grouped_matmul,
        transpose_rhs=column == "gnk",
        implementation=implementation,
        tile=tile,
    )
    return jax_candidate(function, problem, column)


def _wgrad_operands(shape, m):
    operands = random_rows(1, m, shape.k), random_rows(2, m, shape.n)
    return {"bf16": operands, "f32": operands}


def _wgrad_pearl(problem, column, tile=None, implementation="cuda"):
    function = functools.partial(
        pearl_jax.grouped_outer,
        preferred_element_type=problem.form.columns[column],
        implementation=implementation,
        tile=tile,
    )
    return jax_candidate(function, problem, column)


FORMS = {
    "fwd": Form(  # weights (g, n, k), (g, k, n)
        columns={"gnk": jnp.bfloat16, "gkn": jnp.bfloat16},
        operands=_fwd_operands,
        result_shape=lambda shape, m: (m, shape.n),
        cost=protocol.grouped_matmul_floor,
        pearl=_fwd_pearl,
        peers={
            "lax": Peer("gkn", _lax(jax.lax.ragged_dot, lambda shape: shape.k)),
            "mosaic": Peer(
                "gkn",
                _mosaic(
                    "ragged_dot_mgpu",
                    "ragged_dot",
                    lambda rows: [MOSAIC_FEW] * (rows <= 64) + [MOSAIC_MANY] * (rows >= 64),
                ),
            ),
            "torch": Peer("gnk", _on_torch(_torch_grouped_mm)),
            "bmm": Peer("gnk", _on_torch(_torch_bmm), uniform_only=True),
            "quack": Peer("gnk", _quack),
            "tokamax": Peer("gkn", _tokamax("ragged_dot")),
        },
        rows=(1, 4, 16, 64, 256, 1024),
        groupings=lambda rows: tuple(shapes.GROUPINGS) if rows in UNEVEN_ROWS else ("uniform",),
    ),
    "wgrad": Form(  # dtypes of the result
        columns={"bf16": jnp.bfloat16, "f32": jnp.float32},
        operands=_wgrad_operands,
        result_shape=lambda shape, m: (shape.g, shape.k, shape.n),
        cost=protocol.grouped_outer_floor,
        pearl=_wgrad_pearl,
        peers={
            "lax": Peer("bf16", _lax(lax_outer, lambda shape: shape.k + shape.n)),
            "mosaic": Peer(
                "bf16",
                _mosaic(
                    "transposed_ragged_dot_mgpu",
                    "transposed_ragged_dot",
                    lambda rows: [MOSAIC_FEW, MOSAIC_MANY],
                ),
            ),
            "torch": Peer("bf16", _on_torch(_torch_grouped_outer)),
            "bmm": Peer("bf16", _on_torch(_torch_bmm_outer), uniform_only=True),
            "tokamax": Peer("bf16", _tokamax("ragged_dot_general", **lax_outer.keywords)),
        },
        rows=(64, 256, 1024, 2048),
        groupings=lambda rows: ("uniform", "zipf"),
    ),
}
