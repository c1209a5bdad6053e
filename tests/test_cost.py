"""How long a kernel takes by the model, and which tile that chooses."""

import dataclasses
import math

import pytest

from pearl_jax import TileConfig, cost, tiling

FEW, MORE = TileConfig(64, 256), TileConfig(128, 256)
MANY = TileConfig(256, 128, 64, 2, staged=True)
HOPPER = cost.MACHINES["sm_90a"]


def seconds(tile, sizes, k=4096, n=3072, form="dgrad"):
    return cost.estimate("sm_90a", form, tile, k, n, sizes).seconds - HOPPER.launch


def test_many_rows_take_as_long_as_their_arithmetic():
    """Of full tiles and whole rounds, here 66 groups of two tiles by two columns of tiles."""
    e = cost.estimate("sm_90a", "fwd", MANY, 4096, 256, [512] * 66)
    assert (e.work_tiles, e.places, e.rounds, e.bound) == (132, 66, 2, "arithmetic")
    flops = 2 * 66 * 512 * 4096 * 256 * (256 + HOPPER.extra_rows) / 256
    assert e.seconds - HOPPER.launch - 2 * HOPPER.change == pytest.approx(flops / HOPPER.flops)


def test_results_that_are_not_staged_take_their_time():
    staged, straight = (
        cost.estimate("sm_90a", "fwd", tile, 4096, 256, [512] * 66).seconds
        for tile in (MANY, dataclasses.replace(MANY, staged=False))
    )
    assert straight - staged == pytest.approx(2 * HOPPER.store)


def test_few_rows_take_as_long_as_their_weights():
    """Where a multiprocessor can fetch more than its share of the memory's bandwidth."""
    e = cost.estimate("sm_90a", "fwd", FEW, 4096, 256, [16] * 264)
    assert (e.work_tiles, e.rounds, e.bound) == (264, 2, "memory")
    num_bytes = 264 * 4096 * 256 * 2
    want = num_bytes / HOPPER.bandwidth + 2 * HOPPER.change
    assert e.seconds - HOPPER.launch == pytest.approx(want)


def test_columns_that_are_not_there_are_not_read():
    whole, part = (seconds(FEW, [16] * 264, n=n) - HOPPER.change * 2 for n in (256, 192))
    assert part == pytest.approx(whole * 192 / 256)


def test_one_multiprocessor_alone():
    """By hand: twelve K tiles arrive every 1.25 us, and pass a port of 86 GB/s."""
    weights, rows = 4096 * 128 * 2, 16 * 4096 * 2
    want = 4096 / 64 / 12 * 1.25e-6 + (weights + 0.13 * rows) / 86e9 + HOPPER.change
    assert tiling.stages("sm_90a", FEW)[0] * 2 == 12  # of two K tiles each
    assert seconds(FEW, [16], n=128) == pytest.approx(want)


def test_tiles_are_narrow_where_few_groups_have_rows():
    """Up to 66 tiles of 256 columns become twice as many, which 132 multiprocessors share."""
    for groups, columns in ((1, 128), (33, 128), (34, 256)):
        e = cost.estimate("sm_90a", "dgrad", FEW, 4096, 512, [16] * groups + [0] * 7)
        assert (e.tile, e.work_tiles) == (FEW, groups * 512 // columns)


def test_empty_groups_cost_nothing():
    assert seconds(FEW, [16, 0, 0, 16]) == pytest.approx(seconds(FEW, [16, 16]))
    e = cost.estimate("sm_90a", "fwd", FEW, 64, 128, [0, 0])
    assert (e.work_tiles, e.seconds, e.bound) == (0, HOPPER.launch, "nothing")


def test_a_row_more_than_a_tile_reads_weights_again():
    assert seconds(FEW, [65] * 16) > 1.1 * seconds(FEW, [64] * 16)
    assert seconds(MORE, [65] * 16) < 1.05 * seconds(MORE, [64] * 16)


@pytest.mark.parametrize("form", ["fwd", "dgrad"])
@pytest.mark.parametrize("arch", tiling.ARCHS)
def test_more_work_never_takes_less_time(arch, form):
    for tile in tiling.tiles(arch, form):
        for k, n in ((512, 1024), (4096, 3072)):
            times = [
                cost.estimate(arch, form, tile, k, n, [tile.m] * g).seconds
                for g in (0, 1, 2, 8, 33, 100, 300)
            ]
            assert times == sorted(times)


# Microseconds on an H200, even group sizes: (form, g, k, n, rows) -> time of FEW, MORE (of form
# dgrad) and MANY.
TIMES = {
    ("dgrad", 16, 4096, 3072, 32): (99.4, 117.9, 107.3),
    ("dgrad", 16, 4096, 3072, 128): (130.9, 135.2, 102.6),
    ("dgrad", 32, 6144, 4096, 64): (367.3, 372.7, 415.7),
    ("dgrad", 32, 6144, 4096, 256): (903.9, 750.5, 558.7),
    ("dgrad", 32, 2048, 6144, 64): (196.1, 199.3, 209.1),
    ("dgrad", 16, 2880, 2880, 64): (77.3, 86.2, 75.4),
    ("dgrad", 16, 2880, 5760, 128): (163.1, 153.5, 142.2),
}


@pytest.mark.parametrize("problem", TIMES)
def test_measured_times(problem):
    """Every one within a quarter, and the tile with the least estimate within 9 % of the best."""
    form, g, k, n, rows = problem
    found = {t: 1e6 * seconds(t, [rows] * g, k, n, form) for t in (FEW, MORE, MANY)}
    measured = dict(zip(found, TIMES[problem]))
    for tile, time in found.items():
        assert time == pytest.approx(measured[tile], rel=0.25)
    assert measured[min(found, key=found.get)] < 1.09 * min(measured.values())


def test_typical_sizes():
    for m, g in ((1024, 16), (1000, 7), (5, 8), (0, 4)):
        even, random, zipf = cost.typical_sizes(m, g)
        assert sum(even) == m
        assert max(even) - min(even) <= 1
        for sizes in (random, zipf):
            assert len(sizes) == g
            assert min(sizes) >= 0
            assert sum(sizes) == pytest.approx(m, abs=g)
    _, random, zipf = cost.typical_sizes(6400, 64)
    assert zipf[0] == pytest.approx(2 * zipf[1], rel=0.01)
    # A Poisson distribution of mean 100.
    deviation = math.sqrt(sum((s - 100) ** 2 for s in random) / 64)
    assert deviation == pytest.approx(10, rel=0.1)


def test_the_best_estimate_is_chosen():
    ranked = cost.rank("sm_90a", "dgrad", 16 * 64, 4096, 3072, 16)
    assert cost.choose("sm_90a", "dgrad", 16 * 64, 4096, 3072, 16) == ranked[0][0].tile
    products = [math.prod(e.seconds for e in spread) for spread in ranked]
    assert products == sorted(products)
    assert {spread[0].tile for spread in ranked} == {FEW, MORE, MANY}


@pytest.mark.parametrize("arch", tiling.ARCHS)
@pytest.mark.parametrize("form", ["fwd", "dgrad"])
def test_large_groups_get_large_tiles(arch, form):
    for g in (64, 300):
        few, many = (cost.choose(arch, form, g * rows, 4096, 4096, g).m for rows in (4, 4096))
        assert few < 256
        assert many == 256


def test_blackwell_choice():
    """Up to 64 rows of a group get tiles of 64; the widest tile only where it fills the chip."""

    def chosen(mean, n=4096, g=32):
        return cost.choose("sm_100f", "fwd", g * mean, 4096, n, g)

    assert [chosen(mean).m for mean in (1, 16, 17, 64, 65, 128, 129)] == [64] * 4 + [128, 128, 256]
    assert not chosen(16).rows_on_m
    assert chosen(17).rows_on_m
    assert [chosen(mean).n for mean in (300, 512, 4096)] == [512] * 3
    # 8 tiles of 512 columns on 74 pairs of multiprocessors, or 16 of 256: half of the time.
    assert chosen(257, n=4096, g=1).n == 256
    # 2 * 38 * 1 tiles: two rounds of 512 columns, or three of 256 (152 tiles).
    assert chosen(512, n=38 * 512, g=1).n == 256
    assert chosen(512, n=37 * 512, g=1).n == 512
