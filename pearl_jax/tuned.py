"""The choice of a kernel's tile: what measurements chose, or else the cost model.

There is a table that comes with the package, and the user's own, written by
:func:`pearl_jax.autotune`: a text file for each kind of device and version of the package,
with one line for each problem, that goes before the other,

    form  g  k  n  rows  tile  date  tile=microseconds ...

Forms are those of tiling.KernelSpec; rows is the mean of a group, rounded up to a power of
two.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax

import pearl_jax
from pearl_jax import cost, library, shipped, tiling
from pearl_jax.tiling import TileConfig

_log = logging.getLogger(__name__)

tuned_tiles = jax.make_user_context(default_value=os.environ.get("PEARL_JAX_TUNED", "1") != "0")
"""Context manager: ``with pearl_jax.tuned_tiles(False):`` measured tiles are ignored.

Calls compiled inside get the tiles of the cost model. The environment variable
``PEARL_JAX_TUNED=0`` says the same for the whole process.

  >>> import pearl_jax
  >>> with pearl_jax.tuned_tiles(False):
  ...     pass  # call, or compile, what should not depend on measurements
"""


class Problem(NamedTuple):
    """What a tile is chosen for.

    Attributes:
      form: "fwd", "dgrad" or "wgrad", see tiling.KernelSpec.
      g: groups.
      k, n: the weights of a group.
      rows: mean of a group, rounded up to a power of two.
    """

    form: str
    g: int
    k: int
    n: int
    rows: int

    @classmethod
    def of(cls, form, m, k, n, num_groups):
        mean = -(-m // max(num_groups, 1))
        return cls(form, num_groups, k, n, 1 << max(mean - 1, 0).bit_length())


class Measured(NamedTuple):
    """What was measured of a problem.

    Attributes:
      tile: the best one.
      date: when, "2026-11-30".
      microseconds: of each tile, by its name.
    """

    tile: TileConfig
    date: str
    microseconds: dict[str, float]


def choose(arch, form, m, k, n, num_groups, has=lambda tile: True) -> TileConfig:
    """The work tile of a kernel. The log says so once at level DEBUG, and why.

    has: whether there is a kernel with a tile that was measured; dtypes may differ.
    """
    problem = Problem.of(form, m, k, n, num_groups)
    if (found := _chosen_for.get()) is not None:
        found.add(problem)
    tile = None
    if tuned_tiles.value:
        tile, why = _look_up(arch, problem, has)
    if tile is None:
        why = "by the cost model"
        if form == "wgrad":
            tile = cost.choose_outer(arch, k, n, num_groups)
        else:
            tile = cost.choose(arch, form, m, k, n, num_groups)
    _say(arch, problem, tile, why)
    return tile


_chosen_for: contextvars.ContextVar[set[Problem] | None] = contextvars.ContextVar(
    "problems", default=None
)


@contextlib.contextmanager
def problems():
    """What tiles are chosen for inside, as a set that fills."""
    found = set()
    token = _chosen_for.set(found)
    try:
        yield found
    finally:
        _chosen_for.reset(token)


def _look_up(arch, problem, has):
    # The table of the visible GPU, if that is what is compiled for.
    file = path() if arch == library.present_arch() else None
    if file and (found := read(file).get(problem)) and has(found.tile):
        return found.tile, f"measured here on {found.date}"
    name, date = shipped.TILES.get(arch, {}).get(problem, ("", ""))
    compiled = {str(tile): tile for tile in tiling.tiles(arch, problem.form)}
    return compiled.get(name), f"measured on {date}"


@functools.cache
def _say(arch, problem, tile, why):
    _log.debug("pearl_jax: tile %s on %s for %s, %s", tile, arch, problem, why)


def path() -> Path | None:
    """The user's table for the visible GPU; None without one.

    It lies in PEARL_JAX_CACHE_DIR, or in the folder pearl_jax of XDG_CACHE_HOME or ~/.cache.
    """
    try:
        kind = re.sub(r"[^\w.-]+", "_", jax.devices("cuda")[0].device_kind)
    except RuntimeError:  # no such backend
        return None
    folder = os.environ.get("PEARL_JAX_CACHE_DIR")
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "pearl_jax"
    return Path(folder) / f"tiles-{kind}-{pearl_jax.__version__}.txt"


def read(file) -> dict[Problem, Measured]:
    """A user's table. Lines that are damaged are left out, and the log warns of them."""
    try:
        status = os.stat(file)
    except OSError:
        return {}
    return _read(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)
def _read(file, *_):
    table = {}
    text = Path(file).read_bytes().decode(errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            try:
                problem, measured = _parse(line)
            except ValueError as error:
                _log.warning("pearl_jax: line %d of %s is damaged: %s", number, file, error)
            else:
                table[problem] = measured
    return table


def _parse(line):
    form, g, k, n, rows, name, date, *times = line.split()
    tiles = {str(t): t for arch in tiling.ARCHS for t in library.tiles(arch, form)}
    if name not in tiles:
        raise ValueError(f"no kernel of {form!r} has the tile {name!r}")
    microseconds = {tile: float(us) for tile, us in (t.split("=") for t in times)}
    problem = Problem(form, *map(int, (g, k, n, rows)))
    return problem, Measured(tiles[name], date, microseconds)


def format_line(problem, measured) -> str:
    """A line of a user's table."""
    times = "  ".join(f"{tile}={us:.1f}" for tile, us in measured.microseconds.items())
    return (
        f"{problem.form:<5} {problem.g:>4} {problem.k:>6} {problem.n:>6} {problem.rows:>5}  "
        f"{measured.tile!s:<14}  {measured.date}  {times}"
    )


def add(file, found: dict[Problem, Measured]):
    """Adds to a user's table, whatever other processes add to it meanwhile.

    Damaged lines are left out of what is written.
    """
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with _lock(file.with_suffix(".lock")):
        table = read(file) | found
        lines = [
            "# form g k n rows tile date tile=us ...",
            *(format_line(*x) for x in table.items()),
        ]
        # A reader finds the old table or the new one, never a part.
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".tiles")
        with os.fdopen(handle, "w") as new:
            new.write("\n".join(lines) + "\n")
        os.replace(name, file)


@contextlib.contextmanager
def _lock(file):
    import fcntl  # not on Windows, where there are no kernels to tune

    with open(file, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
