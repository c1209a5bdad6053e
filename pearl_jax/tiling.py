"""Tile shapes as data: what a tile is, which kernels exist, and which one a problem gets.

Only the standard library is used here: the build reads this file too.
"""

from __future__ import annotations

import dataclasses
import math
import re

# Rows of a tile of the plain XLA loop. Below 8 the cost of a step is the read of the
# weights, so fewer rows save nothing; above 128 a step is bound by arithmetic already.
_MIN_ROWS, _MAX_ROWS = 8, 128

K_TILE = 64  # elements of k of one stage: 128 bytes, one span of the shared memory swizzle


# What a tile's text has after its extents where a flag is not as by default.
_FLAGS = {
    "_rows_on_m": ("rows_on_m", True),
    "_staged": ("staged", True),
    "_evict_first": ("evict_first", True),
    "_no_pdl": ("pdl", False),
    "_raster_along_n": ("raster_along_n", True),
}


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """The tile by hand, for the ``tile`` argument of the public functions.

    Attributes:
      m: most rows of one work tile. Each group is cut into tiles of this many rows; the
        last one may be partly empty. Plain XLA heeds only this one.
      n: columns of one work tile of a kernel. On Hopper half of 256 where so few groups have
        rows that half of the multiprocessors would have no tile, but not of an outer product.
      k: elements of k of one stage of weights, a multiple of 64.
      cluster: how many neighbouring column tiles are worked on together, each by its own
        multiprocessor (or pair of them), and share one copy of the rows. Of an outer product,
        how many multiprocessors can share a tile, each for a part of its rows: 1 or, on
        Hopper, 2.
      ctas: how many multiprocessors work on one tile, 1 or, on Blackwell, 2.
      rows_on_m: rows are the M operand of the tensor core, and its N are columns; else
        columns are M and rows N, which costs small groups less. On Blackwell only.
      staged: results leave through shared memory and the copy engine, else straight from
        registers. On Hopper only.
      evict_first: weights leave the L2 cache before all else that it holds, as most are read
        once. Of the matmul only.
      pdl: programmatic dependent launch: the kernel starts while the one before it ends, and
        waits for its results only when it is set up.
      raster_along_n: work tiles of a group follow one another along its columns, so that
        neighbours read the same rows; else along its rows, and they read the same weights.
        Of the matmul only.
    """

    m: int
    n: int = 128
    k: int = 128
    cluster: int = 1
    ctas: int = 1
    rows_on_m: bool = False
    staged: bool = False
    evict_first: bool = False
    pdl: bool = True
    raster_along_n: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            flag = isinstance(field.default, bool)
            if isinstance(value, bool) != flag or not isinstance(value, int) or value < (not flag):
                wanted = "a bool" if flag else "a positive int"
                raise ValueError(f"TileConfig: {field.name} must be {wanted}, got {value!r}")

    def __str__(self):
        text = f"{self.m}x{self.n}x{self.k}c{self.cluster}"
        flags = (suffix for suffix, (name, on) in _FLAGS.items() if getattr(self, name) is on)
        return text + "_pair" * (self.ctas == 2) + "".join(flags)

    @classmethod
    def parse(cls, text) -> TileConfig:
        """The tile that str writes so; ValueError if there is none."""
        numbers = re.match(r"(\d+)x(\d+)x(\d+)c(\d+)(_pair)?", text)
        if numbers:
            flags = {name: (suffix in text) is on for suffix, (name, on) in _FLAGS.items()}
            m, n, k, cluster = map(int, numbers.groups()[:4])
            tile = cls(m, n, k, cluster, 2 if numbers[5] else 1, **flags)
            if str(tile) == text:
                return tile
        raise ValueError(f"TileConfig.parse: a tile is written like {cls(64)}, got {text!r}")


# The kernels' name for what each form computes.
OPERATIONS = {
    "fwd": "grouped_matmul_gkn",
    "dgrad": "grouped_matmul_gnk",
    "wgrad": "grouped_outer",
}
FORMS = tuple(OPERATIONS)
ARCHS = ("sm_90a", "sm_100f")


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One compiled kernel; its name is its key in the library.

    Attributes:
      arch: compilation target, "sm_90a" or "sm_100f".
      form: what it computes, and from which layout, by the matmul of a training step:
        "fwd" is grouped_matmul with rhs (g, k, n), n contiguous; "dgrad" the same with
        transpose_rhs, so rhs (g, n, k), k contiguous; "wgrad" is grouped_outer.
      dtype: of lhs and rhs, "bfloat16" or "float16".
      out_dtype: of the result, dtype itself or "float32".
      wide: one request of the copy engine fetches a whole stage, of weights or of both
        operands of an outer product, and results are written in the longest vectors there
        are. Needs their contiguous axis to be a multiple of 64, and n of the columns in 32
        bytes where stores are that long; else k % 8 == n % 8 == 0 is enough.
      tile: the work tile.
    """

    arch: str
    form: str
    dtype: str
    out_dtype: str
    wide: bool
    tile: TileConfig

    @property
    def name(self):
        width = "wide" if self.wide else "plain"
        types = f"{self.dtype}_{self.out_dtype}"
        return f"{OPERATIONS[self.form]}_{self.arch}_{types}_{width}_{self.tile}"


def matmul_form(transpose_rhs):
    """The form of grouped_matmul for one layout of the weights."""
    return "dgrad" if transpose_rhs else "fwd"


# Rows that one tensor core instruction takes: a work tile uses the least that covers its
# rows. Multiples of the 16 rows that one round of stores covers.
EXTENTS = (*range(16, 145, 16), 160, 192, 224, 256)

# Shared memory that one CTA may use, less 1 KiB for barriers and alignment.
_SMEM_BYTES = 226 * 1024
_ELEMENT_BYTES = 2
_LEAST_STAGES = 4  # of rows: fewer do not hide how long the copy engine takes

# Columns of a stage of weights on Hopper: those of the two warpgroups' instructions. Tiles of
# 256 columns have two stages side by side, as smaller ones leave less room unused and are free
# sooner.
STAGE_COLUMNS = 128


# Tiles of an outer product that may be shared in one call: sums of one of two multiprocessors
# go to the other through memory.
SHARED_TILES = 64
_MOST_SUMS = 2**15  # of a tile: the registers of a multiprocessor do not hold more


# Where results leave through shared memory, each of two warpgroups has two buffers.
STAGING_BYTES = 8 * 1024  # of a buffer


def stage_columns(arch, tile) -> int:
    """Columns of a stage of weights, in each CTA."""
    return STAGE_COLUMNS if arch == "sm_90a" else tile.n // tile.ctas


def narrow_columns(arch, tile) -> int:
    """Columns of a work tile of a matmul where only few groups have rows."""
    return STAGE_COLUMNS if arch == "sm_90a" else tile.n


def stages(arch, tile) -> tuple[int, int]:
    """How many stages of weights (stage_columns, k) and of rows (m, K_TILE) a CTA has.

    Hopper: as many of weights, which come from memory, as leave room for the least number
    of rows, which mostly come from a cache, and for staged results.

    Blackwell: as many of rows as leave room for the weights that they use, which are one
    stage for each K tile, or where a stage holds two K tiles one for each two and one more,
    as the first K tile may be the second one of its stage.
    """
    weights_bytes = stage_columns(arch, tile) * tile.k * _ELEMENT_BYTES
    rows_bytes = tile.m // tile.ctas * K_TILE * _ELEMENT_BYTES
    if arch == "sm_90a":
        smem_bytes = _SMEM_BYTES - 4 * STAGING_BYTES * tile.staged
        weights = max((smem_bytes - _LEAST_STAGES * rows_bytes) // weights_bytes, 0)
        return weights, (smem_bytes - weights * weights_bytes) // rows_bytes

    def weights_of(rows):
        return rows if tile.k == K_TILE else rows // 2 + 1

    rows = 0
    while (rows + 1) * rows_bytes + weights_of(rows + 1) * weights_bytes <= _SMEM_BYTES:
        rows += 1
    return weights_of(rows), rows


def _hopper_rules(tile):
    yield tile.m in (16, 32, 64, 128, 192, 256), "m must be 16, 32, 64, 128, 192 or 256"
    yield tile.n in (128, 256), "n must be 128 or 256"
    yield tile.m * tile.n <= _MOST_SUMS, "m * n accumulators must fit into registers, 32768 at most"
    yield tile.cluster in (1, 2, 4), "cluster must be 1, 2 or 4"
    yield tile.ctas == 1, "ctas must be 1"
    yield not tile.rows_on_m, "rows_on_m must be False"
    yield tile.m % 64 == 0 or not tile.staged, "to be staged, m must be a multiple of 64"


def _blackwell_rules(tile):
    yield tile.ctas in (1, 2), "ctas must be 1 or 2"
    if tile.rows_on_m:
        rows = (128, 256) if tile.ctas == 2 else (64, 128)
        columns = (128, 256, 512) if tile.m == 256 else (64, 128, 192, 256)
        if tile.ctas == 2 and tile.m == 128:
            columns = (128, 256)
        yield tile.m in rows, f"with {tile.ctas} ctas and rows on M, m must be one of {rows}"
        yield tile.n in columns, f"for {tile.m} rows on M, n must be one of {columns}"
        # Their first half starts on half of the stages, of which there must be several.
        yield tile.n < 512 or tile.k == 64, "two K tiles of 512 columns leave too few stages"
    else:
        rows = tuple(r for r in (16, 32, 64, 128, 192, 256) if r >= 16 * tile.ctas)
        yield tile.m in rows, f"with {tile.ctas} ctas, m must be one of {rows}"
        yield tile.n == 128 * tile.ctas, f"with {tile.ctas} ctas, n must be {128 * tile.ctas}"
    yield tile.cluster in (1, 2, 4), "cluster must be 1, 2 or 4"
    yield not tile.staged, "staged must be False"


_RULES = {"sm_90a": _hopper_rules, "sm_100f": _blackwell_rules}


def _outer_rules(arch, tile):
    yield tile.m % 64 == 0, "the m of an outer product must be a multiple of 64"
    yield tile.k == K_TILE, f"the k of an outer product must be {K_TILE}"
    clusters = (1, 2) if arch == "sm_90a" else (1,)
    some = " or ".join(map(str, clusters))
    yield tile.cluster in clusters, f"the cluster of an outer product must be {some}"
    yield not tile.evict_first, "the evict_first of an outer product must be False"
    yield not tile.raster_along_n, "the raster_along_n of an outer product must be False"
    if arch == "sm_90a":
        yield tile.staged, "the result of an outer product must be staged"
    else:
        yield tile.rows_on_m, "the rows of an outer product must be on M"
        yield tile.n <= 256, "the n of an outer product must be at most 256"


def is_valid(arch, tile, form="fwd") -> tuple[bool, str]:
    """Whether a kernel for arch can have the tile, and if not, why."""
    if arch not in _RULES:
        return False, f"there are no kernels for {arch}, got {tile!r}"
    for ok, reason in (
        *_RULES[arch](tile),
        (tile.k in (64, 128), "k must be 64 or 128"),
        *(_outer_rules(arch, tile) if form == "wgrad" else ()),
    ):
        if not ok:
            return False, f"{reason}, got {tile!r}"
    if stages(arch, tile)[0] < 2:
        return False, f"two stages of weights must fit into shared memory, got {tile!r}"
    return True, ""


# Blackwell's tensor memory, 512 columns of 128 lanes, holds two accumulators: one is filled
# while the other is stored.
ACCUMULATORS = 2


def lanes(tile) -> int:
    """Lanes of tensor memory that an accumulator takes: one for each M of a CTA, or 128."""
    return 64 if tile.rows_on_m and tile.m == 64 else 128


def accumulator_columns(tile) -> int:
    """Columns of tensor memory that an accumulator takes."""
    if not tile.rows_on_m:
        return tile.m
    if tile.n > 256:  # an accumulator for each half
        return tile.n // 2
    # 64 rows of each CTA of a pair take half of the lanes, and two lanes share a row.
    return tile.n // 2 if tile.m == 64 * tile.ctas == 128 else tile.n


def tensor_memory_columns(tile) -> int:
    """Columns that a CTA allocates: a power of two. Accumulators of 64 lanes share theirs."""
    columns = accumulator_columns(tile) * (1 if lanes(tile) == 64 else ACCUMULATORS)
    return max(32, 1 << (columns - 1).bit_length())


# The tiles of each architecture, by form: for groups of up to so many rows on average, those
# to choose from (see cost.py).
#
# Hopper, measured on an H200 (benchmarks/notes/hopper.md):
#   64 x 256   most bytes in flight; groups of over 64 rows would read their weights twice
#   128 x 256  nearly as many, for groups of up to 128. For k contiguous requests 256 bytes wide
#              matter, else small stages, with which it serves few rows as well
#   192 x 128  for larger groups, and where 256 columns would leave a round of tiles half empty
#   256 x 128  needs the least traffic for its arithmetic, still less where two multiprocessors
#              share rows; staged, as nothing else hides the stores of so many results
#
# Blackwell, from the arithmetic and not measured: 8 TB/s and a latency of 1 us need 54 KB in
# flight on each of 148 multiprocessors, and below 318 rows memory bounds the time
# (benchmarks/notes/blackwell.md):
#   few rows   weights on M: only the 16 rows there are cross the L2 cache, not 64
#   64 rows    160 KB of weights in flight, and 16 KB a K tile where 128 rows take 16 more
#   128, 256   one tile still covers a group, so weights are read once; a pair halves the
#              copies of weights in shared memory, which leaves 9 stages to 256 rows
#   more rows  arithmetic bounds the time: a pair needs 48 bytes a clock from L2 for 512
#              columns and 64, about all there are, for 256, which fill the chip better when few
_MANY = TileConfig(256, 128, 64, 2, staged=True)
_BLACKWELL = (
    (16, TileConfig(64, 128)),
    (64, TileConfig(64, 128, rows_on_m=True)),
    (128, TileConfig(128, 128, rows_on_m=True)),
    (256, TileConfig(256, 128, ctas=2, rows_on_m=True)),
    (
        math.inf,
        TileConfig(256, 512, 64, ctas=2, rows_on_m=True),
        TileConfig(256, 256, ctas=2, rows_on_m=True),
    ),
)
_TILES = {
    "sm_90a": {
        "dgrad": ((math.inf, TileConfig(64, 256), TileConfig(128, 256), _MANY),),
        "fwd": ((math.inf, TileConfig(128, 256, 64), TileConfig(192, 128, 64), _MANY),),
    },
    "sm_100f": {"dgrad": _BLACKWELL, "fwd": _BLACKWELL},
}
_STORE_COLUMNS = {"sm_90a": 8, "sm_100f": 16}  # of 16 bits, in one store


# Of an outer product, m counts rows of the result, so columns of lhs.
#
# Hopper: there is little arithmetic for each element of the result, so storing it counts, and
# the copy engine does that. Both tiles need the least traffic for their arithmetic; one has
# the half-empty tiles at the lower end of the result, the other at the right. Where a group of
# many rows has too few tiles, two multiprocessors share one.
#
# Blackwell, from the arithmetic and not measured (benchmarks/notes/blackwell.md): for its
# arithmetic a pair needs 64 bytes a clock from L2, all there are; 128 x 256 on one CTA
# would need 96, more than its smaller waste can make up for. 128 x 128 needs 128, but
# makes four times the tiles of a result too small to fill the chip.
_OUTER_TILES = {
    "sm_90a": (
        TileConfig(256, 128, K_TILE, 2, staged=True),
        TileConfig(128, 256, K_TILE, 2, staged=True),
    ),
    "sm_100f": (
        TileConfig(128, 128, K_TILE, rows_on_m=True),
        TileConfig(256, 256, K_TILE, ctas=2, rows_on_m=True),
    ),
}


def tiles(arch, form) -> list[TileConfig]:
    """The tiles of the kernels of one form that are compiled for arch."""
    if form == "wgrad":
        return list(_OUTER_TILES.get(arch, ()))
    return [tile for _, *some in _TILES.get(arch, {}).get(form, ()) for tile in some]


def kernels(arch) -> list[KernelSpec]:
    """Every kernel that is compiled for arch."""
    return [
        KernelSpec(arch, form, dtype, out_dtype, wide, tile)
        for form in FORMS
        for dtype in ("bfloat16", "float16")
        for out_dtype in (dtype, "float32")
        for wide in (True, False)
        for tile in tiles(arch, form)
    ]


def kernel(arch, form, dtype, out_dtype, k, n, tile) -> KernelSpec:
    """The kernel for operands with these k and n, both multiples of 8."""
    contiguous = {"fwd": (n,), "dgrad": (k,), "wgrad": (k, n)}[form]
    wide = all(extent % K_TILE == 0 for extent in contiguous) and n % _STORE_COLUMNS[arch] == 0
    return KernelSpec(arch, form, dtype, out_dtype, wide, tile)


def partial_sums(spec) -> int:
    """How many float32 sums a kernel may keep in memory."""
    return SHARED_TILES * _MOST_SUMS if spec.form == "wgrad" and spec.tile.cluster > 1 else 0


def candidates(arch, form, mean) -> tuple[TileConfig, ...]:
    """The tiles to choose from for groups of so many rows on average."""
    return next(tuple(some) for most, *some in _TILES[arch][form] if mean <= most)


def choose(m, num_groups) -> TileConfig:
    """The tile for m rows in num_groups groups (group sizes are not known here).

    The mean group fits into one tile, rounded up to a power of two. With a symbolic
    m the mean is unknown and the largest tile is taken.
    """
    if not isinstance(m, int):
        return TileConfig(_MAX_ROWS)
    mean = -(-m // max(num_groups, 1))
    return TileConfig(min(max(1 << max(mean - 1, 0).bit_length(), _MIN_ROWS), _MAX_ROWS))
