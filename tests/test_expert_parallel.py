"""Experts on meshes of CPU devices: the layer of one device, its losses and all its gradients.

Each compiled program runs all routings of CASES, which differ in values only.
"""

import csv
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_problem import (
    AUTO,
    CONFIG,
    EXPLICIT,
    PARAMETERS,
    D,
    E,
    F,
    K,
    T,
    agree,
    apply_kept,
    expert_gradients,
    experts_of,
    kept_pairs,
    make_mesh,
    normal,
    problem,
    routed_problem,
)

from pearl_jax import moe, nn, routing
from pearl_jax.expert_parallel import ExpertParallel

STRATEGIES = ("replicate", "gather", "all_to_all")
CASES = ("uniform", "hot expert", "empty devices", "masked", "all masked")


def loss_of(apply_experts, activation="silu", weight_input=False):
    def loss(tokens, mask, bias, ct, parameters):
        logits = routing.project(jnp.where(mask[:, None], tokens, 0), parameters["router"], bias)
        out = moe.moe(
            tokens,
            routing.route(logits, CONFIG, token_mask=mask),
            moe.MoEWeights(experts_of(parameters)),
            activation=moe.Activation(activation),
            weight_input=weight_input,
            apply_experts=apply_experts,
        )
        return jnp.sum(out.out * ct) + 3 * out.load_balance_loss + 5 * out.z_loss, out

    return loss


# Small problems: compiling is what takes the time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def with_gradients(loss):
    """The loss and all results, and the gradients for tokens and each parameter."""
    return jit(jax.value_and_grad(loss, (0, 4), has_aux=True))


@functools.cache
def on_one_device(case, t=T, **options):
    return _one_device(**options)(*problem(case, t), PARAMETERS)


@functools.cache
def _one_device(**options):
    return with_gradients(loss_of(moe.apply_experts, **options))


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def put_parameters(ep):
    specs = {"router": P(), **ep.weight_specs._asdict()}
    return {name: put(x, ep.mesh, specs[name]) for name, x in PARAMETERS.items()}


def moved_shapes(text):
    """Shapes that exchanges of a compiled program give, but for sums."""
    kinds = "all-gather|all-to-all|collective-permute"
    results = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text)
    shapes = (shape for r in results for shape in re.findall(r"\w+\[([\d,]+)\]", r))
    return {tuple(map(int, shape.split(","))) for shape in shapes}


def is_weights(shape):
    """Whether an array of that shape has both d and f, as nothing but weights has."""
    return len(shape) > 2 and D in shape and any(f in shape for f in (F, 2 * F, F // 2))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        (AUTO, {"expert": 8}),
        (AUTO, {"data": 2, "expert": 4}),
        (AUTO, {"expert": 4, "tensor": 2}),
        (AUTO, {"expert": 2, "fsdp": 2, "tensor": 2}),
        (EXPLICIT, {"data": 2, "expert": 2, "tensor": 2}),
    ],
    ids=lambda x: getattr(x, "name", None) or "-".join(f"{n}{s}" for n, s in x.items()),
)
def test_same_as_one_device(kind, axes, strategy):
    """Values, losses, counts and each gradient, whatever the load; weights do not move.

    jax#34755: an exchange that CPU devices do not have. marin#8077, #8081, #7891: NaN in gradients
    that came through an exchange.
    TransformerEngine PR#2912: the combine's gradient came from one shard; PR#3116: only those of
    weights were tested. transformers#48687, pytorch#160285, NeMo Automodel PR#1260: the router's
    gradient wrong, or twice or half as large. torchtitan PR#4054: sums over tensor lost.
    """
    ep = ExpertParallel(make_mesh(kind, **axes), strategy=strategy)
    with jax.set_mesh(ep.mesh):
        parameters = put_parameters(ep)
        function = None
        for case in CASES:
            tokens, mask, bias, ct = problem(case)
            tokens, ct = (put(x, ep.mesh, ep.token_spec) for x in (tokens, ct))
            args = tokens, mask, bias, ct, parameters
            function = function or with_gradients(loss_of(ep)).lower(*args).compile()
            got = function(*args)
            agree(got, on_one_device(case))
            for name, gradient in got[1][1].items():
                kept = parameters[name].sharding
                assert gradient.sharding.is_equivalent_to(kept, gradient.ndim), name
    weights = {shape for shape in moved_shapes(function.as_text()) if is_weights(shape)}
    if "fsdp" in axes:  # along d only
        weights -= {(E // 2, D, 2, F // 2), (E // 2, F // 2, D)}
    assert not weights


@pytest.mark.parametrize(
    ("kind", "strategy"), [(AUTO, "replicate"), (EXPLICIT, "gather"), (AUTO, "all_to_all")]
)
def test_any_number_of_tokens(kind, strategy):
    ep = ExpertParallel(make_mesh(kind, data=2, expert=4), strategy=strategy)
    args = *problem("masked", 29), PARAMETERS
    agree(with_gradients(loss_of(ep))(*args), on_one_device("masked", 29))


@pytest.mark.parametrize(("strategy", "t"), [("gather", 0), ("all_to_all", 0), ("all_to_all", 1)])
def test_hardly_a_token(strategy, t):
    ep = ExpertParallel(make_mesh(expert=4), strategy=strategy)
    args = *problem("uniform", t), PARAMETERS
    agree(*(jit(loss_of(apply))(*args)[1] for apply in (ep, moe.apply_experts)))


def test_one_expert_shard():
    """Tensor parallelism alone, and an axis of one device: tokens stay where they are.

    torchtitan PR#4054: without an expert axis gradients below the experts lacked a sum.
    """
    for axes in ({"tensor": 2}, {"data": 2, "expert": 1}):
        ep = ExpertParallel(make_mesh(**axes))
        args = *problem("masked"), put_parameters(ep)
        function = with_gradients(loss_of(ep)).lower(*args).compile()
        agree(function(*args), on_one_device("masked"))
        assert not any(D in shape for shape in moved_shapes(function.as_text()))


def test_one_device_is_apply_experts(monkeypatch):
    monkeypatch.setattr(moe, "apply_experts", lambda *args, **options: (args, options))
    assert ExpertParallel(make_mesh(expert=1))(1, 2, 3, contraction=4) == (
        (1, 2, 3),
        {"contraction": 4},
    )


@pytest.mark.parametrize("strategy", ["gather", "all_to_all"])
def test_activation_and_weight_input(strategy):
    """Weights on the input (Llama-4): their gradient comes from where the expert is."""
    ep = ExpertParallel(make_mesh(expert=2), strategy=strategy)
    options = {"activation": "gpt_oss", "weight_input": True}
    got = with_gradients(loss_of(ep, **options))(*problem("uniform"), PARAMETERS)
    agree(got, on_one_device("uniform", **options))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inside_a_shard_map(strategy, check_vma):
    """local, in a shard_map of one's own: gradients are right with and without check_vma."""
    ep = ExpertParallel(make_mesh(expert=2, fsdp=2, tensor=2), strategy=strategy)
    spec = ep.token_spec

    def apply(tokens, routed, weights):
        # scores and logits are not needed, and could be left out.
        return jax.shard_map(
            ep.local,
            mesh=ep.mesh,
            in_specs=(spec, spec, ep.weight_specs),
            out_specs=(spec, P(), P()),
            check_vma=check_vma,
        )(tokens, routed, weights)

    want = jit(expert_gradients(moe.apply_experts))
    got = jit(expert_gradients(apply))
    for case in ("uniform", "empty devices", "masked"):
        args = routed_problem(case)
        agree(got(*args), want(*args))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_capacity(strategy):
    """What has room is as without a capacity, the rest is left out and counted.

    maxtext PR#3678, #5080: what is dropped has to be counted.
    """
    ep = ExpertParallel(make_mesh(expert=4), strategy=strategy, capacity=0.75)
    got, want = jit(expert_gradients(ep)), jit(expert_gradients(apply_kept))
    for case in ("uniform", "hot expert", "masked"):
        args = routed_problem(case)
        kept = kept_pairs(ep, np.asarray(args[1].experts))
        expected = want(*args, kept)
        assert 0 < expected[0][1][2] < T * K
        agree(got(*args), expected)


def test_enough_capacity_drops_nothing():
    args = routed_problem("hot expert")[:3]
    ep = ExpertParallel(make_mesh(expert=4), strategy="all_to_all", capacity=4)
    agree(jit(ep)(*args), jit(moe.apply_experts)(*args))


def dense_ragged_all_to_all(rows, out, starts, sizes, out_starts, out_sizes, *, axis_name):
    """What lax.ragged_all_to_all does, which a CPU does not have, from everyone's rows."""
    here = lax.axis_index(axis_name)
    rows, starts, sizes, out_starts = (
        lax.all_gather(x, axis_name) for x in (rows, starts, sizes, out_starts)
    )
    for source in range(len(rows)):
        i = jnp.arange(rows.shape[1])
        to = jnp.where(i < sizes[source, here], out_starts[source, here] + i, len(out))
        out = out.at[to].set(
            rows[source].at[starts[source, here] + i].get(mode="clip"), mode="drop"
        )
    return out


def test_ragged(monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", dense_ragged_all_to_all)
    ep = ExpertParallel(make_mesh(data=2, expert=4), strategy="ragged")
    function = with_gradients(loss_of(ep))
    for case in CASES:
        agree(function(*problem(case), PARAMETERS), on_one_device(case))


def test_ragged_is_lowered_for_gpus_jax_26915():
    """jax#26915: no gradient of ragged_all_to_all. Both directions, three exchanges each."""
    ep = ExpertParallel(make_mesh(expert=4), strategy="ragged")
    traced = with_gradients(loss_of(ep)).trace(*problem("uniform"), PARAMETERS)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @ragged_all_to_all", text)) == 6


def test_micro_batches():
    ep = ExpertParallel(make_mesh(expert=4), strategy="all_to_all", micro_batches=3)
    args = *problem("masked"), PARAMETERS
    agree(with_gradients(loss_of(ep))(*args), on_one_device("masked"))


def test_auto():
    """Few tokens are replicated; many are exchanged, by slots where a capacity bounds them."""

    def chosen(t, dtype="bfloat16", **options):
        mesh = jax.sharding.AbstractMesh((8,), ("expert",))
        return ExpertParallel(mesh, **options).choose(t, 6144, 8, dtype).strategy

    assert chosen(8) == chosen(512) == "replicate"
    assert chosen(8 * 4096) == "all_to_all"
    assert chosen(8 * 4096, "float32") == "gather"  # the same bytes, without slots
    assert chosen(8 * 4096, "float32", capacity=0.5) == "all_to_all"
    assert chosen(8, strategy="gather") == "gather"
    ep = ExpertParallel(make_mesh(expert=4))
    args = routed_problem()[:3]
    agree(jit(ep)(*args), jit(moe.apply_experts)(*args))


@pytest.mark.parametrize("t", [64, 512, 4096, 32768])
def test_auto_is_as_fast_as_the_best(t):
    """On two H200s, t tokens of GLM-5.3 on each."""
    file = Path(__file__).parents[1] / "benchmarks/results/h200-x2.csv"
    forward_us = {
        row["candidate"]: float(row["us"])
        for row in csv.DictReader(file.read_text().splitlines())
        if (row["form"], row["rows"]) == ("ep_forward", str(t))
        and row["candidate"] in ("replicate", "gather", "all_to_all")
    }
    ep = ExpertParallel(jax.sharding.AbstractMesh((2,), ("expert",)))
    chosen = ep.choose(2 * t, 6144, 8, jnp.bfloat16).strategy
    assert len(forward_us) == 3
    assert forward_us[chosen] <= 1.05 * min(forward_us.values())


def test_errors():
    mesh = make_mesh(expert=4, tensor=2)
    for options, message in (
        ({"strategy": "ring"}, r"strategy is one of .*'gather'"),
        ({"capacity": 0.0}, "capacity is above 0"),
        ({"micro_batches": 0}, "micro_batches is at least 1"),
        ({"data": "expert"}, "an axis has one role"),
        ({"expert": "experts"}, r"expert='experts' but the axes of the mesh are \('expert', 't"),
    ):
        with pytest.raises(ValueError, match=message):
            ExpertParallel(mesh, **options)
    tokens, routed, weights, _ = routed_problem()
    with pytest.raises(ValueError, match=r"gate_up \(8, 16, 2, 9\) cannot be split evenly"):
        ExpertParallel(mesh)(tokens, routed, weights._replace(gate_up=weights.gate_up[..., :9]))
    with pytest.raises(ValueError, match="local takes no strategy 'auto'"):
        ExpertParallel(mesh).local(tokens, routed, weights)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_flax_layer(kind):
    """MoE(mesh=...): created sharded with the same values, trained under jit as on one device."""
    options = {"num_experts": E, "top_k": 2, "shared_size": 6, "shared_gate": True}
    options |= {"latent_size": 8, "use_bias": True, "selection_bias": True}

    def make(mesh):
        return nn.MoE(D, F, rngs=nnx.Rngs(0), mesh=mesh, **options)

    def step(layer, tokens):
        def loss(layer):
            out = layer.with_aux(tokens)
            return jnp.mean(out.out**2) + out.load_balance_loss, out.tokens_per_expert

        (value, counts), gradients = nnx.value_and_grad(loss, has_aux=True)(layer)
        layer.update_selection_bias(counts, 0.1)
        return value, gradients, nnx.state(layer, nn.SelectionBias)

    mesh = make_mesh(kind, expert=2, fsdp=2, tensor=2)
    sharded, alone = make(mesh), make(None)
    for a, b in zip(*(jax.tree.leaves(nnx.state(layer)) for layer in (sharded, alone))):
        assert a.sharding.mesh == mesh
        np.testing.assert_array_equal(a, b)
    assert sharded.gate_up.sharding.spec == P("expert", "fsdp", None, "tensor")
    tokens = normal(6, 4, 8, D)
    with jax.set_mesh(mesh):
        got = nnx.jit(step)(sharded, put(tokens, mesh, P(("fsdp", "expert"))))
    got, want = (jax.tree.leaves(x) for x in (got, nnx.jit(step)(alone, tokens)))
    agree(got, want)
    with pytest.raises(ValueError, match="give a mesh or parallel"):
        nn.MoE(D, F, rngs=nnx.Rngs(0), mesh=mesh, parallel=ExpertParallel(mesh), **options)


# Public reports, in the manner of test_reports.py.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_bits_transformers_43362(strategy):
    """transformers#43362, torchtitan#1974, #2775: combine added in any order. The same bits."""
    ep = ExpertParallel(make_mesh(expert=4, tensor=2), strategy=strategy)
    function = jit(ep)
    args = routed_problem()[:3]
    assert len({np.asarray(function(*args)[0]).tobytes() for _ in range(20)}) == 1


def test_devices_without_tokens_xla_47146(monkeypatch):
    """xla#47146, #46982, sgl-kernel-npu#69, uccl#940: devices to which no token is sent.

    The exchange that does without ragged_all_to_all gives the same bits.
    """
    monkeypatch.setattr(lax, "ragged_all_to_all", dense_ragged_all_to_all)
    args = routed_problem("empty devices")
    found = [
        jit(expert_gradients(ExpertParallel(make_mesh(expert=8), strategy=strategy)))(*args)
        for strategy in ("all_to_all", "ragged")
    ]
    for a, b in zip(*map(jax.tree.leaves, found)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_devices_in_the_same_process_te_3036(strategy):
    """TransformerEngine PR#3036, #3522, #3021: one device a process; communicators of before.

    Four devices of one process, then other ones, then the first again.
    """
    args = routed_problem()[:3]
    want = jit(moe.apply_experts)(*args)
    first, others = jax.devices()[:4], jax.devices()[::-2]
    for devices in (first, others, first):
        mesh = jax.make_mesh((len(devices),), ("expert",), (AUTO,), devices=devices)
        agree(jit(ExpertParallel(mesh, strategy=strategy))(*args), want)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharded_and_replicated_tokens_tpu_inference_2248(strategy, kind):
    """tpu-inference PR#2248: a psum over different tokens. However they come, the same result."""
    tokens, routed, weights, _ = routed_problem()
    ep = ExpertParallel(make_mesh(kind, expert=4), strategy=strategy)
    other = P("expert") if strategy == "replicate" else P()
    with jax.set_mesh(ep.mesh):
        got = jit(ep)(put(tokens, ep.mesh, other), routed, weights)
    agree(got, jit(moe.apply_experts)(tokens, routed, weights))
    if kind == EXPLICIT:
        assert got[0].sharding.is_equivalent_to(NamedSharding(ep.mesh, other), 2)


def test_no_uninitialised_buffers_maxtext_4898():
    """maxtext#4898, #4905: a buffer from lax.empty, with room left, was weighted in."""
    for capacity in (None, 0.5, 3):
        ep = ExpertParallel(make_mesh(expert=4), strategy="all_to_all", capacity=capacity)
        jaxpr = str(jax.make_jaxpr(expert_gradients(ep))(*routed_problem("masked")))
        assert not re.search(r"= empty\b|= create_token", jaxpr)


def test_losses_do_not_depend_on_the_mesh_megablocks_85():
    """megablocks#85, hyper-parallel#752: the loss changed with parallelism, or with nothing."""
    ep = ExpertParallel(make_mesh(expert=4), strategy="gather")
    sharded, balanced = jit(loss_of(ep)), float(on_one_device("uniform")[0][1].load_balance_loss)
    for case in ("uniform", "hot expert", "empty devices"):
        alone = on_one_device(case)[0][1].load_balance_loss
        loss = float(sharded(*problem(case), PARAMETERS)[1].load_balance_loss)
        assert loss == pytest.approx(float(alone), rel=1e-6)
        assert case == "uniform" or loss > 2 * balanced


def test_losses_inside_a_shard_map():
    """With axis_name they are those of all tokens, in value and gradient, not a mean of local."""
    mesh = make_mesh(data=4)
    _, mask, bias, _ = problem("masked")
    logits = routing.project(normal(6, T, D), PARAMETERS["router"], bias)

    def losses(axis_name):
        def function(logits, mask):
            routed = routing.route(logits, CONFIG, token_mask=mask)
            balance = routing.load_balance_loss(routed, axis_name=axis_name)
            return balance + routing.z_loss(routed, axis_name=axis_name)

        return function

    want = jax.value_and_grad(losses(None))(logits, mask)
    for check_vma in (True, False):
        sharded = jax.shard_map(
            losses("data"), mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=check_vma
        )
        agree(jit(jax.value_and_grad(sharded))(logits, mask), want)


def test_layers_in_a_scan_with_remat():
    """A stack of layers, scanned and computed again in the gradient."""
    args = routed_problem()
    tokens, routed, weights, ct = args

    def loss(apply, tokens, stacked):
        def layer(tokens, weights):
            return tokens + jnp.tanh(apply(tokens, routed, weights)[0]), None

        return jnp.sum(lax.scan(jax.checkpoint(layer), tokens, stacked)[0] * ct)

    stacked = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), weights)
    ep = ExpertParallel(make_mesh(expert=4), strategy="all_to_all")
    got, want = (
        jit(jax.value_and_grad(functools.partial(loss, apply), (0, 1)))(tokens, stacked)
        for apply in (ep, moe.apply_experts)
    )
    agree(got, want)


def test_bfloat16():
    """As far from float32 as one device is: sums of devices are rounded no more than rows."""
    tokens, routed, weights, _ = routed_problem()
    exact = np.asarray(moe.apply_experts(tokens, routed, weights)[0])
    tokens, weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (tokens, weights))

    def error(apply):
        out = jit(apply)(tokens, routed, weights)[0]
        assert out.dtype == jnp.float32
        return np.linalg.norm(out - exact) / np.linalg.norm(exact)

    alone = error(moe.apply_experts)
    for strategy in STRATEGIES:
        assert error(ExpertParallel(make_mesh(expert=4), strategy=strategy)) < 1.2 * alone
