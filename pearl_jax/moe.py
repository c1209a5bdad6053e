"""A Mixture-of-Experts layer as a pure function of tokens, routing and weights.

Shapes: d hidden, e experts, f intermediate of one expert. Weights have the axes of the
products, (in, out), with the expert first. gate and up lie side by side, (e, d, 2, f), so
that one grouped matmul computes both, and a shard of f holds matching parts of both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pearl_jax.grouped_matmul import grouped_matmul
from pearl_jax.routing import (
    Routing,
    combine,
    dispatch,
    load_balance_loss,
    sort_by_expert,
    to_rows,
    token_mask,
    z_loss,
)


class ExpertWeights(NamedTuple):
    """Of the routed experts.

    Attributes:
      gate_up: (e, d, 2, f), gate first.
      down: (e, f, d).
      gate_up_bias: (e, 2, f), or None.
      down_bias: (e, d), or None.
    """

    gate_up: jax.Array
    down: jax.Array
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


class SharedWeights(NamedTuple):
    """Of the experts that every token takes, as one MLP of their summed width s.

    Attributes:
      gate_up: (d, 2, s), gate first.
      down: (s, d).
      gate: (d, 1), or None: the output is multiplied by sigmoid(token @ gate) (Qwen3-Next).
    """

    gate_up: jax.Array
    down: jax.Array
    gate: jax.Array | None = None


class LatentWeights(NamedTuple):
    """Around routed experts that work at a smaller width l in place of d (Kimi-K3).

    Attributes:
      down: (d, l), before the experts.
      norm: (l,), the scale of an RMSNorm of the combined output; or None, no norm.
      up: (l, d), after it.
    """

    down: jax.Array
    norm: jax.Array | None
    up: jax.Array


class MoEWeights(NamedTuple):
    """Everything after the router; shared and latent may be None."""

    experts: ExpertWeights
    shared: SharedWeights | None = None
    latent: LatentWeights | None = None


class MoEOutput(NamedTuple):
    """Result of a layer.

    Attributes:
      out: like the tokens.
      load_balance_loss, z_loss: float32 scalars, without a coefficient; see routing.
      tokens_per_expert: (e,) int32, of all tokens that are not masked.
      dropped: int32 scalar, how many choices of an expert had no room and were left out;
        0 unless expert parallelism is given a capacity.
    """

    out: jax.Array
    load_balance_loss: jax.Array
    z_loss: jax.Array
    tokens_per_expert: jax.Array
    dropped: jax.Array


@dataclasses.dataclass(frozen=True)
class Activation:
    """hidden = f(gate, up), by name.

    Attributes:
      name: "silu", "gelu" (exact), "gelu_tanh", "relu": f(gate) * up. "none": gate * up.
        "gpt_oss": gate * sigmoid(1.702 * gate) * (up + 1). "situ" (Kimi-K3):
        beta * tanh(gate / beta) * sigmoid(gate) * up', up' = linear_beta * tanh(up / linear_beta).
      limit: before all that, gate is cut off above limit, and up to [-limit, limit].
      beta, linear_beta: of "situ"; linear_beta None leaves up as it is.
    """

    name: str = "silu"
    limit: float | None = None
    beta: float = 4.0
    linear_beta: float | None = 25.0

    def __post_init__(self):
        if self.name not in _ACTIVATIONS:
            raise ValueError(f"Activation: name is one of {[*_ACTIVATIONS]}, got {self.name!r}")

    def __call__(self, gate, up):
        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit)
        return _ACTIVATIONS[self.name](self, gate, up)


def _situ(activation, gate, up):
    beta, linear_beta = activation.beta, activation.linear_beta
    if linear_beta is not None:
        up = linear_beta * jnp.tanh(up / linear_beta)
    return beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate) * up


_ACTIVATIONS: dict[str, Callable] = {
    "silu": lambda _, gate, up: jax.nn.silu(gate) * up,
    "gelu": lambda _, gate, up: jax.nn.gelu(gate, approximate=False) * up,
    "gelu_tanh": lambda _, gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "relu": lambda _, gate, up: jax.nn.relu(gate) * up,
    "none": lambda _, gate, up: gate * up,
    "gpt_oss": lambda _, gate, up: gate * jax.nn.sigmoid(1.702 * gate) * (up + 1),
    "situ": _situ,
}


def expert_mlp(rows, group_sizes, weights: ExpertWeights, activation, contraction):
    """Rows (r, d) sorted by expert -> (r, d), the MLP of each row's expert.

    Rows of no expert are exactly 0. All that happens between the contractions
    and after them happens here and in combine: what a fused epilogue would replace.

    contraction is called as contraction(lhs, rhs, group_sizes), like grouped_matmul.
    """
    product = functools.partial(contraction, group_sizes=group_sizes)

    def add_bias(rows, bias):
        # As a product, which rounds nothing, its gradient is a sum in a fixed order.
        row, ends = jnp.arange(len(rows))[:, None], jnp.cumsum(group_sizes)
        one_hot = ((row >= ends - group_sizes) & (row < ends)).astype(rows.dtype)  # (r, e)
        bias = jnp.dot(one_hot, bias.astype(rows.dtype), precision=jax.lax.Precision.HIGHEST)
        return rows + bias

    e, d, two, f = weights.gate_up.shape
    gate_up = product(rows, weights.gate_up.reshape(e, d, two * f))
    if weights.gate_up_bias is not None:
        gate_up = add_bias(gate_up, weights.gate_up_bias.reshape(e, two * f))
    gate, up = gate_up.astype(jnp.float32)[:, :f], gate_up.astype(jnp.float32)[:, f:]
    hidden = activation(gate, up).astype(rows.dtype)
    out = product(hidden, weights.down)
    if weights.down_bias is not None:
        out = add_bias(out, weights.down_bias)
    return out


def apply_experts(
    tokens,
    routing: Routing,
    weights: ExpertWeights,
    *,
    activation=Activation(),
    weight_input=False,
    contraction=grouped_matmul,
):
    """Tokens (t, d) -> the weighted sum of their experts' outputs, (t, d) float32; on one device.

    Every token gets all its experts, whatever their load. Also returned are
    tokens_per_expert and dropped, as in MoEOutput.

    Raises:
      ValueError: an Explicit mesh axis shards the tokens.
    """
    sharded = jax.typeof(routing.experts).sharding
    if not sharded.is_fully_replicated:
        raise ValueError(
            f"apply_experts: tokens are sharded, {sharded.spec}, but this is for one device; "
            "take expert_parallel.ExpertParallel(mesh) in its place"
        )
    out, group_sizes = apply_local_experts(
        tokens,
        routing.experts,
        routing.weights,
        weights,
        activation=activation,
        weight_input=weight_input,
        contraction=contraction,
    )
    return out, group_sizes, jnp.int32(0)


def apply_local_experts(
    tokens,
    experts,
    expert_weights,
    weights: ExpertWeights,
    *,
    max_rows=None,
    activation=Activation(),
    weight_input=False,
    contraction=grouped_matmul,
):
    """What the experts in weights add to each token: (t, d) float32, and their (e,) sizes.

    Args:
      tokens: (t, d).
      experts, expert_weights: (t, top_k) as in Routing, with numbers of the e experts in
        weights, and e for all others.
      max_rows: room for that many rows, the pairs of a token and an expert; those past it
        are left out, though the sizes count them. By default there is room for all.
    """
    permutation = sort_by_expert(experts, weights.gate_up.shape[0])
    permutation = permutation._replace(order=permutation.order[:max_rows])
    rows = dispatch(tokens, permutation)
    if weight_input:
        row_weights = to_rows(expert_weights, permutation)
        rows = (rows.astype(jnp.float32) * row_weights[:, None]).astype(rows.dtype)
        expert_weights = jnp.ones_like(expert_weights)
    rows = expert_mlp(rows, permutation.group_sizes, weights, activation, contraction)
    return combine(rows, expert_weights, permutation), permutation.group_sizes


def moe(
    tokens,
    routing: Routing,
    weights: MoEWeights,
    *,
    activation=Activation(),
    weight_input=False,
    norm_eps=1e-6,
    contraction=grouped_matmul,
    apply_experts=apply_experts,
) -> MoEOutput:
    """Tokens (..., d) and their routing -> MoEOutput, the whole layer after the router.

    Tokens that routing has masked get exactly 0, whatever they hold.

    Args:
      tokens: (..., d), t tokens in all; the dtype of the products and of the result.
      routing: of the t tokens.
      weights: in the dtype of the tokens.
      activation: between the contractions, of the routed and the shared experts.
      weight_input: as in RouterConfig.
      norm_eps: of the norm of latent experts.
      contraction: in place of grouped_matmul, with its first three arguments.
      apply_experts: in place of the function of that name, with its arguments: how the
        experts are spread over devices.

    Raises:
      TypeError: tokens are not floats.
      ValueError: shapes do not fit.
    """
    shape, dtype = tokens.shape, tokens.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"moe: tokens must be floats, got {dtype}{[*shape]}")
    t, d = math.prod(shape[:-1]), shape[-1]
    _check_shapes(t, d, routing, weights)
    valid = token_mask(routing)[:, None]
    tokens = jnp.where(valid, tokens.reshape(t, d), 0)

    latent = weights.latent
    inputs = tokens if latent is None else _dot(tokens, latent.down).astype(dtype)
    out, tokens_per_expert, dropped = apply_experts(
        inputs,
        routing,
        weights.experts,
        activation=activation,
        weight_input=weight_input,
        contraction=contraction,
    )
    if latent is not None:
        if latent.norm is not None:
            mean_square = jnp.mean(out**2, axis=-1, keepdims=True)
            out = out * jax.lax.rsqrt(mean_square + norm_eps) * latent.norm.astype(jnp.float32)
        out = _dot(out.astype(dtype), latent.up)
    if weights.shared is not None:
        out = out + _shared_mlp(tokens, weights.shared, activation)
    out = jnp.where(valid, out, 0).astype(dtype)
    return MoEOutput(
        out.reshape(shape),
        load_balance_loss(routing),
        z_loss(routing),
        tokens_per_expert,
        dropped,
    )


def _shared_mlp(tokens, weights: SharedWeights, activation):
    gate_up = _dot(tokens, weights.gate_up.swapaxes(0, 1))  # (t, 2, s): a mesh may shard s
    hidden = activation(gate_up[:, 0], gate_up[:, 1]).astype(tokens.dtype)
    out = _dot(hidden, weights.down)
    if weights.gate is not None:
        out = jax.nn.sigmoid(_dot(tokens, weights.gate)) * out
    return out


def _dot(lhs, rhs):
    return jnp.dot(lhs, rhs, preferred_element_type=jnp.float32)


def _check_shapes(t, d, routing, weights):
    experts, shared, latent = weights
    if experts.gate_up.ndim != 4:
        raise ValueError(
            f"moe: experts.gate_up must be (e, d, 2, f), gate first, got {experts.gate_up.shape}"
        )
    e, width, _, f = experts.gate_up.shape
    want = {
        "routing.experts": (routing.experts, (t, routing.experts.shape[-1])),
        "routing.scores": (routing.scores, (t, e)),
        "experts.gate_up": (experts.gate_up, (e, width if latent else d, 2, f)),
        "experts.down": (experts.down, (e, f, width)),
        "experts.gate_up_bias": (experts.gate_up_bias, (e, 2, f)),
        "experts.down_bias": (experts.down_bias, (e, width)),
    }
    if shared is not None:
        s = shared.down.shape[0]
        want["shared.gate_up"] = shared.gate_up, (d, 2, s)
        want["shared.down"] = shared.down, (s, d)
        want["shared.gate"] = shared.gate, (d, 1)
    if latent is not None:
        want["latent.down"] = latent.down, (d, width)
        want["latent.norm"] = latent.norm, (width,)
        want["latent.up"] = latent.up, (width, d)
    for name, (array, shape) in want.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"moe: {name} must be {shape} with {t} tokens of width {d} and {e} experts, "
                f"got {array.shape}"
            )
