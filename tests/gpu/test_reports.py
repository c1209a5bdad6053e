"""Failures of other grouped matmuls on GPUs that users have reported in public, as tests of ours.

Each test names the reports it is about. Those about memory, repeated runs and compiled
programs stand beside their like in the other files here.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import pearl_jax
from gpu.problems import SIZES, G, M, Problem, check, int32, on_gpu, problem

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n", [128, 160, 192, 208, 320])
def test_n_between_tiles_marin_7484(n):
    """marin#7484: 18 % of the elements were wrong for n = 160 with a tile of 256 columns."""
    p = problem(512, 72, n, 2)
    lhs, rhs = p.operands("bfloat16")
    run = on_gpu()
    for sizes in ([256, 256], [257, 255]):
        check(run(lhs, rhs, int32(*sizes), np.int32(0)), p.want(sizes), sizes)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_neighbours_at_the_edge_marin_8610(out_dtype):
    """marin#8610: a lost mask at the edge of a tile wrote over neighbours at n = 192.

    Rows are neighbours of each other: each group's rows are right to the last column, and
    the first ones of the next group as well, for every number of rows up to a tile's.
    """
    p = problem(600, 64, 192, 3)
    lhs, rhs = p.operands("bfloat16")
    run = on_gpu(preferred_element_type=out_dtype)
    for rows in range(1, 300, 7):
        sizes = [rows, 1, 300 - rows]
        check(run(lhs, rhs, int32(*sizes), np.int32(0)), p.want(sizes), sizes)


@pytest.mark.parametrize("g", [1, 2, 31, 32, 33, 64, 127, 300, 1024])
def test_number_of_groups_te_2660(g):
    """TE#2660: a workspace was too small for some numbers of groups."""
    rng = np.random.default_rng(g)
    p = Problem(700, 64, 72, g, seed=g)
    lhs, rhs = p.operands("bfloat16")
    run = on_gpu()
    one_hot = np.zeros(g, int)
    one_hot[rng.integers(g)] = 650
    for sizes in (
        rng.multinomial(650, np.ones(g) / g),
        rng.multinomial(650, rng.dirichlet(np.full(g, 0.05))),
        one_hot,
        one_hot[::-1],
    ):
        sizes = [int(s) for s in sizes]
        check(run(p.poisoned(lhs, sizes), rhs, int32(*sizes), np.int32(0)), p.want(sizes), sizes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_group_counts_flashinfer_3792(dtype):
    """flashinfer#3792: only the first group was computed. Weights i + 1 show which one it was."""
    g, k, n = 40, 64, 136
    w = jnp.broadcast_to(jnp.arange(1, g + 1)[:, None, None], (g, k, n)).astype(dtype)
    sizes = np.random.default_rng(0).integers(0, 9, g)
    m = sizes.sum() + 5
    out = on_gpu(preferred_element_type="float32")(
        jnp.ones((m, k), dtype), w, int32(*sizes), np.int32(0)
    )
    group = np.append(np.repeat(np.arange(1, g + 1), sizes), [0] * 5)
    np.testing.assert_array_equal(out, np.broadcast_to(k * group[:, None], (m, n)))


def test_zero_groups_cutlass_2547():
    """cutlass#2547, PR#1593, PR#3195: groups without rows, after a call with large values.

    cutlass#2674: a stale accumulator was written for them.
    """
    p = problem(300, 136, 264, 6)
    lhs, rhs = p.operands("bfloat16")
    run, rng = on_gpu(), np.random.default_rng(0)
    large = jnp.full(lhs.shape, 2.0**60, "bfloat16")
    cases = [np.zeros(6, int)]
    for where in (slice(0, 2), slice(2, 4), slice(4, 6), slice(0, 6, 2), slice(1, 6, 2)):
        for _ in range(6):
            cases.append(rng.multinomial(rng.integers(1, 300), np.ones(6) / 6))
            cases[-1][where] = 0
    for sizes in cases:
        sizes = [int(s) for s in sizes]
        run(large, rhs, int32(300, 0, 0, 0, 0, 0), np.int32(0))
        check(run(p.poisoned(lhs, sizes), rhs, int32(*sizes), np.int32(0)), p.want(sizes), sizes)


@pytest.mark.parametrize(("m", "n"), [(768, 1536), (384, 1152), (960, 640), (1000, 3000)])
@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["gkn", "gnk"])
def test_extents_that_are_no_powers_of_two_deepgemm_405(m, n, transpose_rhs):
    """DeepGEMM#405: an illegal instruction for m = 768, n = 1536."""
    p = problem(m, 192, n, 5)
    lhs, rhs = p.operands("bfloat16", transpose_rhs)
    run = on_gpu(transpose_rhs=transpose_rhs)
    for sizes in ([m // 5] * 5, [m, 0, 0, 0, 0], [1, m // 2, 0, 3, m // 4]):
        check(run(lhs, rhs, int32(*sizes), np.int32(0)), p.want(sizes), sizes)


def test_permuted_groups_pytorch_186365(rng):
    """pytorch#186365: other results in a loop. Permuted groups give exactly permuted rows."""
    sizes = np.array([120, 0, 13, 300, 1, 77], np.int32)
    lhs = jnp.asarray(rng.standard_normal((511, 264)), "bfloat16")
    rhs = jnp.asarray(rng.standard_normal((6, 264, 520)), "bfloat16")
    run = on_gpu()
    out = np.asarray(run(lhs, rhs, sizes, np.int32(0)).view(jnp.uint16))
    blocks = np.split(np.arange(511), np.cumsum(sizes)[:-1])
    for order in ([3, 0, 5, 2, 1, 4], [5, 4, 3, 2, 1, 0]):
        rows = np.concatenate([blocks[i] for i in order])
        permuted = run(lhs[rows], rhs[np.array(order)], sizes[order], np.int32(0))
        np.testing.assert_array_equal(np.asarray(permuted.view(jnp.uint16)), out[rows])


def test_second_step_is_finite_pytorch_154557():
    """pytorch#154557, transformers PR#48205, MSLK#158: NaN in recycled memory reached step two."""
    p, sizes = problem(M, 136, 136, G), SIZES["sum below m"]
    lhs, rhs = p.operands("bfloat16")
    f = on_gpu()

    @jax.jit
    def step(x, w):
        out, vjp = jax.vjp(lambda x, w: f(x, w, int32(*sizes), np.int32(0)), x, w)
        dx, dw = vjp(out / 64)
        return x - dx / 64, w - dw / 64

    expected = None
    for fill in (0.0, jnp.nan):
        junk = [jnp.full(shape, fill, "bfloat16") for shape in (lhs.shape, rhs.shape) * 4]
        jax.block_until_ready(junk)
        del junk
        x = jnp.where((jnp.arange(M) < sum(sizes))[:, None], lhs, fill)
        w = rhs
        for _ in range(3):
            x, w = step(x, w)
        found = np.asarray(x[: sum(sizes)], np.float32), np.asarray(w, np.float32)
        assert np.isfinite(found[0]).all()
        assert np.isfinite(found[1]).all()
        assert (found[1] != np.asarray(rhs, np.float32)).any()
        expected = expected or found
        for a, b in zip(found, expected):
            np.testing.assert_array_equal(a, b)


def test_no_compiler_where_it_runs_marin_8045():
    """marin PR#8045, cutlass#3398: kernels were compiled again in each process.

    Here a process that can import no compiler runs three kernels, and its environment
    does not matter.
    """
    code = """
        import sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("cutlass", "triton"):
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Block())
        import jax, jax.numpy as jnp, pearl_jax
        sizes = jnp.array([3, 0, 61])
        for m, dtype in ((64, "bfloat16"), (64, "float16"), (1024, "bfloat16")):
            x, w = jnp.ones((m, 64), dtype), jnp.ones((3, 64, 64), dtype)
            y = pearl_jax.grouped_matmul(x, w, sizes, implementation="cuda")
            print(int(y.astype("float32").sum()) == 64 * 64 * 64)
    """
    root = str(Path(pearl_jax.__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    for unrelated in ({}, {"SOME_OTHER_VARIABLE": "1", "CUTE_DSL_ARCH": "sm_100a"}):
        env = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=env | unrelated, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["True"] * 3


def test_ragged_dot_runs_a_kernel_too():
    """The drop-in for jax.lax.ragged_dot, with its results."""
    p, sizes = problem(M, 136, 264, G), SIZES["unaligned"]
    lhs, rhs = p.operands("bfloat16")
    run = jax.jit(pearl_jax.ragged_dot).lower(lhs, rhs, int32(*sizes)).compile()
    assert "pearl_jax.grouped_matmul" in run.as_text()
    check(run(lhs, rhs, int32(*sizes)), oracle.grouped_matmul(p.lhs, p.rhs, sizes))
    outer = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    general = jax.jit(lambda *args: pearl_jax.ragged_dot_general(*args, outer))
    check(general(lhs, jnp.swapaxes(rhs, 1, 2), int32(*sizes)), p.want(sizes))
