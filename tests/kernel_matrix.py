"""Every test of the kernels in the emulator on every one of them, as a table.

  python tests/kernel_matrix.py --arch sm_100f             the kernels of the library
  python tests/kernel_matrix.py --arch sm_100f --valid     one of every valid tile and layout,
                                                           and some with each other flag

`--only PATTERN` takes kernels by name, `--skip N` takes up a broken run. Slow: minutes a kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import itertools
import operator
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import test_kernels
import test_outer_kernels
from test_kernels import BATCHES, MODES

from pearl_jax import TileConfig, tiling

SHIFTS = range(len(MODES))  # with all of them, every case runs in every mode

# Columns of the table: what runs of test_kernels.py, with the arguments after the name.
CHECKS = {
    "groups": [("test_group_sizes", shift) for shift in SHIFTS],
    "rows": [("test_rows_of_a_tile",)],
    "k tiles": [("test_k_tiles",)],
    "columns": [("test_columns",)],
    "batches": [("test_batches", case) for case in BATCHES],
    "offsets": [("test_more_groups_than_lanes", shift) for shift in SHIFTS],
}
# The same of an outer product, of test_outer_kernels.py.
OUTER_CHECKS = {
    "groups": CHECKS["groups"],
    "rows": [
        (test, shift)
        for test in ("test_rows_around_a_k_tile", "test_neighbours_of_nan")
        for shift in SHIFTS
    ],
    "k tiles": [("test_stages",)],
    "columns": [("test_extents_of_the_result", accumulate) for accumulate in (False, True)],
    "batches": [
        *CHECKS["batches"],
        *(("test_sums_over_batches", reduced, shift) for reduced in (2, 4) for shift in SHIFTS),
    ],
    "offsets": [("test_more_groups_than_lanes",)],
}


def valid_specs(arch):
    """One kernel for each valid tile and layout; dtypes and widths take turns."""
    tiles = (
        TileConfig(*fields)
        for fields in itertools.product(
            (16, 32, 64, 128, 192, 256),
            (64, 128, 192, 256, 512),
            (64, 128),
            (1, 2, 4),
            (1, 2),
            (False, True),
            (False, True),
        )
    )
    tiles = itertools.chain(tiles, flagged(arch))
    kinds = itertools.cycle(
        (
            ("bfloat16", "bfloat16", True),
            ("float16", "float32", True),
            ("float16", "float16", False),
            ("bfloat16", "float32", False),
            ("bfloat16", "bfloat16", False),
        )
    )
    return [
        tiling.KernelSpec(arch, form, *next(kinds), tile)
        for tile in tiles
        for form in tiling.FORMS
        if tiling.is_valid(arch, tile, form)[0]
    ]


def flagged(arch):
    """Tiles of the library, each with one of the flags that change no extents, and all."""
    flags = ({"evict_first": True}, {"pdl": False}, {"raster_along_n": True})
    tiles = dict.fromkeys(t for form in tiling.FORMS for t in tiling.tiles(arch, form))
    for flag, tile in zip(itertools.cycle((*flags, functools.reduce(operator.or_, flags))), tiles):
        yield dataclasses.replace(tile, **flag)


def check(spec, kernel):
    """A word for each column, and the first error."""
    outer = spec.form == "wgrad"
    module, checks = (test_outer_kernels, OUTER_CHECKS) if outer else (test_kernels, CHECKS)
    module.SPECS[spec.name] = spec
    words, error = [], None
    for tests in checks.values():
        start = time.perf_counter()
        try:
            for test, *arguments in tests:
                getattr(module, test)({spec.name: kernel}, spec.name, *arguments)
            words.append(f"{time.perf_counter() - start:.0f} s")
        except Exception:
            error = error or traceback.format_exc()
            words.append("FAILED")
    return words, error


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", choices=("sm_90a", "sm_100f"), default="sm_100f")
    parser.add_argument("--valid", action="store_true", help="not those of the library")
    parser.add_argument("--only", default="*", metavar="PATTERN")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="not the first N of them")
    args = parser.parse_args()
    specs = valid_specs(args.arch) if args.valid else tiling.kernels(args.arch)
    specs = [s for s in specs if fnmatch.fnmatch(s.name, args.only)][args.skip :]
    if not specs:
        parser.error(f"no kernel's name is like {args.only}, or all are skipped")
    width = max(len(s.name) for s in specs)
    print(f"{'kernel':<{width}}", *(f"{column:>8}" for column in CHECKS))
    failed = 0
    for spec in specs:
        try:
            (kernel,) = test_kernels.compile_specs(args.arch, [spec]).values()
        except RuntimeError as reason:
            words, error = ["FAILED"] * len(CHECKS), f"not compiled: {reason}"
        else:
            words, error = check(spec, kernel)
        print(f"{spec.name:<{width}}", *(f"{word:>8}" for word in words), flush=True)
        if error:
            failed += 1
            print(error, flush=True)
    print(f"{len(specs)} kernels, {failed} of them failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
