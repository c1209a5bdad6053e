"""The layer as a function: against float64, against other libraries' data, and public reports."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest

from pearl_jax import grouped_matmul, moe, routing
from pearl_jax.moe import Activation, ExpertWeights, LatentWeights, MoEWeights, SharedWeights
from pearl_jax.routing import RouterConfig

E, D, F, S, L, T = 6, 8, 5, 7, 4, 12
SILU, ACTIVATIONS = Activation(), [*moe_oracle.ACTIVATIONS]
SHAPES = {
    "tokens": (T, D),
    "router": (D, E),
    "gate_up": (E, D, 2, F),
    "down": (E, F, D),
    "router_bias": (E,),
    "gate_up_bias": (E, 2, F),
    "down_bias": (E, D),
    "shared_gate_up": (D, 2, S),
    "shared_down": (S, D),
    "shared_gate": (D, 1),
    "latent_down": (D, L),
    "latent_norm": (L,),
    "latent_up": (L, D),
}
PLAIN = ("tokens", "router", "gate_up", "down")
BIASES = ("router_bias", "gate_up_bias", "down_bias")
SHARED = ("shared_gate_up", "shared_down")
LATENT = ("latent_down", "latent_norm", "latent_up")
# What of the layer is there, with which router and activation.
LAYERS = {
    "Mixtral": ((), RouterConfig(E, 2), Activation()),
    "Qwen3-Next": ((*SHARED, "shared_gate"), RouterConfig(E, 3), Activation()),
    "GLM": (SHARED, RouterConfig(E, 3, "sigmoid", scaling_factor=2.5), Activation()),
    "gpt-oss": (BIASES, RouterConfig(E, 4), Activation("gpt_oss", limit=0.7)),
    "Llama-4": (
        SHARED,
        RouterConfig(E, 1, "sigmoid", normalize=False, weight_input=True),
        Activation(),
    ),
    "Kimi-K3": ((*SHARED, *LATENT), RouterConfig(E, 3, "sigmoid"), Activation("situ")),
    "weighted input": (BIASES, RouterConfig(E, 2, weight_input=True), Activation("gelu")),
    "all experts": ((), RouterConfig(E, E), Activation()),
}


def parameters(rng, names, **changed):
    shapes = SHAPES | changed
    if "latent_down" in names:
        shapes = shapes | {"gate_up": (E, L, 2, F), "down": (E, F, L)}
    return {name: np.float32(0.6 * rng.standard_normal(shapes[name])) for name in names}


def weights_of(p):
    experts = ExpertWeights(*(p.get(name) for name in ExpertWeights._fields))
    shared = SharedWeights(*(p.get(name) for name in (*SHARED, "shared_gate")))
    latent = LatentWeights(*(p.get(name) for name in LATENT))
    return MoEWeights(
        experts,
        shared if "shared_down" in p else None,
        latent if "latent_down" in p else None,
    )


def routed(p, config, token_mask=None):
    tokens = p["tokens"].reshape(-1, p["tokens"].shape[-1])
    if token_mask is not None:
        tokens = jnp.where(token_mask[:, None], tokens, 0)
    logits = routing.project(tokens, p["router"], p.get("router_bias"))
    return routing.route(logits, config, token_mask=token_mask)


def layer(p, config, activation=SILU, token_mask=None, **options):
    p = {name: jnp.asarray(x) for name, x in p.items()}
    return moe.moe(
        p["tokens"], routed(p, config, token_mask), weights_of(p),
        activation=activation, weight_input=config.weight_input, **options,
    )  # fmt: skip


@pytest.fixture(params=LAYERS)
def case(request, rng):
    names, config, activation = LAYERS[request.param]
    return parameters(rng, (*PLAIN, *names)), config, activation


some = pytest.mark.parametrize("case", ["gpt-oss", "Kimi-K3", "weighted input"], indirect=True)


def test_against_float64_te_3116(case, rng):
    """TransformerEngine PR#3116: gradients of weights only were tested. Here of everything.

    Along a random direction in each parameter, and in each expert's part of it.
    """
    p, config, activation = case
    ct = rng.standard_normal((T, D))

    def total(p):
        out = layer(p, config, activation)
        return (out.out * ct).sum(), (out, routed(p, config).logits)

    gradients, (out, logits) = jax.jit(jax.grad(total, has_aux=True))(p)
    exact = lambda p: moe_oracle.layer(p, config, activation.name, activation.limit)
    np.testing.assert_allclose(out.out, exact(p), rtol=1e-5, atol=2e-6)
    experts, _ = moe_oracle.route(logits, config)
    counts = np.bincount(experts.ravel(), minlength=E)
    np.testing.assert_array_equal(out.tokens_per_expert, counts)
    assert out.dropped == 0

    for name, x in p.items():
        per_expert = name in ExpertWeights._fields
        for part in range(E) if per_expert else [slice(None)]:
            direction, step = np.zeros(x.shape), 1e-6
            direction[part] = rng.standard_normal(x[part].shape)
            ends = (exact(p | {name: x + sign * step * direction}) for sign in (1, -1))
            want = (np.subtract(*ends) * ct).sum() / (2 * step)
            got = (np.float64(gradients[name]) * direction).sum()
            scale = np.linalg.norm(gradients[name][part]) * np.linalg.norm(direction)
            assert abs(got - want) <= 1e-5 * scale + 1e-7, (name, part)


# The blocks of transformers, by the names that torch gives their parameters.

GOLDEN = np.load(pathlib.Path(__file__).parent / "data" / "hf_moe_golden.npz")
SIGMOID = {"score": "sigmoid", "scaling_factor": 2.5}
MODELS = {
    "mixtral": {"top_k": 2},
    "qwen3_moe": {},
    "qwen3_moe_nonorm": {"normalize": False},
    "qwen3_next": {},
    "deepseek_v3": {"num_groups": 4, "top_k_groups": 2, **SIGMOID},
    "glm4_moe": SIGMOID,
    "glm_moe_dsa": SIGMOID,
    "minimax_m2": {"score": "sigmoid"},
    "gpt_oss": {},
    "llama4": {"top_k": 1, "score": "sigmoid", "normalize": False, "weight_input": True},
    "deepseek_v4": {"score": "sqrt_softplus", "scaling_factor": 1.5},
    "deepseek_v4_hash": {"score": "sqrt_softplus", "scaling_factor": 1.5},
}


def from_torch(model, p):
    """Torch's parameters, transposed to the layer's."""
    gate_up, down = p["experts.gate_up_proj"], p["experts.down_proj"]
    if model == "gpt_oss":  # interleaved
        bias = p["experts.gate_up_proj_bias"].reshape(8, 12, 2).swapaxes(1, 2)
        gate_up = gate_up.reshape(8, 16, 12, 2).swapaxes(2, 3)
        return MoEWeights(ExpertWeights(gate_up, down, bias, p["experts.down_proj_bias"]))
    if model != "llama4":
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    experts = ExpertWeights(gate_up.reshape(8, 16, 2, 12), down)
    for name in ("shared_expert", "shared_experts"):
        if f"{name}.up_proj.weight" in p:
            gate, up, down = (p[f"{name}.{x}_proj.weight"].T for x in ("gate", "up", "down"))
            gated = p["shared_expert_gate.weight"].T if "shared_expert_gate.weight" in p else None
            return MoEWeights(experts, SharedWeights(jnp.stack([gate, up], 1), down, gated))
    return MoEWeights(experts)


@pytest.mark.parametrize("model", MODELS)
def test_models_of_transformers_tpu_inference_1891(model):
    """tpu-inference PR#1891: scores activated twice, no scaling factor, top-k in bfloat16.

    Outputs, the gradient of the tokens and of each parameter, as torch computed them.
    """
    data = {k.partition("/")[2]: GOLDEN[k] for k in GOLDEN.files if k.startswith(f"{model}/")}
    of = lambda kind: {k[2:]: jnp.asarray(x) for k, x in data.items() if k.startswith(f"{kind}/")}
    config = RouterConfig(8, **{"top_k": 3, **MODELS[model]})
    limit = 0.7 if model in ("gpt_oss", "deepseek_v4", "deepseek_v4_hash") else None
    activation = Activation("gpt_oss" if model == "gpt_oss" else "silu", limit)
    buffers = of("b")
    bias = next((x for k, x in buffers.items() if k.endswith("e_score_correction_bias")), None)
    table = buffers.get("gate.tid2eid")

    def block(x, p):
        router = p["gate.weight"] if "gate.weight" in p else p["router.weight"]
        logits = routing.project(x.reshape(-1, 16), router.T, p.get("router.bias"))
        experts = None if table is None else table[data["ids"].ravel()]
        routed = routing.route(logits, config, selection_bias=bias, experts=experts)
        weights = from_torch(model, p)
        return moe.moe(
            x, routed, weights, activation=activation, weight_input=config.weight_input
        ).out

    @jax.jit
    def run(x, p, ct):
        y, vjp = jax.vjp(block, x, p)
        return y, *vjp(ct)

    y, dx, gradients = run(data["x"], of("p"), data["ct"])
    pairs = {"y": (y, data["y"]), "dx": (dx, data["dx"])}
    pairs |= {name: (gradients[name], want) for name, want in of("g").items()}
    assert gradients.keys() == of("g").keys()
    for name, (got, want) in pairs.items():
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), name


# Public reports.


@pytest.mark.parametrize("contraction", [grouped_matmul, jax.lax.ragged_dot])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_each_contraction_marin_7838(name, contraction, rng):
    """marin PR#7838: a back end ignored the activation. Values differ by it, for each."""
    p = parameters(rng, ("tokens", "gate_up", "down"))
    weights = ExpertWeights(jnp.asarray(p["gate_up"]), jnp.asarray(p["down"]))
    sizes, expert = np.array([2, 0, 5, 1, 3, 1]), np.repeat(np.arange(E), [2, 0, 5, 1, 3, 1])
    both = Activation(name), Activation(name, limit=0.3)
    outs = jax.jit(
        lambda *args: [moe.expert_mlp(*args, activation, contraction) for activation in both]
    )(p["tokens"], jnp.asarray(sizes, jnp.int32), weights)
    for out, activation in zip(outs, both):
        options = {"activation": name, "limit": activation.limit}
        for row, x, e in zip(out, np.float64(p["tokens"]), expert):
            want = moe_oracle.mlp(x, p["gate_up"][e], p["down"][e], **options)
            np.testing.assert_allclose(row, want, rtol=1e-5, atol=2e-6)
    assert np.abs(outs[0] - outs[1]).max() > 0.01


def test_unknown_activation_marin_7838():
    with pytest.raises(ValueError, match=r"Activation: name is one of .*'silu'.*, got 'swish'"):
        Activation("swish")


def test_uneven_experts_tokamax_887_marin_8339(rng):
    """tokamax#887, marin#8339, #8549: wrong gradients of empty or unaligned groups passed.

    Each expert against float64 by itself, the worst one counts; empty ones are exactly 0.
    """
    sizes = np.array([1, 7, 63, 65, 0, 129])
    t, expert = sizes.sum(), np.repeat(np.arange(E), sizes)
    expert = rng.permutation(expert)
    x, ct = (np.float32(rng.standard_normal((t, D))) for _ in range(2))
    gate_up, down = (np.float32(rng.standard_normal(SHAPES[n])) for n in ("gate_up", "down"))
    weight = np.float32(rng.uniform(0.5, 2, (t, 1)))
    chosen = jnp.asarray(expert[:, None], jnp.int32)
    choice = routing.Routing(chosen, jnp.asarray(weight), jnp.ones((t, E)) / E, jnp.zeros((t, E)))

    def run(x, gate_up, down):
        weights = MoEWeights(ExpertWeights(gate_up, down))
        return moe.moe(x, choice, weights, activation=Activation("none")).out

    out, vjp = jax.vjp(jax.jit(run), jnp.asarray(x), jnp.asarray(gate_up), jnp.asarray(down))
    dx, dgate_up, ddown = vjp(jnp.asarray(ct))

    order = np.argsort(expert, kind="stable")
    rows, cts = np.float64(x)[order], np.float64(ct * weight)[order]
    flat = np.float64(gate_up).reshape(E, D, 2 * F)
    both = oracle.grouped_matmul(rows, flat, sizes)
    gate, up = both[:, :F], both[:, F:]
    dhidden = oracle.grouped_matmul(cts, np.float64(down), sizes, transpose_rhs=True)
    dboth = np.concatenate([dhidden * up, dhidden * gate], axis=1)
    want_out = oracle.grouped_matmul(gate * up, np.float64(down), sizes) * weight[order]
    for got, want in (
        (out[order], want_out),
        (dx[order], oracle.grouped_matmul(dboth, flat, sizes, transpose_rhs=True)),
        (dgate_up.reshape(E, D, 2 * F), oracle.grouped_outer(rows, dboth, sizes)),
        (ddown, oracle.grouped_outer(gate * up, cts, sizes)),
    ):
        assert oracle.worst_group_error(got, want, sizes) < 2e-6


@pytest.mark.parametrize(
    "case", ["Qwen3-Next", "gpt-oss", "Kimi-K3", "weighted input"], indirect=True
)
def test_masked_tokens_lalamo_310(case, rng):
    """lalamo#310, TransformerEngine PR#3494: padding leaked, or was multiplied by 0.

    Masked tokens hold NaN: they get exactly 0, no gradient sees them, the others are as
    without them.
    """
    p, config, activation = case
    mask = rng.uniform(size=T) < 0.6
    ct = rng.standard_normal((T, D))
    poisoned = p | {"tokens": np.where(mask[:, None], p["tokens"], np.nan)}

    def total(p, token_mask, ct):
        out = layer(p, config, activation, token_mask)
        return (out.out * ct).sum() + out.load_balance_loss + out.z_loss, out

    def run(p, *args):
        p = {name: jnp.asarray(x) for name, x in p.items()}
        return jax.jit(jax.grad(total, has_aux=True))(p, *args)

    gradients, out = run(poisoned, mask, ct)
    kept_gradients, kept = run(p | {"tokens": p["tokens"][mask]}, None, ct[mask])
    assert not out.out[~mask].any()
    assert not gradients["tokens"][~mask].any()
    gradients["tokens"] = gradients["tokens"][mask]
    pairs = (gradients, kept_gradients), (out._replace(out=out.out[mask]), kept)
    for got, want in (pair for trees in pairs for pair in zip(*map(jax.tree.leaves, trees))):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


@some
def test_all_tokens_masked(case):
    p, config, activation = case
    p["tokens"][:] = np.nan
    total = lambda p: layer(p, config, activation, jnp.zeros(T, bool)).out.sum()
    out, gradients = jax.jit(jax.value_and_grad(total))(p)
    assert out == 0
    assert not any(np.any(x) for x in jax.tree.leaves(gradients))


@some
def test_same_bits_huggingface_43362(case, rng):
    """transformers#43362, torchtitan#1974: combine added in another order in each run."""
    p, config, activation = case
    ct = rng.standard_normal((T, D))
    run = jax.jit(jax.value_and_grad(lambda p: (layer(p, config, activation).out * ct).sum()))
    runs = [jax.tree.leaves(run(p)) for _ in range(5)]
    assert len({b"".join(np.asarray(x).tobytes() for x in leaves) for leaves in runs}) == 1


def test_memory_marin_5394(rng):
    """marin#5394: a step's scratch grew with the number of experts times that of rows."""
    t, d, f, top_k, scratch = 128, 64, 32, 2, {}
    for e in (4, 64):
        shapes = {"tokens": (t, d), "router": (d, e), "gate_up": (e, d, 2, f), "down": (e, f, d)}
        p = parameters(rng, PLAIN, **shapes)
        step = jax.grad(lambda p: layer(p, RouterConfig(e, top_k)).out.sum())
        memory = jax.jit(step).lower(p).compile().memory_analysis()
        scratch[e] = memory.temp_size_in_bytes - memory.output_size_in_bytes
    rows = t * top_k * (d + 2 * f) * 4
    assert scratch[64] - scratch[4] < 2 * rows, (scratch, rows)
    assert scratch[64] < 16 * rows, (scratch, rows)


def test_width_of_latent_experts_inference_sim_1690(rng):
    """inference-sim#1690: Kimi-K3's experts were taken to be as wide as the tokens."""
    p = parameters(rng, (*PLAIN, *LATENT))
    assert p["gate_up"].shape == (E, L, 2, F)
    assert layer(p, RouterConfig(E, 2)).out.shape == (T, D)
    p["gate_up"] = np.zeros(SHAPES["gate_up"], np.float32)
    with pytest.raises(ValueError, match=r"moe: experts.down must be \(6, 5, 8\)"):
        layer(p, RouterConfig(E, 2))


# Everything else.


@some
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(dtype, case):
    p, config, activation = case
    p = {name: jnp.asarray(x, dtype) for name, x in p.items()}
    out = jax.jit(lambda p: layer(p, config, activation).out)(p)
    assert out.dtype == dtype
    want = moe_oracle.layer(p, config, activation.name, activation.limit)
    error = np.linalg.norm(np.float64(out) - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 3 * oracle.TOLERANCE[dtype]


def test_batches_of_tokens(rng):
    p, config = parameters(rng, PLAIN), RouterConfig(E, 2)
    flat = layer(p, config)
    for shape in ((3, 4, D), (2, 1, 6, D)):
        got = layer(p | {"tokens": p["tokens"].reshape(shape)}, config)
        np.testing.assert_array_equal(got.out, flat.out.reshape(shape))
        np.testing.assert_array_equal(got.load_balance_loss, flat.load_balance_loss)
    one = layer(p | {"tokens": p["tokens"][0]}, config)
    np.testing.assert_allclose(one.out, flat.out[0], rtol=1e-6, atol=1e-7)


@some
@pytest.mark.parametrize("t", [0, 1])
def test_few_tokens(t, case):
    p, config, activation = case
    p["tokens"] = p["tokens"][:t]
    total = lambda p: layer(p, config, activation).out.sum()
    out, gradients = jax.jit(jax.value_and_grad(total))(p)
    want = moe_oracle.layer(p, config, activation.name, activation.limit).sum()
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    assert t or not any(np.any(x) for x in jax.tree.leaves(gradients))


def test_one_expert(rng):
    shapes = {"router": (D, 1), "gate_up": (1, D, 2, F), "down": (1, F, D)}
    p, config = parameters(rng, PLAIN, **shapes), RouterConfig(1, 1)
    out = layer(p, config)
    np.testing.assert_allclose(out.out, moe_oracle.layer(p, config), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.load_balance_loss, 1, rtol=1e-6)


def test_vmap(rng):
    """Over tokens, with the weights shared: output and gradients of each batch by itself."""
    p, config = parameters(rng, (*PLAIN, *BIASES)), RouterConfig(E, 2)
    batches = rng.standard_normal((3, T, D)).astype(np.float32)

    def run(tokens):
        total = lambda p: (layer(p, config).out ** 2).sum()
        return jax.value_and_grad(total)(p | {"tokens": tokens})

    got = jax.jit(jax.vmap(run))(batches)
    for i, tokens in enumerate(batches):
        for batched, want in zip(*map(jax.tree.leaves, (got, jax.jit(run)(tokens)))):
            np.testing.assert_allclose(batched[i], want, rtol=1e-4, atol=1e-5)


def test_second_order(rng):
    """A gradient of a gradient, against that of every expert computed for every token."""
    p, config = parameters(rng, PLAIN), RouterConfig(E, 2)
    experts = routed(p, config).experts

    def dense(p):
        chosen = jnp.any(experts[:, :, None] == jnp.arange(E), axis=1)
        weights = jax.nn.softmax(jnp.where(chosen, p["tokens"] @ p["router"], -jnp.inf))
        gate, up = jnp.moveaxis(jnp.einsum("td,edgf->tegf", p["tokens"], p["gate_up"]), 2, 0)
        return jnp.einsum("tef,efd,te->td", jax.nn.silu(gate) * up, p["down"], weights)

    def norm_of_gradient(run, p):
        inner = jax.grad(lambda p: (run(p) ** 2).sum())(p)
        return sum((x**2).sum() for x in jax.tree.leaves(inner))

    got, want = (
        jax.jit(jax.grad(functools.partial(norm_of_gradient, run)))(p)
        for run in (lambda p: layer(p, config).out, dense)
    )
    for name in p:
        error = np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name])
        assert error < 2e-5, name


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokens": np.ones((T, D), np.int32)}, TypeError, r"tokens must be floats, got int32"),
        ({"gate_up": (E, D, 2 * F)}, ValueError, r"experts.gate_up must be \(e, d, 2, f\)"),
        ({"gate_up": (E, D, 3, F)}, ValueError, r"experts.gate_up must be \(6, 8, 2, 5\)"),
        ({"down": (E, D, F)}, ValueError, r"experts.down must be \(6, 5, 8\)"),
        ({"down_bias": (E, F)}, ValueError, r"experts.down_bias must be \(6, 8\)"),
        ({"shared_gate_up": (D, S, 2)}, ValueError, r"shared.gate_up must be \(8, 2, 7\)"),
        ({"shared_gate": (D,)}, ValueError, r"shared.gate must be \(8, 1\)"),
    ],
)
def test_errors(changes, error, message, rng):
    p = parameters(rng, (*PLAIN, *BIASES, *SHARED, "shared_gate"))
    choice = routed({name: jnp.asarray(x) for name, x in p.items()}, RouterConfig(E, 2))
    for name, x in changes.items():
        p[name] = np.zeros(x, np.float32) if isinstance(x, tuple) else x
    p = {name: jnp.asarray(x) for name, x in p.items()}
    with pytest.raises(error, match=f"moe: {message}"):
        moe.moe(p["tokens"], choice, weights_of(p))
    with pytest.raises(ValueError, match=r"moe: routing.experts must be \(11, 2\) with 11 tokens"):
        moe.moe(jnp.zeros((11, D)), choice, weights_of(parameters(rng, PLAIN)))


def test_sharded_tokens_need_a_mesh(rng):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,),
                         devices=jax.devices()[:4])  # fmt: skip
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    p = parameters(rng, PLAIN)
    with jax.set_mesh(mesh):
        p["tokens"] = jax.device_put(p["tokens"], spec)
        with pytest.raises(ValueError, match=r"sharded, .*'x'.* take .*ExpertParallel\(mesh\)"):
            layer(p, RouterConfig(E, 2))
