"""Grouped matmuls on a GPU: pearl_jax beside its peers and the floors of the machine."""

from __future__ import annotations

import contextlib
import importlib
import platform
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers, protocol, report, shapes

TOLERANCE = 1e-2  # largest relative error of a group between two candidates, in bfloat16


def peaks_of_device(measured) -> tuple[protocol.Peaks, str]:
    """Peaks for the floors, and where they come from."""
    kind = jax.devices()[0].device_kind
    if not measured and kind in protocol.GPU_PEAKS:
        return protocol.GPU_PEAKS[kind], "known"
    return protocol.measure_gpu_peaks(), "measured"


class Output:
    """Prints the lines of the table, notes between them, each once, and the progress."""

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


def make_candidates(problem, names, note):
    """Candidate, "peer" or "peer variant" -> function of group sizes; pearl_jax comes first."""
    form = problem.form
    candidates = {f"pearl {column}": form.pearl(problem, column) for column in form.columns}
    for name in names:
        try:
            variants = form.peers[name].make(problem)
        except Exception as error:  # a peer may fail in any way, and must not end the run
            note(f"{name}: {peers.reason(error)}")
            continue
        candidates |= {f"{name} {variant}".strip(): bind for variant, bind in variants.items()}
    return candidates


def prepare(form, candidates, group_sizes, note):
    """Bursts of the candidates whose results agree with pearl_jax's.

    Raises RuntimeError where its own columns differ, or where several peers ran and none
    agrees.
    """
    even = bool(np.all(group_sizes == group_sizes[0]))
    bursts, want, differing = {}, None, set()
    for name, bind in candidates.items():
        peer = name.split()[0]
        own = peer == "pearl"
        if not own and form.peers[peer].uniform_only and not even:
            continue
        try:
            ready = bind(group_sizes)
            got = ready.result()
            want = got if want is None else want
            # Groups of a result are rows of a matrix, or else entries of the first axis.
            sizes = jnp.asarray(group_sizes) if want.ndim == 2 else None
            error = float(protocol.worst_group_error_on_device(got, want, sizes))
        except Exception as error:
            if own:
                raise
            note(f"{name}: {peers.reason(error)}")
            continue
        if error <= TOLERANCE:
            bursts[name] = ready.burst
        elif own:
            raise RuntimeError(f"{name} differs from the first column by {error:.1e} in a group")
        else:
            differing.add(peer)
            note(f"{name}: differs from pearl_jax by {error:.1e} in a group, not timed")
    if len(differing) > 1 and len(bursts) == len(form.columns):
        raise RuntimeError(f"pearl_jax differs from all of {', '.join(sorted(differing))}")
    return bursts


def make_record(case, problem, grouping, group_sizes, timings, peaks) -> report.Record:
    """timings: candidate -> BurstTiming. Of a peer's variants the fastest counts."""
    form, shape = problem.form, problem.shape
    floors = {column: form.floor(shape, group_sizes, column, peaks) for column in form.columns}
    best = {}
    for name in sorted(timings, key=lambda name: -timings[name].seconds):
        best[name if name.startswith("pearl") else name.split()[0]] = timings[name]
    us = {name: 1e6 * timing.seconds for name, timing in best.items()}
    pearl_us = {column: us.pop(f"pearl {column}") for column in form.columns}
    return report.Record(
        case,
        shape.g,
        shape.k,
        shape.n,
        problem.m // shape.g,
        grouping,
        group_sizes.tolist(),
        {column: 1e6 * floor.seconds for column, floor in floors.items()},
        next(iter(floors.values())).bound,
        pearl_us,
        us,
        {name: t / pearl_us[form.peers[name].column] for name, t in us.items()},
        [name for name, timing in best.items() if timing.host_bound],
        {name: timing.samples for name, timing in timings.items()},
    )


def run(cases, form, *, rows, groupings, names, rounds, measure_peaks, json_path, plot_path):
    """Prints a line for each case (name -> shape), number of rows and grouping.

    Defaults of the form (a name in peers.FORMS) stand in for rows, groupings and names
    (of peers) that are None.
    """
    if plot_path:
        report.plotting()  # fails now rather than after minutes
    start = time.perf_counter()
    form_name, form = form, peers.FORMS[form]
    rows = form.rows if rows is None else rows
    names = list(form.peers if names is None else names)
    points = [(mean, groupings or form.groupings(mean)) for mean in rows]
    peaks, source = peaks_of_device(measure_peaks)
    device = jax.devices()[0].device_kind
    about = {
        "form": form_name,
        "device": device,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "rounds": rounds,
        "peak_bytes_per_second": peaks.bandwidth,
        "peak_flops_per_second": peaks.flops,
    }
    print(
        f"{form_name}, jax {jax.__version__}, {device}, bfloat16, {rounds} rounds; {source} peaks: "
        f"{peaks.bandwidth / 1e12:.2f} TB/s, {peaks.flops / 1e12:.0f} Tflop/s\n\n"
        f"{report.header(form.columns, names)}",
        flush=True,
    )
    output = Output(len(cases) * sum(len(chosen) for _, chosen in points))
    records = []
    for case, shape in cases.items():
        for mean, chosen in points:
            problem = form.problem(shape, shape.g * mean)

            def note(text):
                output.note(text, f"{case} with {mean} rows")

            candidates = make_candidates(problem, names, note)
            for grouping in chosen:
                sizes = shapes.GROUPINGS[grouping](problem.m, shape.g)
                bursts = prepare(form, candidates, sizes, note)
                timings = protocol.measure_bursts(bursts, rounds)
                records.append(make_record(case, problem, grouping, sizes, timings, peaks))
                output.show(report.line(records[-1], names))
                output.done()
        if json_path:
            report.write_json(json_path, about, records)
    output.close()
    print(f"\n{report.summary(records, names)}\n\n{time.perf_counter() - start:.0f} s")
    if plot_path:
        title = f"{form_name}, {device}, bfloat16, jax {jax.__version__}"
        report.write_plot(plot_path, records, names, title)
