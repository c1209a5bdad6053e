"""Measuring which tile is the fastest, on the GPU at hand."""

from __future__ import annotations

import datetime
import functools
import importlib
import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np

from pearl_jax import cost, library, tiling, timing, tuned
from pearl_jax.grouped_matmul import grouped_matmul, grouped_outer
from pearl_jax.tuned import Measured

_PRUNE = 1.4  # tiles that by estimate take so many times the best one are not measured
_IMPLEMENTATION, _DTYPE = "cuda", "bfloat16"
_CALLS = 4  # of one program: from 5 on XLA makes a graph, whose calls may overlap
_MAX_OUTPUT_BYTES = 2**31  # of one program


def autotune(function, *args, again=False, explain=False, rounds=3):
    """Measures tiles for every grouped matmul in function(*args), on the first visible GPU.

    The function is lowered, not run; wrap it in ``jax.grad`` to have its gradients measured
    too. What is found goes into a table in the user's cache directory (tuned.path), and from
    then on into what is compiled for the same shapes and about as many rows: rows count as
    their mean in a group, rounded up to a power of two. What the table has is not measured
    again, so that a broken run is taken up by the same call. Every tile is timed with even
    sizes, random ones, and ones by Zipf's law; the least geometric mean wins.

    Args:
      function: what jax.jit takes.
      *args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      again: measures what the table has already, too.
      explain: prints, beside what is measured, what the cost model says.
      rounds: samples of each time; what counts is their median.

    Returns:
      {tuned.Problem: tuned.Measured} of everything in the function.

    Raises:
      RuntimeError: no GPU, or one that has no kernels.
      ValueError: the function has no grouped matmul that a kernel computes.

      >>> import jax, jax.numpy as jnp, pearl_jax
      >>> x, w = jnp.ones((512, 1024), "bfloat16"), jnp.ones((8, 1024, 2048), "bfloat16")
      >>> sizes = jnp.full(8, 64)
      >>> pearl_jax.autotune(pearl_jax.grouped_matmul, x, w, sizes)  # doctest: +SKIP
      {Problem(form='fwd', g=8, k=1024, n=2048, rows=64): Measured(...)}
    """
    _require_gpu()
    with tuned.problems() as found:
        # A function of its own: what was lowered before is not lowered again.
        jax.jit(lambda *args: function(*args)).trace(*args).lower(lowering_platforms=("cuda",))
    if not found:
        raise ValueError(
            "autotune: the function has no grouped_matmul or grouped_outer that a kernel computes "
            "and that has no tile by hand; the log says why one runs in plain XLA"
        )
    return tune(sorted(found), again=again, explain=explain, rounds=rounds)


def tune(problems, *, again=False, explain=False, rounds=3):
    """As autotune, for a list of problems; prints a line for each as it is done."""
    arch, file = _require_gpu(), tuned.path()
    known = {} if again else tuned.read(file)
    print(f"# {file}", flush=True)
    for problem in _progress(problems):
        if problem not in known:
            tiles = _worth_measuring(arch, problem)
            try:
                times = _measure(problem, tiles, rounds)
            except jax.errors.JaxRuntimeError as error:  # most likely too little memory
                print(f"# {problem}: {str(error).splitlines()[0]}", flush=True)
                continue
            microseconds = {str(tile): round(1e6 * s, 1) for tile, s in times.items()}
            today = datetime.date.today().isoformat()
            best = min(times, key=lambda tile: times[tile])
            known = known | {problem: Measured(best, today, microseconds)}
            tuned.add(file, {problem: known[problem]})
        print(tuned.format_line(problem, known[problem]), flush=True)
        if explain:
            print(explanation(arch, problem), flush=True)
    return {problem: known[problem] for problem in problems if problem in known}


def explanation(arch, problem) -> str:
    """What the cost model says of each tile, for even group sizes, the chosen tile first."""
    form, g, k, n, rows = problem
    if form == "wgrad":
        lines = [
            f"{tile}: {g * math.ceil(k / tile.m) * math.ceil(n / tile.n)} work tiles"
            for tile in tiling.tiles(arch, form)
        ]
    else:
        lines = [str(even) for even, *_ in cost.rank(arch, form, g * rows, k, n, g)]
    return "\n".join(f"  {line}" for line in lines)


def _require_gpu() -> str:
    arch = library.present_arch()
    if arch is None:
        raise RuntimeError("autotune: there is no GPU with kernels here")
    if reason := library.unavailable():
        raise RuntimeError(f"autotune: {reason}")
    return arch


def _progress(problems):
    try:
        return importlib.import_module("tqdm").tqdm(problems, disable=None)
    except ImportError:
        return problems


def _worth_measuring(arch, problem):
    form, g, k, n, rows = problem
    tiles = [
        tile
        for tile in library.tiles(arch, form)
        if library.has(tiling.kernel(arch, form, _DTYPE, _DTYPE, k, n, tile))
    ]
    if form == "wgrad":
        return tiles
    ranked = cost.rank(arch, form, g * rows, k, n, g, tiles)
    seconds = {row[0].tile: cost.mean_seconds(row) for row in ranked}
    return [tile for tile in tiles if seconds[tile] <= _PRUNE * min(seconds.values())]


def _measure(problem, tiles, rounds):
    """tile -> geometric mean of its seconds over typical spreads of rows."""
    form, g, k, n, rows = problem
    m = g * rows
    operands, function, outputs = {
        "fwd": (((m, k), (g, k, n)), grouped_matmul, m * n),
        "dgrad": (
            ((m, k), (g, n, k)),
            functools.partial(grouped_matmul, transpose_rhs=True),
            m * n,
        ),
        "wgrad": (((m, k), (m, n)), grouped_outer, g * k * n),
    }[form]
    operands = [_weights(shape) if len(shape) == 3 else _random(shape) for shape in operands]
    calls = max(1, min(_CALLS, _MAX_OUTPUT_BYTES // (2 * outputs)))
    rng = np.random.default_rng(0)
    spreads = [rng.permutation(sizes) for sizes in cost.typical_sizes(m, g)]

    def program(tile):
        one = functools.partial(function, tile=tile, implementation=_IMPLEMENTATION)
        return jax.jit(lambda operands, sizes: [one(*operands, s) for s in sizes])

    programs = {tile: program(tile) for tile in tiles}
    seconds = {tile: [] for tile in tiles}
    for sizes in spreads:
        # A buffer for each call, or equal calls would be made only once.
        sizes = [jnp.array(sizes, jnp.int32) for _ in range(calls)]
        bursts = {
            tile: timing.jax_burst(program, (operands, sizes), calls)
            for tile, program in programs.items()
        }
        for burst in bursts.values():
            burst.wait(burst.start(1))  # compiles
        for tile, found in timing.measure(bursts, rounds).items():
            # Noise may leave nothing of a call that takes next to no time.
            seconds[tile].append(max(found.seconds, 1e-9))
    return {tile: statistics.geometric_mean(taken) for tile, taken in seconds.items()}


@functools.lru_cache(maxsize=1)
def _weights(shape):
    """Kept for the next problem, which mostly has other rows only."""
    return _random(shape)


@functools.partial(jax.jit, static_argnums=0)
def _random(shape):
    """Normal values, repeated, of variance 1 / shape[-2]: zeros would use less power."""
    size = math.prod(shape)
    some = jax.random.normal(jax.random.key(0), (2**20 + 7,)) / math.sqrt(shape[-2])
    many = jnp.broadcast_to(some.astype(_DTYPE), (-(-size // some.size), some.size))
    return many.reshape(-1)[:size].reshape(shape)
