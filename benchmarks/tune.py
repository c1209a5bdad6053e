"""Every compiled tile on a GPU, and how good the automatic choice is.

  python -m benchmarks.tune --case GLM-5.3 --projection gate_up --rows 16 64

Columns: microseconds of each tile, the best one, the chosen one and how many percent
longer than the best it takes.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics

import jax

from benchmarks import peers, protocol, shapes
from pearl_jax import library, tiling


def run_case(arch, case, shape, layout, rows, groupings, rounds) -> list[float]:
    """Prints a line for each number of rows and grouping; returns what the choice loses."""
    fwd = peers.FORMS["fwd"]
    form = tiling.matmul_form(layout == "gnk")
    tiles = tiling.tiles(arch, form)
    width = 2 + max(12, *(len(str(tile)) for tile in tiles))
    names = "".join(f"{tile!s:>{width}}" for tile in tiles)
    print(f"{case + ' ' + layout:<24}{'rows':>5}  {'groups':<12}{names}  best, chosen")
    losses = []
    for mean in rows:
        m = shape.g * mean
        problem = fwd.problem(shape, m)
        chosen = tiling.choose_kernel_tile(arch, form, m, shape.n, shape.g)
        candidates = {tile: fwd.pearl(problem, layout, tile) for tile in tiles}
        for grouping in groupings or fwd.groupings(mean):
            sizes = shapes.GROUPINGS[grouping](m, shape.g)
            bursts = {tile: bind(sizes).burst for tile, bind in candidates.items()}
            for burst in bursts.values():
                burst.wait(burst.start(1))
            timings = protocol.measure_bursts(bursts, rounds)
            us = {tile: 1e6 * timing.seconds for tile, timing in timings.items()}
            best = min(us, key=lambda tile: us[tile])
            losses.append(100 * (us[chosen] / us[best] - 1))
            times = "".join(f"{us[tile]:>{width}.1f}" for tile in tiles)
            print(
                f"{'':<24}{mean:>5}  {grouping:<12}{times}  {best}, {chosen} +{losses[-1]:.1f}%",
                flush=True,
            )
    return losses


def main():
    fwd = peers.FORMS["fwd"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", action="append", choices=shapes.MODELS, help="several times; by default all"
    )
    parser.add_argument("--projection", choices=shapes.PROJECTIONS)
    parser.add_argument("--layout", choices=fwd.columns)
    parser.add_argument("--rows", type=int, nargs="+", default=fwd.rows, help="mean of a group")
    parser.add_argument("--groupings", nargs="+", choices=shapes.GROUPINGS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    arch = library.present_arch()
    if arch is None:
        parser.error(f"runs on a GPU with kernels, not on {jax.devices()[0].device_kind}")
    projections = [options.projection] if options.projection else shapes.PROJECTIONS
    run = functools.partial(
        run_case, rows=options.rows, groupings=options.groupings, rounds=options.rounds
    )
    losses = []
    for case, shape in shapes.cases(options.case or shapes.MODELS, projections).items():
        for layout in [options.layout] if options.layout else fwd.columns:
            losses += run(arch, case, shape, layout)
    print(
        f"\nthe choice is above the best by {max(losses):.1f}% at most, "
        f"{statistics.median(losses):.1f}% in the median of {len(losses)}"
    )


if __name__ == "__main__":
    main()
