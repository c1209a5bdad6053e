"""Tiles: which there are, which one a problem gets, and that neither without the other."""

import dataclasses
import itertools
import re

import pytest

from pearl_jax import TileConfig, cost, tiling

ARCH = "sm_90a"
FORMS = ("fwd", "dgrad")
every_arch = pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])


def sweep(arch, form):
    """The tiles that problems get, by mean rows of a group from a fraction of one to 4096."""
    rows = [(g, m) for g in (1, 8, 32, 300) for m in (1, 7, *(g * mean for mean in MEANS))]
    problems = [(m, 2048, n, g) for g, m in rows for n in (8, 200, 2880, 4096, 6144)]
    return {p: cost.choose(arch, form, *p) for p in problems}


MEANS = [*range(1, 40), *range(40, 300, 7), *range(300, 4097, 370), 4096]


@every_arch
@pytest.mark.parametrize("form", FORMS)
def test_compiled_tiles_are_those_that_are_chosen(arch, form):
    """No problem gets a tile that is not compiled, and no kernel takes up room for nothing."""
    compiled = {s.tile for s in tiling.kernels(arch) if s.form == form}
    chosen = set(sweep(arch, form).values())
    assert chosen == compiled
    assert len(chosen) > 1


@every_arch
def test_choice_without_rows_or_groups(arch):
    for m, g in ((0, 4), (0, 0), (5, 0)):
        for form in FORMS:
            tile = cost.choose(arch, form, m, 256, 512, g)
            assert tile in tiling.tiles(arch, form)


@pytest.mark.parametrize("g", [1, 32])
def test_outer_tile_covers_the_result_with_the_least_waste(g):
    """Where k or n ends in half a tile of one orientation, it fits the other."""
    outer = tiling.tiles("sm_90a", "wgrad")
    high, wide = (TileConfig(m, n, 64, 2, staged=True) for m, n in ((256, 128), (128, 256)))
    assert cost.choose_outer("sm_90a", 2048, 1408, g) == high
    assert cost.choose_outer("sm_90a", 1408, 2048, g) == wide
    assert cost.choose_outer("sm_90a", 2048, 2048, g) == high
    for k in (8, 64, 130, 256, 2048):
        for n in (8, 100, 128, 200, 768):
            tile = cost.choose_outer("sm_90a", k, n, g)
            covered = {t: -(-k // t.m) * t.m * -(-n // t.n) * t.n for t in outer}
            assert covered[tile] == min(covered.values())


@pytest.mark.parametrize(
    ("k", "n", "g", "m"),
    [
        (6144, 4096, 32, 256),
        (1408, 2048, 32, 256),  # a twelfth of what pairs cover is waste, still the best
        (2880, 2880, 1, 256),
        # 8 tiles of a pair for each group, or 32 of one CTA, of which 148 fit at once.
        (512, 1024, 4, 128),
        (512, 1024, 5, 256),
        # Half of a pair's tile is waste, so it has as many rounds as the small ones.
        (4096, 64, 128, 128),
        (64, 4096, 128, 128),
        (8, 8, 1, 128),
    ],
)
def test_outer_tile_of_blackwell(k, n, g, m):
    """A pair, but for results too small to keep the chip busy with those."""
    assert cost.choose_outer("sm_100f", k, n, g).m == m


@every_arch
@pytest.mark.parametrize("out_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", tiling.FORMS)
def test_every_problem_has_a_compiled_kernel(arch, form, dtype, out_dtype):
    """For every tile, and k and n that are multiples of 8, 64 or both."""
    out_dtype = dtype if out_dtype == "same" else out_dtype
    compiled = set(tiling.kernels(arch))
    for tile in tiling.tiles(arch, form):
        for k in (8, 64, 72, 128, 6144):
            for n in (8, 64, 200, 256, 4096):
                spec = tiling.kernel(arch, form, dtype, out_dtype, k, n, tile)
                assert spec in compiled
                contiguous = {"fwd": [n], "dgrad": [k], "wgrad": [k, n]}[form]
                columns = {"sm_90a": 8, "sm_100f": 16}[arch]  # of one store
                assert spec.wide == (all(c % 64 == 0 for c in contiguous) and n % columns == 0)


@every_arch
def test_every_kernel_is_one_that_some_problem_gets(arch):
    reached = {
        tiling.kernel(arch, form, dtype, out_dtype, k, n, tile)
        for dtype in ("bfloat16", "float16")
        for out_dtype in (dtype, "float32")
        for form in FORMS
        for k, n in ((64, 64), (72, 72))
        for tile in sweep(arch, form).values()
    }
    reached |= {
        tiling.kernel(arch, "wgrad", dtype, out_dtype, k, n, tile)
        for dtype in ("bfloat16", "float16")
        for out_dtype in (dtype, "float32")
        for k, n in ((64, 64), (64, 256), (256, 256), (72, 72), (72, 256), (264, 256))
        for tile in [cost.choose_outer(arch, k, n, 64)]
    }
    assert reached == set(tiling.kernels(arch))


def test_names_are_unique():
    """A name is the key of a kernel in the library: every field is a part of it."""
    specs = [s for arch in ("sm_90a", "sm_100f") for s in tiling.kernels(arch)]
    assert len({s.name for s in specs}) == len(specs)
    for s in specs:
        start = {"fwd": "grouped_matmul_gkn", "dgrad": "grouped_matmul_gnk"}
        assert s.name.startswith(start.get(s.form, "grouped_outer") + f"_{s.arch}_")
        for part in (s.dtype, s.out_dtype, str(s.tile)):
            assert part in s.name
        assert f"_{'wide' if s.wide else 'plain'}_" in s.name
    tile = TileConfig(64)
    fields = vars(tile)
    others = {f: not v if isinstance(v, bool) else 2 * v for f, v in fields.items()}
    tiles = [tile, *(dataclasses.replace(tile, **{f: others[f]}) for f in fields)]
    assert len({str(t) for t in tiles}) == 1 + len(fields)


FLAGS = [field.name for field in dataclasses.fields(TileConfig) if isinstance(field.default, bool)]


def test_text_of_a_tile_is_read_back():
    """It names the flags that are not as by default, and no others."""
    assert str(TileConfig(64)) == "64x128x128c1"
    everything = "16x256x64c4_pair_rows_on_m_staged_evict_first_no_pdl_raster_along_n"
    changed = {"pdl": False} | dict.fromkeys((f for f in FLAGS if f != "pdl"), True)
    assert str(TileConfig(16, 256, 64, 4, 2, **changed)) == everything
    for values in itertools.product((False, True), repeat=len(FLAGS)):
        tile = TileConfig(192, 512, 128, 2, 2, **dict(zip(FLAGS, values)))
        assert TileConfig.parse(str(tile)) == tile
    for text in ("", "64x128", "64x128x128c1_fast", "64x128x128c1_pdl", f"{everything}_pair"):
        with pytest.raises(ValueError, match=r"^TileConfig\.parse: a tile is written like"):
            TileConfig.parse(text)


def test_no_kernels_for_other_architectures():
    assert tiling.kernels("sm_80") == []


@every_arch
def test_every_compiled_tile_is_valid(arch):
    for spec in tiling.kernels(arch):
        assert tiling.is_valid(arch, spec.tile, spec.form) == (True, "")


@pytest.mark.parametrize(
    ("arch", "tile", "reason"),
    [
        ("sm_80", TileConfig(64, 256), "there are no kernels for sm_80"),
        (ARCH, TileConfig(48, 256), "m must be"),
        (ARCH, TileConfig(64, 192), "n must be"),
        (ARCH, TileConfig(64, 256, 32), "k must be"),
        (ARCH, TileConfig(256, 256, 64), "must fit into registers"),
        (ARCH, TileConfig(64, 256, 128, 3), "cluster must be"),
        (ARCH, TileConfig(64, 256, ctas=2), "ctas must be 1"),
        (ARCH, TileConfig(64, 256, rows_on_m=True), "rows_on_m must be False"),
        ("sm_100f", TileConfig(64, 128, ctas=3), "ctas must be 1 or 2"),
        ("sm_100f", TileConfig(48, 128), "with 1 ctas, m must be one of"),
        ("sm_100f", TileConfig(16, 256, ctas=2), "with 2 ctas, m must be one of"),
        ("sm_100f", TileConfig(64, 256), "with 1 ctas, n must be 128"),
        ("sm_100f", TileConfig(64, 128, ctas=2), "with 2 ctas, n must be 256"),
        ("sm_100f", TileConfig(256, 128, rows_on_m=True), "m must be one of (64, 128)"),
        ("sm_100f", TileConfig(64, 128, ctas=2, rows_on_m=True), "m must be one of (128, 256)"),
        ("sm_100f", TileConfig(128, 512, rows_on_m=True), "n must be one of (64, 128, 192, 256)"),
        ("sm_100f", TileConfig(128, 192, ctas=2, rows_on_m=True), "n must be one of (128, 256)"),
        ("sm_100f", TileConfig(64, 128, cluster=3), "cluster must be"),
        ("sm_100f", TileConfig(64, 128, 32), "k must be"),
        ("sm_100f", TileConfig(256, 512, ctas=2, rows_on_m=True), "two K tiles of 512 columns"),
    ],
)
def test_invalid_tiles_have_a_reason(arch, tile, reason):
    """One thing is wrong, and the text says which, and with which tile."""
    valid, text = tiling.is_valid(arch, tile)
    assert not valid
    assert reason in text
    assert str(tile) in text or repr(tile) in text


@pytest.mark.parametrize(
    ("arch", "tile", "reason"),
    [
        (ARCH, TileConfig(32, 256, 64), "m of an outer product must be a multiple of 64"),
        (ARCH, TileConfig(256, 128, 128), "k of an outer product must be 64"),
        (ARCH, TileConfig(256, 128, 64, 4), "cluster of an outer product must be 1 or 2"),
        (
            "sm_100f",
            TileConfig(128, 128, 64, rows_on_m=True, evict_first=True),
            "evict_first of an outer product must be False",
        ),
        (
            "sm_100f",
            TileConfig(128, 128, 64, rows_on_m=True, raster_along_n=True),
            "raster_along_n of an outer product must be False",
        ),
        ("sm_100f", TileConfig(128, 128, 64), "rows of an outer product must be on M"),
        (
            "sm_100f",
            TileConfig(256, 512, 64, ctas=2, rows_on_m=True),
            "n of an outer product must be at most 256",
        ),
    ],
)
def test_invalid_tiles_of_an_outer_product(arch, tile, reason):
    assert tiling.is_valid(arch, tile) == (True, "")
    valid, text = tiling.is_valid(arch, tile, "wgrad")
    assert not valid
    assert reason in text
    assert repr(tile) in text


@pytest.mark.parametrize("m", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("n", [128, 256])
@pytest.mark.parametrize("k", [64, 128])
def test_stages_fit_into_shared_memory(m, n, k):
    """And leave no room for one more stage of rows."""
    tile = TileConfig(m, n, k)
    if not tiling.is_valid(ARCH, tile)[0]:
        return
    weights, rows = tiling.stages(ARCH, tile)
    assert weights >= 2
    assert rows >= 2
    used = 2 * (weights * tiling.stage_columns(ARCH, tile) * k + rows * m * tiling.K_TILE)
    assert used + 1024 <= 227 * 1024 < used + 1024 + 2 * m * tiling.K_TILE


def blackwell_tiles():
    tiles = [
        TileConfig(m, n, k, cluster, ctas, rows_on_m)
        for m in (16, 32, 64, 128, 192, 256)
        for n in (64, 128, 192, 256, 512)
        for k in (64, 128)
        for cluster in (1, 2, 4)
        for ctas in (1, 2)
        for rows_on_m in (False, True)
    ]
    return [tile for tile in tiles if tiling.is_valid("sm_100f", tile)[0]]


def test_blackwell_memory():
    """Of every valid tile: stages fill the shared memory, accumulators fit tensor memory."""
    tiles = blackwell_tiles()
    assert len(tiles) > 100
    for tile in tiles:
        weights, rows = tiling.stages("sm_100f", tile)
        # Every window of as many K tiles as there are stages of rows has its weights.
        ratio = tile.k // tiling.K_TILE
        assert weights == max(len({(s + i) // ratio for i in range(rows)}) for s in range(ratio))
        assert weights >= 2

        def used(weights, rows):
            return 2 * (weights * tile.n * tile.k + rows * tile.m * tiling.K_TILE) // tile.ctas

        assert used(weights, rows) <= 226 * 1024
        more = max(len({(s + i) // ratio for i in range(rows + 1)}) for s in range(ratio))
        assert used(more, rows + 1) > 226 * 1024
        columns = tiling.tensor_memory_columns(tile)
        assert columns in (32, 64, 128, 256, 512)
        values = tile.m * tile.n // tile.ctas * (1 if tile.n == 512 else 2)
        assert 128 * columns >= values


@pytest.mark.parametrize(
    ("tile", "rows", "weights", "columns"),
    [
        (TileConfig(64, 64, rows_on_m=True), 13, 7, 64),
        (TileConfig(64, 128, rows_on_m=True), 8, 5, 128),
        (TileConfig(64, 128, 64, rows_on_m=True), 9, 9, 128),
        (TileConfig(64, 256, rows_on_m=True), 4, 3, 256),
        (TileConfig(128, 64, rows_on_m=True), 9, 5, 128),
        (TileConfig(128, 128, rows_on_m=True), 6, 4, 256),
        (TileConfig(128, 128, 64, rows_on_m=True), 7, 7, 256),
        (TileConfig(128, 192, 64, rows_on_m=True), 5, 5, 512),
        (TileConfig(128, 256, 64, rows_on_m=True), 4, 4, 512),
        (TileConfig(128, 128, ctas=2, rows_on_m=True), 13, 7, 128),
        (TileConfig(128, 256, ctas=2, rows_on_m=True), 8, 5, 256),
        (TileConfig(256, 128, ctas=2, rows_on_m=True), 9, 5, 256),
        (TileConfig(256, 256, ctas=2, rows_on_m=True), 6, 4, 512),
        (TileConfig(256, 256, 64, ctas=2, rows_on_m=True), 7, 7, 512),
        (TileConfig(256, 512, 64, ctas=2, rows_on_m=True), 4, 4, 512),
        (TileConfig(64, 128), 8, 5, 128),
        (TileConfig(16, 128), 11, 6, 32),
    ],
    ids=str,
)
def test_blackwell_memory_of_known_tiles(tile, rows, weights, columns):
    """Worked out by hand: 226 KiB of stages, columns for two accumulators or two halves."""
    assert tiling.is_valid("sm_100f", tile) == (True, "")
    assert tiling.stages("sm_100f", tile) == (weights, rows)
    assert tiling.tensor_memory_columns(tile) == columns


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_flags_are_bools(flag, value):
    message = f"TileConfig: {flag} must be a bool, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TileConfig(64, **{flag: value})


@pytest.mark.parametrize("field", ["m", "n", "k", "cluster", "ctas"])
@pytest.mark.parametrize("value", [0, -8, 8.0, True, "8", None])
def test_fields_of_a_tile_are_positive_ints(field, value):
    good = {"m": 64, "n": 128, "k": 64, "cluster": 1, "ctas": 1}
    assert TileConfig(**good).m == 64
    message = f"TileConfig: {field} must be a positive int, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TileConfig(**(good | {field: value}))


def test_tile_is_a_value():
    """Tiles are parameters of compiled functions: equal ones are one, and none changes."""
    assert TileConfig(64) == TileConfig(64, 128)
    assert len({TileConfig(64), TileConfig(64), TileConfig(32)}) == 2
    with pytest.raises(AttributeError):
        TileConfig(64).m = 32  # pyright: ignore


def test_tile_of_plain_xla():
    """A power of two from 8 to 128 that holds the mean group; the largest where m is symbolic."""
    for m, g in ((1, 1), (9, 1), (64, 8), (65, 8), (1000, 3), (10**6, 1), (0, 0), (5, 0)):
        rows, mean = tiling.choose(m, g).m, -(-m // max(g, 1))
        assert rows in (8, 16, 32, 64, 128)
        assert rows >= min(mean, 128)
        assert rows == 8 or rows < 2 * mean
    assert tiling.choose("m", 4).m == 128
