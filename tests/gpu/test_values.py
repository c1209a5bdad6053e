"""Every compiled kernel, every kind of shape, and random problems, against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import pearl_jax
from gpu.problems import (
    KERNELS,
    SIZES,
    TILES,
    G,
    M,
    Problem,
    check,
    int32,
    on_gpu,
    owned_rows,
    problem,
)

pytestmark = pytest.mark.gpu

# 51 groups around the extents that a kernel may compute with, with empty ones in between.
EXTENTS = (*range(16, 145, 16), 160, 192, 224, 256)
MANY = [e + d for d in (0, -1, 1) for e in EXTENTS]
MANY = [0, 0, *MANY[:20], 0, 1, 0, *MANY[20:], 2, 0, 300, 0, 5, 0, 0]


def compiled(spec, m, k, n, held, given):
    """A compiled call of one kernel, with its operands."""
    p, transposed = problem(m, k, n, held), spec.form == "dgrad"
    lhs, rhs = p.operands(spec.dtype, transposed)
    call = on_gpu(transpose_rhs=transposed, tile=spec.tile, preferred_element_type=spec.out_dtype)
    lowered = call.lower(lhs, rhs, int32(*[0] * given), np.int32(0))
    assert f'"{spec.name}"' in lowered.as_text()
    run = lowered.compile()

    def test(sizes, offset=0):
        out = run(p.poisoned(lhs, sizes, offset), rhs, int32(*sizes), np.int32(offset))
        assert out.dtype == spec.out_dtype
        check(out, p.want(sizes, offset), f"{spec.name}, sizes {sizes}, offset {offset}")

    return test


@pytest.mark.parametrize("spec", KERNELS, ids=lambda s: s.name)
def test_every_kernel(spec):
    """Rows of no group hold NaN and Inf. n and k end inside a tile where the kernel allows it."""
    wide = 320 if spec.wide else 328
    k, n = (wide, 328) if spec.form == "dgrad" else (328, wide)
    test = compiled(spec, M, k, n, G, G)
    for sizes in SIZES.values():
        test(sizes)
    wide = 64 if spec.wide else 72
    k, n = (wide, 200) if spec.form == "dgrad" else (72, 3 * wide)
    test = compiled(spec, sum(MANY) + 45, k, n, 40, len(MANY))
    for offset in (0, 5, len(MANY) - 40, 20, -3, 2**31 - 1, -(2**31)):
        test(MANY, offset)
    test([3] * 30 + MANY[:-30], 12)


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["gkn", "gnk"])
@pytest.mark.parametrize(
    ("k", "n"),
    [(1, 7), (7, 1), (1, 1), (72, 100), (100, 72), (130, 64), (64, 130), (250, 257), (136, 200)],
)
def test_any_k_and_n(k, n, transpose_rhs):
    """Not only multiples of 8, which a kernel reads in place."""
    p = problem(M, k, n, G)
    for dtype, out_dtype in (("bfloat16", "bfloat16"), ("float16", "float32")):
        lhs, rhs = p.operands(dtype, transpose_rhs)
        run = on_gpu(transpose_rhs=transpose_rhs, preferred_element_type=out_dtype)
        for case in ("unaligned", "sum below m", "empty middle"):
            out = run(p.poisoned(lhs, SIZES[case]), rhs, int32(*SIZES[case]), np.int32(0))
            check(out, p.want(SIZES[case]), f"{case}, {dtype}")


@pytest.mark.parametrize("m", [1, 2, 7, 8, 15, 16, 17, 63, 65, 129, 255, 257, 513])
def test_any_m(m):
    """With the tile that is chosen by itself."""
    p = problem(m, 136, 264, 3)
    lhs, rhs = p.operands("bfloat16")
    run = on_gpu()
    for sizes in ([m // 2, 0, m - m // 2], [0, m, 0], [0, 0, 1], [0, 0, 0], [m, m, m]):
        check(run(p.poisoned(lhs, sizes), rhs, int32(*sizes), np.int32(0)), p.want(sizes), sizes)


@pytest.mark.parametrize("options", TILES.values(), ids=TILES)
def test_one_row(options):
    p = problem(1, 128, 256, 3)
    lhs, rhs = p.operands("bfloat16", options["transpose_rhs"])
    run = on_gpu(**options)
    for sizes in ([0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 7]):
        out = run(p.poisoned(lhs, sizes), rhs, int32(*sizes), np.int32(0))
        check(out, p.want(sizes), sizes)


@pytest.mark.parametrize("zero", "mkng")
def test_empty_dimensions(zero):
    m, k, n, g = (0 if name == zero else size for name, size in zip("mkng", (16, 64, 64, 2)))
    lhs, rhs = jnp.ones((m, k), "bfloat16"), jnp.ones((g, k, n), "bfloat16")
    out = on_gpu()(lhs, rhs, int32(*[8] * g), np.int32(0))
    check(out, oracle.grouped_matmul(lhs, rhs, [8] * g))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["gkn", "gnk"])
def test_accumulates_in_float32(rng, dtype, transpose_rhs):
    """Of sums that no 16-bit format holds, every element is right to float32's precision.

    The tensor core cuts off instead of rounding, so the k / 16 = 128 additions of an element
    of size sqrt(k) lose up to 128 * 2**-23 = 1.5e-5 of it each way; adding up in 16 bits
    would lose 4e-3 and more.
    """
    m, k, n, g = 500, 2048, 264, 4
    sizes = [200, 0, 37, 250]
    lhs = jnp.asarray(rng.standard_normal((m, k)), dtype)
    rhs = jnp.asarray(rng.standard_normal((g, n, k) if transpose_rhs else (g, k, n)), dtype)
    want = oracle.grouped_matmul(lhs, rhs, sizes, transpose_rhs)
    for out_dtype, rounding in (("float32", 0), (dtype, jnp.finfo(dtype).eps)):
        run = on_gpu(transpose_rhs=transpose_rhs, preferred_element_type=out_dtype)
        out = np.float64(run(lhs, rhs, int32(*sizes), np.int32(0)))
        error = np.abs(out - want) - rounding * np.abs(want)
        assert error.max() < 4e-5 * np.sqrt(k), (out_dtype, error.max())
        assert not out[sum(sizes) :].any()


def test_other_result_dtypes():
    """Results that no kernel writes are cast from float32."""
    p = problem(M, 64, 128, G)
    lhs, rhs = p.operands("bfloat16")
    out = on_gpu(preferred_element_type="float16")(
        lhs, rhs, int32(*SIZES["unaligned"]), np.int32(0)
    )
    assert out.dtype == "float16"
    check(out, p.want(SIZES["unaligned"]))


def test_infinities_of_one_group_stay_in_it(rng):
    sizes = SIZES["unaligned"]
    p = problem(M, 136, 264, G)
    lhs, rhs = p.operands("bfloat16")
    rhs = rhs.at[2].set(jnp.inf).at[4].set(jnp.nan)
    out = np.asarray(on_gpu()(lhs, rhs, int32(*sizes), np.int32(0)), np.float32)
    rows = oracle.bounds(sizes, M)
    for i in range(G):
        assert np.isfinite(out[rows[i] : rows[i + 1]]).all() == (i not in (2, 4)), i


def random_sizes(rng, m, given):
    """Group sizes of one of several kinds; of any sum, and with values out of range."""
    mean = max(m // given, 1)
    kind = rng.integers(5)
    if kind == 0:
        return rng.multinomial(m, np.ones(given) / given)
    if kind == 1:  # few groups have all rows
        return rng.multinomial(rng.integers(m + 1), rng.dirichlet(np.full(given, 0.1)))
    if kind == 2:
        return rng.integers(0, 2 * mean + 1, given) * (rng.random(given) < 0.6)
    if kind == 3:
        return rng.integers(-3, m + 3, given)
    return rng.choice([0, 0, 0, 1, mean, m, 2**31 - 1, -(2**31)], given)


def random_extent(rng, most):
    extent = int(rng.integers(1, most))
    return extent if rng.random() < 0.2 else -(-extent // 8) * 8


@pytest.mark.parametrize("seed", range(30))
def test_random_problems(seed):
    """40 of one shape: new values do not compile again."""
    rng = np.random.default_rng(seed)
    m, given = int(rng.integers(1, 700)), int(rng.integers(1, 48))
    k, n, held = random_extent(rng, 400), random_extent(rng, 800), int(rng.integers(1, given + 1))
    dtype = str(rng.choice(["bfloat16", "float16"]))
    options = dict(rng.choice(list(TILES.values())))
    options["tile"] = rng.choice([options["tile"], None])
    options["preferred_element_type"] = str(rng.choice([dtype, "float32"]))
    p = Problem(m, k, n, held, seed)
    lhs, rhs = p.operands(dtype, options["transpose_rhs"])
    run = on_gpu(**options)
    for _ in range(40):
        sizes = [int(s) for s in random_sizes(rng, m, given)]
        offset = int(rng.integers(-2, given + 2)) if rng.random() < 0.5 else 0
        rows = rng.permutation(m)  # other data of the same shape
        x = jnp.where(owned_rows(sizes, m, held, offset)[:, None], lhs[rows], jnp.nan)
        out = run(x, rhs, int32(*sizes), np.int32(offset))
        want = oracle.grouped_matmul(p.lhs[rows], p.rhs, sizes, offset=offset)
        check(out, want, f"m {m}, k {k}, n {n}, {options}, sizes {sizes}, offset {offset}")
    assert run._cache_size() == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", oracle.SIZES)
def test_by_default(rng, case, dtype):
    """Values and gradients of what runs where nothing is asked for, also without a kernel."""
    sizes = oracle.SIZES[case]
    lhs, y = (jnp.asarray(rng.standard_normal((64, d)), dtype) for d in (72, 100))
    rhs = jnp.asarray(rng.standard_normal((len(sizes), 72, 100)), dtype)
    assert lhs.device.platform == "gpu"
    call = functools.partial(_value_and_gradients, int32(*sizes))
    with jax.default_matmul_precision("highest"):
        out, d_lhs, d_rhs = call(lhs, rhs, y)
    for got, want in (
        (out, oracle.grouped_matmul(lhs, rhs, sizes)),
        (d_lhs, oracle.grouped_matmul(y, rhs, sizes, True)),
        (d_rhs, oracle.grouped_outer(lhs, y, sizes)),
    ):
        assert oracle.worst_group_error(got, want, sizes) < oracle.TOLERANCE[dtype]


@jax.jit
def _value_and_gradients(sizes, lhs, rhs, y):
    out, vjp = jax.vjp(lambda a, b: pearl_jax.grouped_matmul(a, b, sizes), lhs, rhs)
    return out, *vjp(y)
