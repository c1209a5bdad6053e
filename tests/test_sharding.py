"""Meshes of eight CPU devices: values, gradients, where results live, and what is exchanged."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pearl_jax

M, K, N, G = 16, 8, 12, 8
SIZES = np.array([3, 0, 4, 1, 2, 2, 0, 1], np.int32)  # 13 of 16 rows

# PartitionSpec of lhs and of rhs (g, k, n), of the result, and the collectives it takes.
MATMUL = {
    "nothing": (P(), P(), P(None, None), []),
    "m": (P("x", None), P(), P("x", None), []),
    "n": (P(), P(None, None, "y"), P(None, "y"), []),
    "m and n": (P("x", None), P(None, None, "y"), P("x", "y"), []),
    "k": (P(None, "y"), P(None, "y", None), P(None, None), ["all-reduce"]),
    "k of lhs only": (P(None, "y"), P(), P(None, None), ["all-reduce"]),
    "k of rhs only": (P(), P(None, "y", None), P(None, None), ["all-reduce"]),
    "m and k": (P("x", "y"), P(None, "y", None), P("x", None), ["all-reduce"]),
    "g": (P(), P("y", None, None), P(None, None), ["all-reduce"]),
    "g over both": (P(), P(("x", "y"), None, None), P(None, None), ["all-reduce"]),
    "m and g": (P("x", None), P("y", None, None), P("x", None), ["all-reduce"]),
    "g and n": (P(), P("x", None, "y"), P(None, "y"), ["all-reduce"]),
    "g and k": (P(None, "y"), P("x", "y", None), P(None, None), ["all-reduce"]),
    "m and g on one axis": (
        P("x", None),
        P("x", None, None),
        P("x", None),
        ["all-gather", "reduce-scatter"],
    ),
}


@pytest.fixture(params=[AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def mesh(request):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(request.param,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def full_spec(x):
    spec = tuple(x.sharding.spec)
    entries = (e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in spec)
    return P(*entries, *[None] * (x.ndim - len(spec)))


def compiled_text(function, *args):
    return jax.jit(function).lower(*args).compile().as_text()


def collectives(text):
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return sorted(set(re.findall(rf" ({kinds})(?:-start)?\(", text)))


def gathered_shapes(text):
    return set(re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-gather", text))


def close(got, want):
    # To the host first: on a mesh the two sides live on different devices.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-4), got, want
    )


def problem(rng, dtype="float32"):
    lhs = rng.standard_normal((M, K)).astype(dtype)
    rhs = rng.standard_normal((G, K, N)).astype(dtype)
    return lhs, rhs


def on_one_device(function, *args):
    """The result on a mesh of one device, as the expectation."""
    with jax.set_mesh(jax.make_mesh((1,), ("one",), devices=jax.devices()[:1])):
        return jax.tree.map(np.asarray, _jitted(function)(*args))


# One compilation serves all tests that expect the same function of the same shapes.
_jitted = functools.cache(jax.jit)


def loss_of(call):
    return lambda *args: jnp.sum(jnp.sin(call(*args)))


gnk = functools.partial(pearl_jax.grouped_matmul, transpose_rhs=True)
LOSSES = {call: loss_of(call) for call in (pearl_jax.grouped_matmul, gnk, pearl_jax.grouped_outer)}
GRADS = {call: jax.grad(loss, (0, 1)) for call, loss in LOSSES.items()}


def auto_mesh(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


@pytest.mark.parametrize(
    ("case", "transpose_rhs"),
    [(case, False) for case in MATMUL] + [(case, True) for case in ("m and n", "m and k", "g")],
)
def test_matmul(rng, mesh, case, transpose_rhs):
    lhs_spec, rhs_spec, out_spec, expected = MATMUL[case]
    lhs, rhs = problem(rng)
    call = pearl_jax.grouped_matmul
    if transpose_rhs:
        call = gnk
        rhs = np.swapaxes(rhs, 1, 2)
        rhs_spec = P(rhs_spec[0], rhs_spec[2], rhs_spec[1])
    want = on_one_device(call, lhs, rhs, SIZES)
    want_grads = on_one_device(GRADS[call], lhs, rhs, SIZES)

    lhs, rhs, sizes = put(mesh, lhs, lhs_spec), put(mesh, rhs, rhs_spec), put(mesh, SIZES, P())
    text = compiled_text(call, lhs, rhs, sizes)
    assert collectives(text) == expected
    assert gathered_shapes(text) <= {f"{M},{K}"}, "weights are gathered"
    got = jax.jit(call)(lhs, rhs, sizes)
    assert full_spec(got) == out_spec
    close(got, want)
    assert not np.asarray(got)[SIZES.sum() :].any()

    grad = jax.jit(GRADS[call]).lower(lhs, rhs, sizes).compile()
    grads = grad(lhs, rhs, sizes)
    close(grads, want_grads)
    if rhs_spec != P():  # else the gradient has to end up whole on every device
        assert ",".join(map(str, rhs.shape)) not in gathered_shapes(grad.as_text())
    if AxisType.Explicit in mesh.axis_types:
        # The type of a gradient is the type of its operand.
        assert (full_spec(grads[0]), full_spec(grads[1])) == (full_spec(lhs), full_spec(rhs))


OUTER = {
    "k and n": (P(None, "x"), P(None, "y"), P(None, "x", "y"), []),
    "m": (P("x", None), P("x", None), P(None, None, None), ["all-reduce"]),
    "m over both": (P(("x", "y"), None), P(("x", "y"), None), P(None, None, None), ["all-reduce"]),
    "m and n": (P("x", None), P("x", "y"), P(None, None, "y"), ["all-reduce"]),
}


@pytest.mark.parametrize("case", OUTER)
def test_outer(rng, mesh, case):
    lhs_spec, rhs_spec, out_spec, expected = OUTER[case]
    lhs = rng.standard_normal((M, K)).astype("float32")
    rhs = rng.standard_normal((M, N)).astype("float32")
    lhs[SIZES.sum() :] = np.nan
    want = on_one_device(pearl_jax.grouped_outer, lhs, rhs, SIZES)
    want_grads = on_one_device(GRADS[pearl_jax.grouped_outer], lhs, rhs, SIZES)
    args = put(mesh, lhs, lhs_spec), put(mesh, rhs, rhs_spec), put(mesh, SIZES, P())
    assert collectives(compiled_text(pearl_jax.grouped_outer, *args)) == expected
    got = jax.jit(pearl_jax.grouped_outer)(*args)
    assert full_spec(got) == out_spec
    close(got, want)
    close(jax.jit(GRADS[pearl_jax.grouped_outer])(*args), want_grads)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("case", [*OUTER, "g"])
def test_accumulate(rng, case, kind):
    """It is added once, where the result lies: as much is exchanged as without it."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    specs = (P("x"), P("x"), P("y"), ["all-reduce"])
    lhs_spec, rhs_spec, out_spec, expected = OUTER.get(case, specs)
    lhs = rng.standard_normal((M, K)).astype("float32")
    rhs = rng.standard_normal((M, N)).astype("float32")
    old = rng.standard_normal((G, K, N)).astype("float32")
    want = on_one_device(pearl_jax.grouped_outer, lhs, rhs, SIZES) + old
    call = lambda a, b, s, old: pearl_jax.grouped_outer(a, b, s, accumulate=old)
    args = put(mesh, lhs, lhs_spec), put(mesh, rhs, rhs_spec), put(mesh, SIZES, P())
    args += (put(mesh, old, out_spec),)
    with jax.set_mesh(mesh):
        assert collectives(compiled_text(call, *args)) == expected
        close(jax.jit(call)(*args), want)


def test_outer_sharded_by_group(rng):
    """Asked for a result sharded by group, each device computes its own groups only."""
    mesh = auto_mesh((2, 4), ("x", "y"))
    lhs = rng.standard_normal((M, K)).astype("float32")
    rhs = rng.standard_normal((M, N)).astype("float32")
    call = jax.jit(
        lambda a, b, s: pearl_jax.grouped_outer(a, b, s), out_shardings=NamedSharding(mesh, P("y"))
    )
    args = put(mesh, lhs, P()), put(mesh, rhs, P()), put(mesh, SIZES, P())
    text = call.lower(*args).compile().as_text()
    assert collectives(text) == []
    assert f"f32[{G},{K},{N}]" not in text, "all groups are computed everywhere"
    close(call(*args), on_one_device(pearl_jax.grouped_outer, lhs, rhs, SIZES))


def test_partial_sums_are_rounded_once(rng, mesh):
    """bfloat16 with a sharded contraction is as accurate as on one device."""
    lhs, rhs = problem(rng, jnp.bfloat16)
    wide = on_one_device(
        pearl_jax.grouped_matmul, lhs.astype("float32"), rhs.astype("float32"), SIZES
    )
    args = put(mesh, lhs, P(None, "y")), put(mesh, rhs, P(None, "y", None)), put(mesh, SIZES, P())
    got = jax.jit(pearl_jax.grouped_matmul)(*args)
    np.testing.assert_array_equal(np.asarray(got), wide.astype(jnp.bfloat16))


def test_vmap_with_a_sharded_batch(rng, mesh):
    b = 4
    lhs = rng.standard_normal((b, M, K)).astype("float32")
    rhs = problem(rng)[1]
    call = jax.vmap(pearl_jax.grouped_matmul, (0, None, None))
    want = on_one_device(call, lhs, rhs, SIZES)
    want_grad = on_one_device(jax.grad(loss_of(call), 1), lhs, rhs, SIZES)
    # Weights sharded as well: on Auto meshes only, see the limits in the README.
    rhs_spec = P("y") if AxisType.Auto in mesh.axis_types else P()
    args = put(mesh, lhs, P("x")), put(mesh, rhs, rhs_spec), put(mesh, SIZES, P())
    text = compiled_text(call, *args)
    assert gathered_shapes(text) == set()
    got = jax.jit(call)(*args)
    assert full_spec(got) == P("x", None, None)
    close(got, want)
    close(jax.jit(jax.grad(loss_of(call), 1))(*args), want_grad)


def test_dimensions_that_do_not_divide(rng, mesh):
    """8 groups over 2 x 4 devices fit, 12 columns over 8 do not: still right."""
    lhs, rhs = problem(rng)
    want = on_one_device(pearl_jax.grouped_matmul, lhs, rhs[:, :, :6], SIZES)
    args = (
        put(mesh, lhs, P("y")),
        put(mesh, rhs[:, :, :6], P(None, None, "x")),
        put(mesh, SIZES, P()),
    )
    close(jax.jit(pearl_jax.grouped_matmul)(*args), want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_expert_parallel(rng, check_vma):
    """Groups sharded by hand with group_offset: result and gradients of the whole."""
    mesh = auto_mesh((8,), ("e",))
    lhs, rhs = problem(rng)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("e"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    def parallel(lhs, rhs, sizes):
        offset = jax.lax.axis_index("e") * rhs.shape[0]
        part = pearl_jax.grouped_matmul(lhs, rhs, sizes, group_offset=offset)
        return jax.lax.psum(part, "e")

    close(
        jax.jit(parallel)(lhs, rhs, SIZES), on_one_device(pearl_jax.grouped_matmul, lhs, rhs, SIZES)
    )
    want = on_one_device(GRADS[pearl_jax.grouped_matmul], lhs, rhs, SIZES)
    close(jax.jit(jax.grad(loss_of(parallel), (0, 1)))(lhs, rhs, SIZES), want)


@pytest.mark.parametrize("varying", [0, 1, 2])
def test_varying_result_is_not_taken_for_replicated(rng, varying):
    """shard_map must refuse out_specs=P() as soon as one operand varies."""
    mesh = auto_mesh((8,), ("e",))
    lhs, rhs = problem(rng)
    args = [lhs, rhs, SIZES]
    args[varying] = np.stack([args[varying]] * 8)
    specs = [P("e") if i == varying else P() for i in range(3)]

    def local(*args):
        args = [a[0] if i == varying else a for i, a in enumerate(args)]
        return pearl_jax.grouped_matmul(*args)

    with pytest.raises(ValueError, match=r"replicat|varying"):
        jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=P())(*args)


def test_gradient_of_a_replicated_operand_is_summed(rng):
    """Weights replicated over a mesh of tokens get the gradient of all the tokens."""
    mesh = auto_mesh((8,), ("e",))
    lhs = rng.standard_normal((8, M, K)).astype("float32")
    rhs = problem(rng)[1]

    def local(lhs, rhs):
        loss = jnp.sum(jnp.sin(pearl_jax.grouped_matmul(lhs[0], rhs, SIZES)))
        return jax.lax.psum(loss, "e")

    loss = jax.shard_map(local, mesh=mesh, in_specs=(P("e"), P()), out_specs=P())
    batched = jax.vmap(pearl_jax.grouped_matmul, (0, None, None))
    want = on_one_device(jax.grad(loss_of(batched), 1), lhs, rhs, SIZES)
    close(jax.jit(jax.grad(loss, 1))(lhs, rhs), want)


@pytest.mark.parametrize("other", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_shard_map_over_one_axis_of_two(rng, other):
    """One axis by hand, the other left to the types or to the compiler."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(other,) * 2)
    lhs, rhs = problem(rng)
    want = on_one_device(pearl_jax.grouped_matmul, lhs, rhs, SIZES)
    with jax.set_mesh(mesh):

        @functools.partial(
            jax.shard_map, in_specs=(P(), P("x"), P()), out_specs=P(), axis_names={"x"}
        )
        def parallel(lhs, rhs, sizes):
            offset = jax.lax.axis_index("x") * rhs.shape[0]
            part = pearl_jax.grouped_matmul(lhs, rhs, sizes, group_offset=offset)
            return jax.lax.psum(part, "x")

        args = put(mesh, lhs, P()), put(mesh, rhs, P("x", None, "y")), put(mesh, SIZES, P())
        got = jax.jit(parallel)(*args)
        close(got, want)


def test_out_sharding_of_ragged_dot(rng, mesh):
    lhs, rhs = problem(rng)
    args = put(mesh, lhs, P()), put(mesh, rhs, P()), put(mesh, SIZES, P())
    call = jax.jit(lambda *a: pearl_jax.ragged_dot(*a, out_sharding=P("x", "y")))
    got = call(*args)
    assert full_spec(got) == P("x", "y")
    close(got, on_one_device(pearl_jax.grouped_matmul, lhs, rhs, SIZES))


def test_export_from_an_explicit_mesh(rng):
    """The sharding rule survives jax.export, weights are not gathered after reloading."""
    mesh = jax.make_mesh((8,), ("e",), axis_types=(AxisType.Explicit,))
    lhs, rhs = problem(rng)
    with jax.set_mesh(mesh):
        args = put(mesh, lhs, P()), put(mesh, rhs, P("e")), put(mesh, SIZES, P())
        exported = jax.export.export(jax.jit(pearl_jax.grouped_matmul))(*args)
        loaded = jax.export.deserialize(exported.serialize())
        text = compiled_text(loaded.call, *args)
        assert collectives(text) == ["all-reduce"]
        got = jax.jit(loaded.call)(*args)
    close(got, on_one_device(pearl_jax.grouped_matmul, lhs, rhs, SIZES))


@pytest.mark.parametrize("how", ["no mesh known", "part of a shard_map", "export"])
def test_xla_partitions_alone_only_with_a_warning(rng, how, caplog):
    """Where the rule cannot apply on an Auto mesh, the result is right and the reason logged."""
    mesh = auto_mesh((2, 4), ("x", "y"))
    lhs, rhs = problem(rng)
    want = on_one_device(pearl_jax.grouped_matmul, lhs, rhs, SIZES)
    args, call = (lhs, rhs, SIZES), pearl_jax.grouped_matmul
    sharding = NamedSharding(mesh, P("y"))
    with caplog.at_level("WARNING", "pearl_jax"):
        if how == "no mesh known":
            got = jax.jit(call, in_shardings=(None, sharding, None))(*args)
            reason = "no mesh is known while lowering"
        elif how == "export":
            args = put(mesh, lhs, P()), put(mesh, rhs, P("y")), put(mesh, SIZES, P())
            got = jax.jit(jax.export.export(jax.jit(call))(*args).call)(*args)
            reason = "an exported module cannot hold the sharding rule"
        else:
            specs = (P("x"), P(), P())
            local = jax.shard_map(
                lambda a, b, s: call(a[0], b, s)[None],
                mesh=mesh,
                in_specs=specs,
                out_specs=P("x"),
                axis_names={"x"},
            )
            got = jax.jit(local)(np.stack([lhs, lhs]), put(mesh, rhs, P("y")), SIZES)[1]
            reason = "a shard_map leaves some axes to the compiler"
    close(got, want)
    assert reason in caplog.text
