"""Grouped matmuls beside what else there is, on the shapes of real MoE models.

  python -m benchmarks.grouped_matmul --csv times.csv          on a GPU, or on a CPU scaled down
  python -m benchmarks.grouped_matmul --case GLM-5.3 --projection gate_up
  python -m benchmarks.grouped_matmul --form fwd dgrad wgrad --expert-parallel 1 8 --csv times.csv
  python -m benchmarks.grouped_matmul --form wgrad --case GLM-5.3 --peers torch bmm
  python -m benchmarks.grouped_matmul --host
  python -m benchmarks.report times.csv                        pictures and tables of a file

The form fwd multiplies rows by weights (g, n, k) and (g, k, n); dgrad, the gradient of the
rows, does with k and n exchanged; wgrad is the gradient of the weights, its result in the
operands' dtype, as all peers give it, and in float32.

Printed are: the floor of the actual group sizes and what bounds it; microseconds of
pearl_jax in each column, and how many times its floor that is; how many times longer
each peer takes than pearl_jax in the same column (above 1: pearl_jax is faster). Lines with
# say which peers do not run and why; * marks a time that the host may have held up. The
floor shown is that of the first column.

Every cell is added to the file as soon as it is timed. Run again with the same file, and
cells that it has are not timed again: an interrupted run goes on, other cases, forms and
peers are added.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import forms, host, peers, protocol, report, results, shapes
from pearl_jax import timing

# Largest relative error of a group between two candidates.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
HEADLINE = shapes.Case("headline", 1, shapes.Shape(g=32, k=1024, n=1024))  # of a CPU
CPU_ROWS = (16, 64)
CPU_GROUPINGS = ("uniform", "zipf")


class Output:
    """Prints lines, notes between them, each once, and the progress."""

    def __init__(self, total):
        self._seen = set()
        self._bar = None
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                tqdm = importlib.import_module("tqdm").tqdm
                self._bar = tqdm(total=total, file=sys.stderr, leave=False)

    def show(self, text):
        with self._bar.external_write_mode() if self._bar else contextlib.nullcontext():
            print(text, flush=True)

    def note(self, text, where):
        if text not in self._seen:
            self._seen.add(text)
            self.show(f"# {text} (from {where} on)")

    def done(self):
        if self._bar:
            self._bar.update()

    def close(self):
        if self._bar:
            self._bar.close()


def memory() -> int:
    """Bytes that JAX may use, or that the host has."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def make_candidates(problem, names):
    """(candidate, column) -> function of group sizes, pearl_jax's first; and why others are not."""
    form, notes = problem.form, {}
    candidates = {("pearl", column): form.pearl(problem, column) for column in problem.columns}
    for name in names:
        for column in form.peers[name].columns_of(problem):
            try:
                variants = form.peers[name].variants(problem, column)
            except Exception as error:  # a peer may fail in any way, and must not end the run
                notes[name, column] = forms.reason(error)
                continue
            for variant, bind in variants.items():
                candidates[f"{name} {variant}".strip(), column] = bind
    return candidates, notes


def prepare(problem, candidates, group_sizes):
    """Bursts of the candidates whose results agree with pearl_jax's; and why others do not run.

    Raises RuntimeError where its own columns differ, or where several peers ran and none
    agrees.
    """
    even = bool(np.all(group_sizes == group_sizes[0]))
    bursts, notes, want, differing = {}, {}, None, set()
    for key, bind in candidates.items():
        name = key[0].split()[0]
        own = name == "pearl"
        if not own and problem.form.peers[name].uniform_only and not even:
            notes[key] = UNEVEN
            continue
        try:
            ready = bind(group_sizes)
            got = ready.result()
            want = got if want is None else want
            # Groups of a result are rows of a matrix, or else entries of the first axis.
            sizes = jnp.asarray(group_sizes) if want.ndim == 2 else None
            error = float(protocol.worst_group_error(got, want, sizes))
        except Exception as error:
            if own:
                raise
            notes[key] = forms.reason(error)
            continue
        if error <= TOLERANCES[problem.dtype.name]:
            bursts[key] = ready.burst
        elif own:
            raise RuntimeError(f"pearl {key[1]} differs from the first column by {error:.1e}")
        else:
            differing.add(name)
            notes[key] = f"differs from pearl_jax by {error:.1e} in a group, not timed"
    if len(differing) > 1 and all(name == "pearl" for name, _ in bursts):
        raise RuntimeError(f"pearl_jax differs from all of {', '.join(sorted(differing))}")
    return bursts, notes


UNEVEN = "takes groups of the same size only"


@dataclasses.dataclass(frozen=True)
class Run:
    """Times cells of one form, and keeps them.

    Attributes:
      form: a name in peers.FORMS.
      names: of peers.
      path: of the file of results, or None.
    """

    form: str
    dtype: str
    names: list[str]
    rounds: int
    peaks: protocol.Peaks
    output: Output
    path: str | None = None
    found: list[results.Row] = dataclasses.field(default_factory=list)

    def point(self, case, mean, groupings):
        """Cells of one case with so many rows in a group on average, unless they are there."""
        form, where = peers.FORMS[self.form], f"{case.name} with {mean} rows"
        shape = form.product(case.shape)
        blank = results.start(
            dtype=self.dtype,
            form=self.form,
            case=case.name,
            ep=case.expert_parallel,
            **dataclasses.asdict(shape),
            rows=mean,
        )
        cells = [blank._replace(grouping=name) for name in groupings]
        todo = [cell for cell in cells if not self._has(cell)]
        needed, limit = form.num_bytes(shape, shape.g * mean, self.dtype), memory()
        note = ""
        if needed > limit:
            note = f"needs {needed / 2**30:.1f} GiB, there are {limit / 2**30:.1f}"
        elif todo:
            try:
                self._time(todo, shape, where)
            except jax.errors.JaxRuntimeError as error:  # of pearl_jax
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                note = forms.reason(error)
        if note and (left := [cell for cell in todo if not self._has(cell)]):
            self.output.note(f"over {case.expert_parallel} devices: {note}", where)
            self._keep([cell._replace(note=note) for cell in left])
        for _ in groupings:
            self.output.done()

    def _has(self, cell):
        return results.holds(self.found, cell, self.names)

    def _time(self, cells, shape, where):
        """Cells of the same operands."""
        problem = peers.FORMS[self.form].problem(shape, shape.g * cells[0].rows, self.dtype)
        candidates, absent = make_candidates(problem, self.names)
        for cell in cells:
            sizes = shapes.GROUPINGS[cell.grouping](problem.m, shape.g)
            bursts, notes = prepare(problem, candidates, sizes)
            for (candidate, _), note in (absent | notes).items():
                if note != UNEVEN:
                    self.output.note(f"{candidate}: {note}", where)
            timings = timing.measure(bursts, self.rounds)
            cell = cell._replace(date=results.now())
            self._keep(self._rows(cell, problem, sizes, timings, absent | notes))

    def _rows(self, cell, problem, group_sizes, timings, notes) -> list[results.Row]:
        rows = []
        for candidate, column in [*timings, *notes]:
            floor = problem.floor(group_sizes, column, self.peaks)
            row = cell._replace(
                candidate=candidate,
                layout=column,
                floor_us=round(1e6 * floor.seconds, 3),
                bound=floor.bound,
                note=notes.get((candidate, column), ""),
            )
            if (peer := problem.form.peers.get(row.peer)) is not None:
                row = row._replace(version=results.version(peer.package))
            if (candidate, column) in timings:
                row = results.with_times(row, timings[candidate, column])
            rows.append(row)
        return rows

    def _keep(self, rows):
        self.found.extend(rows)
        if self.path:
            results.append(self.path, rows)
        for cell in report.cells(rows):
            if cell.pearl:
                self.output.show(report.line(cell, self.names))


def _release_torch():
    """Gives memory that torch keeps for later back to the GPU, which JAX needs it from."""
    gc.collect()
    if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(form, points, *, dtype, names, rounds, peaks, path):
    """Times points, (case, mean rows of a group, groupings), prints and keeps what it finds.

    What the file has already is not timed again.
    """
    output = Output(sum(len(groupings) for _, _, groupings in points))
    found = results.so_far(path)
    here = Run(form, dtype, names, rounds, peaks, output, path, found)
    before = len(found)
    columns = peers.FORMS[form].columns_in(dtype)
    output.show(f"\n{form}\n{report.header(columns, names)}")
    for point in points:
        here.point(*point)
        _release_torch()
    output.close()
    print(f"\n{report.summary(report.cells(found[before:]), names)}", flush=True)


def peaks_of_device(dtype, measured) -> tuple[protocol.Peaks, str]:
    """Peaks for the floors, and where they come from."""
    kind = jax.devices()[0].device_kind
    if not measured and dtype == "bfloat16" and kind in protocol.GPU_PEAKS:
        return protocol.GPU_PEAKS[kind], "known"
    return (
        protocol.measure_gpu_peaks() if forms.on_gpu() else protocol.measure_peaks(dtype)
    ), "measured"


def _parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = (HEADLINE.name, *shapes.MODELS)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU even if there is a GPU")
    parser.add_argument("--host", action="store_true", help="time what a call costs the host")
    parser.add_argument("--csv", metavar="FILE", help="add what is found, and skip what is there")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each candidate")
    parser.add_argument(
        "--case",
        nargs="+",
        choices=known,
        metavar="NAME",
        default=known,
        help=f"of {', '.join(known)} (the first on a CPU only); by default all",
    )
    parser.add_argument("--projection", choices=shapes.PROJECTIONS, help="by default both")
    parser.add_argument(
        "--expert-parallel",
        nargs="+",
        type=int,
        metavar="DEVICES",
        help="that a model's experts are spread over; by default one number for each model",
    )
    parser.add_argument("--dtype", choices=TOLERANCES, help="on a CPU; by default float32")
    parser.add_argument("--form", nargs="+", choices=peers.FORMS, default=["fwd"])
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        help="mean of a group; by default "
        + "; ".join(f"{name}: {' '.join(map(str, f.rows))}" for name, f in peers.FORMS.items())
        + f"; on a CPU {' '.join(map(str, CPU_ROWS))}",
    )
    parser.add_argument(
        "--groupings",
        nargs="+",
        choices=shapes.GROUPINGS,
        help="by default all for "
        + " and ".join(map(str, forms.UNEVEN_ROWS))
        + " rows, else uniform; wgrad: "
        + " ".join(peers.FORMS["wgrad"].groupings(1))
        + "; on a CPU "
        + " ".join(CPU_GROUPINGS),
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=dict.fromkeys(name for f in peers.FORMS.values() for name in f.peers),
        help="by default all that the platform and the form have",
    )
    parser.add_argument("--measure-peaks", action="store_true", help="instead of known ones")
    return parser


def main(argv=None):
    parser = _parser()
    options = parser.parse_args(argv)
    if min(options.rounds, *(options.rows or [1]), *(options.expert_parallel or [1])) < 1:
        parser.error("--rounds, --rows and --expert-parallel must be at least 1")
    for form in options.form:
        if unknown := set(options.peers or ()) - set(peers.FORMS[form].peers):
            parser.error(f"{form} has no peer {', '.join(sorted(unknown))}")
    # The GPU's memory is shared with torch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"  # also of processes started from here
        jax.config.update("jax_platforms", "cpu")
    if jax.default_backend() not in ("cpu", "gpu"):
        parser.error(f"runs on cpu and gpu, not on {jax.default_backend()}; give --cpu")
    on_gpu = forms.on_gpu()
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    if on_gpu and dtype != "bfloat16":
        parser.error(f"on a GPU only bfloat16 is timed, not {dtype}; give --cpu")
    if options.host:
        host.run(dtype, options.rounds)
        return

    start = time.perf_counter()
    projections = [options.projection] if options.projection else shapes.PROJECTIONS
    models = [name for name in dict.fromkeys(options.case) if name in shapes.MODELS]
    cases = shapes.select(models, projections, options.expert_parallel)
    if not on_gpu:
        cases = [case._replace(shape=shapes.scale_down(case.shape)) for case in cases]
        cases = [HEADLINE] * (HEADLINE.name in options.case) + cases
    peaks, source = peaks_of_device(dtype, options.measure_peaks)
    print(
        f"jax {jax.__version__}, {results.device()}, {dtype}, {options.rounds} rounds; "
        f"{source} peaks: {peaks.bandwidth / 1e12:.3g} TB/s, {peaks.flops / 1e12:.3g} Tflop/s"
    )
    for name in options.form:
        form = peers.FORMS[name]
        here = [peer for peer, p in form.peers.items() if on_gpu or p.on_cpu]
        run(
            name,
            [
                (
                    case,
                    mean,
                    options.groupings or (form.groupings(mean) if on_gpu else CPU_GROUPINGS),
                )
                for case in cases
                for mean in options.rows or (form.rows if on_gpu else CPU_ROWS)
            ],
            dtype=dtype,
            names=here if options.peers is None else list(dict.fromkeys(options.peers)),
            rounds=options.rounds,
            peaks=peaks,
            path=options.csv,
        )
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
