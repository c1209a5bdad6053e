"""The layers for Flax: their numbers, transforms of NNX, checkpoints, Linen, what they refuse."""

import doctest

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import linen, nnx
from interpreter import python
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pearl_jax import moe, nn, routing
from pearl_jax.routing import RouterConfig

D, F, E, K = 8, 6, 4, 2
FULL = {
    "router": RouterConfig(E, K, "sigmoid", scaling_factor=1.5),
    "use_bias": True,
    "router_bias": True,
    "selection_bias": True,
    "shared_size": 4,
    "shared_gate": True,
    "latent_size": 3,
}


def make(seed=0, **options):
    options = options if "router" in options else {"num_experts": E, "top_k": K, **options}
    return nn.MoE(D, F, rngs=nnx.Rngs(seed), **options)


def normal(seed, *shape):
    return jnp.float32(np.random.default_rng(seed).standard_normal(shape))


def randomize(layer):
    """Biases and scales too, which start as zeros and ones."""
    values = nnx.state(layer, nnx.Param)
    leaves, tree = jax.tree.flatten(values)
    leaves = [0.5 * normal(i, *x.shape).astype(x.dtype) for i, x in enumerate(leaves)]
    nnx.update(layer, jax.tree.unflatten(tree, leaves))
    return layer


X = normal(1, 3, 5, D)
call = nnx.jit(lambda layer, *args, **options: layer(*args, **options))
with_aux = nnx.jit(lambda layer, *args, **options: layer.with_aux(*args, **options))


def gradients(layer, *args, **options):
    def total(layer):
        out = layer.with_aux(*args, **options)
        return (out.out**2).sum() + out.load_balance_loss + out.z_loss

    return nnx.jit(nnx.grad(total))(layer)


def close(got, want, **tolerance):
    tolerance = {"rtol": 1e-5, "atol": 1e-5} | tolerance
    got, want = (jax.tree.flatten(nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x)
                 for x in (got, want))  # fmt: skip
    assert got[1] == want[1]
    for a, b in zip(got[0], want[0]):
        np.testing.assert_allclose(a, b, **tolerance)


# What it computes.


@pytest.mark.parametrize(
    ("options", "activation"),
    [({}, "silu"), (FULL, "gelu_tanh"), ({"shared_size": 5, "use_bias": True}, "relu")],
    ids=["plain", "full", "shared"],
)
def test_against_float64(options, activation):
    layer = randomize(make(activation=activation, **options))
    p = {k: v[...] for k, v in vars(layer).items() if isinstance(v, nnx.Param)}
    p |= {"tokens": X.reshape(-1, D), "router": layer.router.kernel[...]}
    if layer.router.bias is not None:
        p["router_bias"] = layer.router.bias[...]
    want = moe_oracle.layer(p, layer.router.config, activation).reshape(X.shape)
    out = with_aux(layer, X)
    np.testing.assert_allclose(out.out, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out.out, call(layer, X))
    assert out.tokens_per_expert.sum() == 15 * K


def test_variance_of_kernels():
    """Neither experts nor gate and up count: the product of a normal token is normal."""
    layer = nn.MoE(
        64, 128, num_experts=8, top_k=2, shared_size=96, latent_size=32, shared_gate=True,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    for name, axis in {
        "gate_up": 1, "down": 1, "shared_gate_up": 0, "shared_down": 0, "latent_down": 0,
        "latent_up": 0,
    }.items():  # fmt: skip
        kernel = getattr(layer, name)[...]
        assert abs(kernel.std() * kernel.shape[axis] ** 0.5 - 1) < 0.03, name
    gate_up = layer.gate_up[...].reshape(8, 32, 256).swapaxes(0, 1).reshape(32, -1)
    assert len(np.unique(gate_up)) > 0.99 * gate_up.size  # no two matrices are the same
    seen = []
    make(kernel_init=lambda key, shape, dtype: seen.append(shape) or jnp.ones(shape, dtype))
    assert seen == [(D, E), (D, F), (F, D)]


def test_dtypes():
    layer = make()
    assert call(layer, X.astype(jnp.bfloat16)).dtype == jnp.float32  # as nnx.Linear promotes
    half = make(dtype=jnp.bfloat16)
    assert half.gate_up.dtype == half.router.kernel.dtype == jnp.float32
    assert call(half, X).dtype == jnp.bfloat16
    small = make(param_dtype=jnp.bfloat16, selection_bias=True, use_bias=True, expert_scale=True)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(small, nnx.Param))} == {
        jnp.dtype("bfloat16")
    }
    assert small.router.selection_bias.dtype == jnp.float32
    assert call(small, X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    close(call(half, X).astype(jnp.float32), call(layer, X), rtol=0.05, atol=0.05)


def test_routing_is_float32_sglang_38695():
    """sglang#38695, #33764: with bfloat16 tokens and weights the router is float32 all the same."""
    layer, d = nn.MoE(256, F, num_experts=64, top_k=8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), 256
    tokens = normal(1, 100, d).astype(jnp.bfloat16)
    got = nnx.jit(lambda router, x: router(x))(layer.router, tokens)
    assert got.logits.dtype == got.weights.dtype == jnp.float32
    logits = np.float64(tokens) @ np.float64(layer.router.kernel[...])
    want, _ = moe_oracle.route(logits, layer.router.config)
    np.testing.assert_array_equal(got.experts, want)


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
def test_padding_te_3494(options):
    """TransformerEngine PR#3494: NaN in padding reached the gradients; of the router too."""
    layer = randomize(make(jitter=0.1, deterministic=True, **options))
    mask = np.arange(15).reshape(3, 5) % 4 != 1
    poisoned, kept = jnp.where(mask[..., None], X, jnp.nan), X[mask]
    out = with_aux(layer, poisoned, token_mask=mask)
    want = with_aux(layer, kept)
    assert not out.out[~mask].any()
    close(out._replace(out=out.out[mask]), want)
    close(gradients(layer, poisoned, token_mask=mask), gradients(layer, kept))
    layer.train()
    assert all(np.isfinite(x).all() for x in
               jax.tree.leaves(gradients(layer, poisoned, token_mask=mask)))  # fmt: skip


def test_experts_by_token_id():
    config = RouterConfig(E, K, "sqrt_softplus")
    layer = make(router=config, vocab_size=10)
    table = layer.router.expert_table[...]
    assert all(len({*row}) == K for row in table.tolist())
    np.testing.assert_array_equal(np.bincount(table.ravel()), [5] * E)
    table = jnp.array([[(3 * i) % E, (3 * i + 1) % E] for i in range(10)], jnp.int32)
    layer.router.expert_table[...] = table
    ids = np.arange(15).reshape(3, 5) % 10
    got = layer.router(X.reshape(-1, D), token_ids=ids.ravel())
    np.testing.assert_array_equal(got.experts, table[ids.ravel()])
    assert call(layer, X, token_ids=ids).shape == X.shape


def test_jitter():
    """In training only, of the router only, other noise in each call."""
    layer, x = make(jitter=0.3), X.reshape(-1, D)
    exact = routing.project(x, layer.router.kernel[...])
    logits = nnx.jit(lambda layer: layer.router(x).logits)
    noise = lambda: np.abs(logits(layer) - exact).max()
    first, second = logits(layer), logits(layer)
    assert np.abs(first - second).max() > 0.01
    assert noise() > 0.01
    close(layer.router(x, deterministic=True).logits, exact)
    layer.eval()
    assert noise() < 1e-5
    assert np.abs(layer.router(x, deterministic=False).logits - exact).max() > 0.01
    layer.train()
    assert noise() > 0.01
    quiet = layer(X, deterministic=True)
    assert not np.array_equal(layer(X), quiet)
    layer.eval()
    np.testing.assert_array_equal(layer(X), quiet)
    with pytest.raises(KeyError, match="jitter"):
        nn.MoE(D, F, num_experts=E, top_k=K, jitter=0.1, rngs=nnx.Rngs(params=0))


def test_contraction():
    layer = randomize(make(use_bias=True))
    other = nnx.merge(*nnx.split(layer))
    other.contraction = jax.lax.ragged_dot
    close(call(other, X), call(layer, X))
    close(gradients(other, X), gradients(layer, X))


def test_parallel():
    """A function in place of moe.apply_experts."""
    calls = []

    def parallel(*args, **options):
        calls.append(options)
        return moe.apply_experts(*args, **options)

    layer = make(parallel=parallel, activation="relu")
    np.testing.assert_array_equal(layer(X), make(activation="relu")(X))
    assert [call["activation"].name for call in calls] == ["relu"]


# Training.


def test_training():
    """The loss falls; the bias follows the load and is neither trained nor decayed."""
    layer = make(selection_bias=True)
    optimizer = nnx.Optimizer(layer, optax.adamw(3e-3, weight_decay=0.1), wrt=nnx.Param)
    x, y = normal(2, 64, D), normal(3, 64, D)

    @nnx.jit
    def step(layer, optimizer):
        def loss(layer):
            out = layer.with_aux(x)
            return ((out.out - y) ** 2).mean() + 0.01 * out.load_balance_loss, out

        (value, out), grads = nnx.value_and_grad(loss, has_aux=True)(layer)
        optimizer.update(layer, grads)
        before = layer.router.selection_bias[...]
        layer.update_selection_bias(out.tokens_per_expert, 0.125)
        return value, out.tokens_per_expert, before

    assert "selection_bias" not in str(jax.tree.structure(gradients(layer, x)))
    losses, bias = [], np.zeros(E)
    for _ in range(30):
        value, counts, before = step(layer, optimizer)
        np.testing.assert_array_equal(before, bias)
        bias = bias + 0.125 * np.sign(counts.mean() - counts)
        losses.append(float(value))
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_array_equal(layer.router.selection_bias[...], bias)
    assert bias.any()


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_scan_over_layers(remat):
    """A stack of layers under nnx.scan: output, losses, gradients of one after the other."""
    num, keys = 3, nnx.Rngs(0)

    @nnx.split_rngs(splits=num)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
    def stacked(rngs):
        return nn.MoE(D, F, num_experts=E, top_k=K, selection_bias=True, rngs=rngs)

    layers = stacked(keys)
    assert layers.gate_up.shape == (num, E, D, 2, F)
    assert layers.gate_up.out_sharding == (None, "expert", "embed", None, "mlp")
    assert np.abs(layers.down[0] - layers.down[1]).max() > 0.1
    one = lambda layer, x: (lambda out: (x + out.out, out.load_balance_loss))(layer.with_aux(x))
    one = nnx.remat(one) if remat else one

    def scanned(layers):
        step = nnx.scan(lambda x, layer: one(layer, x), in_axes=(nnx.Carry, 0),
                        out_axes=(nnx.Carry, 0))  # fmt: skip
        x, losses = step(X, layers)
        return (x**2).sum() + losses.sum(), x

    def in_turn(layers):
        graphdef, state = nnx.split(layers)
        x, total = X, 0
        for i in range(num):
            out = nnx.merge(graphdef, jax.tree.map(lambda a: a[i], state)).with_aux(x)
            x, total = x + out.out, total + out.load_balance_loss
        return (x**2).sum() + total, x

    got, want = (nnx.jit(nnx.value_and_grad(f, has_aux=True))(layers) for f in (scanned, in_turn))
    close(got[0], want[0])
    close(got[1], want[1], rtol=1e-4, atol=1e-4)


# Where the parameters are.

RULES = (("expert", "ep"), ("embed", None), ("mlp", "tp"))


def test_names_of_axes():
    """They need no mesh, and rules turn them into shardings, also of what is not yet made."""
    abstract = nnx.eval_shape(lambda: make(**FULL))
    assert isinstance(abstract.gate_up.get_value(), jax.ShapeDtypeStruct)
    mesh = jax.make_mesh((2, 2), ("ep", "tp"), devices=jax.devices()[:4])
    with nnx.logical_axis_rules(RULES):
        shardings = nnx.get_named_sharding(nnx.state(abstract), mesh)
    specs = {path[-1]: s.get_value().spec for path, s in nnx.to_flat_state(shardings)}
    assert specs["gate_up"] == P("ep", None, None, "tp")
    assert specs["down"] == P("ep", "tp", None)
    assert specs["shared_down"] == P("tp", None)
    assert specs["gate_up_bias"] == P("ep", None, "tp")
    assert not {"ep", "tp"} & {*specs["kernel"], *specs["selection_bias"]}
    state = nnx.state(make(**FULL))
    placed = jax.device_put(state, shardings)
    gate_up = placed["gate_up"].get_value()
    assert gate_up.addressable_shards[0].data.shape == (E // 2, 3, 2, F // 2)
    close(jax.device_get(placed), state)


def test_names_on_a_mesh():
    """With a mesh they are its own, and say where the parameters have been created."""
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), devices=jax.devices()[:4])
    state = nnx.state(make(mesh=mesh, shared_size=4, selection_bias=True))
    shardings = nnx.to_flat_state(nnx.get_named_sharding(state, mesh))
    for (path, sharding), (_, variable) in zip(shardings, nnx.to_flat_state(state)):
        value = variable.get_value()
        assert value.sharding.is_equivalent_to(sharding.get_value(), value.ndim), path
    assert state["gate_up"].out_sharding == ("expert", None, None, "tensor")


def test_checkpoint(tmp_path):
    """Split, saved, restored into an abstract layer on a mesh, merged: the same numbers."""
    layer = randomize(make(**FULL, jitter=0.1))
    layer.router.selection_bias[...] = normal(5, E)
    layer.eval()
    want = call(layer, X)
    graphdef, state = nnx.split(layer)
    path = (tmp_path / "layer").resolve()
    mesh = jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2])
    with nnx.logical_axis_rules((*RULES[:2], ("mlp", None))):
        shardings = nnx.get_named_sharding(state, mesh)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        target = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            nnx.to_pure_dict(state), nnx.to_pure_dict(shardings),
        )  # fmt: skip
        restored = checkpointer.restore(path, target)
    abstract = nnx.state(nnx.eval_shape(lambda: make(**FULL, jitter=0.1)))
    assert [*nnx.to_pure_dict(abstract)] == [*restored]
    assert restored["gate_up"].sharding.is_equivalent_to(
        NamedSharding(mesh, P("ep", None, None, None)), 4
    )
    nnx.replace_by_pure_dict(state, jax.device_get(restored))
    np.testing.assert_array_equal(call(nnx.merge(graphdef, state), X), want)


# Linen.


def test_linen():
    """The same numbers, gradients and updates, as a layer of a Linen model."""
    layer = randomize(make(**FULL))
    layer.router.selection_bias[...] = normal(5, E)

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            return nn.linen_moe(D, F, name="moe", **FULL)(x)

    model = Model()
    variables = model.init(jax.random.key(0), X)
    assert {*variables} == {"params", "SelectionBias"}
    shapes = jax.tree.map(jnp.shape, linen.unbox(variables)["params"]["moe"])
    assert shapes == nnx.to_pure_dict(jax.tree.map(jnp.shape, nnx.state(layer, nnx.Param)))
    variables = {
        "params": {"moe": nnx.to_pure_dict(nnx.state(layer, nnx.Param))},
        "SelectionBias": {"moe": nnx.to_pure_dict(nnx.state(layer, nn.SelectionBias))},
    }
    np.testing.assert_array_equal(jax.jit(model.apply)(variables, X), call(layer, X))

    single = nn.linen_moe(D, F, **FULL)
    variables = {collection: v["moe"] for collection, v in variables.items()}

    def total(params):
        out = single.apply({**variables, "params": params}, X, nnx_method="with_aux")
        return (out.out**2).sum() + out.load_balance_loss + out.z_loss

    got = jax.jit(jax.grad(total))(variables["params"])
    close(got, nnx.to_pure_dict(gradients(layer, X)))


# What it refuses.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": None, "top_k": None}, "give num_experts and top_k, or a router"),
        ({"num_experts": 4, "top_k": 2, "router": RouterConfig(4, 2)}, "or a router, got num_exp"),
        ({"num_experts": 4, "top_k": 5}, "top_k is between 1 and num_experts"),
        ({"num_experts": 4, "top_k": 2, "activation": "swish"}, "Activation: name is one of"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        nn.MoE(D, F, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    ("tokens", "options", "error", "message"),
    [
        (jnp.ones((3, 7)), {}, ValueError, r"MoE: tokens must be \(..., 8\), got \(3, 7\)"),
        (jnp.ones((3, D), int), {}, TypeError, "MoE: tokens must be floats, got int"),
        (X, {"token_mask": jnp.ones(15, bool)}, ValueError,
         r"MoE: token_mask must be \(3, 5\) for tokens \(3, 5, 8\), got \(15,\)"),
        (X, {"token_mask": jnp.ones((3, 5))}, TypeError, "token_mask must be bool, got float32"),
        (X, {"token_ids": jnp.ones((3, 5))}, TypeError, "token_ids must be integers, got float32"),
        (X, {"token_ids": jnp.ones((3, 5), int)}, ValueError,
         r"Router: token_ids go with an expert_table, got token_ids \(15,\) and no expert_table"),
    ],
)  # fmt: skip
def test_wrong_arguments(tokens, options, error, message):
    with pytest.raises(error, match=message):
        make()(tokens, **options)


def test_missing_arguments():
    with pytest.raises(ValueError, match="got token_ids none and an expert_table"):
        make(vocab_size=10)(X)
    with pytest.raises(ValueError, match="no selection_bias, make it with selection_bias=True"):
        make().update_selection_bias(jnp.ones(E), 0.1)


def test_flax_is_imported_when_used():
    code = """
        import sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name == "flax":
                    raise ModuleNotFoundError(name, name=name)

        import pearl_jax
        assert not any(name.partition(".")[0] == "flax" for name in sys.modules)
        sys.meta_path.insert(0, Block())
        try:
            pearl_jax.nn
        except ModuleNotFoundError as e:
            print(e.name, e)
        sys.meta_path.pop(0)
        print(pearl_jax.nn.MoE.__name__)
        try:
            pearl_jax.nm
        except AttributeError as e:
            print(e)
    """
    missing, name, unknown = python(code).splitlines()
    assert missing == (
        "flax pearl_jax.nn needs Flax, which is not installed: pip install 'pearl-jax[nn]'"
    )
    assert name == "MoE"
    assert unknown == "module 'pearl_jax' has no attribute 'nm'"


def test_docstrings_run():
    assert doctest.testmod(nn).failed == 0
