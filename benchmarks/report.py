"""What a run on a GPU found, as lines of a table, a summary, JSON and a plot."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import statistics
from typing import Any


@dataclasses.dataclass(frozen=True)
class Record:
    """One case with one number of rows and one grouping. Times are medians in microseconds.

    Attributes:
      case: model and projection; rows: mean of a group.
      floor_us: column of pearl_jax -> floor; bound, and peers, go by that of the first one.
      pearl_us: column of pearl_jax -> time.
      peer_us: peer -> time; only peers that ran and agreed.
      ratios: peer -> its time over that of pearl_jax in the same column.
      host_bound: candidates that may have waited for the host.
      samples: candidate (variants apart) -> all its times.
    """

    case: str
    g: int
    k: int
    n: int
    rows: int
    grouping: str
    group_sizes: list[int]
    floor_us: dict[str, float]
    bound: str
    pearl_us: dict[str, float]
    peer_us: dict[str, float]
    ratios: dict[str, float]
    host_bound: list[str]
    samples: dict[str, list[float]]

    @property
    def peer_floor_us(self) -> float:
        return next(iter(self.floor_us.values()))

    def over_floor(self, column) -> float:
        return self.pearl_us[column] / self.floor_us[column]


def header(columns, peers) -> str:
    pearl = "".join(f"{column + ' us':>10}{'floor x':>8}" for column in columns)
    names = "".join(f"{name + ' x':>10}" for name in peers)
    return f"{'case':<24}{'rows':>5}  {'groups':<12}{'floor us':>9} {'bound':<6}{pearl}{names}"


def line(record, peers) -> str:
    """* marks a time that the host may have held up."""

    def marked(text, name):
        return text + ("*" if name in record.host_bound else " ")

    pearl = "".join(
        marked(f"{us:>9.1f}", f"pearl {column}") + f"{record.over_floor(column):>8.3f}"
        for column, us in record.pearl_us.items()
    )
    ratios = "".join(
        marked(f"{record.ratios[name]:>9.2f}", name) if name in record.ratios else f"{'-':>9} "
        for name in peers
    )
    return (
        f"{record.case:<24}{record.rows:>5}  {record.grouping:<12}{record.peer_floor_us:>9.1f} "
        f"{record.bound:<6}{pearl}{ratios}".rstrip()
    )


def summary(records, peers) -> str:
    """Worst and median ratio of each peer, and of pearl_jax to its floor."""
    lines = []
    for name in peers:
        found = [(r.ratios[name], r) for r in records if name in r.ratios]
        lines.append(_summary_line(f"{name} over pearl", found, min) if found else f"{name}: -")
    for column in records[0].pearl_us if records else ():
        found = [(r.over_floor(column), r) for r in records]
        lines.append(_summary_line(f"pearl {column} over its floor", found, max))
    return "\n".join(lines)


def _summary_line(label, found, worst_of):
    ratio, record = worst_of(found, key=lambda item: item[0])
    median = statistics.median(ratio for ratio, _ in found)
    return (
        f"{label}: worst {ratio:.3f} ({record.case}, {record.rows} rows, {record.grouping}), "
        f"median {median:.3f} of {len(found)}"
    )


def write_json(path, about, records):
    """about: what the run was made with."""
    content = {**about, "records": [dataclasses.asdict(r) for r in records]}
    with open(path, "w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def plotting() -> Any:
    """matplotlib.pyplot; ImportError says how to get it."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError(
            f"--plot needs matplotlib: pip install 'pearl-jax[bench]' ({error})"
        ) from error


def curves(records, peers, case) -> dict[str, list[tuple[int, float]]]:
    """Candidate -> (rows, time over floor), uniform groups of one case."""
    found: dict[str, list[tuple[int, float]]] = {}
    for r in sorted(records, key=lambda r: r.rows):
        if r.case == case and r.grouping == "uniform":
            over = {f"pearl {column}": r.over_floor(column) for column in r.pearl_us}
            over |= {name: r.peer_us[name] / r.peer_floor_us for name in peers if name in r.peer_us}
            for name, ratio in over.items():
                found.setdefault(name, []).append((r.rows, ratio))
    order = [name for name in found if name.startswith("pearl")] + list(peers)
    return {name: found[name] for name in order if name in found}


def write_plot(path, records, peers, title):
    """Time over floor against rows per group, uniform groups, a panel for each case."""
    pyplot = plotting()
    cases = list(dict.fromkeys(r.case for r in records if r.grouping == "uniform"))
    if not cases:
        return
    columns = min(len(cases), 3)
    rows = math.ceil(len(cases) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    first = f"pearl {next(iter(records[0].pearl_us))}"
    colors = {name: f"C{i}" for i, name in enumerate(("pearl", *peers))}
    for axis, case in zip(axes.flat, cases):
        for name, points in curves(records, peers, case).items():
            axis.plot(
                *zip(*points),
                marker="o",
                markersize=3,
                color=colors[name.split()[0]],
                linestyle="--" if name.startswith("pearl") and name != first else "-",
                linewidth=2.2 if name.startswith("pearl") else 1.2,
                label=name,
            )
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set(title=case, xlabel="rows per group", ylabel="time / floor", ylim=(0.9, 2.5))
        axis.set_xscale("log", base=2)
        axis.legend(fontsize=7)
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
