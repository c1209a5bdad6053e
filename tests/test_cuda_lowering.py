"""What a call becomes on CUDA, seen without a GPU: the kernel, its operands, and fallbacks."""

import itertools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lowering import (
    ARCHS,
    BATCH,
    KERNELS,
    OUTER,
    SOME_TILE,
    TARGET,
    G,
    K,
    M,
    N,
    calls,
    forget,
    lower,
    matmul,
    names,
    operands,
    spec,
    with_library,  # noqa: F401
    work,
)

import pearl_jax
from pearl_jax import TileConfig, cost, cuda, library, tiling, tuned


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["gkn", "gnk"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("out_dtype", ["same", "float32"])
@pytest.mark.parametrize(("k", "n"), [(128, 192), (72, 192), (128, 200), (72, 200)])
def test_forward(dtype, out_dtype, transpose_rhs, k, n):
    """One call, on the operands as they are but for a batch axis of size 1."""
    out_dtype = dtype if out_dtype == "same" else out_dtype
    f = matmul(transpose_rhs=transpose_rhs, preferred_element_type=out_dtype)
    text = lower(f, *operands(dtype, transpose_rhs, k=k, n=n))
    ((name, types, result),) = calls(text)
    short, short_out = (
        {"bfloat16": "bf16"}.get(d, d.replace("loat", "")) for d in (dtype, out_dtype)
    )
    rhs = (n, k) if transpose_rhs else (k, n)
    assert types == [
        f"1x{M}x{k}x{short}",
        f"1x{G}x{rhs[0]}x{rhs[1]}x{short}",
        f"1x{G}xi32",
        "1xi32",
        "1x4xi32",
    ]
    assert result == f"1x{M}x{n}x{short_out}"
    wide = (k if transpose_rhs else n) % 64 == 0
    form = tiling.matmul_form(transpose_rhs)
    tile = cost.choose("sm_90a", form, M, k, n, G)
    want = tiling.KernelSpec("sm_90a", form, dtype, out_dtype, wide, tile)
    assert name == want.name
    assert name in names()
    assert not re.search(r"stablehlo\.(transpose|pad|slice|dot_general|while|convert)\b", text)


def test_tile_by_hand_and_by_rows():
    for transpose_rhs in (False, True):
        for tile in tiling.tiles("sm_90a", tiling.matmul_form(transpose_rhs)):
            f = matmul(transpose_rhs=transpose_rhs, tile=tile)
            ((name, *_),) = calls(lower(f, *operands(transpose_rhs=transpose_rhs)))
            assert name.endswith(f"_{tile}")
            assert name in names()
        chosen = set()
        k, n, g = 4096, 3072, 16
        for m in (1, 16 * 32, 16 * 1024):
            f = matmul(transpose_rhs=transpose_rhs)
            given = operands(transpose_rhs=transpose_rhs, m=m, k=k, n=n, g=g)
            ((name, *_),) = calls(lower(f, *given))
            tile = tuned.choose("sm_90a", tiling.matmul_form(transpose_rhs), m, k, n, g)
            assert name.endswith(f"_{tile}")
            chosen.add(tile)
        assert len(chosen) > 1


def test_a_tile_that_only_this_library_has(monkeypatch):
    """It can be asked for where it was compiled, and is never chosen."""
    tile = TileConfig(32, 256, pdl=False)
    extra = tiling.KernelSpec("sm_90a", "fwd", "bfloat16", "bfloat16", True, tile)
    f = matmul(tile=tile, implementation="cuda")
    with pytest.raises(ValueError, match=r"its kernels for rhs .* have the tiles"):
        lower(f, *operands())
    compiled = frozenset({*names(), extra.name})
    monkeypatch.setattr(library, "kernel_names", lambda: compiled)
    forget()
    text = lower(f, *operands())
    assert re.search(KERNELS, text).groups() == ("", extra.name)
    assert library.tiles("sm_90a", "fwd") == [*tiling.tiles("sm_90a", "fwd"), tile]
    for arch, form in itertools.product(ARCHS, tiling.FORMS):
        if (arch, form) != ("sm_90a", "fwd"):
            assert library.tiles(arch, form) == tiling.tiles(arch, form)
    with pytest.raises(ValueError, match=r"its kernels for rhs .* have the tiles"):
        lower(
            matmul(tile=tile, implementation="cuda", transpose_rhs=True),
            *operands(transpose_rhs=True),
        )


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["gkn", "gnk"])
def test_one_program_for_both_architectures(transpose_rhs):
    """Each gets the kernel that tiling chooses for it; a tile by hand may be for one only."""
    form = tiling.matmul_form(transpose_rhs)

    def chosen(m, tile=None):
        f = matmul(transpose_rhs=transpose_rhs, tile=tile)
        text = lower(f, *operands(transpose_rhs=transpose_rhs, m=m, k=512, n=512))
        return re.search(KERNELS, text).groups()

    for m in (8, 256, 8000):
        tiles = [cost.choose(arch, form, m, 512, 512, G) for arch in ARCHS]
        for arch, tile, name in zip(ARCHS, tiles, chosen(m)):
            assert name == tiling.kernel(arch, form, "bfloat16", "bfloat16", 512, 512, tile).name
    both = {arch: tiling.tiles(arch, form) for arch in ARCHS}
    for tile in {*both["sm_100f"], *both["sm_90a"]}:
        for arch, name in zip(ARCHS, chosen(64, tile)):
            assert bool(name) == (tile in both[arch])
            assert not name or name.endswith(f"_{tile}")


def test_a_shard_of_the_groups_has_its_share_of_the_rows():
    """The tile is that of 16 rows for each group at hand, not of all rows for them."""
    f = lambda x, w, s: pearl_jax.grouped_matmul(x, w, s, group_offset=2)
    m, k, n = 16 * 256, 4096, 3200  # of no measured shape
    ((name, types, _),) = calls(lower(f, spec(m, k), spec(16, k, n), spec(256, dtype="int32")))
    tile, other = (cost.choose("sm_90a", "fwd", rows, k, n, 16) for rows in (16 * 16, m))
    assert name.endswith(f"_{tile}")
    assert tile != other
    assert types[1:4] == [f"1x16x{k}x{n}xbf16", "1x256xi32", "1xi32"]


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["gkn", "gnk"])
def test_gradient_of_lhs(transpose_rhs):
    """The same weights in the other layout's kernel, nothing transposed."""
    f = matmul(transpose_rhs=transpose_rhs)

    def gradient(x, w, s, ct):
        return jax.vjp(lambda x: f(x, w, s), x)[1](ct)[0]

    args = operands(transpose_rhs=transpose_rhs)
    text = lower(gradient, *args, spec(M, N))
    ((name, types, result),) = calls(text)
    assert ("_gkn_" if transpose_rhs else "_gnk_") in name
    assert name in names()
    assert types[:2] == [f"1x{M}x{N}xbf16", "x".join(map(str, (1, *args[1].shape, "bf16")))]
    assert result == f"1x{M}x{K}xbf16"
    assert "transpose" not in text


def test_both_gradients():
    """A training step is three kernels, on operands that nobody transposes, copies or converts."""

    def both(x, w, s, ct):
        f = lambda x, w: pearl_jax.grouped_matmul(x, w, s, implementation="cuda")
        out, vjp = jax.vjp(f, x, w)
        return out, *vjp(ct)

    text = lower(both, *operands(), spec(M, N))
    found = calls(text)
    assert [("_gkn_" in name, "_gnk_" in name) for name, *_ in found] == [(1, 0), (0, 1)]
    ((name, types, result),) = calls(text, OUTER)
    assert types[:2] == [f"1x{M}x{K}xbf16", f"1x{M}x{N}xbf16"]
    assert result == f"1x{G}x{K}x{N}xbf16"
    assert name in names()
    assert not work(text)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_float32_cotangent_of_a_bfloat16_call(precision, caplog):
    """Both gradients by kernels, on the two halves of the cotangent: three for highest."""
    parts = 3 if precision == "highest" else 2

    def both(x, w, s, ct):
        f = matmul(preferred_element_type="float32", precision=precision, implementation="cuda")
        return jax.vjp(lambda x, w: f(x, w, s), x, w)[1](ct)

    with caplog.at_level("WARNING", "pearl_jax"):
        text = lower(both, *operands(), spec(M, N, dtype="float32"))
    dgrad = [c for c in calls(text) if "_gnk_" in c[0]]
    wgrad = calls(text, OUTER)
    assert len(dgrad) == len(wgrad) == parts
    for _, types, result in dgrad:
        assert (types[0], result) == (f"1x{M}x{N}xbf16", f"1x{M}x{K}xf32")
    for i, (_, types, result) in enumerate(wgrad):
        assert (types[1], result) == (f"1x{M}x{N}xbf16", f"1x{G}x{K}x{N}xf32")
        assert len(types) == (6 if i else 5)  # the later ones add to the first
    assert not caplog.records


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-20])
@pytest.mark.parametrize(("precision", "bound"), [(None, 2.0**-17), (lax.Precision.HIGHEST, 0)])
def test_parts_sum_to_the_value(scale, precision, bound):
    x = (np.random.default_rng(0).standard_normal(1000) * scale).astype(np.float32)
    parts = jax.jit(lambda x: cuda._parts(x, jnp.dtype("bfloat16"), precision))(x)
    total = sum(np.asarray(p, np.float64) for p in parts)
    assert np.max(np.abs(total - x) / np.abs(x)) <= bound
    assert len(parts) == (2 if bound else 3)


def test_parts_of_infinity_are_not_nan():
    x = jnp.array([jnp.inf, -jnp.inf, 0.0, 3.0])
    small, large = cuda._parts(x, jnp.dtype("bfloat16"), None)
    np.testing.assert_array_equal(large, x.astype("bfloat16"))
    np.testing.assert_array_equal(small, jnp.zeros(4, "bfloat16"))


# Batches: which batch of each operand a batch of the result takes.

SUBSETS = [s for s in itertools.product([None, 0], repeat=4) if any(d == 0 for d in s)]


def batch_index(f, *args):
    """The last operand of the call, as a value: the operation runs with a stand-in for it."""
    seen = []

    def ffi_call(name, result):
        assert name == TARGET

        def call(*operands, kernels):
            seen.append(operands)
            return jnp.zeros(result.shape, result.dtype)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.ffi, "ffi_call", ffi_call)
        run = lambda *args: cuda._matmul(
            *args, transpose_rhs=False, precision=None, out_dtype=jnp.dtype("bfloat16"), tile=None
        )
        f(run)(*args)
    (operands,) = seen
    return np.asarray(operands[-1])


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join("ny"[d == 0] for d in s))
def test_vmap_of_every_subset(subset):
    """Shared operands keep one batch; each of the others has all of its own."""
    args = [*operands(), spec(dtype="int32")]
    args = [spec(BATCH, *x.shape, dtype=x.dtype) if d == 0 else x for x, d in zip(args, subset)]
    f = lambda x, w, s, i: pearl_jax.grouped_matmul(x, w, s, group_offset=i)
    text = lower(jax.vmap(f, subset), *args)
    ((_, types, result),) = calls(text)
    assert [int(t.split("x")[0]) for t in types] == [
        *(BATCH if d == 0 else 1 for d in subset),
        BATCH,
    ]
    assert result == f"{BATCH}x{M}x{N}xbf16"
    # No array as large as a copy of the weights for each batch, unless they come so.
    if subset[1] is None:
        assert f"{BATCH}x{G}x{K}x{N}" not in text


def test_batch_index():
    """The values, for operands that are mapped by either of two vmaps or by both."""
    a, b = 2, 3
    lhs, rhs = jnp.zeros((a, 1, M, K), "bfloat16"), jnp.zeros((1, b, G, K, N), "bfloat16")
    sizes, offset = jnp.zeros((a, b, G), jnp.int32), jnp.zeros((), jnp.int32)
    found = batch_index(lambda f: f, lhs, rhs, sizes, offset)
    flat = [(i, j) for i in range(a) for j in range(b)]
    np.testing.assert_array_equal(found, [[i, j, i * b + j, 0] for i, j in flat])
    assert found.dtype == np.int32


def test_padding_is_said_and_only_where_needed(caplog):
    """k = 100 and n = 250 are padded to multiples of 8, the result is cut: said once."""
    with caplog.at_level("WARNING", "pearl_jax"):
        text = lower(matmul(), *operands(k=100, n=250))
        lower(matmul(), *operands(k=100, n=250, m=5))
    ((name, types, result),) = calls(text)
    assert types[:2] == [f"1x{M}x104xbf16", f"1x{G}x104x256xbf16"]
    assert result == f"1x{M}x256xbf16"
    assert f"-> tensor<{M}x250xbf16>" in text
    assert name in names()
    assert [r.message for r in caplog.records] == [
        "pearl_jax: grouped_matmul copies its operands on the GPU: k and n must be multiples of "
        "8 to be read in place, got k = 100 and n = 250"
    ]
    caplog.clear()
    lower(matmul(), *operands(k=104, n=8))
    assert not caplog.records


def test_empty_problems_call_nothing():
    for zero in ("m", "k", "n", "g"):
        assert not calls(lower(matmul(), *operands(**{zero: 0})))


# Where there is no kernel: plain XLA, said once and with the reason, or an error.

OBSTACLES = {
    "float32": (
        operands("float32"),
        {},
        "its kernels take lhs and rhs both bfloat16 or both float16",
    ),
    "mixed": ((spec(M, K), *operands("float16")[1:]), {}, "got bfloat16 and float16"),
    "precision": (
        operands(),
        {"precision": lax.DotAlgorithmPreset.F32_F32_F32},
        "its kernels do not compute bfloat16 with precision F32_F32_F32",
    ),
    "tile": (operands(), {"tile": SOME_TILE}, f"got {SOME_TILE!r}"),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_fallback_is_said_once_with_its_reason(case, caplog):
    args, options, reason = OBSTACLES[case]
    with caplog.at_level("WARNING", "pearl_jax"):
        text = lower(matmul(**options), *args)
        assert not calls(text)
        assert "dot" in text
        jax.clear_caches()
        lower(matmul(**options), *args)
    (record,) = caplog.records
    assert record.message.startswith("pearl_jax: grouped_matmul runs in plain XLA on the GPU: ")
    assert reason in record.message


@pytest.mark.parametrize("case", OBSTACLES)
def test_no_kernel_is_an_error_if_asked_for(case):
    """One that begins with the operator's name, and gives the reason."""
    args, options, reason = OBSTACLES[case]
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        lower(matmul(implementation="cuda", **options), *args)
    assert str(caught.value).startswith("grouped_matmul: implementation='cuda' cannot run, ")


def test_missing_library(monkeypatch, caplog):
    monkeypatch.setattr(library, "unavailable", lambda: "it is on the moon")
    with caplog.at_level("WARNING", "pearl_jax"):
        assert not calls(lower(matmul(), *operands()))
        lower(matmul(), *operands(m=5))
    assert [r.message for r in caplog.records] == [
        "pearl_jax: grouped_matmul runs in plain XLA on the GPU: it is on the moon"
    ]
    with pytest.raises(ValueError, match="implementation='cuda' cannot run, it is on the moon"):
        lower(matmul(implementation="cuda"), *operands())


def test_symbolic_shapes_have_no_kernel(caplog):
    """An exported module for any m runs in plain XLA, and says so."""
    (m,) = jax.export.symbolic_shape("m")
    args = (jax.ShapeDtypeStruct((m, K), "bfloat16"), *operands()[1:])
    export = lambda f: jax.export.export(jax.jit(lambda *a: f(*a)), platforms=["cuda"])(*args)
    with caplog.at_level("WARNING", "pearl_jax"):
        assert TARGET not in export(matmul()).mlir_module()
    assert "need constant shapes, got lhs (m, 128)" in caplog.records[0].message
    with pytest.raises(ValueError, match="constant shapes"):
        export(matmul(implementation="cuda"))


def test_xla_never_calls_the_kernel(caplog):
    """Also not in derivatives and batches; and is not said to be slow, as it was asked for."""
    f = matmul(implementation="xla")

    def both(x, w, s, ct):
        out, vjp = jax.vjp(lambda x, w: f(x, w, s), x, w)
        return out, *vjp(ct)

    with caplog.at_level("WARNING", "pearl_jax"):
        text = lower(both, *operands(), spec(M, N))
        batched = lower(jax.vmap(f, (0, None, None)), spec(2, M, K), *operands()[1:])
    assert "pearl_jax." not in text
    assert not calls(batched)
    assert not caplog.records


def test_other_platforms():
    """There is no kernel there: plain XLA without a word, or an error."""
    jitted = jax.jit(lambda *args: matmul()(*args))
    assert TARGET not in jitted.trace(*operands()).lower(lowering_platforms=("cpu",)).as_text()
    asked = jax.jit(lambda *args: matmul(implementation="cuda")(*args)).trace(*operands())
    with pytest.raises(ValueError, match="runs on NVIDIA GPUs only, and this is for another"):
        asked.lower(lowering_platforms=("cpu",))


@pytest.mark.parametrize(
    "precision", [None, "default", "highest", lax.Precision.HIGH, "BF16_BF16_F32"]
)
def test_precisions_that_the_kernels_have(precision):
    """Products of 16-bit numbers are exact in float32: no higher precision would differ."""
    assert len(calls(lower(matmul(precision=precision), *operands()))) == 1


# Public reports.


def test_nothing_but_arrays_of_xla_cudnn_frontend_1174():
    """cudnn-frontend PR#1174: scratch that Python held was freed while a kernel used it.

    Ours has none: five operands and one result, all of them XLA's.
    """
    text = lower(matmul(), *operands())
    ((_, types, _),) = calls(text)
    assert len(types) == 5
    line = next(line for line in text.splitlines() if f"@{TARGET}(" in line)
    assert "has_side_effect = true" not in line
    assert "output_operand_aliases" not in line


def test_environment_does_not_matter_cutlass_3398(monkeypatch):
    """cutlass#3398 and its like: a cache key held the whole environment, so all compiled again."""
    before = lower(matmul(), *operands())
    for name in ("SOME_OTHER_VARIABLE", "CUTE_DSL_ARCH", "PATH"):
        monkeypatch.setenv(name, os.environ.get(name, "") + ":1")
    jax.clear_caches()
    assert lower(matmul(), *operands()) == before


def test_lowering_compiles_nothing_marin_8045(monkeypatch):
    """marin PR#8045: kernels were compiled in every lowering. Here none is, in any."""
    import builtins
    import subprocess

    real = builtins.__import__

    def no_compiler(name, *args, **kwargs):
        assert name.partition(".")[0] not in ("cutlass", "triton"), name
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_compiler)
    monkeypatch.setattr(subprocess, "Popen", None)
    for m in (1, 100, 4000):
        assert calls(lower(matmul(), *operands(m=m)))


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["gkn", "gnk"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_forward_works_so_does_the_gradient_tokamax_sm100(transpose_rhs, out_dtype):
    """tokamax raised for some calls in the gradient only. Here for every tile and result."""
    for tile in (None, *tiling.tiles("sm_90a", tiling.matmul_form(transpose_rhs))):
        f = matmul(
            transpose_rhs=transpose_rhs,
            preferred_element_type=out_dtype,
            tile=tile,
            implementation="cuda",
        )

        def both(x, w, s, ct):
            out, vjp = jax.vjp(lambda x, w: f(x, w, s), x, w)
            return out, *vjp(ct)

        args = operands(transpose_rhs=transpose_rhs)
        assert calls(lower(f, *args))
        assert calls(lower(both, *args, spec(M, N, dtype=out_dtype)))


def test_rows_over_all_batches_are_counted():
    """2**32 rows in 4096 batches: refused while lowering, not by the handler."""
    f = jax.vmap(matmul(implementation="cuda"), in_axes=(0, None, None))
    with pytest.raises(
        ValueError, match=r"fewer than 2\*\*31 rows over all batches, got 4294967296"
    ):
        lower(f, spec(4096, 2**20, 64), spec(2, 64, 64), spec(2, dtype="int32"))
