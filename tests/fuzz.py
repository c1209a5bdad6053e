"""Random problems against the oracle: in the test suite, or many of them by hand.

    python tests/fuzz.py --examples 100000

A pool of configurations (what is compiled) is drawn first; each example then draws group
sizes, an offset and data for one of them, so that most examples compile nothing.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pearl_jax

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything static of one problem."""

    op: str  # "matmul" or "outer"
    m: int
    k: int
    n: int
    given: int  # groups in group_sizes
    held: int  # groups that rhs or the result holds
    lhs_dtype: str
    rhs_dtype: str
    transpose_rhs: bool
    rows: int | None  # of a tile chosen by hand

    @classmethod
    def random(cls, rng):
        given = int(rng.integers(1, 9))
        return cls(
            op=str(rng.choice(["matmul", "outer"])),
            m=int(rng.integers(0, 90)) if rng.random() < 0.7 else int(rng.integers(200, 600)),
            k=int(rng.integers(1, 60)),
            n=int(rng.integers(1, 60)),
            given=given,
            held=int(rng.integers(0, given + 1)),
            lhs_dtype=str(rng.choice(DTYPES, p=[0.4, 0.3, 0.1, 0.1, 0.1])),
            rhs_dtype=str(rng.choice(DTYPES, p=[0.4, 0.3, 0.1, 0.1, 0.1])),
            transpose_rhs=bool(rng.random() < 0.5),
            rows=int(rng.integers(1, 70)) if rng.random() < 0.3 else None,
        )


@functools.lru_cache(maxsize=256)
def compiled(config):
    tile = None if config.rows is None else pearl_jax.TileConfig(config.rows)
    options = {"preferred_element_type": jnp.float32, "tile": tile}

    def call(lhs, rhs, sizes, offset):
        if config.op == "outer":
            return pearl_jax.grouped_outer(
                lhs, rhs, sizes, group_offset=offset, num_groups=config.held, **options
            )
        return pearl_jax.grouped_matmul(
            lhs, rhs, sizes, group_offset=offset, transpose_rhs=config.transpose_rhs, **options
        )

    return jax.jit(call)


@st.composite
def problems(draw, pool):
    config = draw(st.sampled_from(pool))
    mean = max(config.m // config.given, 1)
    size = st.one_of(
        st.just(0),
        st.integers(0, 2 * mean),
        st.integers(-3, config.m + 3),
        st.sampled_from([1, config.m, -(2**31), 2**31 - 1]),
    )
    sizes = draw(st.lists(size, min_size=config.given, max_size=config.given))
    offset = draw(st.one_of(st.just(0), st.integers(-2, config.given + 2)))
    return config, sizes, offset, draw(st.integers(0, 2**32 - 1))


def check(problem):
    """Raises AssertionError where the worst group of the result is wrong."""
    config, sizes, offset, seed = problem
    rng = np.random.default_rng(seed)
    rhs_shape = (config.m, config.n)
    if config.op == "matmul":
        inner = (config.n, config.k) if config.transpose_rhs else (config.k, config.n)
        rhs_shape = (config.held, *inner)
    lhs = jnp.asarray(rng.standard_normal((config.m, config.k)), config.lhs_dtype)
    rhs = jnp.asarray(rng.standard_normal(rhs_shape), config.rhs_dtype)

    # Rows of no group hold NaN, which must not be seen.
    owned = np.zeros(config.m, bool)
    rows = oracle.bounds(sizes, config.m)
    for i in range(offset, offset + config.held):
        if 0 <= i < config.given:
            owned[rows[i] : rows[i + 1]] = True
    if lhs.size:
        lhs = jnp.where(jnp.asarray(owned)[:, None], lhs, jnp.nan)
    if config.op == "outer":
        if rhs.size:
            rhs = jnp.where(jnp.asarray(owned)[:, None], rhs, jnp.nan)
        want = oracle.grouped_outer(lhs, rhs, sizes, config.held, offset)
    else:
        want = oracle.grouped_matmul(lhs, rhs, sizes, config.transpose_rhs, offset)
    got = compiled(config)(lhs, rhs, np.array(sizes, np.int32), np.int32(offset))
    assert not np.asarray(got)[~owned].any() if config.op == "matmul" else True
    error = oracle.worst_group_error(got, want, sizes)
    assert error < oracle.TOLERANCE["float32"], f"worst group error {error}"


def run(examples, seed, configs=64, progress=lambda: None, **options):
    """Checks `examples` problems over a pool of `configs` configurations."""
    rng = np.random.default_rng(seed)
    pool = [Config.random(rng) for _ in range(configs)]

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )
    @given(problems(pool))
    def test(problem):
        check(problem)
        progress()

    test()


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first pool")
    arguments = parser.parse_args()
    if arguments.examples < 1:
        parser.error(f"--examples must be positive, got {arguments.examples}")
    from tqdm import tqdm

    chunk = 2000
    with tqdm(total=arguments.examples) as bar:
        for i, done in enumerate(range(0, arguments.examples, chunk)):
            count = min(chunk, arguments.examples - done)
            run(count, arguments.seed + i, progress=bar.update)
    print(f"{arguments.examples} random problems agree with the oracle")


if __name__ == "__main__":
    main()
