"""Grouped matmuls beside what else there is, on the shapes of real MoE models.

  python -m benchmarks.grouped_matmul --cpu
  python -m benchmarks.grouped_matmul --case GLM-5.3 --projection gate_up --json glm.json
  python -m benchmarks.grouped_matmul --form wgrad --case GLM-5.3 --peers torch bmm
  python -m benchmarks.grouped_matmul --host

On a CPU shapes are scaled down. Columns: median milliseconds of pearl_jax; how many times
longer jax.lax's ragged dot and the dense einsum over equal groups take (above 1: pearl_jax
is faster); how many times its floor pearl_jax takes, and what bounds that floor.

On a GPU, in bfloat16: the floor of the actual group sizes and what bounds it; microseconds
of pearl_jax in two columns, and how many times its floor that is; how many times longer
each peer takes than pearl_jax in the same column (above 1: pearl_jax is faster). Lines with
# say which peers do not run and why; * marks a time that the host may have held up.
The form fwd multiplies rows by weights (g, n, k) and (g, k, n). wgrad is the gradient of
weights, its result in bfloat16, as all peers give it, and in float32, held against a floor
of its own: the floor shown, and what bounds it, are those of the first column.
"""

from __future__ import annotations

import argparse
import os

import jax

from benchmarks import cpu, gpu, host, peers, shapes

CASES = (cpu.HEADLINE, *shapes.MODELS)


def _parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="run on the CPU even if there is a GPU")
    parser.add_argument("--host", action="store_true", help="time what a call costs the host")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each candidate")
    parser.add_argument(
        "--case",
        choices=CASES,
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(CASES)}; may be given several times; by default all",
    )
    parser.add_argument("--projection", choices=shapes.PROJECTIONS, help="by default both")
    on_cpu = parser.add_argument_group("on a CPU")
    on_cpu.add_argument("--dtype", choices=cpu.TOLERANCES)
    on_gpu = parser.add_argument_group("on a GPU")
    on_gpu.add_argument("--form", choices=peers.FORMS, default="fwd")
    on_gpu.add_argument(
        "--rows",
        type=int,
        nargs="+",
        help="mean of a group; by default "
        + "; ".join(f"{name}: {' '.join(map(str, f.rows))}" for name, f in peers.FORMS.items()),
    )
    on_gpu.add_argument(
        "--groupings",
        nargs="+",
        choices=shapes.GROUPINGS,
        help="by default fwd: uniform, and all for "
        + " and ".join(map(str, peers.UNEVEN_ROWS))
        + " rows; wgrad: "
        + " ".join(peers.FORMS["wgrad"].groupings(1)),
    )
    on_gpu.add_argument(
        "--peers",
        nargs="*",
        choices=dict.fromkeys(name for f in peers.FORMS.values() for name in f.peers),
        help="by default all of the form",
    )
    on_gpu.add_argument("--measure-peaks", action="store_true", help="instead of known ones")
    on_gpu.add_argument("--json", metavar="FILE", help="write all times")
    on_gpu.add_argument("--plot", metavar="FILE.png", help="draw time over floor against rows")
    return parser


def main():
    parser = _parser()
    options = parser.parse_args()
    if options.rounds < 1 or min(options.rows or [1]) < 1:
        parser.error("--rounds and --rows must be at least 1")
    unknown = set(options.peers or ()) - set(peers.FORMS[options.form].peers)
    if unknown:
        parser.error(f"{options.form} has no peer {', '.join(sorted(unknown))}")
    # The GPU's memory is shared with torch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"  # also of processes started from here
        jax.config.update("jax_platforms", "cpu")
    platform = jax.default_backend()
    if platform not in ("cpu", "gpu"):
        parser.error(f"runs on cpu and gpu, not on {platform}; give --cpu")
    if options.host:
        host.run("float32" if platform == "cpu" else "bfloat16", options.rounds)
        return

    names = list(dict.fromkeys(options.case or CASES))
    projections = [options.projection] if options.projection else shapes.PROJECTIONS
    cases = shapes.cases([name for name in names if name in shapes.MODELS], projections)
    if platform == "cpu":
        if cpu.HEADLINE in names:
            cases = {cpu.HEADLINE: cpu.HEADLINE_SHAPE} | cases
        cpu.run(cases, options.dtype or "float32", options.rounds)
        return
    if options.dtype not in (None, "bfloat16"):
        parser.error(f"on a GPU only bfloat16 is timed, not {options.dtype}; give --cpu")
    try:
        gpu.run(
            cases,
            options.form,
            rows=options.rows,
            groupings=options.groupings,
            names=options.peers and list(dict.fromkeys(options.peers)),
            rounds=options.rounds,
            measure_peaks=options.measure_peaks,
            json_path=options.json,
            plot_path=options.plot,
        )
    except ImportError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
