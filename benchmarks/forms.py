"""The products that are timed, their operands, and how candidates compute them.

A candidate is a program of several independent calls. All get the same operands: those of
torch are the JAX arrays, passed by DLPack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pearl_jax
from benchmarks import protocol, shapes
from pearl_jax import timing

MAX_CALLS = 4  # of one program on a GPU: from 5 on XLA makes a graph, whose calls may overlap
MAX_CPU_COPIES = 64  # of the operands
MAX_OUTPUT_BYTES = 2**31  # of one program
UNEVEN_ROWS = (16, 64)  # for which fwd and dgrad time all groupings by default
ASSUMED = protocol.GPU_PEAKS["NVIDIA H200"]  # only to choose numbers of calls


class Absent(Exception):
    """Why a candidate does not run."""


def on_gpu():
    return jax.default_backend() == "gpu"


@dataclasses.dataclass(frozen=True)
class Form:
    """A product of grouped matrices, how pearl_jax computes it, and what it is compared with.

    Attributes:
      columns: what is timed of pearl_jax -> dtype of the result, None for the operands'.
      product: shape of a layer's matmul -> that of the product.
      operands: (shape, m, dtype) -> {column: (lhs, rhs)}, m rows in all groups together.
      result_shape: (shape, m) -> shape of the result.
      cost: one of the floors in protocol.
      pearl: (problem, column, tile=None) -> candidate.
      peers: peer by name.
      rows: means of a group that are timed by default.
      groupings: such a mean -> groupings that are timed by default.
    """

    columns: dict[str, Any]
    product: Callable[[shapes.Shape], shapes.Shape]
    operands: Callable[..., dict[str, tuple[jax.Array, jax.Array]]]
    result_shape: Callable[[shapes.Shape, int], tuple[int, ...]]
    cost: Callable[..., protocol.Floor]
    pearl: Callable[..., Callable]
    peers: dict[str, Peer]
    rows: tuple[int, ...]
    groupings: Callable[[int], tuple[str, ...]]

    def columns_in(self, dtype) -> dict[str, Any]:
        """Column -> dtype of the result, for operands of dtype; each dtype once in wgrad."""
        dtype = jnp.dtype(dtype)
        columns = {c: jnp.dtype(out or dtype) for c, out in self.columns.items()}
        return {c: out for c, out in columns.items() if self.columns[c] is None or out != dtype}

    def problem(self, shape, m, dtype=jnp.bfloat16) -> Problem:
        most = MAX_CALLS if on_gpu() else MAX_CPU_COPIES
        operands = {
            column: protocol.cold_copies(arrays, most)
            for column, arrays in self.operands(shape, m, dtype).items()
            if column in self.columns_in(dtype)
        }
        return Problem(self, shape, m, jnp.dtype(dtype), operands)

    def num_bytes(self, shape, m, dtype=jnp.bfloat16) -> int:
        """An estimate of the memory that a problem needs, above it if anything.

        Operands of each column, two results that are compared, those of two programs.
        """
        columns = self.columns_in(dtype)
        operands = jax.eval_shape(lambda: self.operands(shape, m, dtype))
        given = sum(x.size * x.dtype.itemsize for c in columns for x in operands[c])
        result = math.prod(self.result_shape(shape, m)) * max(d.itemsize for d in columns.values())
        program = max(result, min(MAX_OUTPUT_BYTES, MAX_CALLS * result))
        return given + len(columns) * protocol.COLD_BYTES + 2 * (result + program)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What every candidate multiplies: column -> copies of (lhs, rhs), m rows in all."""

    form: Form
    shape: shapes.Shape
    m: int
    dtype: Any
    operands: dict[str, list[tuple[jax.Array, ...]]]

    @property
    def flops(self):
        return 2 * self.m * self.shape.k * self.shape.n

    @property
    def result_shape(self):
        return self.form.result_shape(self.shape, self.m)

    @property
    def columns(self):
        return self.form.columns_in(self.dtype)

    def floor(self, group_sizes, column, peaks) -> protocol.Floor:
        itemsizes = self.dtype.itemsize, self.columns[column].itemsize
        return self.form.cost(self.shape.k, self.shape.n, group_sizes, peaks, *itemsizes)

    def calls(self, column) -> int:
        """Calls of one program: enough to hide its start, but with room for all outputs."""
        if not on_gpu():
            return 1
        floor = self.floor(shapes.uniform(self.m, self.shape.g), column, ASSUMED)
        enough = math.ceil(timing.BURST_SECONDS / floor.seconds)
        num_bytes = math.prod(self.result_shape) * self.columns[column].itemsize
        return max(1, min(enough, MAX_OUTPUT_BYTES // num_bytes, MAX_CALLS))


@dataclasses.dataclass(frozen=True)
class Peer:
    """What pearl_jax is compared with, in columns of the form.

    Attributes:
      columns: in which it is; none: the first one of the problem.
      variants: (problem, column) -> {variant: candidate}; the fastest counts.
      package: whose version it has.
      uniform_only: takes groups of the same size only.
      on_cpu: runs on a CPU too.
    """

    columns: tuple[str, ...]
    variants: Callable[[Problem, str], dict[str, Callable]]
    package: str
    uniform_only: bool = False
    on_cpu: bool = False

    def columns_of(self, problem) -> tuple[str, ...]:
        return self.columns or tuple(problem.columns)[:1]


@dataclasses.dataclass(frozen=True)
class Ready:
    """A candidate with its group sizes: what is timed, and the result of one call."""

    burst: timing.Burst
    result: Callable[[], jax.Array]


# A candidate: called with group sizes (a numpy array), it gives a Ready.


def jax_candidate(
    function,
    problem,
    column,
    *,
    calls=None,
    prepare=lambda *operands: operands,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    compiler_options=None,
    expect="",
):
    """function (lhs, rhs, group_sizes) -> result; one program for all group sizes.

    prepare makes other operands of lhs and rhs first, which is not timed. The program is
    compiled in context, with XLA's options; what that gives must hold the text expect.
    """
    calls = calls or problem.calls(column)
    copies = [prepare(*arrays) for arrays in problem.operands[column]]
    one = jax.jit(function)
    # Every call has parameters of its own, or XLA would make equal calls only once.
    program = jax.jit(lambda given: [one(*operands) for operands in given])
    found = []  # the executable, or why there is none

    def compile_once(given):
        if not found:
            try:
                with context():
                    executable = program.lower(given).compile(compiler_options)
                if expect not in (executable.as_text() or ""):
                    raise Absent(f"XLA compiles it without {expect}")
                found.append(executable)
            except Exception as error:
                found.append(error)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def bind(group_sizes):
        sizes = jnp.array(group_sizes)
        endless = itertools.cycle([(*arrays, sizes) for arrays in copies])
        given = [[next(endless) for _ in range(calls)] for _ in range(0, len(copies), calls)]
        run, turns = compile_once(given[0]), itertools.cycle(given)
        burst = timing.jax_burst(lambda: run(next(turns)), (), calls)
        return Ready(burst, lambda: run(given[0])[0])

    return bind


def torch_candidate(make_call, problem, column):
    """make_call(torch, lhs, rhs, group_sizes) -> (function without arguments, finish).

    finish makes the result of what the function gives, which is not timed; None: nothing.
    """
    torch = import_peer("torch")
    if not torch.cuda.is_available():
        raise Absent("torch sees no GPU")
    operands = jax.block_until_ready(problem.operands[column])
    copies = [tuple(map(torch.from_dlpack, arrays)) for arrays in operands]
    calls = problem.calls(column)

    def bind(group_sizes):
        made = [make_call(torch, *arrays, group_sizes) for arrays in copies]
        burst, out = torch_burst(torch, [call for call, _ in made], calls)
        finish = made[0][1]

        def result():
            burst.wait(burst.start(1))
            found = finish(out) if finish else out
            return jnp.from_dlpack(found.reshape(problem.result_shape))

        return Ready(burst, result)

    return bind


def torch_burst(torch, functions, calls=1):
    """A burst of a CUDA graph of independent calls, of the functions in turn.

    And the output of the first, which every run of the graph overwrites.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for function in functions:
            function()  # allocates and tunes what must not be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # JAX's threads may use the GPU meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = [functions[i % len(functions)]() for i in range(calls)]

    def start(count, _alive=functions):  # the graph reads tensors that only they hold
        for _ in range(count):
            graph.replay()

    return timing.Burst(start, lambda _: torch.cuda.synchronize(), calls), outputs[0]


def import_peer(name) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # also what fails while being imported
        raise Absent(f"{name} cannot be imported: {reason(error)}") from error


def reason(error) -> str:
    """An exception in one short line."""
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, Absent) else f"{type(error).__name__}: {text}"


# Operands and pearl_jax.


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_weights(shape, dtype=jnp.bfloat16) -> dict[str, jax.Array]:
    """The same weights in both layouts, of variance 1 / k."""

    def one_group(key):
        w = jax.random.normal(key, (shape.n, shape.k)) / math.sqrt(shape.k)
        w = w.astype(dtype)
        return {"gnk": w, "gkn": w.T}

    # Group by group: all at once would take several times the memory.
    return jax.lax.map(one_group, jax.random.split(jax.random.key(0), shape.g))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def random_rows(seed, m, columns, dtype=jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (m, columns)).astype(dtype)


def weights_operands(shape, m, dtype):
    lhs = random_rows(1, m, shape.k, dtype)
    return {layout: (lhs, weights) for layout, weights in random_weights(shape, dtype).items()}


def rows_operands(shape, m, dtype):
    operands = random_rows(1, m, shape.k, dtype), random_rows(2, m, shape.n, dtype)
    return {"same": operands, "f32": operands}


def _implementation():
    return "cuda" if on_gpu() else None  # never plain XLA on a GPU, unnoticed


def pearl_matmul(problem, column, tile=None):
    function = functools.partial(
        pearl_jax.grouped_matmul,
        transpose_rhs=column == "gnk",
        implementation=_implementation(),
        tile=tile,
    )
    return jax_candidate(function, problem, column)


def pearl_outer(problem, column, tile=None):
    function = functools.partial(
        pearl_jax.grouped_outer,
        preferred_element_type=problem.columns[column],
        implementation=_implementation(),
        tile=tile,
    )
    return jax_candidate(function, problem, column)


def matmul(peers) -> Form:
    """Rows by weights; columns are the layouts of these, (g, n, k) and (g, k, n)."""
    return Form(
        columns={"gnk": None, "gkn": None},
        product=lambda shape: shape,
        operands=weights_operands,
        result_shape=lambda shape, m: (m, shape.n),
        cost=protocol.grouped_matmul_floor,
        pearl=pearl_matmul,
        peers=peers,
        rows=(1, 4, 16, 64, 256, 1024),
        groupings=lambda rows: tuple(shapes.GROUPINGS) if rows in UNEVEN_ROWS else ("uniform",),
    )


def outer(peers) -> Form:
    """The gradient of weights; columns are dtypes of the result."""
    return Form(
        columns={"same": None, "f32": jnp.float32},
        product=lambda shape: shape,
        operands=rows_operands,
        result_shape=lambda shape, m: (shape.g, shape.k, shape.n),
        cost=protocol.grouped_outer_floor,
        pearl=pearl_outer,
        peers=peers,
        rows=(64, 256, 1024, 2048),
        groupings=lambda rows: ("uniform", "zipf"),
    )
