"""Routers of Mixture-of-Experts layers, their losses, and tokens sorted by expert.

Shapes: t tokens, d hidden, e experts, top_k experts of each token. Scores, weights and
losses are float32 whatever the tokens are: with bfloat16 logits, tokens change experts.

A masked token has the expert number e, which no expert has, and weight 0: it is counted
nowhere, and as the last "group" its rows are what grouped_matmul leaves exactly 0.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pearl_jax import sharding


def _log_softplus(x):
    # Below -15 softplus(x) is exp(x) in float32, and further down it underflows.
    low = x < -15
    return jnp.where(low, x, jnp.log(jax.nn.softplus(jnp.where(low, 0, x))))


# Logarithms, as the scores of all chosen experts may underflow, but their ratios do not.
_LOG_SCORES = {
    "softmax": jax.nn.log_softmax,
    "sigmoid": jax.nn.log_sigmoid,
    "sqrt_softplus": lambda logits: 0.5 * _log_softplus(logits),
}


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How tokens choose their experts; the fields name what model families differ in.

    Attributes:
      num_experts: e.
      top_k: experts of one token.
      score: of all e logits of a token: "softmax" (Mixtral, Qwen3, Gemma-4, gpt-oss),
        "sigmoid" (DeepSeek-V3, GLM, Kimi, MiniMax, Llama-4) or "sqrt_softplus" (DeepSeek-V4).
      normalize: weights are divided by their sum over the chosen experts; with "softmax"
        they are the softmax of the chosen logits alone.
      scaling_factor: of the weights, after that.
      num_groups, top_k_groups: experts in num_groups equal groups; only the top_k_groups
        groups with the largest sum of their two best scores take part (DeepSeek-V3).
      weight_input: the weight multiplies the input of the expert, not its output (Llama-4).
    """

    num_experts: int
    top_k: int
    score: str = "softmax"
    normalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    weight_input: bool = False

    def __post_init__(self):
        groups = self.num_groups
        for ok, rule in (
            (self.score in _LOG_SCORES, f"score is one of {[*_LOG_SCORES]}"),
            (self.num_experts >= 1, "num_experts is at least 1"),
            (1 <= self.top_k <= self.num_experts, "top_k is between 1 and num_experts"),
            (groups >= 1 and self.num_experts % groups == 0, "num_groups divides num_experts"),
            (1 <= self.top_k_groups <= groups, "top_k_groups is between 1 and num_groups"),
            (
                self.top_k * groups <= self.top_k_groups * self.num_experts,
                "the chosen groups hold at least top_k experts",
            ),
        ):
            if not ok:
                raise ValueError(f"RouterConfig: {rule}, got {self}")


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
      experts: (t, top_k) int32, best first, ties to the lower number; e for masked tokens.
      weights: (t, top_k) float32, 0 for masked tokens.
      scores: (t, e) float32, of all experts, summing to 1; for load_balance_loss.
      logits: (t, e) float32; for z_loss.
    """

    experts: jax.Array
    weights: jax.Array
    scores: jax.Array
    logits: jax.Array


def route(
    logits,
    config: RouterConfig,
    *,
    selection_bias=None,
    experts=None,
    expert_scale=None,
    token_mask=None,
) -> Routing:
    """Logits (t, e) -> Routing.

    Args:
      logits: (t, e), any float dtype; taken to float32.
      config: of the router.
      selection_bias: (e,) added to the scores for the choice, not for the weights; no
        gradient flows to it (DeepSeek-V3, arXiv:2412.19437, eq. 16).
      experts: (t, top_k) integers, the choice made elsewhere, as by a table of token ids
        (DeepSeek-V4); the weights still come from the scores.
      expert_scale: (e,) factor of each expert's weight (Gemma-4).
      token_mask: (t,) bool, False for padding.

    Raises:
      TypeError: an argument has the wrong dtype.
      ValueError: shapes do not fit.
    """
    if logits.ndim != 2:
        raise ValueError(f"route: logits must be (t, e), got {logits.shape}")
    t, e = logits.shape[0], config.num_experts
    for name, x, shape, kind in (
        ("logits", logits, (t, e), jnp.floating),
        ("selection_bias", selection_bias, (e,), jnp.floating),
        ("experts", experts, (t, config.top_k), jnp.integer),
        ("expert_scale", expert_scale, (e,), jnp.floating),
        ("token_mask", token_mask, (t,), jnp.bool_),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(
                f"route: {name} must be {shape} with {t} tokens and {config}, got {x.shape}"
            )
        if x is not None and not jnp.issubdtype(x.dtype, kind):
            raise TypeError(f"route: {name} must be of type {kind.__name__}, got {x.dtype}")

    logits = logits.astype(jnp.float32)
    if token_mask is not None:
        logits = jnp.where(token_mask[:, None], logits, 0)  # whatever padding holds
    log_scores = _LOG_SCORES[config.score](logits)
    if experts is None:
        experts = _choose(logits, log_scores, selection_bias, config)
    experts = experts.astype(jnp.int32)

    chosen = _pick(log_scores, experts)
    weights = jax.nn.softmax(chosen) if config.normalize else jnp.exp(chosen)
    weights *= config.scaling_factor
    if expert_scale is not None:
        scale = jnp.broadcast_to(expert_scale.astype(jnp.float32), logits.shape)
        weights *= _pick(scale, experts)
    if token_mask is not None:
        experts = jnp.where(token_mask[:, None], experts, e)
        weights = jnp.where(token_mask[:, None], weights, 0)
    return Routing(experts, weights, jax.nn.softmax(log_scores), logits)


def _choose(logits, log_scores, selection_bias, config):
    """(t, e) -> the top_k experts of each token, those of the best groups only."""
    # Where only the order counts, logits still tell apart scores that are both 1.
    scores = lax.stop_gradient(logits)
    if selection_bias is not None or config.num_groups > 1:
        scores = jnp.exp(lax.stop_gradient(log_scores))
    if selection_bias is not None:
        scores = scores + lax.stop_gradient(selection_bias).astype(jnp.float32)
    if config.num_groups > 1:
        t, e = scores.shape
        groups = scores.reshape(t, config.num_groups, e // config.num_groups)
        best_two = lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(-1)
        chosen = lax.top_k(best_two, config.top_k_groups)[1]
        kept = jnp.any(chosen[:, :, None] == jnp.arange(config.num_groups), axis=1)
        scores = jnp.where(kept[:, :, None], groups, -jnp.inf).reshape(t, e)
    return lax.top_k(scores, config.top_k)[1]


def _pick(values, experts) -> jax.Array:
    """Values (t, e), experts (t, top_k) -> (t, top_k), the values of these experts."""
    values, experts = sharding.vary_alike(values, experts)
    return _gather(values.shape[1], values, experts)  # type: ignore[return-value]


def _spread(values, experts, num_experts):
    """Values and experts (t, top_k) -> (t, num_experts), the values of each expert summed.

    Without a scatter, which is slow, and adds in no fixed order where a token has an
    expert twice.
    """
    numbers = jnp.arange(num_experts)
    return sum(
        jnp.where(experts[:, i, None] == numbers, values[:, i, None], 0)
        for i in range(experts.shape[1])
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(num_experts, values, experts):
    return jnp.take_along_axis(values, experts, axis=1)


_gather.defvjp(
    lambda num_experts, values, experts: (_gather(num_experts, values, experts), experts),
    lambda num_experts, experts, ct: (_spread(ct, experts, num_experts), None),
)


def jitter(tokens, eps, key):
    """Tokens (t, d) -> (t, d) float32, times uniform noise from [1 - eps, 1 + eps].

    For the router while training (Switch Transformers, arXiv:2101.03961, section 2.2).
    """
    return tokens * jax.random.uniform(key, tokens.shape, jnp.float32, 1 - eps, 1 + eps)


def project(tokens, kernel, bias=None):
    """Tokens (t, d), kernel (d, e), bias (e,) -> logits (t, e) float32.

    Of 16-bit operands with one dtype the products are exact; else both are taken to
    float32, and multiplied as such also where a device would rather round them.
    """
    if tokens.dtype == kernel.dtype and tokens.dtype.itemsize == 2:
        logits = jnp.dot(tokens, kernel, preferred_element_type=jnp.float32)
    else:
        tokens, kernel = tokens.astype(jnp.float32), kernel.astype(jnp.float32)
        logits = jnp.dot(tokens, kernel, precision=lax.Precision.HIGHEST)
    return logits if bias is None else logits + bias.astype(jnp.float32)


# Losses. Sums over tokens run over the mesh axes of axis_name too, before anything is
# multiplied: the loss is that of all tokens, not a mean of local losses.


def load_balance_loss(routing: Routing, *, axis_name=None):
    """e * sum_i f_i P_i, 1 at balance: f the share of choices and P the mean score of expert i.

    Switch Transformers (arXiv:2101.03961), eq. 4 to 6, for top_k choices. Masked tokens
    do not count. In shard_map, axis_name has the mesh axes that shard the tokens.
    """
    e = routing.scores.shape[-1]
    valid = token_mask(routing)
    counts = tokens_per_expert(routing.experts, e).astype(jnp.float32)
    sums = jnp.sum(jnp.where(valid[:, None], routing.scores, 0), axis=0)
    counts, sums, tokens = _sum((counts, sums, jnp.sum(valid, dtype=jnp.float32)), axis_name)
    top_k = routing.experts.shape[-1]
    return e * jnp.sum(counts * sums) / jnp.maximum(top_k * tokens**2, 1)


def z_loss(routing: Routing, *, axis_name=None):
    """The mean of logsumexp(logits)**2 over tokens (ST-MoE, arXiv:2202.08906, eq. 5)."""
    valid = token_mask(routing)
    squares = jax.nn.logsumexp(routing.logits, axis=-1) ** 2
    total, tokens = _sum(
        (jnp.sum(jnp.where(valid, squares, 0)), jnp.sum(valid, dtype=jnp.float32)), axis_name
    )
    return total / jnp.maximum(tokens, 1)


def update_selection_bias(selection_bias, tokens_per_expert, rate):
    """The bias (e,) after a step: up by rate where the load is below the mean, else down.

    Balancing without a loss (arXiv:2408.15664, algorithm 1). tokens_per_expert is of
    the whole batch, over all devices.
    """
    load = tokens_per_expert.astype(jnp.float32)
    step = rate * jnp.sign(jnp.mean(load) - load)
    return selection_bias + step.astype(selection_bias.dtype)


def tokens_per_expert(experts, num_experts):
    """How many of experts (t, top_k) each expert has: (e,) int32; masked tokens count nowhere."""
    # Compared, not counted by a scatter: a mesh may shard the tokens in any way.
    ones = jnp.ones(experts.shape, jnp.int32)
    return jnp.sum(_spread(ones, experts, num_experts), axis=0, dtype=jnp.int32)


def token_mask(routing: Routing):
    """(t,) bool: tokens that are not masked."""
    return routing.experts[:, 0] < routing.scores.shape[-1]


def _sum(values, axis_name):
    return values if axis_name is None else lax.psum(values, axis_name)


# Tokens sorted by expert.


class Permutation(NamedTuple):
    """The t * top_k pairs of a token and one of its experts, as r rows sorted by expert.

    Not all pairs need have a row, nor all rows a pair: what has none is 0 on the other
    side. So a Permutation also says which rows there is room for.

    Attributes:
      order: (r,) int32, the pair of each row; pair p is choice p % top_k of token p // top_k,
        and t * top_k is none.
      inverse: (t, top_k) int32, the row of each pair; r and above is none.
      group_sizes: (e,) int32; rows past their sum have no pair, nor masked tokens a row.
    """

    order: jax.Array
    inverse: jax.Array
    group_sizes: jax.Array


def sort_by_expert(experts, num_experts) -> Permutation:
    """Experts (t, top_k) -> Permutation, by a stable sort; num_experts and above are masked."""
    keys, pairs = experts.ravel(), lax.iota(jnp.int32, experts.size)
    keys, pairs = sharding.vary_alike(keys, pairs)
    # Not argsort: in shard_map, jax 0.11 takes its result for the same on all devices, and
    # gradients through it are those of one device.
    keys, order = lax.sort((keys, pairs), num_keys=1, is_stable=True)
    inverse = jnp.zeros_like(order).at[order].set(pairs, unique_indices=True)
    # Rows of no expert may be most of them: what they had to read would take as long.
    order = jnp.where(keys < num_experts, order, experts.size)
    inverse = jnp.where(experts < num_experts, inverse.reshape(experts.shape), experts.size)
    return Permutation(order, inverse, tokens_per_expert(experts, num_experts))


def dispatch(tokens, permutation: Permutation):
    """Tokens (t, ...) -> (r, ...), the token of each row."""
    return _gather_tokens(*sharding.vary_alike(tokens, permutation.order, permutation.inverse))


def to_rows(pairs, permutation: Permutation):
    """(t, top_k, ...) -> (r, ...), what each row's pair has."""
    return _to_rows(*sharding.vary_alike(pairs, permutation.order, permutation.inverse))


def to_pairs(rows, permutation: Permutation):
    """(r, ...) -> (t, top_k, ...), the inverse of to_rows."""
    return _to_pairs(*sharding.vary_alike(rows, permutation.order, permutation.inverse))


def combine(rows, weights, permutation: Permutation):
    """Rows (r, d), weights (t, top_k) -> (t, d) float32, each token's weighted sum."""
    pairs = to_pairs(rows, permutation).astype(jnp.float32)
    return jnp.sum(pairs * weights[..., None].astype(jnp.float32), axis=1)


# Autodiff would scatter. With both directions at hand the transposes are gathers as well,
# and so fast and deterministic on every platform.


@jax.custom_vjp
def _to_rows(pairs, order, inverse):
    return _take(pairs.reshape(inverse.size, *pairs.shape[2:]), order)


@jax.custom_vjp
def _to_pairs(rows, order, inverse):
    return _take(rows, inverse)


@jax.custom_vjp
def _gather_tokens(tokens, order, inverse):
    return _take(tokens, order // inverse.shape[1])


def _take(x, index):
    return jnp.asarray(x).at[index].get(mode="fill", fill_value=0)


def _sum_pairs(ct, order, inverse):
    return jnp.sum(_to_pairs(ct, order, inverse), axis=1, dtype=jnp.float32).astype(ct.dtype)


for _function, _transpose in (
    (_to_rows, _to_pairs),
    (_to_pairs, _to_rows),
    (_gather_tokens, _sum_pairs),
):
    _function.defvjp(
        functools.partial(lambda f, x, *orders: (f(x, *orders), orders), _function),
        functools.partial(lambda f, orders, ct: (f(ct, *orders), None, None), _transpose),
    )
