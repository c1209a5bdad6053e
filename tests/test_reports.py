"""Failures that users of other grouped matmuls have reported in public, as tests of ours.

Each test names the reports it is about. Reports about GPUs, kernels and packages have
their tests elsewhere; here is what a CPU can show.
"""

import ast
import contextlib
import doctest
import inspect
import itertools
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pearl_jax
from pearl_jax import TileConfig, grouped_matmul, grouped_outer, ragged_dot

ROOT = pathlib.Path(pearl_jax.__file__).parents[1]
FORMS = ("matmul", "transposed", "outer")


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def ternary(seed, *shape, dtype=np.float32):
    """Values -1, 0 and 1: short sums of their products are exact in every dtype."""
    return jnp.asarray(np.random.default_rng(seed).integers(-1, 2, shape), dtype)


def sizes_of(*sizes):
    return jnp.array(sizes, jnp.int32)


def problem(form, m, k, n, g, make=normal, **options):
    """The function of one form, its oracle, and two operands."""
    if form == "outer":
        return grouped_outer, oracle.grouped_outer, make(1, m, k, **options), make(2, m, n, **options)
    transposed = form == "transposed"
    shape = (g, n, k) if transposed else (g, k, n)

    def run(*args, **kwargs):
        return grouped_matmul(*args, **kwargs, transpose_rhs=transposed)

    def want(*args):
        return oracle.grouped_matmul(*args, transpose_rhs=transposed)

    return run, want, make(1, m, k, **options), make(2, *shape, **options)


def error_by_group(got, want, sizes):
    """The worst group's relative error; rows (m, n) are cut by sizes, (g, k, n) by group."""
    if want.ndim == 3:
        got, sizes = np.asarray(got).reshape(-1, want.shape[-1]), [want.shape[1]] * len(want)
        want = want.reshape(-1, want.shape[-1])
    return oracle.worst_group_error(got, want, sizes)


def grads(run, ct, sizes):
    """jit: (lhs, rhs) -> the output and both gradients for the cotangent ct."""

    def f(x, w, ct, sizes):
        out, vjp = jax.vjp(lambda x, w: run(x, w, sizes), x, w)
        return out, *vjp(ct)

    return lambda x, w: jax.jit(f)(x, w, ct, sizes)


def python(code, **env):
    """Runs code in a fresh interpreter and returns what it prints."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | env
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCK = """
import importlib, pkgutil, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"no module named {{name}}", name=name.partition(".")[0])
sys.meta_path.insert(0, Block())
import pearl_jax, jax.numpy as jnp
"""


def test_group_offset_jax_34168():
    """jax#34168: group_offset, eager, under jit and in the gradient. The parts sum to the whole."""
    m, k, n, parts, g = 40, 6, 5, 4, 8
    x, w, ct = normal(1, m, k), normal(2, g, k, n), normal(3, m, n)
    sizes = sizes_of(3, 0, 7, 10, 0, 0, 9, 6)

    def part(x, w, offset, ct):
        out, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, group_offset=offset), x, w)
        return out, *vjp(ct)

    for run in (part, jax.jit(part)):
        found = [run(x, w[i : i + 2], jnp.int32(i), ct) for i in range(0, g, g // parts)]
        out, dx, dw = zip(*found)
        want = oracle.grouped_matmul(x, w, sizes)
        assert oracle.worst_group_error(sum(out), want, sizes) < 1e-6
        want = oracle.grouped_matmul(ct, w, sizes, transpose_rhs=True)
        assert oracle.worst_group_error(sum(dx), want, sizes) < 1e-6
        want = oracle.grouped_outer(x, ct, sizes)
        assert error_by_group(jnp.concatenate(dw), want, sizes) < 1e-6
        # Rows of other parts' groups are exactly 0 in each part.
        for i, y in enumerate(out):
            ends = np.cumsum([0, *sizes])[[2 * i, 2 * i + 2]]
            assert not np.any(np.delete(y, np.arange(*ends), axis=0))


def test_all_modules_import_jax_40888():
    """jax#40888: files were missing. Every module imports, without CuTe DSL and Flax."""
    code = BLOCK.format(blocked=("cutlass", "flax")) + textwrap.dedent("""
        for module in pkgutil.walk_packages(pearl_jax.__path__, "pearl_jax."):
            if module.name.startswith("pearl_jax.kernels"):
                continue  # the sources of the kernels: only the build imports them
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as e:
                assert (module.name, e.name) == ("pearl_jax.nn", "flax"), (module.name, e)
        print(*sorted(m for m in sys.modules if m.startswith("pearl_jax.")))
        assert not {"cutlass", "flax"} & set(sys.modules)
    """)
    assert {"pearl_jax.ragged_dot", "pearl_jax.tiling"} <= set(python(code).split())


def test_import_on_cpu_only_host_cutlass_3083():
    """cutlass#3083: importing beside jax crashed on a host without GPUs."""
    code = BLOCK.format(blocked=("cutlass",)) + textwrap.dedent("""
        y = pearl_jax.grouped_matmul(jnp.ones((3, 2)), jnp.ones((2, 2, 1)), jnp.array([1, 2]))
        print(y.sum())
    """)
    assert python(code, CUDA_VISIBLE_DEVICES="").strip() == "6.0"


@pytest.mark.parametrize("shardy", [True, False])
def test_both_partitioners_jax_33403(shardy):
    """jax#33403: RaggedDot did not compile under Shardy. Both partitioners give the result."""
    code = f"""
        import jax, jax.numpy as jnp, numpy as np, pearl_jax
        try:
            jax.config.update("jax_use_shardy_partitioner", {shardy})
            refused = None
        except ValueError as e:
            refused = str(e)
        if refused:
            assert "hardy" in refused and not {shardy}, refused
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        rng = np.random.default_rng(0)
        x = rng.standard_normal((64, 16), np.float32)
        w = rng.standard_normal((8, 16, 6), np.float32)
        sizes = jnp.array([9, 0, 7, 16, 0, 1, 20, 5])
        put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))

        def f(x, w):
            return pearl_jax.grouped_matmul(x, w, sizes).sum(), 0
        g = jax.grad(lambda x, w: (pearl_jax.grouped_matmul(x, w, sizes) ** 2).sum(), (0, 1))
        want = [pearl_jax.grouped_matmul(x, w, sizes), *g(jnp.array(x), jnp.array(w))]
        with jax.set_mesh(mesh):
            for sx, sw in ((("a",), ()), ((), (None, None, "b")), (("b",), ("a",))):
                args = put(x, *sx), put(w, *sw)
                got = [jax.jit(lambda x, w: pearl_jax.grouped_matmul(x, w, sizes))(*args)]
                got += jax.jit(g)(*args)
                for a, b in zip(got, want):
                    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        print("same", len(jax.devices()))
    """
    flags = "--xla_force_host_platform_device_count=8"
    assert python(code, XLA_FLAGS=flags).strip() == "same 8"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("factor", ["m", "n"])
@pytest.mark.parametrize("form", ["matmul", "outer"])
def test_no_all_gather_jax_38551(form, factor, kind):
    """jax#38551, jax#32098, TE#2467: sharded operands were gathered without a word."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,), devices=jax.devices()[:4])
    run, want, x, w = problem(form, 64, 24, 16, 4)
    sizes = sizes_of(10, 0, 33, 17)
    spec_x = P("a") if factor == "m" else P()
    spec_w = {"m": P("a") if form == "outer" else P(), "n": P(*[None] * (w.ndim - 1), "a")}[factor]
    out_spec = {"m": P("a"), "n": P(None, "a")}[factor]
    if form == "outer":
        out_spec = {"m": P(), "n": P(None, None, "a")}[factor]
    with jax.set_mesh(mesh):
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, spec_x), (w, spec_w))]
        f = jax.jit(lambda x, w: run(x, w, sizes))
        hlo = f.lower(*args).compile().as_text()
        out = f(*args)
    assert not re.search(r"all-gather|all-to-all|collective-permute", hlo)
    assert ("all-reduce" in hlo) == (form == "outer" and factor == "m")
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, out_spec), out.ndim)
    assert error_by_group(out, want(x, w, sizes), sizes) < 1e-6


# The relative error that float32 operands may, and for the narrow ones must, show.
EXACT, THREE_PASSES, BF16 = (0, 1e-6), (0, 1e-4), (1e-4, 1e-2)
PRECISIONS = {None: EXACT, "default": EXACT, "tensorfloat32": EXACT, "float32": EXACT}
PRECISIONS |= dict.fromkeys(lax.Precision, EXACT) | {(lax.Precision.HIGH, None): EXACT}
PRECISIONS |= {p: BF16 for p in lax.DotAlgorithmPreset} | {
    p: EXACT
    for p in lax.DotAlgorithmPreset
    if p.name.startswith(("F32", "F64", "DEFAULT", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9"))
}
PRECISIONS |= {p: THREE_PASSES for p in lax.DotAlgorithmPreset if p.name.endswith("X3")}


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_precision_jax_32207(precision):
    """jax#32207: DotAlgorithmPreset was rejected. Each value is honoured or a ValueError."""
    sizes = sizes_of(3, 0, 9)
    run, want, x, w = problem("matmul", 12, 32, 8, 3)
    try:
        lax.dot_general(x, w[0], (((1,), (0,)), ((), ())), precision=precision)
        supported = True
    except ValueError:
        supported = False
    if not supported:
        with pytest.raises(ValueError, match="(?i)precision"):
            run(x, w, sizes, precision)
        return
    low, high = PRECISIONS[precision]
    out = run(x, w, sizes, precision)
    assert low <= oracle.worst_group_error(out, want(x, w, sizes), sizes) < high
    text = str(jax.make_jaxpr(lambda x, w: run(x, w, sizes, precision))(x, w))
    assert precision in (None, "default") or "precision=None" not in text


@pytest.mark.parametrize("name", ["grouped_matmul", "grouped_outer"])
def test_remat_policies_jax_30717(name, capsys):
    """jax PR#30717: scaled_dot was not saved by dots_saveable.

    That policy is a closed list of jax's own primitives, which no other package can
    join. Ours carry a name instead, which any policy can be combined with.
    """
    form = name.removeprefix("grouped_")
    run, _, x, w = problem(form, 8, 4, 6, 2)
    sizes, policies = sizes_of(3, 5), jax.checkpoint_policies
    named = policies.save_only_these_names(name)
    both = policies.save_from_both_policies(policies.dots_saveable, named)

    def loss(x, w):
        return jnp.sin(run(x, w, sizes)).sum()

    found = {}
    for policy in (policies.nothing_saveable, named, both):
        f = jax.checkpoint(loss, policy=policy)
        jax.ad_checkpoint.print_saved_residuals(f, x, w)
        saved = [line for line in capsys.readouterr().out.splitlines() if f"'{name}'" in line]
        jaxpr = str(jax.make_jaxpr(jax.grad(f, (0, 1)))(x, w))
        found[policy] = len(saved), len(re.findall(rf"= {name}\\[", jaxpr))
    kept, again = found[named], found[policies.nothing_saveable]
    assert kept[0] == 1 and again[0] == 0 and found[both] == kept
    assert again[1] == kept[1] + 1  # the call that is computed again


@pytest.mark.parametrize("form", FORMS)
def test_shard_map_check_vma_jax_36180(form):
    """jax PR#36180: kernels broke under check_vma. Forward and gradient, weights replicated."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    run, want, x, w = problem(form, 32, 5, 6, 2)
    sizes = jnp.tile(sizes_of(3, 4), (4, 1))  # each device has 8 rows and one row of slack
    spec = P("a") if form == "outer" else P()

    def loss(x, w, sizes):
        local = jax.shard_map(
            lambda x, w, s: run(x, w, s[0])[None],
            mesh=mesh, in_specs=(P("a"), spec, P("a")), out_specs=P("a"), check_vma=True,
        )  # fmt: skip
        out = local(x, w, sizes)
        return (out**2).sum(), out

    (_, out), (dx, dw) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, w, sizes)

    def plain(x, w):
        blocks = [slice(8 * i, 8 * i + 8) for i in range(4)]
        outs = [run(x[b], w[b] if form == "outer" else w, sizes[0]) for b in blocks]
        return (jnp.stack(outs) ** 2).sum()

    for i in range(4):
        b = slice(8 * i, 8 * i + 8)
        exact = want(x[b], w[b] if form == "outer" else w, sizes[0])
        assert error_by_group(out[i], exact, sizes[0]) < 1e-6
    for got, exact in zip((dx, dw), jax.grad(plain, (0, 1))(x, w)):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


def test_static_parameters_are_distinct_jax_40847():
    """jax#40847: a static value was missing from a cache key. Each of ours is in it."""
    x, w, sizes = normal(1, 16, 6), normal(2, 3, 6, 6), sizes_of(5, 4, 7)

    def checks(f, want, pair):
        a, b = pair
        texts = [str(jax.make_jaxpr(lambda f=f, o=o: f(**o))()) for o in pair]
        assert texts[0] != texts[1], pair
        for options in (a, b, a):  # a again: it must not get what b left behind
            got, (exact, low, high) = f(**options), want(**options)
            assert low <= error_by_group(got, exact, sizes[: len(exact)]) < high, options
            assert got.dtype == options.get("preferred_element_type", jnp.float32)

    def rows(transpose_rhs=False, precision=None, preferred_element_type=None, tile=None):
        bf16 = precision == "BF16_BF16_F32"
        bounds = BF16 if bf16 else (0, 1e-6)
        return oracle.grouped_matmul(x, w, sizes, transpose_rhs=transpose_rhs), *bounds

    def outer(num_groups=3, group_offset=0, **_):
        return oracle.grouped_outer(x, x, sizes, num_groups, group_offset), 0, 1e-6

    f = lambda **o: grouped_matmul(x, w, sizes, **o)  # noqa: E731
    checks(f, rows, ({"transpose_rhs": False}, {"transpose_rhs": True}))
    checks(f, rows, ({"precision": "F32_F32_F32"}, {"precision": "BF16_BF16_F32"}))
    checks(f, rows, ({"tile": TileConfig(8)}, {"tile": TileConfig(16)}))
    with jax.enable_x64(True):
        wide = {"preferred_element_type": jnp.float64}
        checks(f, rows, ({"preferred_element_type": jnp.float32}, wide))
    f = lambda **o: grouped_outer(x, x, sizes, **o)  # noqa: E731
    first = {"group_offset": 0}
    checks(f, outer, ({**first, "num_groups": 2}, {**first, "num_groups": 3}))


@pytest.mark.parametrize("form", ["matmul", "outer"])
def test_vmap_of_every_subset(form):
    """jax's ragged_dot has no vmap for most operands. Any subset here, against a loop."""
    run, _, x, w = problem(form, 3 * 12, 4, 5, 3 * 2)
    sizes = jnp.array([[4, 6], [0, 12], [9, 0]], jnp.int32)
    operands = x.reshape(3, 12, 4), w.reshape(3, *((12, 5) if form == "outer" else (2, 4, 5))), sizes
    f = jax.jit(run)
    for mapped in itertools.product((0, None), repeat=3):
        if mapped == (None,) * 3:
            continue
        args = [a if d == 0 else a[1] for a, d in zip(operands, mapped)]
        got = jax.jit(jax.vmap(run, mapped))(*args)
        for i in range(3):
            want = f(*(a[i] if d == 0 else a for a, d in zip(args, mapped)))
            np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-6)


def test_poisoned_tail_xla_40189():
    """xla PR#40189, PR#42313: rows past the last group. Ours are exactly 0, and NaN stays out."""
    x, w, sizes = normal(1, 32, 6), normal(2, 3, 6, 5), sizes_of(7, 0, 12)
    for poison in (np.nan, np.inf):
        bad = x.at[19:].set(poison)
        out, dx, dw = grads(grouped_matmul, jnp.ones((32, 5)).at[19:].set(poison), sizes)(bad, w)
        assert not np.any(out[19:]) and not np.any(dx[19:])
        assert np.isfinite(out).all() and np.isfinite(dx).all() and np.isfinite(dw).all()
        assert oracle.worst_group_error(out, oracle.grouped_matmul(x, w, sizes), sizes) < 1e-6


def test_empty_groups_tokamax_887():
    """tokamax#887, TE PR#2765, pytorch#172439: weight gradients of empty groups are exactly 0."""
    sizes = sizes_of(8, 0, 8, 0)
    x, w, ct = 1e30 * normal(1, 16, 4), normal(2, 4, 4, 6), normal(3, 16, 6)
    _, _, dw = grads(grouped_matmul, ct, sizes)(x, w)
    assert np.asarray(dw)[[1, 3]].tobytes() == bytes(2 * 4 * 6 * 4)
    assert error_by_group(dw[::2], oracle.grouped_outer(x, ct, sizes)[::2], sizes) < 1e-6


def test_docstrings_run_tokamax_980():
    """tokamax PR#980: no documentation. All examples in the docstrings run as printed."""
    parser, runner, found = doctest.DocTestParser(), doctest.DocTestRunner(), []
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("pearl_jax.") or name.startswith("pearl_jax.nn"):
            continue
        # Strings of the source, so that those of module constants are among them.
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and ">>>" in text:
                found.append(text)
                runner.run(parser.get_doctest(text, {}, name, module.__file__, node.lineno))
    assert runner.summarize().failed == 0
    public = {n: f for n, f in vars(pearl_jax).items() if inspect.isfunction(f) and n[0] != "_"}
    assert {"grouped_matmul", "grouped_outer", "ragged_dot"} <= set(public)
    for name, function in public.items():
        assert ">>>" in (function.__doc__ or ""), f"{name} has no example"
    assert len(found) > len(public)


DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8")
RUN_PAIRS = {(d, d) for d in DTYPES} | {
    ("bfloat16", "float32"), ("float8_e4m3fn", "float8_e5m2"), ("int8", "bfloat16"),
    ("float8_e5m2", "float32"), ("float16", "bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_forward_has_a_gradient_tokamax_sm100(form):
    """tokamax raised on one platform in the gradient only. Forward works: so does backward."""
    sizes = sizes_of(3, 0, 4)
    with jax.enable_x64(True):
        for pair in itertools.product(DTYPES, repeat=2):
            run, want, x, w = problem(form, 8, 3, 2, 3, ternary)
            x, w = x.astype(pair[0]), w.astype(pair[1])

            def backward(x, w, ct):
                out, vjp = jax.vjp(lambda x, w: run(x, w, sizes), x, w)
                return out, *vjp(ct)

            aval = jax.eval_shape(run, x, w, sizes)
            ct = ternary(3, *aval.shape)
            ct = ct.astype(aval.dtype) if pair != ("int8", "int8") else np.zeros(aval.shape, jax.float0)
            kinds = [jax.dtypes.float0 if d == "int8" else jnp.dtype(d) for d in pair]
            assert [d.dtype for d in jax.eval_shape(backward, x, w, ct)[1:]] == kinds, pair
            if pair not in RUN_PAIRS or pair == ("int8", "int8"):
                continue
            out, dx, dw = jax.jit(backward)(x, w, ct)
            np.testing.assert_array_equal(np.float64(out), want(x, w, sizes))
            exact = gradients(form, x, w, ct, sizes)
            for got, e in zip((dx, dw), exact):
                if got.dtype != jax.dtypes.float0:
                    np.testing.assert_array_equal(np.float64(got), e, err_msg=str(pair))


def gradients(form, x, w, ct, sizes):
    if form == "outer":
        dx = oracle.grouped_matmul(w, ct, sizes, transpose_rhs=True)
        return dx, oracle.grouped_matmul(x, ct, sizes)
    transposed = form == "transposed"
    dx = oracle.grouped_matmul(ct, w, sizes, transpose_rhs=not transposed)
    return dx, oracle.grouped_outer(*((ct, x) if transposed else (x, ct)), sizes)


WIDTHS = (1, 7, 72, 96, 100, 136)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", WIDTHS)
def test_widths_off_the_tile_maxtext_1183(form, k):
    """maxtext#1183, pytorch#172440: wrong where k or n is no multiple of a tile."""
    sizes = sizes_of(9, 1, 0, 21)
    for n in WIDTHS:
        run, want, x, w = problem(form, 33, k, n, 4)
        assert error_by_group(run(x, w, sizes), want(x, w, sizes), sizes) < 2e-6, n
