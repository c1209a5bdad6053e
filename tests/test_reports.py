"""Failures that users of other grouped matmuls have reported in public, as tests of ours.

Each test names the reports it is about. Here is what a CPU can show; those about arguments are
in test_errors, about the package in test_package, about the call of the kernels in
test_cuda_lowering, about GPUs in gpu/.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from interpreter import python
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pearl_jax import TileConfig, grouped_matmul, grouped_outer, ragged_dot

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
    shape = {"matmul": (g, k, n), "transposed": (g, n, k), "outer": (m, n)}[form]
    run, want = grouped_matmul, oracle.grouped_matmul
    if form == "outer":
        run, want = grouped_outer, oracle.grouped_outer
    elif form == "transposed":
        run, want = (functools.partial(f, transpose_rhs=True) for f in (run, want))
    return run, want, make(1, m, k, **options), make(2, *shape, **options)


def grads(run, ct, sizes):
    """jit: (lhs, rhs) -> the output and both gradients for the cotangent ct."""

    def f(x, w, ct, sizes):
        out, vjp = jax.vjp(lambda x, w: run(x, w, sizes), x, w)
        return out, *vjp(ct)

    return lambda x, w: jax.jit(f)(x, w, ct, sizes)


def gradients(form, x, w, ct, sizes):
    """What both gradients must be, in float64."""
    if form == "outer":
        dx = oracle.grouped_matmul(w, ct, sizes, transpose_rhs=True)
        return dx, oracle.grouped_matmul(x, ct, sizes)
    transposed = form == "transposed"
    dx = oracle.grouped_matmul(ct, w, sizes, transpose_rhs=not transposed)
    return dx, oracle.grouped_outer(*((ct, x) if transposed else (x, ct)), sizes)


def test_group_offset_jax_34168():
    """jax#34168: group_offset, eager, under jit and in the gradient. The parts sum to the whole."""
    m, k, n, g = 40, 6, 5, 8
    x, w, ct = normal(1, m, k), normal(2, g, k, n), normal(3, m, n)
    sizes = sizes_of(3, 0, 7, 10, 0, 0, 9, 6)

    def part(x, w, offset):
        return grouped_matmul(x, w, sizes, group_offset=offset)

    parts = [(x, w[i : i + 2], jnp.int32(i)) for i in range(0, g, 2)]
    backward = jax.jit(lambda x, w, i: jax.vjp(lambda x, w: part(x, w, i), x, w)[1](ct))
    dx, dw = zip(*(backward(*p) for p in parts))
    want = gradients("matmul", x, w, ct, sizes)
    assert oracle.worst_group_error(sum(dx), want[0], sizes) < 1e-6
    assert oracle.worst_group_error(jnp.concatenate(dw), want[1], sizes) < 1e-6
    for run in (part, jax.jit(part)):
        for x, weights, i in parts:
            want = oracle.grouped_matmul(x, weights, sizes, offset=int(i))
            out = run(x, weights, i)
            assert oracle.worst_group_error(out, want, sizes) < 1e-6  # others' rows: exactly 0


@pytest.mark.parametrize("shardy", [True, False])
def test_both_partitioners_jax_33403(shardy):
    """jax#33403: RaggedDot did not compile under Shardy. Both partitioners give the result."""
    code = f"""
        import jax, jax.numpy as jnp, numpy as np, pearl_jax
        jax.config.update("jax_use_shardy_partitioner", {shardy})
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        rng = np.random.default_rng(0)
        x = rng.standard_normal((64, 16), np.float32)
        w = rng.standard_normal((8, 16, 6), np.float32)
        sizes = jnp.array([9, 0, 7, 16, 0, 1, 20, 5])
        put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))

        def f(x, w):
            out, vjp = jax.vjp(lambda x, w: pearl_jax.grouped_matmul(x, w, sizes), x, w)
            return out, *vjp(out)

        want = jax.jit(f)(x, w)
        with jax.set_mesh(mesh):
            for sx, sw in ((("a",), (None, None, "b")), (("b",), ("a",))):
                for a, b in zip(jax.jit(f)(put(x, *sx), put(w, *sw)), want):
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
    specs = {
        ("matmul", "m"): (P("a"), P(), P("a")),
        ("matmul", "n"): (P(), P(None, None, "a"), P(None, "a")),
        ("outer", "m"): (P("a"), P("a"), P()),
        ("outer", "n"): (P(), P(None, "a"), P(None, None, "a")),
    }
    *in_specs, out_spec = specs[form, factor]
    with jax.set_mesh(mesh):
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, w), in_specs)]
        f = jax.jit(lambda x, w: run(x, w, sizes))
        hlo = f.lower(*args).compile().as_text()
        out = f(*args)
    assert not re.search(r"all-gather|all-to-all|collective-permute", hlo)
    assert ("all-reduce" in hlo) == (form == "outer" and factor == "m")
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, out_spec), out.ndim)
    assert oracle.worst_group_error(out, want(x, w, sizes), sizes) < 1e-6


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
        found[policy] = len(saved), len(re.findall(rf"= {name}\[", jaxpr))
    kept, again = found[named], found[policies.nothing_saveable]
    assert (kept[0], again[0]) == (1, 0)
    assert found[both] == kept
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

    want_dw = []
    for i in range(4):
        b = slice(8 * i, 8 * i + 8)
        y = w[b] if form == "outer" else w
        exact = want(x[b], y, sizes[0])
        assert oracle.worst_group_error(out[i], exact, sizes[0]) < 1e-6
        want_dx, dw_part = gradients(form, x[b], y, 2 * exact, sizes[0])
        np.testing.assert_allclose(dx[b], want_dx, rtol=1e-5, atol=1e-5)
        want_dw.append(dw_part)
    want_dw = np.concatenate(want_dw) if form == "outer" else sum(want_dw)
    np.testing.assert_allclose(dw, want_dw, rtol=1e-5, atol=1e-5)


def test_vmap_of_every_subset():
    """jax's ragged_dot has no vmap for most operands. Any subset here, against a loop."""
    run, want, x, w = problem("matmul", 3 * 12, 4, 5, 3 * 2)
    sizes = jnp.array([[4, 6], [0, 12], [9, 0]], jnp.int32)
    operands = x.reshape(3, 12, 4), w.reshape(3, 2, 4, 5), sizes
    for mapped in itertools.product((0, None), repeat=3):
        if mapped == (None,) * 3:
            continue
        args = [a if d == 0 else a[1] for a, d in zip(operands, mapped)]
        got = jax.jit(jax.vmap(run, mapped))(*args)
        for i in range(3):
            one = [a[i] if d == 0 else a for a, d in zip(args, mapped)]
            assert oracle.worst_group_error(got[i], want(*one), one[2]) < 1e-6, mapped


def test_poisoned_tail_xla_40189_te_2912():
    """xla PR#40189, PR#42313: rows past the last group. Ours are exactly 0, and NaN stays out.

    TE PR#2912: a check of sum == m fires on padded buffers. Here half of the rows are slack.
    """
    x, w, ct, sizes = normal(1, 32, 6), normal(2, 3, 6, 5), normal(3, 32, 5), sizes_of(7, 0, 9)
    want = oracle.grouped_matmul(x, w, sizes), *gradients("matmul", x, w, ct, sizes)
    for poison in (1, np.nan, np.inf):
        found = grads(grouped_matmul, ct.at[16:].set(poison), sizes)(x.at[16:].set(poison), w)
        for got, exact in zip(found, want):
            assert oracle.worst_group_error(got, exact, sizes) < 1e-6


def test_empty_groups_tokamax_887():
    """tokamax#887, TE PR#2765, pytorch#172439: weight gradients of empty groups are exactly 0."""
    sizes = sizes_of(8, 0, 8, 0)
    x, w, ct = 1e30 * normal(1, 16, 4), normal(2, 4, 4, 6), normal(3, 16, 6)
    _, _, dw = grads(grouped_matmul, ct, sizes)(x, w)
    assert np.asarray(dw)[[1, 3]].tobytes() == bytes(2 * 4 * 6 * 4)
    assert oracle.worst_group_error(dw[::2], oracle.grouped_outer(x, ct, sizes)[::2], sizes) < 1e-6


DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8")
# These run as well: the others are only traced.
MIXED = {
    "matmul": (("bfloat16", "float32"), ("float8_e4m3fn", "float8_e5m2")),
    "transposed": (("int8", "bfloat16"), ("float8_e5m2", "float32")),
    "outer": (("float16", "bfloat16"), ("float64", "int8")),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_forward_has_a_gradient_tokamax_sm100(form):
    """tokamax raised on one platform in the gradient only. Forward works: so does backward."""
    sizes = sizes_of(3, 0, 4)
    with jax.enable_x64(True):
        for pair in itertools.product(DTYPES, repeat=2):
            run, want, x, w = problem(form, 8, 3, 2, 3, ternary)
            x, w = x.astype(pair[0]), w.astype(pair[1])
            floats = tuple(i for i in (0, 1) if pair[i] != "int8")
            if not floats:
                continue  # integers have no gradient

            def loss(x, w, ct, run=run):
                out = run(x, w, sizes)
                return (out * ct.astype(out.dtype)).astype(jnp.float32).sum(), out

            backward = jax.grad(loss, floats, has_aux=True)
            exact = want(x, w, sizes)
            ct = ternary(3, *exact.shape)
            same = form == "matmul" and pair[0] == pair[1]
            if not same and pair not in MIXED[form]:
                found = jax.eval_shape(backward, x, w, ct)[0]
                assert [d.dtype for d in found] == [(x, w)[i].dtype for i in floats], pair
                continue
            found, out = jax.jit(backward)(x, w, ct)
            np.testing.assert_array_equal(np.float64(out), exact, err_msg=str(pair))
            for i, got in zip(floats, found):
                assert got.dtype == (x, w)[i].dtype
                exact = gradients(form, x, w, ct, sizes)[i]
                np.testing.assert_array_equal(np.float64(got), exact, err_msg=str(pair))


WIDTHS = (1, 7, 72, 96, 100, 136)


@pytest.mark.parametrize("i", range(6))
@pytest.mark.parametrize("form", FORMS)
def test_widths_off_the_tile_maxtext_1183(form, i):
    """maxtext#1183: wrong where k or n is no multiple of a tile. Each pair, in one of the forms.

    pytorch#172440, torchtitan#1651: rows had to be a multiple of 16 bytes, on CPU too.
    """
    sizes = sizes_of(9, 1, 0, 21)
    for shift, dtype in ((0, "float32"), (3, "bfloat16")):
        k, n = WIDTHS[i], WIDTHS[(i + FORMS.index(form) + shift) % 6]
        run, want, x, w = problem(form, 33, k, n, 4, dtype=dtype)
        error = oracle.worst_group_error(run(x, w, sizes), want(x, w, sizes), sizes)
        assert error < oracle.TOLERANCE[dtype], (k, n)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_as_jax_maxtext_2319(dtype):
    """maxtext PR#2319, TE#2472: a drop-in for the portable operation, jax.lax.ragged_dot."""
    x, w = normal(1, 40, 12, dtype=dtype), normal(2, 4, 12, 9, dtype=dtype)
    sizes = sizes_of(9, 0, 30, 1)
    got, want = ragged_dot(x, w, sizes), lax.ragged_dot(x, w, sizes)
    assert got.dtype == want.dtype
    assert oracle.worst_group_error(got, want, sizes) < oracle.TOLERANCE[dtype]


def test_empty_local_range_skyrl_862():
    """SkyRL#862: group_offset on a device whose groups are all empty, or that has no group."""
    x, ct, sizes = normal(1, 16, 4), normal(3, 16, 5), sizes_of(9, 0, 0, 5)
    for offset, g in ((1, 2), (2, 1), (4, 0), (0, 0)):
        w = normal(2, g, 4, 5)
        run = functools.partial(grouped_matmul, group_offset=jnp.int32(offset))
        out, dx, dw = grads(run, ct, sizes)(x, w)
        assert (out.shape, dx.shape, dw.shape) == (ct.shape, x.shape, w.shape)
        assert not any(np.any(a) for a in (out, dx, dw))


@pytest.mark.parametrize("n", [128, 160, 192, 208, 320])
def test_n_between_tiles_marin_7484(n):
    """marin#7484, #8610, Primus-Turbo PR#95: wrong columns or neighbours at n = 160 or 192."""
    run, want, x, w = problem("matmul", 512, 8, n, 2)
    f = jax.jit(run)
    for sizes in ((256, 256), (257, 255)):
        sizes = sizes_of(*sizes)
        assert oracle.worst_group_error(f(x, w, sizes), want(x, w, sizes), sizes) < 1e-6


@pytest.mark.parametrize("form", ["matmul", "outer"])
def test_scratch_is_bounded_marin_5394(form):
    """marin#5394: scratch grew with the number of experts. Ours: the output and a few tiles."""
    m, k, n, tile = 1024, 64, 96, TileConfig(16)
    beyond = {}
    for g in (4, 64):
        run, _, x, w = problem(form, m, k, n, g)
        f = jax.jit(functools.partial(run, tile=tile))
        memory = f.lower(x, w, jnp.zeros(g, jnp.int32)).compile().memory_analysis()
        beyond[g] = memory.temp_size_in_bytes - memory.output_size_in_bytes
    tiles = 8 * tile.m * (k + n) * 4
    assert all(b < 4 * tiles for b in beyond.values()), (beyond, tiles)
    assert beyond[64] - beyond[4] < 64 * 64, beyond  # a few integers for each group


def test_no_effects_marin_6979():
    """marin#6979, #6396, #6470: effects kept calls from remat and from dead code removal."""
    x, w, sizes = normal(1, 12, 6), normal(2, 3, 2, 6, 6), sizes_of(5, 7)

    def layer(x, w):
        return jnp.tanh(grouped_matmul(x, w, sizes)), None

    def scanned(w):
        return lax.scan(jax.checkpoint(layer), x, w)[0].sum()

    def unrolled(w):
        h = x
        for weights in w:
            h = jnp.tanh(grouped_matmul(h, weights, sizes))
        return h.sum()

    assert not jax.make_jaxpr(jax.grad(scanned))(w).effects
    got, want = jax.jit(jax.grad(scanned))(w), jax.jit(jax.grad(unrolled))(w)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

    def lowered(keep):
        def f(x, y):
            outs = grouped_matmul(x, w[0], sizes), grouped_outer(x, y, sizes), x + 1
            return outs if keep else outs[-1]

        return jax.jit(f).lower(x, x).as_text()

    assert "while" in lowered(keep=True)
    assert "while" not in lowered(keep=False)


@pytest.mark.parametrize("form", ["matmul", "outer"])
def test_sizes_stay_on_the_device_te_2469(form):
    """TE#2469, PR#2680: sizes were copied to the host. New values never recompile."""
    run, want, x, w = problem(form, 24, 4, 6, 3)
    f = jax.jit(lambda *args: run(*args))  # a new function: jit shares the cache of a known one
    for sizes in ((8, 8, 8), (0, 24, 0), (1, 2, 3), (0, 0, 0), (-1, 30, 5)):
        sizes = sizes_of(*sizes)
        assert oracle.worst_group_error(f(x, w, sizes), want(x, w, sizes), sizes) < 1e-6
    assert f._cache_size() == 1
    host = r"callback|infeed|outfeed|\bsend\(|\brecv\(|S\(5\)|MoveToHost"
    assert not re.search(host, f.lower(x, w, sizes).compile().as_text())
    asked = jax.jit(lambda s: jax.pure_callback(lambda s: s, s, s))  # so that it can fail
    assert re.search(host, asked.lower(sizes).compile().as_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_every_group_counts_flashinfer_3792(dtype):
    """flashinfer#3792: only the first group was computed. Weights i + 1 show which one it was."""
    g, k = 6, 4
    w = jnp.broadcast_to(jnp.arange(1, g + 1)[:, None, None], (g, k, 5)).astype(dtype)
    sizes = sizes_of(3, 0, 5, 1, 4, 2)
    out = grouped_matmul(jnp.ones((16, k), dtype), w, sizes, preferred_element_type=jnp.float32)
    rows = np.append(np.repeat(np.arange(1, g + 1), sizes), 0)
    np.testing.assert_array_equal(out, np.broadcast_to(k * rows[:, None], (16, 5)))


def test_zero_groups_cutlass_2547():
    """cutlass#2547, PR#3195: groups without rows at the head, in the middle, at the tail, all."""
    x, w, ct = normal(1, 40, 6), normal(2, 6, 6, 5), normal(3, 40, 5)
    rng = np.random.default_rng(0)
    f = jax.jit(lambda s, x: grads(grouped_matmul, ct, s)(x, w))
    cases = [np.zeros(6, np.int32)]
    for where in (slice(0, 2), slice(2, 4), slice(4, 6), slice(0, 6, 2), slice(1, 6, 2)):
        for _ in range(4):
            cases.append(rng.multinomial(rng.integers(1, 41), np.ones(6) / 6).astype(np.int32))
            cases[-1][where] = 0
    for sizes in cases:
        want = oracle.grouped_matmul(x, w, sizes), *gradients("matmul", x, w, ct, sizes)
        for got, exact in zip(f(sizes, x), want):
            assert oracle.worst_group_error(got, exact, sizes) < 2e-6, sizes


def test_second_step_is_finite_pytorch_154557():
    """pytorch#154557, #193633, torchtitan#1237: NaN in unused rows reached the second step."""
    sizes, m = sizes_of(6, 0, 9), 24
    w = normal(2, 3, 5, 5)

    @jax.jit
    def step(x, w, target):
        out, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
        dx, dw = vjp(out - target)
        return x - 0.01 * dx, w - 0.01 * dw, out

    tails = {}
    for fill in (0, np.nan):
        x, target = (normal(i, m, 5).at[15:].set(fill) for i in (1, 3))
        state = step(x, w, target)
        x, new_w, out = step(state[0], state[1], jnp.where(target == 0, fill, target))
        tails[fill] = np.asarray(x[:15]).tobytes(), np.asarray(new_w).tobytes(), out
        assert np.isfinite(new_w).all()
        assert np.any(new_w[0] != w[0])
        assert not np.any(out[15:])
    assert tails[0][:2] == tails[np.nan][:2]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("zero", "mkng")
def test_dimensions_of_zero_pytorch_152668(zero, form):
    """pytorch#152668, PR#192497: a hang where k is 0. Each dimension 0, with both gradients."""
    shape = {"m": 6, "k": 3, "n": 4, "g": 2, zero: 0}
    run, want, x, w = problem(form, *shape.values())
    sizes = sizes_of(*(2, 4)[: shape["g"]]) if shape["m"] else jnp.zeros(2, jnp.int32)
    exact = want(x, w, sizes)
    out, dx, dw = grads(run, jnp.ones(exact.shape), sizes)(x, w)
    np.testing.assert_array_equal(out, exact)
    for got, want in zip((dx, dw), gradients(form, x, w, jnp.ones(exact.shape), sizes)):
        np.testing.assert_array_equal(got, want)


def test_fused_gate_and_up_pytorch_159620():
    """pytorch#159620: the backward of fused w1 and w3 had a shape error."""
    g, h, i, sizes = 3, 6, 10, sizes_of(4, 0, 9)
    x, w13, w2 = normal(1, 14, h), normal(2, g, h, 2 * i), normal(3, g, i, h)

    def mlp(x, gate, up, w2):
        return grouped_matmul(jax.nn.silu(gate) * up, w2, sizes)

    def fused(x, w13, w2):
        return (mlp(x, *jnp.split(grouped_matmul(x, w13, sizes), 2, axis=-1), w2) ** 2).sum()

    def separate(x, w1, w3, w2):
        both = (grouped_matmul(x, w, sizes) for w in (w1, w3))
        return (mlp(x, *both, w2) ** 2).sum()

    dx, dw13, dw2 = jax.jit(jax.grad(fused, (0, 1, 2)))(x, w13, w2)
    want = jax.jit(jax.grad(separate, (0, 1, 2, 3)))(x, *jnp.split(w13, 2, axis=-1), w2)
    assert (dx.shape, dw13.shape, dw2.shape) == (x.shape, w13.shape, w2.shape)
    for got, exact in zip((dx, *jnp.split(dw13, 2, axis=-1), dw2), want):
        assert oracle.worst_group_error(got, exact, sizes) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_same_bits_pytorch_186365(form):
    """pytorch#186365: other results in a loop. The same bits; permuted groups, permuted rows."""
    run, _, x, w = problem(form, 64, 24, 40, 5)
    sizes = np.array([20, 0, 13, 30, 1], np.int32)
    f = jax.jit(run)
    out = np.asarray(f(x, w, sizes))
    assert {np.asarray(f(x, w, sizes)).tobytes() for _ in range(50)} == {out.tobytes()}
    order = [3, 0, 4, 2, 1]
    blocks = np.split(np.arange(64), np.cumsum(sizes)[:-1])
    rows = np.concatenate([blocks[i] for i in order])
    pair = (x[rows], w[rows]) if form == "outer" else (x[rows], w[np.array(order)])
    permuted = np.asarray(f(*pair, sizes[order]))
    want = out[order] if form == "outer" else out[rows]
    assert permuted.tobytes() == want.tobytes()


@pytest.mark.parametrize("x64", [True, False])
def test_both_widths_of_x64_primus_437(x64):
    """Primus PR#437: one of the two settings was required. Both work, with 64-bit sizes."""
    make = np.random.default_rng(0).standard_normal
    x, w, ct = (make(shape) for shape in ((12, 7), (3, 7, 6), (12, 6)))
    sizes = np.array([5, 0, 6], np.int64)
    exact = oracle.grouped_matmul(x, w, sizes), *gradients("matmul", x, w, ct, sizes)
    with jax.enable_x64(x64):
        dtype, tolerance = ("float64", 1e-12) if x64 else ("float32", 2e-6)
        for got, want in zip(grads(grouped_matmul, ct, sizes)(x, w), exact):
            assert got.dtype == dtype
            assert oracle.worst_group_error(got, want, sizes) < tolerance
        narrow = grouped_matmul(np.float32(x), np.float32(w), sizes)
        assert narrow.dtype == jnp.float32
        assert oracle.worst_group_error(narrow, exact[0], sizes) < 2e-6
