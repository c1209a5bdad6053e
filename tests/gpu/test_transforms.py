"""Derivatives, batches and control flow, by the kernels."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pearl_jax
from gpu.problems import SIZES, G, M, Problem, check, int32, integers, on_gpu, problem

pytestmark = pytest.mark.gpu

K, N = 136, 264
TARGET = 'custom_call_target="pearl_jax.grouped_matmul"'


def kernel_calls(f, *args):
    return jax.jit(f).lower(*args).compile().as_text().count(TARGET)


# Batches.

B = 3
SUBSETS = [s for s in itertools.product([None, 0], repeat=4) if any(d == 0 for d in s)]


def batches():
    """(B, ..) numpy arrays of every operand: lhs, rhs, sizes, offset."""
    rng = np.random.default_rng(0)
    sizes = np.array([SIZES["unaligned"], SIZES["one hot"], SIZES["negative"]], np.int32) // 4
    lhs, rhs = integers(rng, B, 180, K), integers(rng, B, 4, K, N)
    return lhs, rhs, sizes, int32(0, 2, -1)


def want_of(operands, pick):
    lhs, rhs, sizes, offset = (x[i] for x, i in zip(operands, pick))
    return oracle.grouped_matmul(lhs, rhs, sizes, offset=int(offset))


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join("ny"[d == 0] for d in s))
def test_vmap_of_every_subset(subset):
    """Against a loop. A shared operand is not copied: it keeps one batch in the call."""
    operands = batches()
    args = [x if d == 0 else x[1] for x, d in zip(operands, subset)]
    args = [jnp.asarray(x).astype(jnp.bfloat16 if x.dtype == np.int8 else x.dtype) for x in args]
    call = on_gpu()
    mapped = jax.jit(jax.vmap(call, subset))
    out = mapped(*args)
    for i in range(B):
        want = want_of(operands, [i if d == 0 else 1 for d in subset])
        check(out[i], want, f"batch {i}")
        one = call(*(x[i] if d == 0 else x for x, d in zip(args, subset)))
        assert jnp.array_equal(out[i], one)
    if subset[1] is None:
        assert f"bf16[1,4,{K},{N}]" in mapped.lower(*args).compile().as_text()


def test_vmap_on_other_axes():
    lhs, rhs, sizes, offset = batches()
    args = np.moveaxis(lhs, 0, 1), np.moveaxis(rhs, 0, 3), sizes.T, offset
    args = [jnp.asarray(x).astype(jnp.bfloat16 if x.dtype == np.int8 else x.dtype) for x in args]
    out = jax.vmap(on_gpu(), (1, 3, 1, 0), 2)(*args)
    for i in range(B):
        check(out[..., i], want_of(batches(), [i] * 4), f"batch {i}")


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["gkn", "gnk"])
def test_vmap_nested(transpose_rhs):
    """lhs mapped outside, rhs inside, sizes by both, and the offset outside: a grid of calls."""
    lhs, rhs, sizes, offset = batches()
    grid = np.stack([sizes, sizes[::-1]])  # (2, B, ..)
    w = rhs.swapaxes(2, 3) if transpose_rhs else rhs
    f = on_gpu(transpose_rhs=transpose_rhs, preferred_element_type="float32")
    inner = jax.vmap(f, (None, 0, 0, None))
    outer = jax.jit(jax.vmap(inner, (0, None, 0, 0)))
    x = jnp.asarray(lhs[:2]).astype("float16")
    out = outer(x, jnp.asarray(w).astype("float16"), grid, offset[:2])
    for i in range(2):
        for j in range(B):
            want = oracle.grouped_matmul(lhs[i], rhs[j], grid[i, j], offset=int(offset[i]))
            check(out[i, j], want, f"batch {i}, {j}")


@pytest.mark.parametrize("held", [1, 2, 3])
def test_shards_sum_to_the_whole(held):
    """group_offset: each shard gives its own rows only, in one call for all shards too."""
    p = problem(M, K, N, G)
    lhs, rhs = p.operands("bfloat16")
    run = on_gpu()
    batched = jax.jit(jax.vmap(run, (None, 0, None, 0)))
    for case in ("unaligned", "empty middle", "sum above m"):
        sizes, total = SIZES[case], 0
        for first in range(0, G, held):
            part = run(lhs, rhs[first : first + held], int32(*sizes), np.int32(first))
            want = oracle.grouped_matmul(p.lhs, p.rhs[first : first + held], sizes, offset=first)
            check(part, want, f"{case}, shard {first}")
            total += part.astype(jnp.float32)
        check(total.astype("bfloat16"), p.want(sizes))
        shards = rhs.reshape(G // held, held, K, N)
        offsets = np.arange(0, G, held, dtype=np.int32)
        parts = batched(lhs, shards, int32(*sizes), offsets)
        check(parts.astype(jnp.float32).sum(0).astype("bfloat16"), p.want(sizes))


# Derivatives.


def gradients(p, sizes, ct):
    """Of the loss sum(out * ct), float64."""
    d_lhs = oracle.grouped_matmul(ct, p.rhs, sizes, transpose_rhs=True)
    return d_lhs, oracle.grouped_outer(p.lhs, ct, sizes)


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["gkn", "gnk"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients(dtype, transpose_rhs):
    """Rows of no group hold NaN in lhs and in the cotangent; the gradient there is 0.

    The gradient of lhs is a kernel too, on the same weights.
    """
    p = problem(M, K, N, G)
    ct = integers(np.random.default_rng(1), M, N)
    lhs, rhs = p.operands(dtype, transpose_rhs)
    f = on_gpu(transpose_rhs=transpose_rhs)

    @jax.jit
    def both(lhs, rhs, sizes, ct):
        out, vjp = jax.vjp(lambda a, b: f(a, b, sizes, np.int32(0)), lhs, rhs)
        return out, *vjp(ct)

    assert kernel_calls(both, lhs, rhs, int32(*[0] * G), jnp.zeros((M, N), dtype)) == 2
    for case, sizes in SIZES.items():
        y = p.poisoned(jnp.asarray(ct).astype(dtype), sizes)
        out, d_lhs, d_rhs = both(p.poisoned(lhs, sizes), rhs, int32(*sizes), y)
        want_lhs, want_rhs = gradients(p, sizes, ct)
        check(out, p.want(sizes), case)
        check(d_lhs, want_lhs, case)
        check(d_rhs, want_rhs.swapaxes(1, 2) if transpose_rhs else want_rhs, case)


def test_second_order():
    """The gradient of a function of the gradients: of both kinds, and mixed ones."""
    p, sizes = problem(M, K, N, G), SIZES["sum below m"]
    rng = np.random.default_rng(2)
    ct, u = integers(rng, M, N), integers(rng, M, K)
    v = integers(rng, G, K, N)
    lhs, rhs = p.operands("float32")
    half = lambda x: jnp.asarray(x).astype("bfloat16")
    f = on_gpu()

    def loss(lhs, rhs):
        out = f(half(lhs), half(rhs), int32(*sizes), np.int32(0))
        return jnp.sum(out.astype(jnp.float32) * ct)

    # <u, d lhs> + <v, d rhs> = <u rhs + lhs v, ct>: its gradients are products once more.
    def first(lhs, rhs):
        d_lhs, d_rhs = jax.grad(loss, (0, 1))(lhs, rhs)
        return jnp.sum(d_lhs * u) + jnp.sum(d_rhs * v)

    d_lhs, d_rhs = jax.jit(jax.grad(first, (0, 1)))(lhs, rhs)
    rounded = lambda x: np.asarray(half(x), np.float64)
    check(d_lhs, rounded(oracle.grouped_matmul(ct, v, sizes, transpose_rhs=True)))
    check(d_rhs, rounded(oracle.grouped_outer(u, ct, sizes)))


def test_jvp_and_jacobians_agree():
    p = problem(16, 8, 8, 2)
    lhs, rhs = (x.astype("float32") for x in p.operands("bfloat16"))
    f = on_gpu()

    def call(a, b):
        out = f(a.astype("bfloat16"), b.astype("bfloat16"), int32(9, 5), np.int32(0))
        return out.astype("float32")

    for i in (0, 1):
        forward, reverse = jax.jacfwd(call, i)(lhs, rhs), jax.jacrev(call, i)(lhs, rhs)
        check(forward, np.asarray(reverse))
        assert forward.any()


@pytest.mark.parametrize("subset", [s for s in SUBSETS if s[3] is None][:7])
def test_vmap_of_gradients(subset):
    lhs, rhs, sizes, _ = batches()
    arrays = [x if d == 0 else x[1] for x, d in zip((lhs, rhs, sizes), subset)]
    arrays[:2] = [jnp.asarray(x).astype("bfloat16") for x in arrays[:2]]
    ct = integers(np.random.default_rng(3), 180, N)
    f = on_gpu()

    def loss(a, b, s):
        return jnp.sum(f(a, b, s, np.int32(0)).astype(jnp.float32) * ct)

    d_lhs, d_rhs = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), subset[:3]))(*arrays)
    for i in range(B):
        a, b, s = (x[i if d == 0 else 1] for x, d in zip((lhs, rhs, sizes), subset))
        check(d_lhs[i], oracle.grouped_matmul(ct, b, s, transpose_rhs=True), f"batch {i}")
        check(d_rhs[i], oracle.grouped_outer(a, ct, s, 4), f"batch {i}")


# Control flow and the other transformations.


def small_steps(rng, layers):
    """Integers in {-1, 0, 1}, few of them not 0, so that a product of several stays exact."""
    x = rng.integers(-1, 2, (96, 64)) * (rng.random((96, 64)) < 0.2)
    w = rng.integers(-1, 2, (layers, 3, 64, 64)) * (rng.random((layers, 3, 64, 64)) < 0.02)
    return x, w, np.array([[40, 0, 50], [0, 96, 0], [10, 20, 30], [0, 0, 0]], np.int32)[:layers]


@pytest.mark.parametrize("remat", [False, True])
def test_scan(remat):
    """Layers with weights and sizes of their own, and their gradients, against a loop."""
    x, w, sizes = small_steps(np.random.default_rng(4), 3)
    f = on_gpu()

    def layer(h, inputs):
        weights, s = inputs
        return f(h, weights, s, np.int32(0)) + h, None

    body = jax.checkpoint(layer) if remat else layer

    def scanned(h, w):
        return jax.lax.scan(body, h, (w, sizes))[0]

    def unrolled(h, w):
        for weights, s in zip(w, sizes):
            h = layer(h, (weights, s))[0]
        return h

    half = [jnp.asarray(a).astype("bfloat16") for a in (x, w)]
    h = x.astype(float)
    for weights, s in zip(w, sizes):
        h = h + oracle.grouped_matmul(h, weights, s)
    assert np.abs(h).max() < 256  # exact in bfloat16
    check(jax.jit(scanned)(*half), h)
    loss = lambda f: lambda h, w: jnp.sum(f(h, w).astype(jnp.float32))
    got, want = (jax.jit(jax.grad(loss(f), (0, 1)))(*half) for f in (scanned, unrolled))
    for a, b in zip(got, want):
        assert jnp.array_equal(a, b)
        assert a.any()


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_on_one_device(check_vma):
    mesh = jax.make_mesh((1,), ("a",), (AxisType.Auto,), devices=jax.devices()[:1])
    p, sizes = problem(M, K, N, G), SIZES["unaligned"]
    lhs, rhs = p.operands("bfloat16")
    ct = integers(np.random.default_rng(5), M, N)

    def local(lhs, rhs, sizes):
        return pearl_jax.grouped_matmul(lhs, rhs, sizes, implementation="cuda")

    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("a"), P(), P()),
        out_specs=P("a"),
        check_vma=check_vma,
    )

    @jax.jit
    def both(lhs, rhs, sizes, ct):
        out, vjp = jax.vjp(lambda a, b: f(a, b, sizes), lhs, rhs)
        return out, *vjp(ct)

    args = lhs, rhs, jnp.asarray(int32(*sizes)), jnp.asarray(ct).astype("bfloat16")
    assert kernel_calls(both, *args) == 2
    for got, want in zip(both(*args), (p.want(sizes), *gradients(p, sizes, ct))):
        check(got, want)


def test_export():
    """A module exported here runs after a round trip to bytes."""
    pytest.importorskip("flatbuffers")
    p, sizes = Problem(M, K, N, G), SIZES["unaligned"]
    args = *p.operands("bfloat16"), jnp.asarray(int32(*sizes)), jnp.int32(0)
    allowed = [jax.export.DisabledSafetyCheck.custom_call("pearl_jax.grouped_matmul")]
    exported = jax.export.export(on_gpu(), disabled_checks=allowed)(*args)
    loaded = jax.export.deserialize(exported.serialize())
    check(loaded.call(*args), p.want(sizes))
