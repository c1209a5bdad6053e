"""Routers, losses and the permutation of tokens; tests named after public reports of others."""

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pearl_jax import routing
from pearl_jax.routing import RouterConfig

E = 8
# The routers of model families, and the parts of route they use.
ZOO = {
    "Mixtral": (RouterConfig(E, 2), ()),
    "Qwen3 without norm": (RouterConfig(E, 3, normalize=False), ()),
    "DeepSeek-V3": (
        RouterConfig(E, 3, "sigmoid", scaling_factor=2.5, num_groups=4, top_k_groups=2),
        ("selection_bias",),
    ),
    "GLM": (RouterConfig(E, 3, "sigmoid", scaling_factor=2.5), ("selection_bias",)),
    "MiniMax-M2": (RouterConfig(E, 3, "sigmoid"), ("selection_bias",)),
    "gpt-oss": (RouterConfig(E, 4), ()),
    "Llama-4": (RouterConfig(E, 1, "sigmoid", normalize=False, weight_input=True), ()),
    "DeepSeek-V4": (RouterConfig(E, 3, "sqrt_softplus", scaling_factor=1.5), ("selection_bias",)),
    "DeepSeek-V4 by token": (RouterConfig(E, 3, "sqrt_softplus"), ("experts",)),
    "Gemma-4": (RouterConfig(E, 3), ("expert_scale",)),
    "groups without bias": (RouterConfig(E, 2, num_groups=2, top_k_groups=1), ()),
    "groups of one": (RouterConfig(E, 2, "sigmoid", num_groups=8, top_k_groups=3), ()),
    "all experts": (RouterConfig(E, E), ()),
    "one expert": (RouterConfig(1, 1), ()),
}


def parts(rng, config, names, t, shift=0.0):
    e = config.num_experts
    made = {
        "selection_bias": rng.standard_normal(e) + shift,
        "expert_scale": rng.uniform(0.5, 2, e),
        "experts": np.array([rng.permutation(e)[: config.top_k] for _ in range(t)], int),
    }
    return {name: np.asarray(made[name], np.float32 if name != "experts" else np.int32)
            for name in names}  # fmt: skip


@pytest.mark.parametrize("shift", [0, -10], ids=["", "negative bias"])
@pytest.mark.parametrize("name", ZOO)
def test_families(name, shift, rng):
    """Experts in order and weights, for scores that are all negative with the bias too."""
    config, names = ZOO[name]
    logits = np.float32(3 * rng.standard_normal((64, config.num_experts)))
    options = parts(rng, config, names, len(logits), shift)
    experts, weights = moe_oracle.route(logits, config, **options)
    options = {name: jnp.asarray(x) for name, x in options.items()}
    got = jax.jit(lambda x: routing.route(x, config, **options))(logits)
    np.testing.assert_array_equal(got.experts, experts)
    np.testing.assert_allclose(got.weights, weights, rtol=2e-6)
    np.testing.assert_allclose(got.scores.sum(1), 1, rtol=1e-5)
    assert {x.dtype.name for x in (got.weights, got.scores, got.logits)} == {"float32"}


def test_groups_that_are_left_out_stay_out():
    """Excluded experts are -inf, not 0, which would beat scores that a bias made negative."""
    config = RouterConfig(8, 2, "sigmoid", num_groups=4, top_k_groups=1)
    logits, bias = jnp.zeros((1, 8)).at[0, 4:6].set(1.0), jnp.full(8, -5.0)
    assert sorted(routing.route(logits, config, selection_bias=bias).experts[0]) == [4, 5]


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus", "softmax"])
def test_scores_that_underflow(score):
    """sigmoid(-110) is 0 in float32: the weights still have the ratio of the true scores."""
    config = RouterConfig(4, 2, score)
    logits = np.float32([[-110, -111, -120, -130], [-300, -301, -302, -303], [-16, -15, -14, -20]])
    weights = lambda x: routing.route(x, config).weights
    want = moe_oracle.route(logits, config)[1]
    np.testing.assert_allclose(weights(jnp.asarray(logits)), want, rtol=2e-6)
    total = lambda x: (
        (weights(x) * jnp.array([1.0, 3.0])).sum()
        + routing.load_balance_loss(routing.route(x, config))
    )
    gradient = jax.grad(total)(jnp.asarray(logits))
    assert np.isfinite(gradient).all()
    for i in range(4):
        step = 0.05 * np.float32(np.arange(4) == i)
        slope = (total(logits + step) - total(logits - step)) / 0.1
        np.testing.assert_allclose(gradient.sum(0)[i], slope, atol=2e-3)


def test_saturated_scores():
    """sigmoid(20) and sigmoid(30) are both 1 in float32; the larger logit is chosen (Llama-4)."""
    config = RouterConfig(4, 1, "sigmoid", normalize=False)
    assert routing.route(jnp.array([[0.0, 20, 30, 25]]), config).experts == 2


def test_ties_vllm_55514():
    """vllm#55514, #54403: the order of equal scores was left open. Lower numbers first."""
    zeros = jnp.zeros((3, 8))
    for config in (RouterConfig(8, 3), RouterConfig(8, 3, "sigmoid", num_groups=4, top_k_groups=2)):
        for bias in (None, jnp.zeros(8)):
            got = routing.route(zeros, config, selection_bias=bias).experts
            np.testing.assert_array_equal(got, [[0, 1, 2]] * 3)
    logits = jnp.array([[1.0, 2, 2, 0, 2, 1, 0, 0]])
    assert routing.route(logits, RouterConfig(8, 4)).experts.tolist() == [[1, 2, 4, 0]]


def test_logits_of_bfloat16_tokens_sglang_38695(rng):
    """sglang#38695, #33764, sglang-jax#698: logits rounded to bfloat16 changed the experts."""
    e, d, config = 64, 256, RouterConfig(64, 8)
    tokens, kernel = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((200, d), (d, e))
    )
    logits = jax.jit(routing.project)(tokens, kernel)
    assert logits.dtype == jnp.float32
    exact = np.float64(tokens) @ np.float64(kernel)
    chosen = lambda logits: np.sort(routing.route(jnp.float32(logits), config).experts)
    np.testing.assert_array_equal(chosen(logits), np.sort(moe_oracle.route(exact, config)[0]))
    assert (chosen(exact.astype(jnp.bfloat16)) != chosen(exact)).any()  # rounding would show
    np.testing.assert_allclose(
        routing.project(tokens, jnp.float32(kernel)), exact, rtol=2e-6, atol=1e-5
    )


def test_an_expert_twice(rng):
    """A table may name an expert more than once: the gradient of its score is the sum."""
    config, experts = RouterConfig(4, 3, normalize=False), jnp.array([[1, 1, 2]])
    logits = jnp.asarray(rng.standard_normal((1, 4)))
    total = lambda x: (routing.route(x, config, experts=experts).weights @ jnp.arange(1.0, 4)).sum()
    want = jax.grad(lambda x: (jax.nn.softmax(x) @ jnp.array([0, 3.0, 3, 0])).sum())(logits)
    np.testing.assert_allclose(jax.grad(total)(logits), want, atol=1e-6)


def test_jitter():
    noise = routing.jitter(jnp.ones((64, 32), jnp.bfloat16), 0.1, jax.random.key(0))
    assert noise.dtype == jnp.float32
    assert 0.9 <= noise.min() < 0.91
    assert 1.09 < noise.max() <= 1.1
    assert abs(noise.mean() - 1) < 0.005


# Losses.


def routed(rng, t=24, skew=0.0, score="softmax"):
    logits = rng.standard_normal((t, E)) + skew * (np.arange(E) == 3)
    return routing.route(jnp.float32(logits), RouterConfig(E, 2, score))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_load_balance_loss(score, rng):
    config = RouterConfig(E, 2, score)
    balanced = routing.route(10 * jnp.tile(jnp.eye(E) + jnp.roll(jnp.eye(E), 1, 1), (3, 1)), config)
    np.testing.assert_allclose(routing.load_balance_loss(balanced), 1, rtol=1e-6)
    got = routed(rng, score=score)
    scores = moe_oracle.SCORES[score](np.float64(got.logits))
    scores /= scores.sum(1, keepdims=True)
    share = np.bincount(np.ravel(got.experts), minlength=E) / got.experts.size
    np.testing.assert_allclose(
        routing.load_balance_loss(got), E * share @ scores.mean(0), rtol=1e-6
    )
    logits = np.float64(got.logits)
    want = np.mean(np.log(np.exp(logits).sum(1)) ** 2)
    np.testing.assert_allclose(routing.z_loss(got), want, rtol=1e-6)


def test_loss_of_skewed_routing_megablocks_85(rng):
    """megablocks#85, hyper-parallel#752: the loss was the same whatever the routing."""
    losses = [float(routing.load_balance_loss(routed(rng, 200, skew))) for skew in (0, 1, 3, 9)]
    assert losses == sorted(losses)
    assert losses[-1] > 2 * losses[0]


def test_losses_of_padded_tokens_megatron_5542(rng):
    """Megatron-LM PR#5542, #2121: padding counted. The losses are those of the other tokens."""
    logits, mask = rng.standard_normal((24, E)), rng.uniform(size=24) < 0.6
    config, kept = RouterConfig(E, 3, "sigmoid"), jnp.float32(logits[mask])
    logits[~mask] = np.nan

    def losses(x, mask=None):
        got = routing.route(x, config, token_mask=mask)
        return routing.load_balance_loss(got) + routing.z_loss(got), got

    (got, routed), gradient = jax.value_and_grad(losses, has_aux=True)(jnp.float32(logits), mask)
    (want, of_kept), kept_gradient = jax.value_and_grad(losses, has_aux=True)(kept)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(gradient[mask], kept_gradient, atol=1e-7)
    assert not gradient[~mask].any()
    counts = routing.tokens_per_expert(routed.experts, E)
    np.testing.assert_array_equal(counts, routing.tokens_per_expert(of_kept.experts, E))
    np.testing.assert_array_equal(routing.token_mask(routed), mask)
    assert not routed.weights[~mask].any()
    nothing = routing.route(jnp.float32(logits), config, token_mask=jnp.zeros(24, bool))
    assert routing.load_balance_loss(nothing) == routing.z_loss(nothing) == 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_losses_of_sharded_tokens(check_vma, rng):
    """The loss of all tokens and its gradient, where a mean of the shards' losses is another."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    logits, mask = jnp.float32(rng.standard_normal((24, E))), rng.uniform(size=24) < 0.7
    logits += 2 * jnp.eye(E)[jnp.arange(24) // 6]  # each shard likes another expert

    def losses(logits, mask, axis_name=None):
        got = routing.route(logits, RouterConfig(E, 2), token_mask=mask)
        return jnp.stack(
            [f(got, axis_name=axis_name) for f in (routing.load_balance_loss, routing.z_loss)]
        )

    def sharded(logits, mask, axis_name="x"):
        return jax.shard_map(
            lambda logits, mask: losses(logits, mask, axis_name),
            mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P(), check_vma=check_vma,
        )(logits, mask)  # fmt: skip

    pairs = [
        jax.jit(jax.value_and_grad(lambda x: f(x, mask) @ jnp.array([1.0, 2.0])))(logits)
        for f in (sharded, losses)
    ]
    for got, want in zip(*map(jax.tree.leaves, pairs)):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)
    local = np.mean([losses(x, m) for x, m in zip(jnp.split(logits, 4), np.split(mask, 4))], 0)
    assert abs(local - losses(logits, mask))[0] > 0.1


def test_update_selection_bias():
    bias = routing.update_selection_bias(jnp.zeros(4), jnp.array([0, 4, 8, 4]), 0.25)
    assert bias.tolist() == [0.25, 0, -0.25, 0]


# The permutation.


def permutation_of(rng, t=20, top_k=3, e=6):
    experts = np.array([rng.permutation(e)[:top_k] for _ in range(t)])
    experts[rng.uniform(size=t) < 0.2] = e  # masked
    experts[experts == 2] = 1  # an expert without tokens
    return experts, routing.sort_by_expert(jnp.asarray(experts, jnp.int32), e)


def test_sort_by_expert(rng):
    """Masked tokens have no row: not where they would be read, nor where they would be added."""
    experts, permutation = permutation_of(rng)
    order = np.argsort(experts.ravel(), kind="stable")
    used = np.sum(experts < 6)
    assert 0 < used < order.size
    np.testing.assert_array_equal(permutation.order[:used], order[:used])
    np.testing.assert_array_equal(permutation.order[used:], order.size)
    inverse = np.full(order.size, order.size)
    inverse[order[:used]] = np.arange(used)
    np.testing.assert_array_equal(permutation.inverse.ravel(), inverse)
    counts = np.bincount(experts.ravel(), minlength=7)[:6]
    np.testing.assert_array_equal(permutation.group_sizes, counts)
    assert permutation.group_sizes[2] == 0


def test_rows_and_their_gradients(rng):
    """Each of the four against numpy, and its gradient against the transpose in numpy."""
    experts, permutation = permutation_of(rng)
    (t, top_k), r, d = experts.shape, experts.size, 4
    used = np.sum(experts < 6)
    order = np.argsort(experts.ravel(), kind="stable")[:used]

    def padded(rows):
        return np.pad(rows, ((0, r - used), (0, 0)))

    tokens, pairs, rows, weights = (
        jnp.float32(rng.standard_normal(s)) for s in ((t, d), (t, top_k, d), (r, d), (t, top_k))
    )
    rows = rows.at[used:].set(jnp.nan)
    dispatched, vjp = jax.vjp(lambda x: routing.dispatch(x, permutation), tokens)
    np.testing.assert_array_equal(dispatched, padded(tokens[order // top_k]))
    want = np.zeros((t, d))
    np.add.at(want, order // top_k, rows[:used])
    np.testing.assert_allclose(vjp(rows)[0], want, rtol=1e-5, atol=1e-6)

    in_rows, vjp = jax.vjp(lambda x: routing.to_rows(x, permutation), pairs)
    np.testing.assert_array_equal(in_rows, padded(pairs.reshape(r, d)[order]))
    unsorted = np.zeros((r, d), np.float32)
    unsorted[order] = rows[:used]
    unsorted = unsorted.reshape(t, top_k, d)
    np.testing.assert_array_equal(vjp(rows)[0], unsorted)

    in_pairs, vjp = jax.vjp(lambda x: routing.to_pairs(x, permutation), rows)
    np.testing.assert_array_equal(in_pairs, unsorted)
    np.testing.assert_array_equal(vjp(pairs)[0], in_rows)

    out, vjp = jax.vjp(lambda *args: routing.combine(*args, permutation), rows, weights)
    np.testing.assert_allclose(out, (unsorted * weights[..., None]).sum(1), rtol=1e-5, atol=1e-6)
    drows, dweights = vjp(tokens)
    np.testing.assert_allclose(
        drows, padded((weights[..., None] * tokens[:, None]).reshape(r, d)[order]), rtol=1e-6
    )
    np.testing.assert_allclose(dweights, (unsorted * tokens[:, None]).sum(-1), rtol=1e-5, atol=1e-6)


def float_scatters(function, *args):
    """The primitives of a jaxpr, at any depth, that scatter floats."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name.startswith("scatter") and eqn.outvars[0].aval.dtype.kind == "f":
                yield eqn.primitive.name
            for inner in jaxprs_in_params(eqn.params):
                yield from walk(inner)

    return [*walk(jax.make_jaxpr(function)(*args).jaxpr)]


def test_nothing_is_scattered_huggingface_43362(rng):
    """transformers#43362, torchtitan#1974, #2775: atomics of a scatter-add gave other bits."""
    config = RouterConfig(6, 3, "sigmoid")
    tokens, kernel, scale = (jnp.float32(rng.standard_normal(s)) for s in ((20, 4), (4, 6), (6,)))

    def total(tokens, kernel, scale):
        got = routing.route(tokens @ kernel, config, expert_scale=scale)
        permutation = routing.sort_by_expert(got.experts, 6)
        rows = jnp.tanh(routing.dispatch(tokens, permutation))
        out = routing.combine(rows, got.weights, permutation)
        return (out**2).sum() + routing.load_balance_loss(got)

    gradients = jax.grad(total, (0, 1, 2))
    assert not float_scatters(gradients, tokens, kernel, scale)
    assert float_scatters(jax.grad(lambda x: x[jnp.array([0, 0, 1])].sum()), tokens)
    runs = [jax.tree.leaves(jax.jit(gradients)(tokens, kernel, scale)) for _ in range(3)]
    assert len({b"".join(np.asarray(x).tobytes() for x in run) for run in runs}) == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_local_experts_of_replicated_tokens(check_vma, rng):
    """In shard_map, devices that have the same tokens and other experts: output and gradients.

    A permutation by jnp.argsort, which check_vma takes for the same on all devices, gives a
    right output and the gradients of one device (jax 0.10 to 0.12).
    """
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    tokens, logits, scale = (
        jnp.float32(rng.standard_normal(s)) for s in ((12, 5), (12, E), (E, 5))
    )
    config = RouterConfig(E, 3)

    def layer(tokens, logits, scale, first=0):
        got = routing.route(logits, config)
        own = (got.experts >= first) & (got.experts < first + len(scale))
        permutation = routing.sort_by_expert(
            jnp.where(own, got.experts - first, len(scale)), len(scale)
        )
        groups = jnp.repeat(
            jnp.arange(len(scale) + 1),
            jnp.append(permutation.group_sizes, jnp.sum(~own)),
            total_repeat_length=own.size,
        )
        rows = routing.dispatch(tokens, permutation)
        rows = rows * jnp.append(scale, jnp.zeros((1, 5)), axis=0)[groups]
        return routing.combine(rows, got.weights, permutation)

    def sharded(tokens, logits, scale):
        def local(tokens, logits, scale):
            first = jax.lax.axis_index("x") * len(scale)
            return jax.lax.psum(layer(tokens, logits, scale, first), "x")

        return jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=P(), check_vma=check_vma
        )(tokens, logits, scale)

    both = [
        jax.jit(jax.value_and_grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2)))(
            tokens, logits, scale
        )
        for f in (sharded, layer)
    ]
    for got, want in zip(*map(jax.tree.leaves, both)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_vmap(rng):
    logits, tokens = jnp.float32(rng.standard_normal((2, 10, E))), jnp.ones((10, 4))

    def rows(logits):
        got = routing.route(logits, RouterConfig(E, 2))
        permutation = routing.sort_by_expert(got.experts, E)
        rows = routing.dispatch(tokens, permutation) * jnp.arange(20.0)[:, None]
        return routing.combine(rows, got.weights, permutation), permutation.group_sizes

    both = lambda x: (rows(x), jax.grad(lambda x: (rows(x)[0] ** 2).sum())(x))
    batched, one = jax.jit(jax.vmap(both))(logits), jax.jit(both)
    for i, x in enumerate(logits):
        for got, want in zip(*map(jax.tree.leaves, (batched, one(x)))):
            np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-5)


def test_no_tokens():
    got = routing.route(jnp.zeros((0, E)), RouterConfig(E, 2, "sigmoid", num_groups=2))
    assert got.experts.shape == (0, 2)
    assert routing.load_balance_loss(got) == routing.z_loss(got) == 0
    permutation = routing.sort_by_expert(got.experts, E)
    assert not permutation.group_sizes.any()
    assert routing.combine(jnp.zeros((0, 4)), got.weights, permutation).shape == (0, 4)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"num_experts": 0, "top_k": 1}, "num_experts is at least 1"),
        ({"num_experts": 8, "top_k": 9}, "top_k is between 1 and num_experts"),
        ({"num_experts": 8, "top_k": 2, "score": "tanh"}, "score is one of"),
        ({"num_experts": 8, "top_k": 2, "num_groups": 3}, "num_groups divides num_experts"),
        (
            {"num_experts": 8, "top_k": 2, "num_groups": 2, "top_k_groups": 3},
            "top_k_groups is between",
        ),
        # Else an expert that was left out is chosen, and has a weight.
        ({"num_experts": 8, "top_k": 3, "num_groups": 4}, "the chosen groups hold at least top_k"),
    ],
)
def test_config_errors(options, rule):
    with pytest.raises(ValueError, match=rf"RouterConfig: {rule}.*got RouterConfig\(num_experts"):
        RouterConfig(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"logits": jnp.zeros((4, 7))}, ValueError, r"logits must be \(4, 8\) .* got \(4, 7\)"),
        ({"logits": jnp.zeros(8)}, ValueError, r"logits must be \(t, e\), got \(8,\)"),
        ({"logits": jnp.zeros((4, 8), int)}, TypeError, "logits must be .*floating, got int"),
        ({"selection_bias": jnp.zeros(7)}, ValueError, r"selection_bias must be \(8,\)"),
        ({"experts": jnp.zeros((4, 3), int)}, ValueError, r"experts must be \(4, 2\)"),
        ({"experts": jnp.zeros((4, 2))}, TypeError, "experts must be .*integer, got float32"),
        ({"token_mask": jnp.ones(3, bool)}, ValueError, r"token_mask must be \(4,\)"),
        ({"token_mask": jnp.ones(4)}, TypeError, "token_mask must be .*bool.*, got float32"),
    ],
)
def test_errors(options, error, message):
    options = {"logits": jnp.zeros((4, 8)), **options}
    with pytest.raises(error, match=f"route: {message}"):
        routing.route(options.pop("logits"), RouterConfig(8, 2), **options)
