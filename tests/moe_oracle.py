"""What routers and layers mean, in numpy float64, token by token."""

import math

import numpy as np


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


SCORES = {
    "softmax": softmax,
    "sigmoid": lambda x: np.exp(-np.logaddexp(0, -x)),
    "sqrt_softplus": lambda x: np.sqrt(np.logaddexp(0, x)),
}


def largest(values, k):
    """Indices of the k largest, best first; ties to the lower index."""
    return np.argsort(-values, kind="stable")[:k]


def choose(scores, config):
    """The experts of one token, by its scores (e,), biased already."""
    groups = scores.reshape(config.num_groups, -1)
    best_two = np.array([np.sort(group)[-2:].sum() for group in groups])
    kept = largest(best_two, config.top_k_groups)
    allowed = np.full(groups.shape, -np.inf)
    allowed[kept] = groups[kept]
    return largest(allowed.ravel(), config.top_k)


def route(logits, config, selection_bias=0.0, experts=None, expert_scale=None):
    """Logits (t, e) -> experts and weights (t, top_k)."""
    scores = SCORES[config.score](np.asarray(logits, np.float64))
    if experts is None:
        biased = scores + np.asarray(selection_bias, np.float64)
        experts = np.array([choose(row, config) for row in biased], int)
    experts = np.asarray(experts).reshape(-1, config.top_k)
    weights = np.take_along_axis(scores, experts, axis=1)
    if config.normalize:
        weights = weights / weights.sum(1, keepdims=True)
    weights = weights * config.scaling_factor
    if expert_scale is not None:
        weights = weights * np.asarray(expert_scale, np.float64)[experts]
    return experts, weights


def sigmoid(x):
    return SCORES["sigmoid"](x)


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "silu": lambda gate, up: gate * sigmoid(gate) * up,
    "gelu": lambda gate, up: gelu(gate) * up,
    "gelu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "relu": lambda gate, up: np.maximum(gate, 0) * up,
    "none": lambda gate, up: gate * up,
    "gpt_oss": lambda gate, up: (up + 1) * gate * sigmoid(1.702 * gate),
    # With beta 4 and linear_beta 25.
    "situ": lambda gate, up: 4 * np.tanh(gate / 4) * sigmoid(gate) * 25 * np.tanh(up / 25),
}


def mlp(x, gate_up, down, gate_up_bias=0.0, down_bias=0.0, *, activation, limit=None):
    """x (d,) through one MLP, gate_up (d, 2, f) and down (f, d) -> (d,)."""
    gate, up = np.einsum("d,dtf->tf", x, gate_up) + gate_up_bias
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return ACTIVATIONS[activation](gate, up) @ down + down_bias


def layer(parameters, config, activation="silu", limit=None, norm_eps=1e-6):
    """The output (t, d) of tokens and all weights in parameters, by the names nn.MoE gives them."""
    p = {name: np.asarray(x, np.float64) for name, x in parameters.items() if x is not None}
    tokens = p["tokens"]
    chosen, weights = route(tokens @ p["router"] + p.get("router_bias", 0), config)
    inputs = tokens @ p["latent_down"] if "latent_down" in p else tokens
    out = np.zeros_like(inputs)
    options = {"activation": activation, "limit": limit}
    for t, x in enumerate(inputs):
        for e, weight in zip(chosen[t], weights[t]):
            biases = [p[b][e] if b in p else 0.0 for b in ("gate_up_bias", "down_bias")]
            expert = p["gate_up"][e], p["down"][e], *biases
            if config.weight_input:
                out[t] += mlp(x * weight, *expert, **options)
            else:
                out[t] += weight * mlp(x, *expert, **options)
    if "latent_down" in p:
        out /= np.sqrt((out**2).mean(1, keepdims=True) + norm_eps)
        out = (out * p["latent_norm"]) @ p["latent_up"]
    if "shared_down" in p:
        for t, x in enumerate(tokens):
            gate = sigmoid(x @ p["shared_gate"]) if "shared_gate" in p else 1
            out[t] += gate * mlp(x, p["shared_gate_up"], p["shared_down"], **options)
    return out
