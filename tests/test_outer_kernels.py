"""The outer product of groups on a CPU, run by the PTX emulator in every schedule."""

import dataclasses
from typing import NamedTuple

import numpy as np
import oracle
import pytest
from emulator import emulate
from emulator.kernels import missing
from emulator.problems import ENCODE, POISON
from test_kernels import (
    BATCHES,
    MODES,
    NAMES,
    SIZES,
    SMS,
    Compiled,
    cache_policies,
    check_dependent_launch,
    decoded,
    in_turn,
    integers,
    mode_of,
)

from pearl_jax import tiling

pytestmark = pytest.mark.skipif(
    bool(missing()), reason=f"the kernels were not compiled and not tested: {missing()}"
)


def covering(arch):
    """Each of the two tiles, and each other property with one of them."""
    tiles = tiling.tiles(arch, "wgrad")
    return [
        tiling.KernelSpec(
            arch, "wgrad", dtype, out_dtype, wide, dataclasses.replace(tiles[i], **flag)
        )
        for dtype, out_dtype, wide, i, flag in (
            ("bfloat16", "bfloat16", True, 1, {}),
            ("bfloat16", "float32", True, 0, {}),
            ("bfloat16", "float32", False, 1, {"pdl": False}),
            ("float16", "float16", False, 0, {}),
        )
    ]


SPECS = {s.name: s for arch in ("sm_90a", "sm_100f") for s in covering(arch)}
every_kernel = pytest.mark.parametrize("name", SPECS)


@pytest.fixture(scope="module")
def compiled():
    return Compiled(SPECS)


def shape(spec, k, n):
    """(k, n) that the kernel takes, no larger than the given ones."""
    unit = 64 if spec.wide else 8
    return k // unit * unit, n // unit * unit


class Run(NamedTuple):
    """What a problem took: instructions, also those of the CTA with the most."""

    busiest: int
    instructions: int
    partial_sums: int  # that went from one CTA to another


def run(kernel, spec, sizes, *, mode="random", seed=0, **shape):
    """Runs a problem in the emulator and compares the result with the oracle, bit by bit."""
    values, want = problem(spec, sizes, **shape)
    outputs, report = emulate(kernel, values, mode=mode, seed=seed, sm_count=SMS)
    wrong = np.argwhere((decoded(outputs[5]) != want) & ~np.isnan(want))
    assert not len(wrong), f"{len(wrong)} elements are wrong, the first at {wrong[0]}"
    assert report.launches[0].pdl == spec.tile.pdl
    return Run(report.busiest, report.instructions, int(np.isfinite(outputs[6]).sum()))


def problem(
    spec,
    sizes,
    *,
    m,
    k,
    n,
    offset=(0,),
    held=None,
    index=None,
    reduced=1,
    accumulate=False,
    poisoned=(),
):
    """The launcher's arguments and the result, NaN where it may be anything.

    As problem of test_kernels; each result sums over `reduced` batches of index. Groups in
    poisoned hold NaN and Inf, so their results may be anything; all others must be exact.
    """
    sizes, offset = np.atleast_2d(np.array(sizes, np.int64)), np.array(offset)
    held = sizes.shape[1] if held is None else held
    index = np.array([[0] * 4] if index is None else index, np.int32)
    batches = index.max(0) + 1
    lhs, rhs = integers(1, batches[0], m, k), integers(2, batches[1], m, n)

    want = np.zeros((len(index), held, k, n))
    owned = np.zeros((2, max(batches[:2]), m), bool)
    for i, (a, b, c, d) in enumerate(index):
        want[i] = oracle.grouped_outer(lhs[a], rhs[b], sizes[c], held, int(offset[d]))
        bounds = oracle.bounds(sizes[c], m)
        for group in range(held):
            if 0 <= (j := group + int(offset[d])) < sizes.shape[1] and j not in poisoned:
                owned[0, a, bounds[j] : bounds[j + 1]] = True
                owned[1, b, bounds[j] : bounds[j + 1]] = True
    want = want.reshape(-1, reduced, held, k, n).sum(1)

    dtype, out_dtype = NAMES[spec.dtype], NAMES[spec.out_dtype]
    encoded = [ENCODE[dtype](x.astype(np.float32)) for x in (lhs, rhs)]
    infinity = ENCODE[dtype](np.full(1, np.inf, np.float32))[0]
    for x, rows, batch in zip(encoded, owned, batches):
        x[~rows[:batch]] = POISON[dtype]  # rows that nobody may use
        x[~rows[:batch] & (np.arange(m) % 2 == 0)] = infinity
    old = integers(3, *want.shape)
    encode = ENCODE[out_dtype]
    values = [
        *encoded,
        np.clip(sizes, -(2**31), 2**31 - 1).astype(np.int32),
        offset.astype(np.int32),
        index,
        encode(old.astype(np.float32)) if accumulate else np.full(want.shape, POISON[out_dtype]),
        np.full(SMS // 2 * spec.tile.m * spec.tile.n, np.nan, np.float32),  # of each two CTAs
        m, n, k, held, sizes.shape[1], len(want), batches[0], batches[1],
        reduced, int(accumulate), SMS,
    ]  # fmt: skip
    want = decoded(encode((want + accumulate * old).astype(np.float32)))
    want[:, [i for i in range(held) if i + int(offset[0]) in poisoned]] = np.nan
    return values, want


@every_kernel
@in_turn
def test_group_sizes(compiled, name, shift):
    """Groups that begin and end anywhere, also none; every second case is added to."""
    spec = SPECS[name]
    k, n = shape(spec, 136, 264)
    for seed, sizes in enumerate(SIZES.values()):
        more = {"accumulate": seed % 2 == 1, "mode": mode_of(seed, shift), "seed": seed}
        run(compiled[name], spec, sizes, m=90, k=k, n=n, **more)


@every_kernel
def test_bands_of_columns(compiled, name):
    """The last band is narrower than the first, and both have several rows of tiles."""
    spec = SPECS[name]
    k, n = shape(spec, 264, 8456)
    run(compiled[name], spec, [3, 0, 2], m=6, k=k, n=n)


def test_the_largest_group_has_a_cta_to_itself(compiled):
    """Who works on one group with nearly all rows leaves the others' tiles to other CTAs."""
    name, spec = next(iter(SPECS.items()))
    rows = 32 * tiling.K_TILE

    def busiest(sizes):
        return run(compiled[name], spec, sizes, m=rows, k=64, n=64, mode="in order").busiest

    alone = busiest([rows])
    for before in (1, 8):
        assert busiest([0] * before + [rows] + [0] * (8 - before)) < 1.1 * alone


def test_nobody_runs_ahead_of_the_largest_group_for_long(compiled):
    """One CTA of four has one tile less of it, and instead not all of the second largest."""
    name, spec = next(iter(SPECS.items()))
    sizes = [tiling.K_TILE * k_tiles for k_tiles in (32, 40, 4, 4, 4, 4, 4, 4)]
    report = run(compiled[name], spec, sizes, m=sum(sizes), k=64, n=3 * spec.tile.n)
    assert report.busiest < 1.3 * report.instructions / SMS


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.tile.cluster == 2])
@in_turn
@pytest.mark.parametrize(
    ("tiles", "others", "shared"),
    [(1, [0], 1), (2, [5, 0], 2), (5, [0], 1), (3, [0], 0), (2, [1536, 0], 0), (1, [0, 2000], 1)],
)
def test_two_ctas_share_a_tile(compiled, name, tiles, others, shared, shift):
    """The last tiles of the largest group, if fewer than half of four CTAs have one.

    And only if all others together then take less than one of these does alone.
    """
    spec = SPECS[name]
    k, n = shape(spec, spec.tile.m, spec.tile.n * tiles)
    for seed, size in enumerate((32 * tiling.K_TILE, 39 * tiling.K_TILE - 3)):
        sizes = [*others, size, 0, 5]
        more = {"mode": mode_of(seed + tiles, shift), "seed": seed, "accumulate": seed == 1}
        report = run(compiled[name], spec, sizes, m=sum(sizes) + 2, k=k, n=n, **more)
        assert report.partial_sums == shared * spec.tile.m * spec.tile.n


@every_kernel
@in_turn
def test_rows_around_a_k_tile(compiled, name, shift):
    spec = SPECS[name]
    k, n = shape(spec, 64, 128)
    for seed, sizes in enumerate(([0, 1, 7, 63, 64, 65, 129, 0, 2], [129, 128, 127, 3], [64, 64])):
        m, mode = sum(sizes) + seed, mode_of(seed, shift)
        run(compiled[name], spec, sizes, m=m, k=k, n=n, mode=mode, seed=seed)


@every_kernel
def test_stages(compiled, name):
    """Around once and twice as many K tiles as each ring of stages holds."""
    spec = SPECS[name]
    k, n = shape(spec, 64, 64)
    stages = tiling.stages(spec.arch, spec.tile)
    for k_tiles in sorted({r * s + d for r in (1, 2) for s in stages for d in (-1, 0, 1)}):
        sizes = [5, 64 * k_tiles - k_tiles % 3, 0, 1]
        mode = MODES[k_tiles % 3]
        run(compiled[name], spec, sizes, m=sum(sizes) + 2, k=k, n=n, mode=mode, seed=k_tiles)


@every_kernel
@pytest.mark.parametrize("accumulate", [False, True])
def test_extents_of_the_result(compiled, name, accumulate):
    """k and n from one vector to a few tiles: with the last tile nearly empty and full."""
    spec = SPECS[name]
    extents = (8, 64, 120, 128, 136, 192, 256, 264, 320, 512, 520)
    for i, (k, n) in enumerate(zip(extents, extents[3:] + extents[:3])):
        k, n = shape(spec, k, n)
        if k and n:
            more = {"accumulate": accumulate, "mode": MODES[i % 3], "seed": i}
            run(compiled[name], spec, [20, 0, 3], m=25, k=k, n=n, **more)


@every_kernel
@in_turn
def test_neighbours_of_nan(compiled, name, shift):
    """Groups on both sides hold NaN and Inf, and not one reaches the group between them."""
    spec = SPECS[name]
    k, n = shape(spec, 64, 136)
    for size in (1, 63, 64, 65, 130):
        sizes = [9, size, 70, 3, 0, 5]
        more = {"poisoned": (0, 2, 5), "mode": mode_of(size, shift), "seed": size}
        run(compiled[name], spec, sizes, m=sum(sizes) + 9, k=k, n=n, **more)


@every_kernel
@pytest.mark.parametrize("case", BATCHES)
def test_batches(compiled, name, case):
    spec, index = SPECS[name], BATCHES[case]
    k, n = shape(spec, 72, 136)
    sizes = [[9, 0, 20], [0, 0, 0], [40, 1, 2]]
    mode = MODES[len(case) % 3]
    held = {"offset": (1, 0, -1), "held": 2}
    run(compiled[name], spec, sizes, m=40, k=k, n=n, index=index, mode=mode, **held)


@every_kernel
@in_turn
@pytest.mark.parametrize("reduced", [2, 4])
def test_sums_over_batches(compiled, name, reduced, shift):
    """Of four batches of rows: two results of two each, or one of all."""
    spec = SPECS[name]
    k, n = shape(spec, 72, 136)
    index = [[0, 1, 0, 0], [1, 0, 1, 0], [2, 1, 2, 0], [0, 0, 1, 0]]
    sizes = [[9, 0, 20, 70], [0, 0, 0, 0], [40, 1, 2, 65]]
    more = {"accumulate": reduced == 4, "mode": mode_of(reduced, shift), "seed": reduced}
    run(compiled[name], spec, sizes, m=110, k=k, n=n, index=index, reduced=reduced, **more)


@every_kernel
def test_more_groups_than_lanes(compiled, name):
    """70 groups, of which the result holds 40 from an offset on, or some beyond either end."""
    spec = SPECS[name]
    rng = np.random.default_rng(len(name))
    sizes = rng.integers(0, 4, 70) * (rng.random(70) < 0.7)
    k, n = shape(spec, 64, 64)
    m = int(sizes.sum()) + 2
    for i, offset in enumerate((0, 17, 30, 50, -20, 70, -40, 2**31 - 1, -(2**31))):
        more = {"offset": (offset,), "held": 40, "mode": MODES[i % 3], "seed": i}
        run(compiled[name], spec, sizes, m=m, k=k, n=n, **more)


@every_kernel
def test_dependent_launch(compiled, name):
    check_dependent_launch(compiled[name], SPECS[name].tile)


@every_kernel
def test_cache_policy(compiled, name):
    """None, as there are no weights."""
    assert cache_policies(compiled[name]) == {5 if SPECS[name].wide else 4: {0}}


def test_wrong_answers_are_noticed(compiled, monkeypatch):
    """So that the tests above can fail: the oracle is told another row."""
    name, spec = next(iter(SPECS.items()))
    real = oracle.grouped_outer
    monkeypatch.setattr(oracle, "grouped_outer", lambda x, *a: real(x[::-1], *a))
    with pytest.raises(AssertionError, match="elements are wrong"):
        run(compiled[name], spec, [5, 6], m=12, k=128, n=128)
