"""Values: every form, dtype and case of group sizes against the float64 oracle."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import SIZES, TOLERANCE, worst_group_error

import pearl_jax

M, G = 64, 6


@pytest.fixture(params=[False, True], ids=["gkn", "gnk"])
def transpose_rhs(request):
    return request.param


def random(rng, shape, dtype="float32"):
    if dtype == "int8":
        return jnp.asarray(rng.integers(-20, 20, shape), jnp.int8)
    return jnp.asarray(rng.standard_normal(shape), dtype)


def weights(rng, k, n, transpose_rhs, dtype="float32"):
    return random(rng, (G, n, k) if transpose_rhs else (G, k, n), dtype)


def poison(x, sizes):
    """NaN in all rows that no group owns."""
    return x.at[oracle.bounds(sizes, x.shape[0])[-1] :].set(np.nan)


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matmul_group_sizes(rng, case, dtype, transpose_rhs):
    sizes = SIZES[case]
    lhs = poison(random(rng, (M, 72), dtype), sizes)
    rhs = weights(rng, 72, 100, transpose_rhs, dtype)
    got = pearl_jax.grouped_matmul(lhs, rhs, np.array(sizes), transpose_rhs=transpose_rhs)
    want = oracle.grouped_matmul(lhs, rhs, sizes, transpose_rhs)
    assert got.dtype == dtype
    assert worst_group_error(got, want, sizes) < TOLERANCE[dtype]


@pytest.mark.parametrize(("k", "n"), [(1024, 1032), (72, 2**15)])
def test_large_weights(rng, k, n, transpose_rhs):
    """The first tiles of all groups are one batched matmul, unless many groups are empty."""
    m, g = 96, 12
    rhs = random(rng, (g, n, k) if transpose_rhs else (g, k, n))
    run = jax.jit(functools.partial(pearl_jax.grouped_matmul, transpose_rhs=transpose_rhs))
    for sizes in (
        [8] * 12,
        [1, 7, 8, 9, 15, 16, 17, 0, 0, 3, 2, 1],  # tiles of 8 rows; 17 rows have none
        [0, 0, 0, 40, 2, 2, 2, 2, 2, 2, 2, 2],  # as many groups as it takes
        [0, 0, 0, 0, 40, 2, 2, 2, 2, 2, 2, 2],
        [90, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],  # more rows than there are
    ):
        lhs = poison(random(rng, (m, k)), sizes)
        got = run(lhs, rhs, np.array(sizes, np.int32))
        want = oracle.grouped_matmul(lhs, rhs, sizes, transpose_rhs)
        assert worst_group_error(got, want, sizes) < TOLERANCE["float32"], sizes
    assert "stablehlo.case" in run.lower(lhs, rhs, np.array(sizes, np.int32)).as_text()


@pytest.mark.parametrize(("k", "dtype"), [(8, "float32"), (1024, "bfloat16")])
def test_the_loop_alone_serves_other_weights(k, dtype):
    """Small ones, and such as would have to be converted, copied."""
    m, g = 96, 12
    operands = jnp.zeros((m, k), dtype), jnp.zeros((g, k, 1032), dtype), jnp.zeros(g, jnp.int32)
    assert "stablehlo.case" not in jax.jit(pearl_jax.grouped_matmul).lower(*operands).as_text()


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outer_group_sizes(rng, case, dtype):
    sizes = SIZES[case]
    lhs = poison(random(rng, (M, 72), dtype), sizes)
    rhs = poison(random(rng, (M, 100), dtype), sizes)
    got = pearl_jax.grouped_outer(lhs, rhs, np.array(sizes))
    assert got.dtype == dtype
    want = oracle.grouped_outer(lhs, rhs, sizes)
    assert worst_group_error(got, want, sizes) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("k", "n"), [(1, 7), (7, 1), (72, 100), (100, 72), (136, 200), (192, 136), (200, 192), (1, 1)]
)
def test_shapes(rng, k, n, transpose_rhs):
    sizes = SIZES["unaligned"]
    lhs, rhs = random(rng, (M, k)), weights(rng, k, n, transpose_rhs)
    got = pearl_jax.grouped_matmul(lhs, rhs, np.array(sizes), transpose_rhs=transpose_rhs)
    want = oracle.grouped_matmul(lhs, rhs, sizes, transpose_rhs)
    assert worst_group_error(got, want, sizes) < TOLERANCE["float32"]
    if not transpose_rhs:
        y = random(rng, (M, n))
        outer = pearl_jax.grouped_outer(lhs, y, np.array(sizes))
        want = oracle.grouped_outer(lhs, y, sizes)
        assert worst_group_error(outer, want, sizes) < TOLERANCE["float32"]


def test_weights_larger_than_one_piece(rng, transpose_rhs):
    """Weights that are read in several pieces, the last one smaller, and large tiles."""
    sizes, k, n = [130, 7, 0, 300, 1, 62], 700, 600
    lhs, rhs = random(rng, (512, k)), weights(rng, k, n, transpose_rhs)
    got = pearl_jax.grouped_matmul(
        lhs,
        rhs,
        np.array(sizes),
        transpose_rhs=transpose_rhs,
        tile=pearl_jax.TileConfig(16),
    )
    want = oracle.grouped_matmul(lhs, rhs, sizes, transpose_rhs)
    assert worst_group_error(got, want, sizes) < TOLERANCE["float32"]


FLOATS = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("rhs_dtype", [*FLOATS, "int8"])
@pytest.mark.parametrize("lhs_dtype", [*FLOATS, "int8"])
def test_dtypes(rng, lhs_dtype, rhs_dtype, transpose_rhs):
    """Also mixed; the result takes the wider dtype, as jax.lax.dot_general has it."""
    sizes = SIZES["unaligned"]
    x64 = "float64" in (lhs_dtype, rhs_dtype)
    with jax.enable_x64(True) if x64 else contextlib.nullcontext():
        lhs = random(rng, (M, 40), lhs_dtype)
        rhs = weights(rng, 40, 24, transpose_rhs, rhs_dtype)
        y = random(rng, (M, 24), rhs_dtype)
        dims = (((1,), (2 if transpose_rhs else 1,)), ((), ()))
        default = jax.eval_shape(lambda a, b: jax.lax.dot_general(a, b, dims), lhs, rhs).dtype
        got = pearl_jax.grouped_matmul(lhs, rhs, np.array(sizes), transpose_rhs=transpose_rhs)
        assert got.dtype == default
        wide = "float64" if x64 else "float32"
        got = pearl_jax.grouped_matmul(
            lhs,
            rhs,
            np.array(sizes),
            preferred_element_type=wide,
            transpose_rhs=transpose_rhs,
        )
        outer = pearl_jax.grouped_outer(lhs, y, np.array(sizes), preferred_element_type=wide)
        assert got.dtype == outer.dtype == wide
    want = oracle.grouped_matmul(lhs, rhs, sizes, transpose_rhs)
    assert worst_group_error(got, want, sizes) < TOLERANCE[wide]
    want = oracle.grouped_outer(lhs, y, sizes)
    assert worst_group_error(outer, want, sizes) < TOLERANCE[wide]


@pytest.mark.parametrize("dtype", FLOATS[:3])
@pytest.mark.parametrize("preferred", ["bfloat16", "float16", "float32"])
def test_preferred_element_type(rng, dtype, preferred):
    sizes = SIZES["unaligned"]
    lhs, rhs = random(rng, (M, 40), dtype), weights(rng, 40, 24, False, dtype)
    if jnp.dtype(preferred).itemsize < jnp.dtype(dtype).itemsize:
        with pytest.raises(TypeError, match="preferred_element_type must be at least as wide"):
            pearl_jax.grouped_matmul(lhs, rhs, np.array(sizes), None, preferred)
        return
    got = pearl_jax.grouped_matmul(lhs, rhs, np.array(sizes), None, preferred)
    assert got.dtype == preferred
    want = oracle.grouped_matmul(lhs, rhs, sizes)
    assert worst_group_error(got, want, sizes) < TOLERANCE[preferred]


def test_int8_accumulates_in_int32(rng):
    sizes = SIZES["unaligned"]
    lhs, rhs = random(rng, (M, 300), "int8"), weights(rng, 300, 24, False, "int8")
    got = pearl_jax.grouped_matmul(lhs, rhs, np.array(sizes), preferred_element_type=jnp.int32)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, oracle.grouped_matmul(lhs, rhs, sizes).astype(np.int32))
    narrow = pearl_jax.grouped_matmul(lhs, rhs, np.array(sizes))
    np.testing.assert_array_equal(narrow, np.asarray(got).astype(np.int8))


@pytest.mark.parametrize("scalar", [True, False])
def test_group_offset_parts_sum_to_the_whole(rng, scalar, transpose_rhs):
    """Also parts that lie partly or wholly outside the groups, which own nothing."""
    sizes = SIZES["sum below m"]
    lhs, rhs = random(rng, (M, 16)), weights(rng, 16, 24, transpose_rhs)
    total = 0
    for first, last in [(0, 1), (1, 4), (4, 6)]:
        offset = first if scalar else jnp.array([first])
        part = pearl_jax.grouped_matmul(
            lhs,
            rhs[first:last],
            jnp.array(sizes),
            group_offset=offset,
            transpose_rhs=transpose_rhs,
        )
        want = oracle.grouped_matmul(lhs, rhs[first:last], sizes, transpose_rhs, first)
        assert worst_group_error(part, want, sizes) < TOLERANCE["float32"]
        total += part
    want = oracle.grouped_matmul(lhs, rhs, sizes, transpose_rhs)
    assert worst_group_error(total, want, sizes) < TOLERANCE["float32"]
    for offset in (-100, -2, -1, 4, 5, 6, 100, 2**31 - 1, -(2**31)):
        got = pearl_jax.grouped_matmul(
            lhs,
            rhs[:3],
            jnp.array(sizes),
            group_offset=offset,
            transpose_rhs=transpose_rhs,
        )
        want = oracle.grouped_matmul(lhs, rhs[:3], sizes, transpose_rhs, offset)
        assert worst_group_error(got, want, sizes) < TOLERANCE["float32"], offset


def test_group_offset_of_outer(rng):
    sizes = SIZES["unaligned"]
    lhs, rhs = random(rng, (M, 16)), random(rng, (M, 24))
    whole = pearl_jax.grouped_outer(lhs, rhs, jnp.array(sizes))
    for offset in (-2, 0, 1, 4, 7):
        got = pearl_jax.grouped_outer(lhs, rhs, jnp.array(sizes), group_offset=offset, num_groups=3)
        want = oracle.grouped_outer(lhs, rhs, sizes, 3, offset)
        assert worst_group_error(got, want, sizes) < TOLERANCE["float32"]
    parts = [
        pearl_jax.grouped_outer(lhs, rhs, jnp.array(sizes), group_offset=i, num_groups=2)
        for i in (0, 2, 4)
    ]
    np.testing.assert_allclose(jnp.concatenate(parts), whole, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_group_sizes_dtypes(rng, dtype, array):
    sizes = SIZES["sum below m"]
    lhs, rhs = random(rng, (M, 16)), weights(rng, 16, 24, False)
    got = pearl_jax.grouped_matmul(lhs, rhs, array(np.array(sizes, dtype)))
    assert worst_group_error(got, oracle.grouped_matmul(lhs, rhs, sizes), sizes) < 2e-6


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize(
    ("dtype", "big"),
    [
        ("uint32", 2**32 - 1),
        ("int64", 2**40),
        ("int64", 2**32),
        ("uint64", 2**64 - 1),
        ("int32", 2**31 - 1),
    ],
)
def test_huge_sizes_are_cut_off_not_wrapped(rng, dtype, big, x64):
    sizes = np.array([5, big, 0, big, 3, big], dtype)
    with jax.enable_x64(x64):
        lhs = random(rng, (M, 16), "float32")
        rhs = random(rng, (G, 16, 24), "float32")
        got = pearl_jax.grouped_matmul(lhs, rhs, sizes)
        outer = pearl_jax.grouped_outer(lhs, lhs, sizes)
    assert worst_group_error(got, oracle.grouped_matmul(lhs, rhs, sizes), sizes) < 2e-6
    assert worst_group_error(outer, oracle.grouped_outer(lhs, lhs, sizes), sizes) < 2e-6


def test_many_huge_sizes_do_not_wrap(rng):
    """The running sum of 5000 sizes of 2**31 - 1 passes 2**32 many times."""
    sizes = np.full(5000, 2**31 - 1, np.int32)
    lhs, rhs = random(rng, (M, 3)), random(rng, (5000, 3, 2))
    got = pearl_jax.grouped_matmul(lhs, rhs, sizes)
    np.testing.assert_allclose(got, lhs @ rhs[0], rtol=1e-5, atol=1e-5)


class Boxed:
    """An array in the clothes of a library that has its own type."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


def test_inputs_of_other_kinds(rng):
    sizes = jnp.array(SIZES["unaligned"])
    lhs, rhs = random(rng, (M, 16)), weights(rng, 16, 24, False)
    want = pearl_jax.grouped_matmul(lhs, rhs, sizes)
    boxed = pearl_jax.grouped_matmul(Boxed(lhs), Boxed(rhs), Boxed(sizes))
    from_numpy = pearl_jax.grouped_matmul(*map(np.asarray, (lhs, rhs, sizes)))
    np.testing.assert_array_equal(boxed, want)
    np.testing.assert_array_equal(from_numpy, want)


def test_weak_types_follow_the_other_operand(rng):
    sizes = jnp.array(SIZES["unaligned"])
    rhs = weights(rng, 16, 24, False, "bfloat16")
    weak = jnp.full((M, 16), 2.0)
    assert jax.typeof(weak).weak_type
    got = pearl_jax.grouped_matmul(weak, rhs, sizes)
    assert got.dtype == jnp.bfloat16
    assert not jax.typeof(got).weak_type
    assert pearl_jax.grouped_matmul(weak, rhs.astype(jnp.float32), sizes).dtype == jnp.float32
    strong = jnp.full((M, 16), 2, jnp.int8)
    assert pearl_jax.grouped_matmul(strong, rhs, sizes).dtype == jnp.bfloat16


@pytest.mark.parametrize("zero", ["m", "k", "n", "g"])
def test_empty_dimensions(zero, transpose_rhs):
    m, k, n, g = (0 if name == zero else size for name, size in zip("mkng", (5, 4, 3, 2)))
    sizes = jnp.ones(g, jnp.int32)
    rhs = jnp.ones((g, n, k) if transpose_rhs else (g, k, n))
    got = pearl_jax.grouped_matmul(jnp.ones((m, k)), rhs, sizes, transpose_rhs=transpose_rhs)
    assert got.shape == (m, n)
    np.testing.assert_array_equal(
        got, oracle.grouped_matmul(np.ones((m, k)), rhs, sizes, transpose_rhs)
    )
    outer = pearl_jax.grouped_outer(jnp.ones((m, k)), jnp.ones((m, n)), sizes)
    np.testing.assert_array_equal(
        outer, oracle.grouped_outer(np.ones((m, k)), np.ones((m, n)), sizes)
    )


@pytest.mark.parametrize("rows", [1, 3, 8, 64, 1000])
def test_every_tile_gives_the_same(rng, rows):
    sizes = SIZES["unaligned"]
    lhs, rhs, y = random(rng, (M, 40)), weights(rng, 40, 24, False), random(rng, (M, 24))
    tile = pearl_jax.TileConfig(rows)
    got = pearl_jax.grouped_matmul(lhs, rhs, jnp.array(sizes), tile=tile)
    assert worst_group_error(got, oracle.grouped_matmul(lhs, rhs, sizes), sizes) < 2e-6
    outer = pearl_jax.grouped_outer(lhs, y, jnp.array(sizes), tile=tile)
    assert worst_group_error(outer, oracle.grouped_outer(lhs, y, sizes), sizes) < 2e-6


def test_infinities_of_one_group_stay_in_it(rng):
    sizes = SIZES["unaligned"]
    lhs, rhs = random(rng, (M, 16)), weights(rng, 16, 24, False)
    rhs = rhs.at[2].set(np.inf).at[4].set(np.nan)
    got = np.asarray(pearl_jax.grouped_matmul(lhs, rhs, jnp.array(sizes)))
    rows = oracle.bounds(sizes, M)
    for i in range(G):
        assert np.isfinite(got[rows[i] : rows[i + 1]]).all() == (i not in (2, 4))
    lhs = lhs.at[rows[3] : rows[4]].set(np.nan)
    outer = np.asarray(pearl_jax.grouped_outer(lhs, lhs, jnp.array(sizes)))
    assert [bool(np.isfinite(block).all()) for block in outer] == [i != 3 for i in range(G)]


FORMS = {
    "mk,gkn": ((64, 16), (6, 16, 24), ((1,), (1,)), [0], [0]),
    "mk,gnk": ((64, 16), (6, 24, 16), ((1,), (2,)), [0], [0]),
    "mk,mn": ((64, 16), (64, 24), ((0,), (0,)), [0], []),
}


@pytest.mark.parametrize("form", FORMS)
def test_ragged_dot_general(rng, form):
    lhs_shape, rhs_shape, contract, ragged, group = FORMS[form]
    dims = jax.lax.RaggedDotDimensionNumbers((contract, ((), ())), ragged, group)
    args = random(rng, lhs_shape), random(rng, rhs_shape), jnp.array(SIZES["sum below m"])
    got = pearl_jax.ragged_dot_general(*args, dims)
    np.testing.assert_allclose(got, jax.lax.ragged_dot_general(*args, dims), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes_batched", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_ragged_dot_general_with_batch_dimensions(rng, form, sizes_batched):
    """Batch axes second in lhs, last in rhs, first in the result."""
    lhs_shape, rhs_shape, contract, ragged, group = FORMS[form]
    b = 2
    lhs = random(rng, (lhs_shape[0], b, lhs_shape[1]))
    rhs = random(rng, (*rhs_shape, b))
    sizes = jnp.array([SIZES["sum below m"], SIZES["one hot"]])
    sizes = sizes if sizes_batched else sizes[0]
    move = lambda axes: tuple(a + (a >= 1) for a in axes)
    dims = jax.lax.RaggedDotDimensionNumbers(
        ((move(contract[0]), contract[1]), ((1,), (len(rhs_shape),))),
        list(move(ragged)),
        group,
    )
    got = pearl_jax.ragged_dot_general(lhs, rhs, sizes, dims)
    plain = jax.lax.RaggedDotDimensionNumbers((contract, ((), ())), ragged, group)
    for i in range(b):
        want = jax.lax.ragged_dot_general(
            lhs[:, i], rhs[..., i], sizes[i] if sizes_batched else sizes, plain
        )
        np.testing.assert_allclose(got[i], want, rtol=1e-4, atol=1e-4)
