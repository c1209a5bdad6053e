"""Experts on meshes of CPU devices: the layer of one device, its losses and all its gradients."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pearl_jax import moe, routing
from pearl_jax.expert_parallel import ExpertParallel

E, K, D, F = 8, 3, 16, 12
CONFIG = routing.RouterConfig(E, K)
STRATEGIES = ("replicate", "gather", "all_to_all")
MESHES = {
    "e8": {"expert": 8},
    "e4": {"expert": 4},
    "e2": {"expert": 2},
    "dp2 e4": {"data": 2, "expert": 4},
    "e4 tp2": {"expert": 4, "tensor": 2},
    "tp4": {"tensor": 4},
    "fsdp2 e4": {"fsdp": 2, "expert": 4},
    "dp2 e2 tp2": {"data": 2, "expert": 2, "tensor": 2},
    "e2 fsdp2 tp2": {"expert": 2, "fsdp": 2, "tensor": 2},
}


def make_mesh(name, kind=AxisType.Auto):
    axes = MESHES[name]
    devices = jax.devices()[: math.prod(axes.values())]
    types = (kind,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


PARAMETERS = {
    "router": normal(1, D, E) / D**0.5,
    "gate_up": normal(2, E, D, 2, F) / D**0.5,
    "down": normal(3, E, F, D) / F**0.5,
    "gate_up_bias": normal(4, E, 2, F) / 4,
    "down_bias": normal(5, E, D) / 4,
}


def problem(case, t):
    """Tokens, which are not masked, the router's bias that makes the case, a cotangent."""
    tokens, mask, bias = normal(6, t, D), np.ones(t, bool), np.zeros(E, np.float32)
    if case == "hot expert":
        bias[5] = 100
    elif case == "empty ranks":
        bias[3:] = -100  # three experts have everything, and most devices nothing
    elif case == "masked":
        mask[t // 2 :: 2] = mask[:3] = False
        tokens[~mask] = np.nan
    elif case == "all masked":
        mask[:] = False
    return tokens, mask, bias, normal(7, t, D)


CASES = ("uniform", "hot expert", "empty ranks", "masked", "all masked")


def layer(apply, tokens, mask, bias, ct, parameters):
    logits = routing.project(jnp.where(mask[:, None], tokens, 0), parameters["router"], bias)
    routed = routing.route(logits, CONFIG, token_mask=mask)
    experts = (parameters[name] for name in moe.ExpertWeights._fields)
    weights = moe.MoEWeights(moe.ExpertWeights(*experts))
    out = moe.moe(tokens, routed, weights, apply_experts=apply)
    loss = jnp.sum(out.out * ct) + 3 * out.load_balance_loss + 5 * out.z_loss
    return loss, out


def outputs_and_gradients(apply):
    function = jax.value_and_grad(functools.partial(layer, apply), (0, 4), has_aux=True)
    return jax.jit(lambda *args: function(*args))


on_one_device = outputs_and_gradients(moe.apply_experts)


def agree(got, want, tolerance=1e-5):
    """Relative error of each array, scale and all; integers are equal."""
    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (got, want))):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, path
        error, scale = np.linalg.norm(a - b), np.linalg.norm(b)
        assert error <= (tolerance * scale if a.dtype == np.float32 else 0), (path, error, scale)


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def put_parameters(ep):
    specs = {"router": P(), **ep.weight_specs._asdict()}
    return {name: put(x, ep.mesh, specs[name]) for name, x in PARAMETERS.items()}


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, AUTO) for name in MESHES] + [("e4", EXPLICIT), ("dp2 e2 tp2", EXPLICIT)],
    ids=lambda x: getattr(x, "name", x),
)
def test_same_as_one_device(name, kind, strategy):
    """Values, losses, counts and each gradient, for balanced and for extreme routings."""
    ep = ExpertParallel(make_mesh(name, kind), strategy=strategy)
    with jax.set_mesh(ep.mesh):
        parameters = put_parameters(ep)
        function = outputs_and_gradients(ep)
        for case in CASES:
            tokens, mask, bias, ct = problem(case, 32)
            tokens, ct = (put(x, ep.mesh, ep.token_spec) for x in (tokens, ct))
            got = function(tokens, mask, bias, ct, parameters)
            agree(got, on_one_device(*problem(case, 32), PARAMETERS))
            for name, gradient in got[1][1].items():
                kept = parameters[name].sharding
                assert gradient.sharding.is_equivalent_to(kept, gradient.ndim), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("t", [0, 1, 29])
def test_any_number_of_tokens(strategy, t):
    ep = ExpertParallel(make_mesh("dp2 e4"), strategy=strategy)
    args = *problem("masked", t), PARAMETERS
    agree(outputs_and_gradients(ep)(*args), on_one_device(*args))
