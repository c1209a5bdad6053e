"""The look whether results are right here, and what it says when they are not."""

import sys

import jax.numpy as jnp
import pytest

import pearl_jax

selfcheck = sys.modules["pearl_jax.selfcheck"]


def test_right_results():
    found = pearl_jax.selfcheck()
    assert len(found) == 9
    assert all(0 < error < 5e-3 for error in found.values())


@pytest.mark.parametrize(
    ("function", "wrong", "named"),
    [
        ("grouped_matmul", lambda out: out.at[3, 0].add(1), r"\(g, k, n\) is off by"),
        ("grouped_matmul", lambda out: out.at[-1, -1].set(1e-6), r"\(g, n, k\) is off by inf"),
        ("grouped_matmul", lambda out: out.at[100, 0].set(jnp.nan), r"float16 \(g, k, n\) is off"),
        ("grouped_outer", lambda out: out.at[1, 0, 0].set(1e-6), "outer is off by inf"),
    ],
)
def test_wrong_results(monkeypatch, function, wrong, named):
    """A wrong number, something in rows of no group, NaN, and an empty group that is not 0."""
    right = getattr(selfcheck, function)
    monkeypatch.setattr(
        selfcheck, function, lambda *args, **options: wrong(right(*args, **options))
    )
    with pytest.raises(RuntimeError, match=f"^selfcheck: on cpu, plain XLA: .*{named}"):
        pearl_jax.selfcheck()
