"""Tables and pictures of what was measured.

  python -m benchmarks.report times.csv                          prints Markdown, draws pictures
  python -m benchmarks.report benchmarks/results/*.csv --readme README.md

Pictures lie beside the first file: time, share of the roofline, and speedup over each peer,
by tokens of an expert, for groups of the same size. With --readme the tables replace what
lies between two comments of that file.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import math
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks import results

BEGIN = "<!-- begin: python -m benchmarks.report -->\n"
END = "<!-- end: python -m benchmarks.report -->\n"
HEADLINES = ("GLM-5.3 gate_up", "headline")  # shown in full: the first that there is
# Titles of forms in the README; what they do not name is in the files only.
KERNELS = {"fwd": "Matmul", "dgrad": "Gradient of the rows", "wgrad": "Gradient of the weights"}
LAYERS = ("forward", "step")
EXPERT_PARALLEL = ("ep_forward", "ep_step", "ep_exchanges")
COLUMNS = {"gnk": "(g, n, k)", "gkn": "(g, k, n)", "same": "`grouped_outer`", "f32": "float32"}


class Cell:
    """Lines of one cell, also of several times; ratios are between lines of the same date."""

    def __init__(self, rows):
        self.key = rows[0]
        timed = [row for row in rows if row.timed]
        self.pearl = {row.layout: row for row in timed if row.peer == "pearl"}
        self.notes = {row.peer: row.note for row in rows if row.note}
        # Peer -> its fastest variant the last time, and its time over pearl_jax's. In two
        # layouts, the one in which it compares best.
        self.peers: dict[str, tuple[results.Row, float]] = {}
        for date in dict.fromkeys(row.date for row in timed):
            now = [row for row in timed if row.date == date]
            own = {row.layout: row.us for row in now if row.peer == "pearl"}
            ran = [r for r in now if r.peer != "pearl" and r.layout in own]
            ratios = [(row, row.us / own[row.layout]) for row in ran]
            # The best one last, as it replaces others.
            for row, ratio in sorted(ratios, key=lambda item: -item[1]):
                self.peers[row.peer] = row, ratio

    @property
    def name(self):
        return f"{self.key.case}, {self.key.rows} rows, {self.key.grouping}"


def cells(rows) -> list[Cell]:
    """Cells in the order in which they were first timed."""
    found = collections.defaultdict(list)
    for row in rows:
        found[row.cell].append(row)
    return [Cell(group) for group in found.values()]


# Lines of text, while a run goes on.


def header(columns, peers) -> str:
    pearl = "".join(f"{column + ' us':>10}{'floor x':>8}" for column in columns)
    names = "".join(f"{name + ' x':>{_width(name)}}" for name in peers)
    cell = f"{'case':<26}{'ep':>3}{'rows':>6}  {'groups':<12}{'floor us':>9} {'bound':<6}"
    return cell + pearl + names


def _width(name):
    return max(len(name) + 3, 10)


def line(cell, peers) -> str:
    """* marks a time that the host may have held up."""
    key, first = cell.key, next(iter(cell.pearl.values()))
    pearl = "".join(
        f"{row.us:>9.1f}{_mark(row)}{row.over_floor:>8.3f}" for row in cell.pearl.values()
    )
    ratios = "".join(_ratio(cell, name).rjust(_width(name)) for name in peers)
    return (
        f"{key.case:<26}{key.ep:>3}{key.rows:>6}  {key.grouping:<12}{first.floor_us:>9.1f} "
        f"{first.bound:<6}{pearl}{ratios}".rstrip()
    )


def _mark(row):
    return "*" if row.host_bound else " "


def _ratio(cell, name):
    if name not in cell.peers:
        return "- "
    row, ratio = cell.peers[name]
    return f"{ratio:.2f}{_mark(row)}"


def summary(found, peers) -> str:
    """Worst and median ratio of each peer, and of pearl_jax to its floor."""
    lines = []
    for name in peers:
        ratios = [(c.peers[name][1], c) for c in found if name in c.peers]
        lines.append(_summary_line(f"{name} over pearl", ratios, min) if ratios else f"{name}: -")
    for column in dict.fromkeys(column for cell in found for column in cell.pearl):
        over = [(c.pearl[column].over_floor, c) for c in found if column in c.pearl]
        lines.append(_summary_line(f"pearl {column} over its floor", over, max))
    return "\n".join(lines)


def _summary_line(label, found, worst_of):
    ratio, cell = worst_of(found, key=lambda item: item[0])
    median = statistics.median(ratio for ratio, _ in found)
    return f"{label}: worst {ratio:.3f} ({cell.name}), median {median:.3f} of {len(found)}"


# Markdown.


def section(rows, folder) -> str:
    """What the README says of files of results whose pictures lie in the folder."""
    parts = []
    for (device, dtype), own in _groups(rows, lambda row: (row.device, row.dtype)).items():
        parts += [_versions(device, dtype, own), *_kernels(own, folder), *_layers(own)]
        parts += _expert_parallel(own)
        parts += [text for text in (_comparisons(own), _not_timed(own)) if text]
    return "\n\n".join(parts) + "\n" if parts else ""


def _groups(items, key):
    found = collections.defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def _versions(device, dtype, rows):
    dates = sorted(row.date[:10] for row in rows)
    peers = [row for row in rows if row.peer != "pearl" and row.form not in EXPERT_PARALLEL]
    timed = [row for row in peers if row.timed and row.version]
    versions = sorted({f"{row.peer} {row.version}" for row in timed if row.version != row.jax})
    versions = [f"jax {v}" for v in sorted({row.jax for row in rows})] + versions
    versions += [f"driver {v}" for v in sorted({row.driver for row in rows if row.driver})]
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"**{device}**, {dtype}, {when}; {', '.join(versions)}. Times in microseconds; the floor "
        "is the larger of bytes over bandwidth and arithmetic over its peak. Peers as multiples of "
        "the time of `pearl_jax` on the same operands, above 1 where it is faster."
    )


def _kernels(rows, folder):
    for form, title in KERNELS.items():
        found = [c for c in cells(r for r in rows if r.form == form) if c.pearl]
        if not found:
            continue
        case = next((c.key.case for c in found if c.key.case in HEADLINES), found[0].key.case)
        shown = [c for c in found if c.key.case == case]
        shown = [c for c in shown if c.key.ep == max(x.key.ep for x in shown)]
        key = shown[0].key
        yield (
            f"{title} (`--form {form}`), {key.case} over {key.ep} "
            f"{'device' if key.ep == 1 else 'devices'}: g={key.g}, k={key.k}, n={key.n}."
        )
        yield _full_table(shown)
        if len(found) > len(shown):
            yield "All models, projections and numbers of devices: medians, the worst in brackets."
            yield _summary_table(found)
        yield " ".join(
            f"![{label}]({folder}/{picture_name(key.device, form, what)})"
            for what, label in PICTURES.items()
        )


def _peers(found):
    """Peers in the order of their names, as files may hold them in any."""
    return sorted({name for cell in found for name in cell.peers})


def _table(header, lines) -> str:
    rule = ["---"] * len(header)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def _us(us):
    return f"{us:.0f}" if us >= 100 else f"{us:.3g}"


def _times(cell, name):
    return f"{cell.peers[name][1]:.2f}x" if name in cell.peers else ""


def _full_table(found):
    columns = list(dict.fromkeys(column for cell in found for column in cell.pearl))
    names = _peers(found)
    lines = [
        [
            str(c.key.rows),
            c.key.grouping,
            _us(next(iter(c.pearl.values())).floor_us),
            *(_us(c.pearl[column].us) if column in c.pearl else "" for column in columns),
            *(_times(c, name) for name in names),
        ]
        for c in sorted(found, key=lambda c: c.key.rows)
    ]
    titles = [COLUMNS[column] for column in columns]
    return _table(["rows of an expert", "groups", "floor", *titles, *names], lines)


def _summary_table(found):
    columns = list(dict.fromkeys(column for cell in found for column in cell.pearl))
    names = _peers(found)

    def spread(values, worst):
        if not values:
            return ""
        return f"{statistics.median(values):.2f} ({worst(values):.2f})"

    lines = []
    for model, own in _groups(found, lambda c: c.key.case.split()[0]).items():
        over = [[c.pearl[x].over_floor for c in own if x in c.pearl] for x in columns]
        ratios = [[c.peers[name][1] for c in own if name in c.peers] for name in names]
        cells = [*(spread(x, max) for x in over), *(spread(x, min) for x in ratios)]
        lines.append([model, str(len(own)), *cells])
    titles = [f"{COLUMNS[column]} over the floor" for column in columns]
    return _table(["model", "cells", *titles, *names], lines)


def _layers(rows):
    found = [c for c in cells(r for r in rows if r.form in LAYERS) if c.pearl]
    if not found:
        return
    names = _peers(found)
    lines = []
    for c in found:
        (own,) = c.pearl.values()
        key = c.key
        lines.append([key.case, str(key.rows), key.form, _us(own.us), f"{own.gib:.2f}"])
        for name in names:
            gib = f", {c.peers[name][0].gib:.2f}" if name in c.peers else ""
            lines[-1].append(_times(c, name) + gib)
    yield (
        "A whole layer on `grouped_matmul`, on other grouped matmuls in its place, and all of it "
        "in torch, as a CUDA graph. Of peers: times, and GiB."
    )
    yield _table(["layer", "tokens", "pass", "time", "GiB", *names], lines)


def _expert_parallel(rows):
    """The last time of each strategy, beside one device and dense exchanges of that time."""
    timed = [row for row in rows if row.form in EXPERT_PARALLEL and row.timed]
    whole, *others = EXPERT_PARALLEL
    for (case, n), own in _groups(timed, lambda row: (row.case, row.ep)).items():
        at = {(row.date, row.rows, row.candidate, row.form): row for row in own}
        last = {(row.rows, row.candidate): row.date for row in own if row.form == whole}
        lines, notes = [], []
        for (tokens, name), date in sorted(last.items(), key=lambda item: item[0][0]):
            forward, alone = at[date, tokens, name, whole], at[date, tokens, "alone", whole]
            step, moved = (at.get((date, tokens, name, form)) for form in others)
            line = [str(tokens), name, _us(forward.us), f"{forward.gib:.2f}"]
            line += [f"{forward.us / alone.us:.2f}x"]
            line += [_us(step.us), f"{step.gib:.2f}"] if step else ["", ""]
            if moved:
                dense = at[date, tokens, "dense", moved.form]
                line += [_us(moved.us), f"{moved.us / dense.us:.2f}x"]
            lines.append([*line, *[""] * (9 - len(line))])
            if forward.note:
                notes.append(f"{name}, {tokens} tokens: {forward.note}.")
        yield (
            f"Expert parallelism (`python -m benchmarks.expert_parallel`): the experts of {case} "
            f"over {n} devices. Tokens and GiB are those of a device; alone: one device with all "
            "experts and its own tokens; dense: two all_to_all of its tokens."
        )
        header = ["tokens", "strategy", "forward", "GiB", "of alone"]
        yield _table([*header, "step", "GiB", "exchanges", "of dense"], lines)
        if notes:
            yield " ".join(notes)


def _comparisons(rows):
    """Where peers are faster, and by how much."""
    lines = []
    for form in (*KERNELS, *LAYERS):
        found = cells(r for r in rows if r.form == form)
        for name in _peers(found):
            ratios = [(c.peers[name][1], c) for c in found if name in c.peers]
            slower = [item for item in ratios if item[0] < 1]
            line = [form, name, str(len(ratios)), str(len(slower))]
            if slower:
                worst, cell = min(slower, key=lambda item: item[0])
                line += [f"{100 * (1 / worst - 1):.1f} %", f"{cell.name}, ep {cell.key.ep}"]
            lines.append([*line, *[""] * (6 - len(line))])
    if not lines:
        return ""
    header = ["form", "peer", "compared", "pearl_jax slower", "at most by", "there"]
    return "Where `pearl_jax` is slower:\n\n" + _table(header, lines)


def _not_timed(rows):
    """Peers that never ran, with the first reason."""
    timed = {(row.form, row.peer) for row in rows if row.timed}
    reasons = {}
    for row in rows:
        if row.note and row.form in (*KERNELS, *LAYERS) and (row.form, row.peer) not in timed:
            reasons.setdefault(f"{row.peer} ({row.note})", []).append(row.form)
    if not reasons:
        return ""
    texts = [f"{text}, in {', '.join(dict.fromkeys(f))}" for text, f in sorted(reasons.items())]
    return "Not timed: " + "; ".join(texts) + "."


def write_readme(path, text):
    """Replaces what lies between BEGIN and END."""
    content = Path(path).read_text()
    if content.count(BEGIN) != 1 or content.count(END) != 1:
        raise ValueError(f"{path} must hold one line {BEGIN.strip()} and one {END.strip()}")
    before, rest = content.split(BEGIN)
    Path(path).write_text(before + BEGIN + text + END + rest.split(END)[1])


# Pictures.

PICTURES = {
    "time": "microseconds",
    "roofline": "share of the roofline",
    "speedup": "time over that of pearl_jax",
}


def picture_name(device, form, what) -> str:
    return f"{re.sub('[^a-z0-9]+', '-', device.lower())}-{form}-{what}.png"


def curves(found, what) -> dict[str, list[tuple[int, float]]]:
    """Candidate -> (rows, value) of the cells with groups of the same size."""
    lines = collections.defaultdict(list)
    for c in sorted(found, key=lambda c: c.key.rows):
        if c.key.grouping != "uniform":
            continue
        own = {f"pearl {column}": row for column, row in c.pearl.items()}
        ran = own | {name: c.peers[name][0] for name in sorted(c.peers)}
        if what == "time":
            values = {"floor": next(iter(own.values())).floor_us}
            values |= {name: row.us for name, row in ran.items()}
        elif what == "roofline":
            values = {name: 1 / row.over_floor for name, row in ran.items()}
        else:
            values = {name: c.peers[name][1] for name in sorted(c.peers)}
        for name, value in values.items():
            lines[name].append((c.key.rows, value))
    return dict(lines)


def draw(rows, folder) -> list[Path]:
    """Writes the pictures of all forms and devices; a panel for each case."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError(
            f"pictures need matplotlib: pip install 'pearl-jax[bench]' ({error})"
        ) from error
    written = []
    kernels = (row for row in rows if row.form in KERNELS)
    for (device, form), own in _groups(kernels, lambda row: (row.device, row.form)).items():
        found = [cell for cell in cells(own) if cell.pearl]
        panels = _groups(found, lambda c: f"{c.key.case}, ep {c.key.ep}")
        for what, label in PICTURES.items():
            path = Path(folder) / picture_name(device, form, what)
            _draw(pyplot, path, {t: curves(p, what) for t, p in panels.items()}, what, label)
            written.append(path)
    return written


def _draw(pyplot, path, panels, what, label):
    columns = min(len(panels), 4)
    rows = math.ceil(len(panels) / columns)
    size = 3.2 * columns + 1.2, 2.6 * rows
    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, sharex=True, layout="constrained"
    )
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    peers = [name for name in names if name != "floor" and not name.startswith("pearl")]
    for axis, (title, lines) in zip(axes.flat, panels.items()):
        for name, points in lines.items():
            own = name.startswith("pearl")
            axis.plot(
                *zip(*points),
                marker="o",
                markersize=2.5,
                color="gray" if name == "floor" else "C0" if own else f"C{1 + peers.index(name)}",
                linestyle=":" if name == "floor" else "--" if name == "pearl gkn" else "-",
                linewidth=2 if own else 1,
                label=name,
            )
        axis.set_title(title, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_xscale("log", base=2)
        if what == "roofline":
            axis.set_ylim(0, 1.2)
        else:
            axis.set_yscale("log", base=10 if what == "time" else 2)
        if what == "speedup":
            low, high = axis.get_ylim()
            axis.set_ylim(min(low, 0.5), max(high, 4))
            axis.yaxis.set_major_formatter("{x:g}")
        if what != "time":
            axis.axhline(1, color="gray", linewidth=0.8)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    handles = {}
    for axis in axes.flat:
        handles |= {text: line for line, text in zip(*axis.get_legend_handles_labels())}
    figure.legend([handles[n] for n in names], names, loc="outside right upper", fontsize=7)
    figure.supxlabel("tokens of an expert", fontsize=8)
    figure.supylabel(label, fontsize=8)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("--readme", type=Path, help="write the tables there, not to the terminal")
    parser.add_argument("--no-pictures", action="store_true")
    options = parser.parse_args(argv)
    rows = read(options.files)
    folder = options.files[0].parent
    text = section(rows, folder.as_posix())
    if options.readme:
        write_readme(options.readme, text)
    else:
        print(text, end="")
    if not options.no_pictures:
        for path in draw(rows, folder):
            print(f"# {path}")


def read(paths) -> list[results.Row]:
    """The lines of several files, in the order of their names."""
    return [row for path in sorted(paths) for row in results.read(path)]


if __name__ == "__main__":
    main()
