"""What each technique of the Hopper kernel is worth: tiles that differ in it alone, side by side.

  python -m benchmarks.ladder --extra-tiles     what PEARL_JAX_EXTRA_TILES must say for all steps
  python -m benchmarks.ladder                   on a Hopper GPU, with such a library

Tiles that the library lacks are left out. To build one that has them all:

  pip install . -C cmake.define.PEARL_JAX_EXTRA_TILES="$(python -m benchmarks.ladder --extra-tiles)"

Columns: microseconds with and without the technique, and what it saves in percent.
"""

from __future__ import annotations

import argparse
import dataclasses
import os

import jax
import jax.numpy as jnp

from benchmarks import forms, peers, protocol, shapes
from pearl_jax import TileConfig, library, tiling, timing

ARCH = "sm_90a"
TOLERANCE = 1e-2  # largest relative error of a group, in bfloat16
SHAPE = shapes.MODELS["GLM-5.3"].gate_up


@dataclasses.dataclass(frozen=True)
class Step:
    """A technique, where it counts: the tile that has it, and one that differs in it alone."""

    technique: str
    layout: str
    rows: int
    grouping: str
    tile: TileConfig
    without: TileConfig

    @property
    def form(self):
        return tiling.matmul_form(self.layout == "gnk")


_FEW, _SOME, _MANY = (
    TileConfig(64, 256),
    TileConfig(128, 256),
    TileConfig(256, 128, 64, 2, staged=True),
)
_with = dataclasses.replace
STEPS = (
    Step("two K tiles in a stage", "gnk", 16, "uniform", _FEW, TileConfig(64, 256, 64)),
    Step("two K tiles in a stage", "gnk", 64, "uniform", _SOME, TileConfig(128, 256, 64)),
    Step("64 rows, not 128", "gnk", 16, "uniform", _FEW, _SOME),
    Step("128 rows, not 64", "gnk", 64, "multinomial", _SOME, _FEW),
    Step("256 columns, not 128", "gnk", 16, "uniform", _FEW, TileConfig(64, 128)),
    Step("small stages, and more", "gkn", 64, "uniform", TileConfig(192, 128, 64), TileConfig(192)),
    Step("256 x 128, not 128 x 256", "gnk", 1024, "uniform", _MANY, _with(_MANY, m=128, n=256)),
    Step("staged results", "gnk", 1024, "uniform", _MANY, _with(_MANY, staged=False)),
    Step("rows shared by two", "gnk", 1024, "uniform", _MANY, _with(_MANY, cluster=1)),
    Step("evict-first weights", "gnk", 16, "uniform", _with(_FEW, evict_first=True), _FEW),
    Step("evict-first weights", "gnk", 1024, "uniform", _with(_MANY, evict_first=True), _MANY),
    Step("dependent launch", "gnk", 16, "uniform", _FEW, _with(_FEW, pdl=False)),
    Step("raster along n", "gnk", 1024, "uniform", _with(_MANY, raster_along_n=True), _MANY),
)


def extra_tiles() -> list[tuple[str, TileConfig]]:
    """(form, tile) of the steps, as far as the library does not have them anyway."""
    wanted = [(step.form, tile) for step in STEPS for tile in (step.tile, step.without)]
    return [(f, t) for f, t in dict.fromkeys(wanted) if t not in tiling.tiles(ARCH, f)]


def is_compiled(step, shape) -> bool:
    specs = [
        tiling.kernel(ARCH, step.form, "bfloat16", "bfloat16", shape.k, shape.n, tile)
        for tile in (step.tile, step.without)
    ]
    return {spec.name for spec in specs} <= library.kernel_names()


def measure(step, shape, rounds) -> tuple[float, float]:
    """Microseconds with and without the technique."""
    problem = peers.FORMS["fwd"].problem(shape, shape.g * step.rows)
    sizes = shapes.GROUPINGS[step.grouping](problem.m, shape.g)
    ready = {
        tile: forms.pearl_matmul(problem, step.layout, tile)(sizes)
        for tile in (step.tile, step.without)
    }
    got, want = (x.result() for x in ready.values())
    error = float(protocol.worst_group_error(got, want, jnp.asarray(sizes)))
    if not error <= TOLERANCE:
        raise RuntimeError(f"{step.tile} and {step.without} differ by {error:.1e} in a group")
    bursts = {tile: x.burst for tile, x in ready.items()}
    timings = timing.measure(bursts, rounds)
    return 1e6 * timings[step.tile].seconds, 1e6 * timings[step.without].seconds


def run(steps, shape, rounds):
    """Prints a line for each step, as in the table of benchmarks/notes/ladder.md."""
    print(
        "| technique | layout | rows | groups | tile | without | us | us without | saved |\n"
        + "|"
        + " --- |" * 9
    )
    for step in steps:
        with_us, without_us = measure(step, shape, rounds)
        saved = 100 * (1 - with_us / without_us)
        print(
            f"| {step.technique} | {step.layout} | {step.rows} | {step.grouping} | {step.tile} | "
            f"{step.without} | {with_us:.1f} | {without_us:.1f} | {saved:.1f} % |",
            flush=True,
        )


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--extra-tiles", action="store_true", help="print them and stop")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    if options.extra_tiles:
        print(",".join(f"{ARCH}:{form}:{tile}" for form, tile in extra_tiles()))
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if library.present_arch() != ARCH:
        parser.error(f"runs on a Hopper GPU, not on {jax.devices()[0].device_kind}")
    steps = [step for step in STEPS if is_compiled(step, SHAPE)]
    for step in STEPS:
        if step not in steps:
            print(f"# not in the library: {step.technique}, {step.tile} and {step.without}")
    run(steps, SHAPE, options.rounds)


if __name__ == "__main__":
    main()
