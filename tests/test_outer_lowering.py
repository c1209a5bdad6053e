"""What a call of grouped_outer becomes on CUDA, seen without a GPU."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import (
    ARCHS,
    BATCH,
    KERNELS,
    OUTER,
    SOME_TILE,
    G,
    K,
    M,
    N,
    calls,
    lower,
    names,
    operands,
    spec,
    with_library,  # noqa: F401
    work,
)

import pearl_jax
from pearl_jax import cost, cuda, tiling


def outer(**options):
    return functools.partial(pearl_jax.grouped_outer, **options)


def outer_operands(dtype="bfloat16", m=M, k=K, n=N, g=G):
    return spec(m, k, dtype=dtype), spec(m, n, dtype=dtype), spec(g, dtype="int32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("out_dtype", ["same", "float32"])
@pytest.mark.parametrize(("k", "n"), [(128, 192), (72, 192), (128, 200), (72, 200), (1408, 256)])
def test_outer(dtype, out_dtype, k, n):
    """One call, on the operands as they are but for a batch axis of size 1."""
    out_dtype = dtype if out_dtype == "same" else out_dtype
    text = lower(outer(preferred_element_type=out_dtype), *outer_operands(dtype, k=k, n=n))
    ((_, types, result),) = calls(text, OUTER)
    short, short_out = (
        {"bfloat16": "bf16"}.get(d, d.replace("loat", "")) for d in (dtype, out_dtype)
    )
    assert types == [f"1x{M}x{k}x{short}", f"1x{M}x{n}x{short}", f"1x{G}xi32", "1xi32", "1x4xi32"]
    assert result == f"1x{G}x{k}x{n}x{short_out}"
    for arch, name in zip(ARCHS, re.search(KERNELS, text).groups()):
        tile = cost.choose_outer(arch, k, n, G)
        assert name == tiling.kernel(arch, "wgrad", dtype, out_dtype, k, n, tile).name
        assert name in names()
    assert not work(text)
    assert not calls(text)


def test_outer_tile_by_hand():
    """It is a tile of one architecture's kernels; the other then has none."""
    both = {arch: tiling.tiles(arch, "wgrad") for arch in ARCHS}
    for tile in itertools.chain(*both.values()):
        text = lower(outer(tile=tile), *outer_operands())
        for arch, name in zip(ARCHS, re.search(KERNELS, text).groups()):
            assert bool(name) == (tile in both[arch])
            assert not name or name.endswith(f"_{tile}")


def test_outer_in_padded_columns(caplog):
    with caplog.at_level("WARNING", "pearl_jax"):
        text = lower(outer(), *outer_operands(k=100, n=250))
    ((_, types, result),) = calls(text, OUTER)
    assert types[:2] == [f"1x{M}x104xbf16", f"1x{M}x256xbf16"]
    assert result == f"1x{G}x104x256xbf16"
    assert f"-> tensor<{G}x100x250xbf16>" in text
    assert "grouped_outer copies its operands on the GPU" in caplog.text


def test_outer_of_nothing():
    for zero in ("m", "k", "n", "g"):
        assert not calls(lower(outer(), *outer_operands(**{zero: 0})), OUTER)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_accumulate_is_the_memory_of_the_result(out_dtype):
    """One more operand, which the call writes to: nothing is added outside of it."""
    args = *outer_operands(), spec(G, K, N, dtype=out_dtype)
    f = lambda x, y, s, a: outer(preferred_element_type=out_dtype, accumulate=a)(x, y, s)
    text = lower(f, *args)
    ((_, types, result),) = calls(text, OUTER)
    assert len(types) == 6
    assert types[5] == result
    assert re.search(r"output_operand_alias<.*operand_index = 5", text)
    assert not work(text)


def test_outer_keeps_sums_in_memory():
    """In a second result, which nobody reads."""
    text = lower(outer(), *outer_operands())
    assert re.search(rf"-> \(tensor<1x{G}x{K}x{N}xbf16>, tensor<{64 * 256 * 128}xf32>\)", text)


def test_outer_sums_over_batches_in_the_kernel():
    """The gradient of weights that all batches share: one result, of three parts each."""

    def gradient(x, w, s, ct):
        f = jax.vmap(lambda x, w: pearl_jax.grouped_matmul(x, w, s), (0, None))
        return jax.vjp(lambda w: f(x, w), w)[1](ct)[0]

    text = lower(gradient, spec(BATCH, M, K), *operands()[1:], spec(BATCH, M, N))
    ((_, types, result),) = calls(text, OUTER)
    assert types[:2] == [f"{BATCH}x{M}x{K}xbf16", f"{BATCH}x{M}x{N}xbf16"]
    assert types[4] == f"{BATCH}x4xi32"
    assert result == f"1x{G}x{K}x{N}xbf16"
    # JAX then takes the batch axis away, of size 1.
    assert not [line for line in work(text) if f"tensor<1x{G}x{K}x{N}xbf16>" not in line]


def test_batches_that_are_summed_are_consecutive():
    a, b = 2, 3
    sizes, offset = jnp.zeros((a, b, G), jnp.int32), jnp.zeros((), jnp.int32)
    operands = (jnp.zeros((a, 1, M, K)), 2), (jnp.zeros((1, b, M, N)), 2), (sizes, 1), (offset, 0)
    flat = [(i, j, i * b + j, 0) for j in range(b) for i in range(a)]
    np.testing.assert_array_equal(cuda._batch_index((a, b), operands, (0,)), flat)


def test_outer_falls_back_as_the_matmul_does(caplog):
    args = outer_operands("float32")
    with caplog.at_level("WARNING", "pearl_jax"):
        text = lower(outer(), *args)
        lower(outer(), *outer_operands("float32", g=2))
    assert not calls(text, OUTER)
    assert len(caplog.records) == 1
    assert "grouped_outer runs in plain XLA on the GPU: its kernels take" in caplog.text
    with pytest.raises(ValueError, match="grouped_outer: implementation='cuda' cannot run, its"):
        lower(outer(implementation="cuda"), *args)
    with pytest.raises(ValueError, match="its kernels have the tiles"):
        lower(outer(implementation="cuda", tile=SOME_TILE), *outer_operands())
