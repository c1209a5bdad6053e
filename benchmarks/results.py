"""The one format of what was measured: a CSV file with a line for each candidate in each cell.

A cell is a form, a case, a number of rows and a grouping on one device. Its candidates were
timed in turn, and have the same date; ratios are only taken between these. Files grow cell
by cell, and cells can be timed again: the last time counts.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import functools
import importlib.metadata
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, get_type_hints

import jax


class Row(NamedTuple):
    """A line of the file; the columns in this order. What is not known is empty.

    Attributes:
      date: when the cell was timed, in UTC.
      device, driver: the GPU and the version of its driver, or the CPU and nothing.
      jax, version: of JAX, and of the candidate's package.
      dtype: of the operands.
      form: fwd, dgrad or wgrad; or of a whole layer: forward, step, or a part of forward; or
        of its experts over devices: ep_forward, ep_step or ep_exchanges.
      case: model and projection, or the model alone for a layer.
      ep: devices that the experts are spread over.
      g, k, n: groups, contraction and columns of the product; experts, width and
        intermediate size of a layer.
      rows: mean rows of a group; tokens of a layer on one device.
      grouping: how rows spread over groups: a name in shapes.GROUPINGS, or routed.
      layout: of the weights, gnk or gkn. For wgrad dtype of the result: f32, or same.
      floor_us, bound: the least time of the machine, and what it is bound by.
      candidate: pearl, or a peer, with its variant after a space; of experts over devices
        the strategy, with its options after a space.
      us, min_us, max_us: microseconds of a call: median and range of the rounds.
      host_bound: whether the host may have held the GPU up.
      gib: memory of a device for operands, results and scratch, as compiled.
      note: why the candidate was not timed, or what it left out.
    """

    date: str
    device: str
    driver: str
    jax: str
    version: str
    dtype: str
    form: str
    case: str
    ep: int
    g: int
    k: int
    n: int
    rows: int
    grouping: str
    layout: str
    floor_us: float
    bound: str
    candidate: str
    us: float = math.nan
    min_us: float = math.nan
    max_us: float = math.nan
    host_bound: bool = False
    gib: float = math.nan
    note: str = ""

    @property
    def peer(self) -> str:
        """The candidate without its variant."""
        return self.candidate.split()[0]

    @property
    def timed(self) -> bool:
        return not math.isnan(self.us)

    @property
    def over_floor(self) -> float:
        return self.us / self.floor_us

    @property
    def cell(self) -> tuple:
        """What cells are told apart by."""
        return tuple(getattr(self, name) for name in CELL)


COLUMNS = Row._fields
CELL = ("device", "dtype", "form", "case", "ep", "g", "k", "n", "rows", "grouping")


def start(**known) -> Row:
    """pearl_jax's line on this machine now, without times, grouping and what is not given."""
    driver = ""
    if jax.default_backend() == "gpu":
        with contextlib.suppress(OSError):
            text = Path("/proc/driver/nvidia/version").read_text()
            driver = next(iter(re.findall(r"\d+\.\d+(?:\.\d+)?", text)), "")
    given = {
        "date": now(),
        "device": device(),
        "driver": driver,
        "jax": jax.__version__,
        "version": version("pearl-jax"),
        "grouping": "",
        "layout": "",
        "floor_us": math.nan,
        "bound": "",
        "candidate": "pearl",
    }
    return Row(**given | known)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def device() -> str:
    kind = jax.devices()[0].device_kind
    return kind if jax.default_backend() != "cpu" else f"CPU, {os.cpu_count()} cores"


@functools.cache
def version(package) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def holds(rows, cell, peers) -> bool:
    """Whether a cell (of a line) is there with pearl_jax and peers, timed or with a reason."""
    there = [row for row in rows if row.cell == cell.cell]
    whole = any(row.peer == "pearl" and row.note for row in there)  # a reason for all of them
    return whole or {"pearl", *peers} <= {row.peer for row in there}


def with_times(row, timing) -> Row:
    """timing: seconds of one call."""
    us = [1e6 * s for s in timing.samples]
    return row._replace(
        us=round(1e6 * timing.seconds, 3),
        min_us=round(min(us), 3),
        max_us=round(max(us), 3),
        host_bound=timing.host_bound,
    )


def append(path, rows: Iterable[Row]):
    """Adds lines to a file, which need not exist. ValueError where it has other columns."""
    with Path(path).open("a+", newline="") as file:
        file.seek(0)
        old = next(csv.reader(file), None)
        if old:
            _require_columns(path, old)
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not old:
            writer.writeheader()
        writer.writerows({c: _text(getattr(row, c)) for c in COLUMNS} for row in rows)


def _require_columns(path, found):
    if tuple(found or ()) != COLUMNS:
        raise ValueError(f"{path}: the columns are {found}, not {list(COLUMNS)}")


def _text(value):
    if isinstance(value, bool):
        return "1" if value else ""
    return "" if value != value else value


def so_far(path) -> list[Row]:
    """The lines of a file that need not be there yet, or be wanted at all."""
    return read(path) if path and Path(path).exists() else []


def read(path) -> list[Row]:
    """The lines of a file. Raises ValueError where it has other columns."""
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        _require_columns(path, reader.fieldnames)
        return [_parse(line) for line in reader]


_PARSE = {
    str: str,
    int: int,
    bool: bool,
    float: lambda text: float(text) if text else math.nan,
}
_TYPES = get_type_hints(Row)


def _parse(line) -> Row:
    return Row(**{name: _PARSE[kind](line[name]) for name, kind in _TYPES.items()})
