"""The outer product of groups on a GPU: every kernel, values, memory, repeated runs, reports."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import pearl_jax
from gpu.problems import SIZES, G, M, check, int32, integers, owned_rows
from gpu.test_compiled import HOST, NOTHING, operations
from gpu.test_memory import CANARY, address, holes
from gpu.test_runs import UNEVEN, normal
from gpu.test_values import random_extent, random_sizes
from pearl_jax import library, tiling

ARCH = library.present_arch() or "sm_90a"
KERNELS = [s for s in tiling.kernels(ARCH) if s.form == "wgrad"]
SUMS = 4 * max(map(tiling.partial_sums, KERNELS))  # bytes, of every call
TARGET = 'custom_call_target="pearl_jax.grouped_outer"'

pytestmark = pytest.mark.gpu


class Problem:
    """lhs (m, k) and rhs (m, n) of integers, and their products for any group sizes."""

    def __init__(self, m, k, n, seed=0):
        rng = np.random.default_rng(seed)
        self.m, self.lhs, self.rhs = m, integers(rng, m, k), integers(rng, m, n)

    def operands(self, dtype, owned=None):
        """Rows that are not owned hold NaN and Inf."""
        operands = (jnp.asarray(x).astype(dtype) for x in (self.lhs, self.rhs))
        return [x if owned is None else poisoned(x, owned) for x in operands]

    def want(self, sizes, held=None, offset=0):
        return oracle.grouped_outer(self.lhs, self.rhs, sizes, held, offset)


@jax.jit
def poisoned(x, owned):
    rows = jnp.arange(x.shape[0])[:, None]
    return jnp.where(owned[:, None], x, jnp.where(rows % 2 == 0, jnp.nan, jnp.inf))


@functools.lru_cache(16)
def problem(m, k, n):
    return Problem(m, k, n)


def on_gpu(num_groups, **options):
    """jit: (lhs, rhs, sizes, offset, accumulate) -> the product by a kernel, or an error."""

    def call(lhs, rhs, sizes, offset, accumulate=None):
        return pearl_jax.grouped_outer(
            lhs, rhs, sizes, group_offset=offset, num_groups=num_groups,
            accumulate=accumulate, implementation="cuda", **options,
        )  # fmt: skip

    return jax.jit(call)


def options_of(spec):
    return {"tile": spec.tile, "preferred_element_type": spec.out_dtype}


# Rows of groups around the 64 of a K tile, with empty ones in between.
MANY = [0, 0, 1, 7, 63, 64, 65, 0, 127, 128, 129, 2, 0, 191, 192, 193, 0, 500, 3, 0, 0] * 2


@pytest.mark.parametrize("spec", KERNELS, ids=lambda s: s.name)
def test_every_kernel(spec):
    """Rows of no group hold NaN and Inf; k and n end inside a tile; also added to something."""
    k, n = (320, 192) if spec.wide else (328, 200)
    p, old = problem(M, k, n), integers(np.random.default_rng(1), G, k, n)
    run = on_gpu(G, **options_of(spec))
    old_array = jnp.asarray(old).astype(spec.out_dtype)
    for case, sizes in SIZES.items():
        args = *p.operands(spec.dtype, owned_rows(sizes, M, G)), int32(*sizes), np.int32(0)
        check(run(*args), p.want(sizes), f"{spec.name}, {case}")
        check(run(*args, old_array), p.want(sizes) + old, f"{spec.name}, {case}, added")
    assert f'"{spec.name}"' in run.lower(*args).as_text()

    k, n = (64, 384) if spec.wide else (72, 392)
    m, held = sum(MANY) + 45, 40
    p, run = problem(m, k, n), on_gpu(held, **options_of(spec))
    for offset in (0, 1, len(MANY) - held, -3, 2**31 - 1, -(2**31)):
        args = p.operands(spec.dtype, owned_rows(MANY, m, held, offset))
        out = run(*args, int32(*MANY), np.int32(offset))
        check(out, p.want(MANY, held, offset), f"{spec.name}, offset {offset}")


@pytest.mark.parametrize("spec", KERNELS, ids=lambda s: s.name)
def test_one_group_with_nearly_all_rows(spec):
    """On Hopper two multiprocessors share each of its tiles: the same bits in every run."""
    k, n = (512, 768) if spec.wide else (520, 776)
    sizes = [3, 0, 4000, 9]
    p, old = problem(4020, k, n), integers(np.random.default_rng(1), 4, k, n)
    run, old_array = on_gpu(4, **options_of(spec)), jnp.asarray(old).astype(spec.out_dtype)
    args = *p.operands(spec.dtype, owned_rows(sizes, 4020, 4)), int32(*sizes), np.int32(0)
    for _ in range(20):
        check(run(*args), p.want(sizes), spec.name)
        check(run(*args, old_array), p.want(sizes) + old, f"{spec.name}, added")
    x, y = normal(0, 4020, k).astype(spec.dtype), normal(1, 4020, n).astype(spec.dtype)
    first = run(x, y, *args[2:])
    assert all((run(x, y, *args[2:]) == first).all() for _ in range(20))


@pytest.mark.parametrize("spec", KERNELS, ids=lambda s: s.name)
def test_nan_in_neighbours(spec):
    """Every second group holds NaN and Inf, in both operands, and the others none."""
    k, n = (256, 128) if spec.wide else (136, 264)
    sizes = [3, 64, 1, 65, 200, 1, 63, 129, 0, 0, 2, 127]
    p, run = problem(sum(sizes) + 9, k, n), on_gpu(len(sizes), **options_of(spec))
    for first in (0, 1):
        clean = np.arange(len(sizes)) % 2 == first
        rows = np.append(np.repeat(clean, sizes), [False] * 9)
        out = run(*p.operands(spec.dtype, rows), int32(*sizes), np.int32(0))
        check(out[clean], p.want(sizes)[clean], f"{spec.name}, groups from {first}")


@pytest.mark.parametrize(
    ("k", "n"),
    [
        (1, 7),
        (7, 1),
        (1, 1),
        (72, 100),
        (100, 72),
        (130, 64),
        (250, 257),
        (8, 2056),
        (1032, 8),
        (520, 8968),
    ],
)
def test_any_k_and_n(k, n):
    """Not only multiples of 8, which a kernel reads in place."""
    p, sizes = problem(M, k, n), SIZES["unaligned"]
    old = integers(np.random.default_rng(1), G, k, n)
    for dtype, out_dtype in (("bfloat16", "bfloat16"), ("float16", "float32")):
        run = on_gpu(G, preferred_element_type=out_dtype)
        args = *p.operands(dtype, owned_rows(sizes, M, G)), int32(*sizes), np.int32(0)
        check(run(*args), p.want(sizes), dtype)
        check(run(*args, jnp.asarray(old).astype(out_dtype)), p.want(sizes) + old, dtype)


@pytest.mark.parametrize("m", [1, 2, 7, 8, 63, 64, 65, 129])
def test_any_m(m):
    p, run = problem(m, 136, 264), on_gpu(3)
    for sizes in ([m // 2, 0, m - m // 2], [0, m, 0], [0, 0, 1], [0, 0, 0], [m, m, m]):
        args = p.operands("bfloat16", owned_rows(sizes, m, 3))
        check(run(*args, int32(*sizes), np.int32(0)), p.want(sizes), sizes)


@pytest.mark.parametrize("seed", range(30))
def test_random_problems(seed):
    """40 of one shape: new values do not compile again."""
    rng = np.random.default_rng(seed)
    m, given = int(rng.integers(1, 700)), int(rng.integers(1, 48))
    k, n, held = random_extent(rng, 600), random_extent(rng, 600), int(rng.integers(1, given + 1))
    dtype = str(rng.choice(["bfloat16", "float16"]))
    options = {"tile": rng.choice([None, *tiling.tiles(ARCH, "wgrad")])}
    options["preferred_element_type"] = str(rng.choice([dtype, "float32"]))
    p, run = Problem(m, k, n, seed), on_gpu(held, **options)
    for _ in range(40):
        sizes = [int(s) for s in random_sizes(rng, m, given)]
        offset = int(rng.integers(-2, given + 2)) if rng.random() < 0.5 else 0
        args = p.operands(dtype, owned_rows(sizes, m, held, offset))
        out = run(*args, int32(*sizes), np.int32(offset))
        want = p.want(sizes, held, offset)
        check(out, want, f"m {m}, k {k}, n {n}, {options}, sizes {sizes}, offset {offset}")
    assert run._cache_size() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_random_data(dtype):
    """Against float64: the worst group is within the rounding of float32 sums."""
    k, n = 264, 392
    lhs, rhs = (normal(i, sum(UNEVEN) + 50, d).astype(dtype) for i, d in enumerate((k, n)))
    want = oracle.grouped_outer(lhs, rhs, UNEVEN)
    for out_dtype in (dtype, "float32"):
        run = on_gpu(len(UNEVEN), preferred_element_type=out_dtype)
        out = run(lhs, rhs, int32(*UNEVEN), np.int32(0))
        error = oracle.worst_group_error(out, want, UNEVEN)
        # The tensor core cuts off sums to float32, so their error grows with the rows.
        assert error < (2e-5 if out_dtype == "float32" else oracle.TOLERANCE[dtype])


def test_float32_cotangent_of_a_bfloat16_call():
    """Both gradients by kernels; they are far closer than a bfloat16 cotangent gives."""
    m, k, n, sizes = 700, 136, 264, SIZES["sum below m"]
    x, w, ct = normal(0, m, k), normal(1, G, k, n), normal(2, m, n).astype("float32")
    ct = ct + 1e-3 * normal(3, m, n).astype("float32")
    wide = functools.partial(np.asarray, dtype=np.float64)

    for precision, bound in ((None, 2.0**-16), ("highest", 4e-6)):

        def gradients(x, w, ct, precision=precision):
            f = lambda x, w: pearl_jax.grouped_matmul(
                x.astype("bfloat16"), w.astype("bfloat16"), int32(*sizes), precision,
                "float32", implementation="cuda",
            )  # fmt: skip
            return jax.vjp(f, x, w)[1](ct)

        run = jax.jit(gradients).lower(x, w, ct).compile()
        assert run.as_text().count("pearl_jax.grouped_outer") > 0
        d_x, d_w = run(x, w, ct)
        for got, want in (
            (d_x, oracle.grouped_matmul(wide(ct), wide(w), sizes, True)),
            (d_w, oracle.grouped_outer(wide(x), wide(ct), sizes)),
        ):
            assert oracle.worst_group_error(got, want, sizes) < oracle.TOLERANCE["bfloat16"]
        # Before the result is rounded to bfloat16:
        run = jax.jit(
            lambda x, ct: pearl_jax.grouped_outer(
                x, ct, int32(*sizes), precision, "float32", implementation="cuda"
            )
        )
        error = oracle.worst_group_error(
            run(x, ct), oracle.grouped_outer(wide(x), wide(ct), sizes), sizes
        )
        assert error < bound


# Memory.


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_accumulates_in_place(out_dtype):
    """A donated array becomes the result, with no memory for another; others do not change."""
    p, sizes = problem(M, 136, 264), SIZES["unaligned"]
    operands = *p.operands("bfloat16"), int32(*sizes), np.int32(0)
    old = integers(np.random.default_rng(1), G, 136, 264)
    f = on_gpu(G, preferred_element_type=out_dtype)
    run = jax.jit(lambda *args: f(*args), donate_argnums=4)
    make = lambda: jnp.asarray(old).astype(out_dtype)
    compiled = run.lower(*operands, make()).compile()
    assert compiled.memory_analysis().temp_size_in_bytes - SUMS < 4096
    assert operations(compiled.as_text(), old.shape) <= NOTHING
    for _ in range(3):
        x = jax.block_until_ready(make())
        before = address(x)
        out = run(*operands, x)
        assert address(out) == before
        assert x.is_deleted()
        check(out, p.want(sizes) + old)
    x = make()
    check(f(*operands, x), p.want(sizes) + old)
    check(x, old)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tile", tiling.tiles(ARCH, "wgrad"), ids=str)
def test_poisoned_outputs_and_canaries_pytorch_172439(tile, out_dtype):
    """pytorch#172439, MSLK#158: the gradient of an empty group was what the memory held.

    tokamax#887, PR#888: it was NaN, or that of another group. Here outputs lie in memory
    full of NaN, each between two arrays that must not change.
    """
    k, n = 136, 200
    p, run = problem(M, k, n), on_gpu(G, tile=tile, preferred_element_type=out_dtype)
    zero, hits = jnp.int32(0), 0
    jax.block_until_ready(run(*p.operands("bfloat16"), jnp.zeros(G, jnp.int32), zero))
    for name, values in SIZES.items():
        operands = p.operands("bfloat16", owned_rows(values, M, G))
        sizes = jnp.asarray(int32(*values))
        kept, addresses = holes((G, k, n), out_dtype)
        outs = [run(*operands, sizes, zero) for _ in range(8)]
        hits += sum(address(out) in addresses for out in outs)
        for out in outs:
            check(out, p.want(values), name)
        for other in kept:
            assert (other == CANARY).all(), f"{name}: written outside of the output"
        del outs, kept
    assert hits > 50, f"only {hits} of 104 outputs lay in memory full of NaN"


def test_more_than_2_31_elements_vllm_45884():
    """vllm#45884: offsets of 32 bits. The result has 2**31 elements and some more."""
    g = 33
    x, y = (normal(i, 64, 8192) for i in range(2))
    sizes = int32(*[0] * 15, 20, *[0] * 16, 44)
    out = on_gpu(g)(x, y, sizes, np.int32(0))
    assert out.size > 2**31
    for group, rows in ((15, slice(0, 20)), (32, slice(20, 64))):
        want = np.asarray(x[rows, -512:], np.float64).T @ np.asarray(y[rows, -512:], np.float64)
        got = np.asarray(out[group, -512:, -512:], np.float64)
        assert np.linalg.norm(got - want) < oracle.TOLERANCE["bfloat16"] * np.linalg.norm(want)
    assert not out[31].any()
    assert not out[16, -1].any()


# Repeated runs.


@pytest.mark.parametrize("tile", tiling.tiles(ARCH, "wgrad"), ids=str)
def test_same_bits_in_50_runs_pytorch_186365(tile):
    lhs, rhs = normal(0, sum(UNEVEN) + 50, 1096), normal(1, sum(UNEVEN) + 50, 2056)
    run = on_gpu(len(UNEVEN), tile=tile, preferred_element_type="float32")
    sizes, zero = jnp.asarray(int32(*UNEVEN)), jnp.int32(0)
    first = run(lhs, rhs, sizes, zero)
    assert jnp.isfinite(first).all()
    bits = lambda x: x.view(jnp.uint32)
    differ = jax.jit(lambda a, b: jnp.sum(bits(a) != bits(b)))
    assert sum(int(differ(run(lhs, rhs, sizes, zero), first)) for _ in range(50)) == 0


# Compiled programs.


def test_training_step_is_three_kernels():
    """Nothing but kernels makes an array as large as the smallest operand."""
    x, w, ct = normal(0, M, 136), normal(1, G, 136, 264), normal(2, M, 264)

    def step(x, w, sizes, ct):
        f = lambda x, w: pearl_jax.grouped_matmul(x, w, sizes, implementation="cuda")
        out, vjp = jax.vjp(f, x, w)
        return out, *vjp(ct)

    run = jax.jit(step).lower(x, w, int32(*SIZES["unaligned"]), ct).compile()
    hlo = run.as_text()
    assert hlo.count(TARGET) == 1
    assert hlo.count('custom_call_target="pearl_jax.grouped_matmul"') == 2
    assert operations(hlo, x.shape) <= NOTHING | {"tuple"}
    assert not re.search(HOST, hlo)
    assert run.memory_analysis().temp_size_in_bytes - SUMS < 16384


# Public reports.


def test_empty_groups_tokamax_887():
    """tokamax#887, PR#1016: gradients of the weights of empty groups were junk, all the same."""
    sizes = [8, 0, 8, 0, 0, 3]
    p, run = problem(19, 64, 128), on_gpu(6)
    out = run(*p.operands("bfloat16"), int32(*sizes), np.int32(0))
    check(out, p.want(sizes))
    assert not np.asarray(out.view(jnp.uint16))[[1, 3, 4]].any()  # not even a sign


@pytest.mark.parametrize("shift", [1, 3, 8, 17, 63])
def test_groups_that_begin_anywhere_marin_8339(shift):
    """marin#8339, #8793, #8814: wrong unless groups began at multiples of 64 or 256 rows."""
    sizes = [shift, 64, 256, 200 - shift, 512, 1]
    p, run = problem(sum(sizes), 136, 264), on_gpu(6, preferred_element_type="float32")
    out = run(*p.operands("bfloat16"), int32(*sizes), np.int32(0))
    check(out, p.want(sizes), sizes)


def test_zero_groups_te_2765():
    """TE PR#2765, PR#3475: wrong gradients of all weights where one group had no rows.

    cutlass#2674: a stale accumulator was written for it, so large values come first.
    cutlass#2547, PR#1593, PR#3195: it hung, or read out of bounds.
    """
    p, run, rng = problem(300, 136, 264), on_gpu(6), np.random.default_rng(0)
    large = [jnp.full(x.shape, 2.0**60, "bfloat16") for x in p.operands("bfloat16")]
    cases = [np.zeros(6, int)]
    for where in (slice(0, 2), slice(2, 4), slice(4, 6), slice(0, 6, 2), slice(1, 6, 2)):
        for _ in range(6):
            cases.append(rng.multinomial(rng.integers(1, 300), np.ones(6) / 6))
            cases[-1][where] = 0
    for sizes in cases:
        sizes = [int(s) for s in sizes]
        run(*large, int32(50, 50, 50, 50, 50, 50), np.int32(0))
        args = p.operands("bfloat16", owned_rows(sizes, 300, 6))
        check(run(*args, int32(*sizes), np.int32(0)), p.want(sizes), sizes)


def test_new_sizes_do_not_recompile_te_2469():
    """TE#2469, PR#2680: sizes were read by the host. Here only the device sees them."""
    p, run = problem(M, 136, 264), on_gpu(G)
    operands = p.operands("bfloat16")
    with jax.transfer_guard_device_to_host("disallow"):
        outs = {name: run(*operands, int32(*s), np.int32(0)) for name, s in SIZES.items()}
        jax.block_until_ready(outs)
    assert run._cache_size() == 1
    for name, out in outs.items():
        check(out, p.want(SIZES[name]), name)


@pytest.mark.parametrize(("k", "n"), [(768, 1536), (384, 1152), (960, 640), (1000, 3000)])
def test_extents_that_are_no_powers_of_two_deepgemm_405(k, n):
    """DeepGEMM#405: an illegal instruction for k-grouped products of 768 by 1536."""
    p, run = problem(500, k, n), on_gpu(5)
    operands = p.operands("bfloat16")
    for sizes in ([100] * 5, [500, 0, 0, 0, 0], [1, 250, 0, 3, 125]):
        check(run(*operands, int32(*sizes), np.int32(0)), p.want(sizes), sizes)
