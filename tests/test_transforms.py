"""Derivatives of every order and mode, vmap over everything, scan, remat, export."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import pearl_jax

SIZES = np.array([3, 0, 5, 2], np.int32)  # 10 of 12 rows
M, K, N, G, B = 12, 3, 4, 4, 2

OPS = {
    "gkn": (pearl_jax.grouped_matmul, (M, K), (G, K, N)),
    "gnk": (functools.partial(pearl_jax.grouped_matmul, transpose_rhs=True), (M, K), (G, N, K)),
    "outer": (pearl_jax.grouped_outer, (M, K), (M, N)),
}


@pytest.fixture(params=OPS)
def op(request, rng):
    """The operation, lhs and rhs."""
    function, lhs_shape, rhs_shape = OPS[request.param]
    arrays = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (lhs_shape, rhs_shape))
    return function, *arrays


def close(got, want, rtol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-4), got, want)


@pytest.mark.parametrize("modes", [["fwd"], ["rev"]], ids="".join)
def test_check_grads_to_second_order(op, modes):
    function, lhs, rhs = op
    check_grads(lambda a, b: function(a, b, SIZES), (lhs, rhs), order=2, modes=modes)


def test_jacobians_and_hessian(op):
    function, lhs, rhs = op
    call = lambda a, b: function(a, b, SIZES)
    for i in (0, 1):
        close(jax.jacfwd(call, i)(lhs, rhs), jax.jacrev(call, i)(lhs, rhs))
    # Bilinear: the hessian of a sum is the mixed derivative, constant in both.
    hessian = jax.hessian(lambda ab: jnp.sum(call(*ab)))((lhs, rhs))
    (ll, lr), (rl, rr) = hessian
    assert not np.any(ll)
    assert not np.any(rr)
    assert np.any(lr)
    close(lr, jnp.moveaxis(rl, range(rhs.ndim), range(-rhs.ndim, 0)))
    close(jnp.tensordot(lr, rhs, rhs.ndim), jax.grad(lambda a: jnp.sum(call(a, rhs)))(lhs))


def added(lhs, rhs, accumulate):
    return pearl_jax.grouped_outer(lhs, rhs, SIZES, accumulate=accumulate)


def added_afterwards(lhs, rhs, accumulate):
    return pearl_jax.grouped_outer(lhs, rhs, SIZES) + accumulate


ADDED = (M, K), (M, N), (G, K, N)


@pytest.mark.parametrize("subset", [*itertools.product([None, 0], repeat=3), (2, 1, 3)])
def test_accumulate_is_an_addition(rng, subset):
    """In value and gradient, also where vmap goes over some of the operands, on some axis."""
    shapes = [(*s[:d], B, *s[d:]) if d is not None else s for s, d in zip(ADDED, subset)]
    args = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]
    found = []
    for f in (added, added_afterwards):
        if subset != (None,) * 3:
            f = jax.vmap(f, subset)
        loss = lambda *args, f=f: jnp.sum(jnp.sin(f(*args)))
        found.append((f(*args), jax.grad(loss, (0, 1, 2))(*args), jax.jvp(f, args, args)))
    close(*found)


def test_accumulate_is_linear(rng):
    """Its transpose is the cotangent itself; together with either factor as well."""
    x, y, a = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ADDED)
    check_grads(added, (x, y, a), order=2)
    (ct,) = jax.linear_transpose(lambda a: added(0 * x, y, a), a)(a)
    np.testing.assert_array_equal(ct, a)
    ct_x, ct_a = jax.linear_transpose(lambda x, a: added(x, y, a), x, a)(a)
    np.testing.assert_array_equal(ct_a, a)
    close(ct_x, pearl_jax.grouped_matmul(y, a, SIZES, transpose_rhs=True))


def test_accumulate_is_added_before_rounding():
    """1 + 2**-9 + 2**-9 is not 1 in bfloat16, though each sum of two of them is."""
    x, y = jnp.array([[1.0], [2.0**-9]], "bfloat16"), jnp.array([[1.0], [1.0]], "bfloat16")
    a = jnp.array([[[2.0**-8]]], "bfloat16")
    out = pearl_jax.grouped_outer(x, y, jnp.array([2]), accumulate=a)
    assert float(out[0, 0, 0]) == 1 + 2.0**-7  # of 1 + 2**-9 + 2**-8, the nearest


def test_linear_transpose(op):
    function, lhs, rhs = op
    call = lambda a, b: function(a, b, SIZES)
    out = call(lhs, rhs)
    ct = jnp.cos(out)
    for i, (x, fixed) in enumerate([(lhs, lambda a: call(a, rhs)), (rhs, lambda b: call(lhs, b))]):
        (grad,) = jax.linear_transpose(fixed, x)(ct)
        close(grad, jax.vjp(call, lhs, rhs)[1](ct)[i])
        close(jnp.vdot(grad, x), jnp.vdot(ct, out))


def test_gradients_have_the_operands_dtypes(op):
    function, lhs, rhs = op
    lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.float8_e4m3fn)
    loss = lambda a, b: jnp.sum(function(a, b, SIZES, preferred_element_type=jnp.float32))
    grads = jax.grad(loss, (0, 1))(lhs, rhs)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float8_e4m3fn]


def test_gradients_of_group_offset(op):
    """The parts of a sharded rhs give the parts of its gradient, and lhs gets their sum."""
    function, lhs, rhs = op
    if rhs.ndim == 2:
        call = lambda a, b, i, g: function(a, b, SIZES, group_offset=i, num_groups=g)
    else:
        call = lambda a, b, i, g: function(a, b[i : i + g], SIZES, group_offset=i)
    loss = lambda a, b, i, g: jnp.sum(jnp.sin(call(a, b, i, g)))
    whole = jax.grad(loss, (0, 1))(lhs, rhs, 0, G)
    parts = [jax.grad(loss, (0, 1))(lhs, rhs, i, g) for i, g in [(0, 1), (1, 3)]]
    close(jax.tree.map(jnp.add, *parts), whole)


SUBSETS = [s for s in itertools.product([False, True], repeat=3) if any(s)]


def mapped(op, subset, axis):
    """Operands with a batch axis where subset says so, in_axes, and a loop that vmap must equal."""
    function, lhs, rhs = op
    arrays, in_axes = [], []
    for x, is_mapped in zip((lhs, rhs, jnp.asarray(SIZES)), subset):
        if is_mapped:
            other = jnp.array([1, 4, 0, 4], jnp.int32) if x.ndim == 1 else jnp.cos(x)
            position = min(axis, x.ndim) if axis >= 0 else -1
            x = jnp.stack([x, other], axis=position)
            in_axes.append(position)
        else:
            in_axes.append(None)
        arrays.append(x)

    def loop(function, arrays):
        entries = [
            [x if a is None else jnp.take(x, i, axis=a) for x, a in zip(arrays, in_axes)]
            for i in range(B)
        ]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *(function(*e) for e in entries))

    return function, arrays, in_axes, loop


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join("ny"[int(x)] for x in s))
def test_vmap_of_every_subset(op, subset, axis):
    function, arrays, in_axes, loop = mapped(op, subset, axis)
    close(jax.vmap(function, in_axes)(*arrays), loop(function, arrays))


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join("ny"[int(x)] for x in s))
def test_vmap_of_grad_and_grad_of_vmap(op, subset):
    function, arrays, in_axes, loop = mapped(op, subset, 0)
    loss = lambda a, b, s: jnp.sum(jnp.sin(function(a, b, s)))
    grads = jax.grad(loss, (0, 1))
    close(jax.vmap(grads, in_axes)(*arrays), loop(grads, arrays))
    total = lambda a, b: jnp.sum(jax.vmap(loss, in_axes)(a, b, arrays[2]))
    want = jax.grad(lambda a, b: jnp.sum(loop(loss, [a, b, arrays[2]])), (0, 1))(*arrays[:2])
    close(jax.grad(total, (0, 1))(*arrays[:2]), want)


def test_vmap_nested_with_different_operands(op):
    """lhs mapped outside, rhs inside, sizes by both: a grid of 2 x 2 problems, nothing copied."""
    function, lhs, rhs = op
    lhs2, rhs2 = jnp.stack([lhs, 2 * lhs]), jnp.stack([rhs, jnp.sin(rhs)])
    sizes = jnp.array([[SIZES, [0, 0, 12, 0]], [[1, 1, 1, 1], [9, 9, 9, 9]]], jnp.int32)
    inner = jax.vmap(function, (None, 0, 0))
    got = jax.vmap(inner, (0, None, 0))(lhs2, rhs2, sizes)
    want = jnp.stack(
        [jnp.stack([function(lhs2[i], rhs2[j], sizes[i, j]) for j in range(2)]) for i in range(2)]
    )
    close(got, want)
    loss = lambda a, b: jnp.sum(jnp.sin(jax.vmap(inner, (0, None, 0))(a, b, sizes)))
    loop = lambda a, b: sum(
        jnp.sum(jnp.sin(function(a[i], b[j], sizes[i, j]))) for i in range(2) for j in range(2)
    )
    close(jax.grad(loss, (0, 1))(lhs2, rhs2), jax.grad(loop, (0, 1))(lhs2, rhs2))


def test_vmap_over_group_offset(rng):
    """All parts of the weights in one call, and of the weight gradient."""
    lhs, y = (jnp.asarray(rng.standard_normal((M, d)), jnp.float32) for d in (K, N))
    rhs = jnp.asarray(rng.standard_normal((G, K, N)), jnp.float32)
    parts, offsets = rhs.reshape(2, 2, K, N), jnp.array([0, 2])
    call = lambda w, i: pearl_jax.grouped_matmul(lhs, w, SIZES, group_offset=i)
    close(sum(jax.vmap(call)(parts, offsets)), pearl_jax.grouped_matmul(lhs, rhs, SIZES))
    outer = lambda i: pearl_jax.grouped_outer(lhs, y, SIZES, group_offset=i, num_groups=2)
    whole = pearl_jax.grouped_outer(lhs, y, SIZES)
    close(jax.vmap(outer)(offsets).reshape(whole.shape), whole)


def test_vmap_copies_no_shared_operand(rng):
    """64 entries that share 4 MiB of weights, forward and backward, need less than 64 copies."""
    b, k = 64, 512
    lhs = jnp.asarray(rng.standard_normal((b, 8, k)), jnp.float32)
    rhs = jnp.asarray(rng.standard_normal((4, k, k)), jnp.float32)
    sizes = jnp.array([2, 3, 0, 2], jnp.int32)
    step = jax.value_and_grad(
        lambda a, w: jnp.sum(jax.vmap(pearl_jax.grouped_matmul, (0, None, None))(a, w, sizes) ** 2),
        1,
    )
    memory = jax.jit(step).lower(lhs, rhs).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * rhs.nbytes


def test_scan(op):
    function, lhs, rhs = op
    all_sizes = jnp.array([[3, 0, 5, 2], [0, 0, 0, 0], [12, 0, 0, 0]], jnp.int32)

    def step(total, sizes):
        out = function(lhs, rhs, sizes)
        return total + jnp.sum(out), out

    total, outs = jax.lax.scan(step, 0.0, all_sizes)
    want = jnp.stack([function(lhs, rhs, s) for s in all_sizes])
    close(outs, want)
    close(total, jnp.sum(want))
    grad = jax.grad(
        lambda b: jax.lax.scan(
            lambda c, s: (c + jnp.sum(function(lhs, b, s)), None), 0.0, all_sizes
        )[0]
    )
    close(grad(rhs), sum(jax.grad(lambda b: jnp.sum(function(lhs, b, s)))(rhs) for s in all_sizes))


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [
        (None, True),
        (jax.checkpoint_policies.nothing_saveable, True),
        (jax.checkpoint_policies.everything_saveable, False),
        (jax.checkpoint_policies.save_only_these_names("grouped_matmul", "grouped_outer"), False),
        (jax.checkpoint_policies.save_only_these_names("something else"), True),
    ],
    ids=["default", "nothing", "everything", "by name", "other name"],
)
def test_checkpoint(op, policy, recomputed):
    """The gradient is the same; the forward product is computed again only if not saved."""
    function, lhs, rhs = op
    loss = lambda a, b: jnp.sum(jnp.sin(function(a, b, SIZES)))
    kept = jax.checkpoint(loss, policy=policy)
    grads = jax.grad(kept, (0, 1))
    close(grads(lhs, rhs), jax.grad(loss, (0, 1))(lhs, rhs))
    calls = str(jax.make_jaxpr(grads)(lhs, rhs)).count("out_dtype=")
    assert calls == (4 if recomputed else 3)


@pytest.mark.parametrize("name", OPS)
def test_export_with_symbolic_rows(rng, name):
    """One exported module serves every m, with its gradient, after a round trip to bytes."""
    function, lhs_shape, rhs_shape = OPS[name]
    (m,) = jax.export.symbolic_shape("m")
    symbolic = lambda shape: jax.ShapeDtypeStruct([m if d == M else d for d in shape], jnp.float32)
    sizes_spec = jax.ShapeDtypeStruct((G,), jnp.int32)
    call = jax.jit(lambda a, b, s: function(a, b, s))
    exported = jax.export.export(call)(symbolic(lhs_shape), symbolic(rhs_shape), sizes_spec)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    for rows in (1, 12, 300):
        shape = lambda s: [rows if d == M else d for d in s]
        lhs = jnp.asarray(rng.standard_normal(shape(lhs_shape)), jnp.float32)
        rhs = jnp.asarray(rng.standard_normal(shape(rhs_shape)), jnp.float32)
        sizes = jnp.array([1, 0, rows // 2, 2], jnp.int32)
        close(loaded.call(lhs, rhs, sizes), function(lhs, rhs, sizes))
        loss = lambda f: lambda a, b: jnp.sum(jnp.sin(f(a, b, sizes)))
        close(
            jax.grad(loss(loaded.call), (0, 1))(lhs, rhs),
            jax.grad(loss(function), (0, 1))(lhs, rhs),
        )


def test_export_for_many_platforms():
    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((M, K), (G, K, N))]
    exported = jax.export.export(
        jax.jit(pearl_jax.grouped_matmul), platforms=["cpu", "cuda", "tpu"]
    )(*specs, jax.ShapeDtypeStruct((G,), jnp.int32))
    lhs, rhs = jnp.ones((M, K)), jnp.ones((G, K, N))
    close(exported.call(lhs, rhs, SIZES), pearl_jax.grouped_matmul(lhs, rhs, SIZES))
