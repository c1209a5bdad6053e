"""Tiles: which there are, which one a problem gets, and that neither without the other."""

import re

import pytest

from pearl_jax import TileConfig, tiling

ARCH = "sm_90a"
FORMS = ("fwd", "dgrad")


def sweep(form):
    """The tiles that problems get, by mean rows of a group from a fraction of one to 4096."""
    problems = [(m, g) for g in (1, 8, 32, 300) for m in (1, 7, *(g * mean for mean in MEANS))]
    return {p: tiling.choose_kernel_tile(ARCH, form, *p) for p in problems}


MEANS = [*range(1, 300), *range(300, 4097, 37), 4096]


@pytest.mark.parametrize("form", FORMS)
def test_compiled_tiles_are_those_that_are_chosen(form):
    """No problem gets a tile that is not compiled, and no kernel takes up room for nothing."""
    compiled = {s.tile for s in tiling.kernels(ARCH) if s.form == form}
    chosen = set(sweep(form).values())
    assert chosen == compiled
    assert len(chosen) > 1


@pytest.mark.parametrize("form", FORMS)
def test_larger_groups_never_get_smaller_tiles(form):
    for g in (1, 8, 300):
        rows = [tiling.choose_kernel_tile(ARCH, form, g * mean, g).m for mean in MEANS]
        assert rows == sorted(rows)
        assert rows[0] < rows[-1]


def test_choice_without_rows_or_groups():
    for m, g in ((0, 4), (0, 0), (5, 0)):
        for form in FORMS:
            tile = tiling.choose_kernel_tile(ARCH, form, m, g)
            assert tile in tiling.tiles(ARCH, form)


@pytest.mark.parametrize("out_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_every_problem_has_a_compiled_kernel(form, dtype, out_dtype):
    """For every tile, and k and n that are multiples of 8, 64 or both."""
    out_dtype = dtype if out_dtype == "same" else out_dtype
    compiled = set(tiling.kernels(ARCH))
    for tile in tiling.tiles(ARCH, form):
        for k in (8, 64, 72, 128, 6144):
            for n in (8, 64, 200, 256, 4096):
                spec = tiling.kernel(ARCH, form, dtype, out_dtype, k, n, tile)
                assert spec in compiled
                assert spec.wide == ((k if form == "dgrad" else n) % 64 == 0)


def test_every_kernel_is_one_that_some_problem_gets():
    reached = {
        tiling.kernel(ARCH, form, dtype, out_dtype, k, n, tile)
        for dtype in ("bfloat16", "float16")
        for out_dtype in (dtype, "float32")
        for form in FORMS
        for k, n in ((64, 64), (72, 72))
        for tile in sweep(form).values()
    }
    assert reached == set(tiling.kernels(ARCH))


def test_names_are_unique():
    """A name is the key of a kernel in the library: every field is a part of it."""
    specs = tiling.kernels(ARCH)
    assert len({s.name for s in specs}) == len(specs)
    for s in specs:
        assert re.fullmatch(r"grouped_matmul_\w+", s.name)
        for part in (
            s.dtype,
            s.out_dtype,
            f"_{'gnk' if s.form == 'dgrad' else 'gkn'}_",
            str(s.tile),
        ):
            assert part in s.name
        assert f"_{'wide' if s.wide else 'plain'}_" in s.name
    tiles = [TileConfig(64, 128, 64, 1)]
    tiles += [
        TileConfig(*(2 * v if i == j else v for j, v in enumerate((64, 128, 64, 1))))
        for i in range(4)
    ]
    assert len({str(t) for t in tiles}) == 5


def test_no_kernels_for_other_architectures():
    assert tiling.kernels("sm_80") == []


def test_every_compiled_tile_is_valid():
    for spec in tiling.kernels(ARCH):
        assert tiling.is_valid(ARCH, spec.tile) == (True, "")


@pytest.mark.parametrize(
    ("arch", "tile", "reason"),
    [
        ("sm_80", TileConfig(64, 256), "there are no kernels for sm_80"),
        (ARCH, TileConfig(48, 256), "m must be"),
        (ARCH, TileConfig(64, 192), "n must be"),
        (ARCH, TileConfig(64, 256, 32), "k must be"),
        (ARCH, TileConfig(256, 256, 64), "must fit into registers"),
        (ARCH, TileConfig(64, 256, 128, 3), "cluster must be"),
    ],
)
def test_invalid_tiles_have_a_reason(arch, tile, reason):
    """One thing is wrong, and the text says which, and with which tile."""
    valid, text = tiling.is_valid(arch, tile)
    assert not valid
    assert reason in text
    assert str(tile) in text or repr(tile) in text


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
    used = 2 * (weights * n * k + rows * m * tiling.K_TILE)
    assert used + 1024 <= 227 * 1024 < used + 1024 + 2 * m * tiling.K_TILE


@pytest.mark.parametrize("field", ["m", "n", "k", "cluster"])
@pytest.mark.parametrize("value", [0, -8, 8.0, True, "8", None])
def test_fields_of_a_tile_are_positive_ints(field, value):
    good = {"m": 64, "n": 128, "k": 64, "cluster": 1}
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
