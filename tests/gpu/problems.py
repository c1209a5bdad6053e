"""Problems with exact answers: small integers, whose sums float32 holds whatever the order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import pearl_jax
from pearl_jax import library, tiling

KERNELS = [s for s in tiling.kernels(library.present_arch() or "sm_90a") if s.form != "wgrad"]
# The options of a call for each tile of each layout, for pytest.mark.parametrize.
TILES = {
    f"{'gnk' if spec.form == 'dgrad' else 'gkn'}-{spec.tile}": {
        "tile": spec.tile,
        "transpose_rhs": spec.form == "dgrad",
    }
    for spec in KERNELS
}

# Group sizes by name, for 700 rows in 6 groups.
SIZES = {
    "uniform": [117, 117, 117, 117, 116, 116],
    "empty first": [0, 201, 40, 300, 100, 59],
    "empty middle": [201, 40, 0, 0, 300, 159],
    "empty last": [257, 255, 1, 127, 60, 0],
    "all empty": [0, 0, 0, 0, 0, 0],
    "size one": [1, 1, 1, 1, 1, 1],
    "sum below m": [33, 90, 0, 257, 1, 50],
    "unaligned": [7, 130, 513, 17, 3, 19],
    "one hot": [0, 0, 700, 0, 0, 0],
    "sum above m": [300, 0, 310, 90, 400, 5],
    "negative": [100, -5, 257, -1, 0, 300],
    "huge": [5, 2**31 - 1, 2**31 - 1, 0, 2**31 - 1, 3],
    "least": [-(2**31), 350, -(2**31), 350, 0, 0],
}
M, G = 700, 6


def integers(rng, *shape):
    return rng.integers(-2, 3, shape, np.int8)


class Problem:
    """lhs (m, k) and rhs (g, k, n) of integers, and the products for any group sizes."""

    def __init__(self, m, k, n, g, seed=0):
        rng = np.random.default_rng(seed)
        self.m, self.g = m, g
        self.lhs, self.rhs = integers(rng, m, k), integers(rng, g, k, n)

    def operands(self, dtype, transpose_rhs=False):
        rhs = self.rhs.swapaxes(1, 2) if transpose_rhs else self.rhs
        return jnp.asarray(self.lhs).astype(dtype), jnp.asarray(rhs).astype(dtype)

    def want(self, sizes, offset=0):
        return _want(self, tuple(sizes), offset)

    def poisoned(self, lhs, sizes, offset=0):
        """lhs with NaN and Inf in the rows that no group of rhs owns."""
        return _poisoned(lhs, owned_rows(sizes, self.m, self.g, offset))


@functools.lru_cache(64)
def _want(problem, sizes, offset):
    return oracle.grouped_matmul(problem.lhs, problem.rhs, sizes, offset=offset)


@functools.lru_cache(16)
def problem(m, k, n, g):
    return Problem(m, k, n, g)


def owned_rows(sizes, m, held, offset=0):
    """(m,) bool: rows of the groups [offset, offset + held)."""
    owned = np.zeros(m, bool)
    rows = oracle.bounds(sizes, m)
    for i in range(max(offset, 0), min(offset + held, len(sizes))):
        owned[rows[i] : rows[i + 1]] = True
    return owned


@jax.jit
def _poisoned(x, owned):
    rows = jnp.arange(x.shape[0])[:, None]
    return jnp.where(owned[:, None], x, jnp.where(rows % 2 == 0, jnp.nan, jnp.inf))


def check(got, want, what=""):
    """got is exactly want, rounded once to the dtype of got."""
    want = np.asarray(want, np.float32).astype(got.dtype).astype(np.float32)
    got = np.asarray(got, np.float32)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    wrong = np.argwhere(got != want)  # also NaN, which want never has
    if len(wrong):
        first = tuple(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.size} elements are wrong, "
            f"the first at {first}: {got[first]} instead of {want[first]}"
        )


def on_gpu(**options):
    """jit: (lhs, rhs, sizes, offset) -> the product by a kernel, or an error."""

    def call(lhs, rhs, sizes, offset):
        return pearl_jax.grouped_matmul(
            lhs, rhs, sizes, group_offset=offset, implementation="cuda", **options
        )

    return jax.jit(call)


def int32(*values):
    return np.array(values, np.int32)
