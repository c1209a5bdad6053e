"""How long a kernel takes, estimated; the choice of its tile where nothing was measured.

A kernel is persistent: work tiles are dealt out in rounds to as many places as the
multiprocessors leave (each place has tile.ctas * tile.cluster of them). A work tile takes
the longest of

  arithmetic   its share of the flops that the machine does, and its results' way to memory if
               they are not staged, during which nothing is multiplied
  memory       its weights, while every place that works now reads its own; row tiles of the
               same group read the same ones at about the same time, from memory only once
  copies       its K tiles, of which so many are in flight for the latency of a request, and
               what of weights and rows has to pass the port of a multiprocessor

and a little to change to the next one. A round takes the mean of its work tiles. How far off
the estimates are, and what the tiles that they choose lose: benchmarks/notes/tiles.md.

Only the standard library is used here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections import Counter

from pearl_jax import tiling

_ELEMENT_BYTES = 2
_ROW_COPIES = 0.13  # the share of rows that do not arrive while weights are waited for


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a GPU does at most, in bytes, flops and seconds.

    Attributes:
      bandwidth: of memory, per second.
      flops: of 16-bit products, per second, all multiprocessors together.
      port: bytes per second into one multiprocessor.
      latency: form -> seconds from a request of weights to their arrival, under load.
      rows_latency: the same of rows, which mostly come from a cache.
      extra_rows: rows that an instruction could have had more of in the same time.
      store: seconds of 256 x 128 results that are not staged, if nothing hides them.
      change: seconds from one work tile to the next.
      launch: seconds of a kernel beside its work tiles.
    """

    multiprocessors: int
    bandwidth: float
    flops: float
    port: float
    latency: dict[str, float]
    rows_latency: float = 0.34e-6
    extra_rows: int = 0
    store: float = 0.0
    change: float = 0.5e-6
    launch: float = 5e-6


MACHINES = {
    # Fitted to measurements. Requests of 256 contiguous bytes (dgrad) take longer than of 512.
    "sm_90a": Machine(
        multiprocessors=132,
        bandwidth=4.39e12,
        flops=988e12,
        port=86e9,
        latency={"fwd": 0.56e-6, "dgrad": 1.25e-6},
        extra_rows=66,
        store=2e-6,
    ),
    # B200's data sheet, the rest as on Hopper: nothing was measured. Stores are hidden.
    "sm_100f": Machine(148, 8e12, 2250e12, 86e9, {"fwd": 0.56e-6, "dgrad": 1.25e-6}),
}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the model says of one tile.

    Attributes:
      work_tiles, places: how many there are to do, and how many are worked on at a time.
      seconds: of the kernel.
      bound: "arithmetic", "memory" or "copies": what most of a full round's work tiles wait for.
    """

    tile: tiling.TileConfig
    work_tiles: int
    places: int
    seconds: float
    bound: str

    @property
    def rounds(self) -> float:
        return self.work_tiles / self.places

    def __str__(self):
        return (
            f"{self.tile}: {1e6 * self.seconds:.1f} us, {self.work_tiles} work tiles in "
            f"{self.rounds:.2f} rounds of {self.places}, bound by {self.bound}"
        )


def estimate(arch, form, tile, k, n, group_sizes) -> Estimate:
    """For groups of these sizes, (m, k) rows and n columns."""
    machine = MACHINES[arch]
    places = machine.multiprocessors // (tile.ctas * tile.cluster)
    column_tiles = math.ceil(n / (tile.n * tile.cluster))
    columns = n / (column_tiles * tile.cluster)  # of a tile that are there, in the mean
    weights = k * columns * _ELEMENT_BYTES
    k_tiles = k / tiling.K_TILE
    weights_stages, rows_stages = tiling.stages(arch, tile)
    side_by_side = tile.n // tile.ctas // tiling.stage_columns(arch, tile)
    waiting = k_tiles * max(
        machine.latency[form] / (weights_stages / side_by_side * tile.k / tiling.K_TILE),
        machine.rows_latency / rows_stages,
    )
    flops = machine.flops / machine.multiprocessors * tile.ctas
    store = 0.0 if tile.staged else machine.store * tile.n / 128 / 256  # of a row

    # (rows, row tiles of the group) -> how many such row tiles
    row_tiles = Counter()
    for size in group_sizes:
        full, rest = divmod(size, tile.m)
        row_tiles[tile.m, full + (rest > 0)] += full
        row_tiles[rest, full + (rest > 0)] += rest > 0
    count = row_tiles.total()
    work_tiles = count * column_tiles
    narrow = tiling.narrow_columns(arch, tile)
    if narrow < tile.n and 2 * work_tiles <= places:
        half = estimate(arch, form, dataclasses.replace(tile, n=narrow), k, n, group_sizes)
        return dataclasses.replace(half, tile=tile)

    def work(active):
        """Mean seconds of a work tile while so many places work, and what it waits for."""
        seconds, waits = 0.0, Counter()
        for (rows, sharing), times in row_tiles.items():
            if times:
                extent = tile.m if tile.rows_on_m else 16 * math.ceil(rows / 16)
                parts = {
                    "arithmetic": 2 * k * tile.n * (extent + machine.extra_rows) / flops
                    + store * extent,
                    "memory": weights * active * tile.cluster / (machine.bandwidth * sharing),
                    "copies": waiting
                    + (weights + _ROW_COPIES * rows * k * _ELEMENT_BYTES)
                    / (machine.port * tile.ctas),
                }
                bound = max(parts, key=lambda name: parts[name])
                seconds += times * parts[bound] / count
                waits[bound] += times
        return seconds + machine.change, waits.most_common(1)[0][0]

    seconds, bound = machine.launch, "nothing"
    rounds, rest = divmod(work_tiles, places)
    if rest:
        last, bound = work(rest)
        seconds += last
    if rounds:
        full, bound = work(places)
        seconds += rounds * full
    return Estimate(tile, work_tiles, places, seconds, bound)


def typical_sizes(m, num_groups) -> list[list[int]]:
    """How m rows may spread over groups, as routers do: evenly, at random, and by Zipf's law."""
    groups = range(num_groups)
    mean = m / max(num_groups, 1)
    normal = statistics.NormalDist(mean, math.sqrt(mean) or 1)
    harmonic = sum(1 / (i + 1) for i in groups)
    return [
        [m // num_groups + (i < m % num_groups) for i in groups],
        [max(round(normal.inv_cdf((i + 0.5) / num_groups)), 0) for i in groups],
        [round(m / harmonic / (i + 1)) for i in groups],
    ]


def mean_seconds(estimates) -> float:
    """What counts of a tile's estimates for all typical spreads: their geometric mean."""
    return statistics.geometric_mean(e.seconds for e in estimates)


def rank(arch, form, m, k, n, num_groups, tiles=None) -> list[list[Estimate]]:
    """Of each tile an estimate for every typical spread; the best tile first.

    tiles: by default those to choose from.
    """
    spreads = typical_sizes(m, num_groups)
    tiles = tiles or tiling.candidates(arch, form, m / max(num_groups, 1))
    found = [[estimate(arch, form, tile, k, n, sizes) for sizes in spreads] for tile in tiles]
    return sorted(found, key=mean_seconds)


@functools.cache
def choose(arch, form, m, k, n, num_groups) -> tiling.TileConfig:
    """The work tile of a grouped matmul with m rows in num_groups groups, by this model."""
    return rank(arch, form, m, k, n, num_groups)[0][0].tile


def choose_outer(arch, k, n, num_groups) -> tiling.TileConfig:
    """The work tile of num_groups outer products (k, n), whatever their rows.

    The one with which the busiest multiprocessor has the least to copy, and of several the
    one that covers the result with the least waste. Of those that are left, the smallest.
    """

    def cost(tile):
        rows, columns = math.ceil(k / tile.m), math.ceil(n / tile.n)
        places = MACHINES[arch].multiprocessors // tile.ctas
        rounds = math.ceil(num_groups * rows * columns / places)
        return (
            rounds * (tile.m + tile.n) / tile.ctas,
            rows * tile.m * columns * tile.n,
            tile.m * tile.n,
            tile.n,
        )

    return min(tiling.tiles(arch, "wgrad"), key=cost)
