"""A layer's experts with random weights, its routings by name, and what a capacity keeps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from pearl_jax import moe, routing

E, K, T, D, F = 8, 3, 32, 16, 10
CONFIG = routing.RouterConfig(E, K)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def make_mesh(kind=AUTO, **axes):
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


def problem(case, t=T):
    """Tokens, which of them count, the router's bias that makes the case, a cotangent."""
    tokens, mask, bias = normal(6, t, D), np.ones(t, bool), np.zeros(E, np.float32)
    if case == "hot expert":
        bias[5] = 100
    elif case == "empty devices":
        bias[3:] = -100  # three experts have everything
    elif case == "masked":
        mask[t // 2 :: 2] = mask[:3] = False
        tokens[~mask] = np.nan
    elif case == "all masked":
        mask[:] = False
    return tokens, mask, bias, normal(7, t, D)


def experts_of(parameters):
    return moe.ExpertWeights(*(parameters[name] for name in moe.ExpertWeights._fields))


def routed_problem(case="uniform"):
    tokens, mask, bias, ct = problem(case)
    tokens = np.where(mask[:, None], tokens, 0)
    logits = routing.project(tokens, PARAMETERS["router"], bias)
    return tokens, routing.route(logits, CONFIG, token_mask=mask), experts_of(PARAMETERS), ct


def expert_gradients(apply):
    """Results, and gradients for tokens, the weights of their routing, and all weights."""

    def function(tokens, routed, weights, ct, *more):
        def loss(tokens, expert_weights, weights):
            results = apply(tokens, routed._replace(weights=expert_weights), weights, *more)
            return jnp.sum(jnp.sin(results[0]) * ct), results

        grad = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
        return grad(tokens, routed.weights, weights)

    return function


def apply_kept(tokens, routed, weights, kept):
    """As moe.apply_experts, without the pairs of (t, top_k) that are not kept, which it counts."""
    dropped = jnp.sum(~kept & (routed.experts < E), dtype=jnp.int32)
    routed = routed._replace(weights=jnp.where(kept, routed.weights, 0))
    return *moe.apply_experts(tokens, routed, weights)[:2], dropped


def kept_pairs(ep, experts):
    """(t, top_k): which pairs find room, by the rule in the docstring."""
    n = ep.mesh.shape["expert"]
    here, choices = T // n, experts.size / n
    kept = np.ones(experts.shape, bool)
    if ep.strategy == "all_to_all":
        slots = min(here, math.ceil(ep.capacity * here * K / n))
        for source in range(n):
            for peer in range(n):
                tokens = range(source * here, (source + 1) * here)
                sent = [t for t in tokens if (experts[t] // (E // n) == peer).any()]
                for t in sent[slots:]:
                    kept[t, experts[t] // (E // n) == peer] = False
    rows = math.ceil(ep.capacity * choices)
    for peer in range(n):
        pairs = [(experts[t, j], t, j) for t, j in np.ndindex(*experts.shape) if kept[t, j]]
        mine = sorted(p for p in pairs if p[0] // (E // n) == peer)
        for _, t, j in mine[rows:]:
            kept[t, j] = False
    return kept


def agree(got, want, tolerance=1e-5):
    """The relative error of each array, so that a factor shows; integers are equal."""
    got, want = (jax.tree_util.tree_leaves_with_path(x) for x in (got, want))
    assert len(got) == len(want)
    for (path, a), (_, b) in zip(got, want):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, path
        error, scale = np.linalg.norm(a - b), np.linalg.norm(b)
        exact = np.issubdtype(a.dtype, np.integer)
        assert error <= (0 if exact else tolerance * scale), (path, error, scale)
