"""A byte-level language model with Mixture-of-Experts blocks, in Flax, and its checkpoints.

Shapes: b sequences, s positions, d hidden, h heads of width d / h, e experts, l layers.
A byte is a token. Byte 0 ends a text and is in none.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from pearl_jax.nn import MoE
from pearl_jax.routing import RouterConfig

VOCAB_SIZE, END = 256, 0
ROTARY_BASE = 10000.0


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model, as options of train_moe.py name them.

    Attributes:
      layers, hidden, heads: l, d and h.
      experts, top_k: e, and how many each token takes.
      intermediate: width of one expert.
      context: positions that the model is trained for.
      dtype: of activations and products; weights are float32.
    """

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    intermediate: int = 256
    context: int = 256
    dtype: str = "float32"

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if name != "dtype" and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden must be a multiple of twice the heads, got {self.hidden} and {self.heads}"
            )
        if self.top_k > self.experts:
            raise ValueError(f"top_k must be at most experts, got {self.top_k} of {self.experts}")


class Output(NamedTuple):
    """Result of the model.

    Attributes:
      logits: (b, s, 256) float32.
      caches: of each layer, keys and values (b, capacity, h, d / h).
      load_balance_loss, z_loss: float32 scalars, means over layers.
      load: (l, e) int32, tokens of each expert.
    """

    logits: jax.Array
    caches: list
    load_balance_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array


def rotate(x, positions):
    """Rotary embedding (arXiv:2104.09864) of x (b, s, h, w) at positions (b, s)."""
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half) / half)
    angles = positions[:, :, None, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    x1, x2 = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Each position sees those at or before its own."""

    def __init__(self, config: Config, *, rngs):
        def linear(n):
            return nnx.Linear(config.hidden, n, use_bias=False, dtype=config.dtype, rngs=rngs)

        self.heads = config.heads
        self.qkv, self.out = linear(3 * config.hidden), linear(config.hidden)

    def __call__(self, x, positions, cache):
        b, s, d = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(b, s, 3 * self.heads, -1), 3, axis=2)
        q, k = rotate(q, positions), rotate(k, positions)
        if cache is not None:
            sequences = jnp.arange(b)[:, None]
            k, v = (old.at[sequences, positions].set(new) for old, new in zip(cache, (k, v)))
        # What lies at later positions of a cache is never seen, so it may be anything finite.
        mask = jnp.arange(k.shape[1]) <= positions[:, None, :, None]
        return self.out(jax.nn.dot_product_attention(q, k, v, mask=mask).reshape(b, s, d)), (k, v)


class Block(nnx.Module):
    def __init__(self, config: Config, *, rngs):
        router = RouterConfig(config.experts, config.top_k, score="sigmoid")
        norm = lambda: nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.attention_norm, self.moe_norm = norm(), norm()
        self.attention = Attention(config, rngs=rngs)
        self.moe = MoE(
            config.hidden,
            config.intermediate,
            router=router,
            selection_bias=True,
            dtype=config.dtype,
            rngs=rngs,
        )

    def __call__(self, x, positions, cache, token_mask):
        attended, cache = self.attention(self.attention_norm(x), positions, cache)
        x = x + attended
        moe = self.moe.with_aux(self.moe_norm(x), token_mask=token_mask)
        return x + moe.out, cache, moe


class MoELM(nnx.Module):
    def __init__(self, config: Config, *, rngs):
        self.config = config
        self.embed = nnx.Embed(VOCAB_SIZE, config.hidden, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.unembed = nnx.Linear(
            config.hidden, VOCAB_SIZE, use_bias=False, dtype=config.dtype, rngs=rngs
        )

    def __call__(self, tokens, *, positions=None, caches=None, token_mask=None) -> Output:
        """Tokens (b, s) integers -> Output.

        Args:
          positions: (b, s); by default 0, 1, and so on.
          caches: as in Output, of earlier positions; positions may then be any. By default
            the tokens see each other only.
          token_mask: (b, s) bool; a token with False goes to no expert.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.embed(tokens)
        new_caches, layers = [], []
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x, cache, layer = block(x, positions, cache, token_mask)
            new_caches.append(cache)
            layers.append(layer)
        return Output(
            self.unembed(self.norm(x)).astype(jnp.float32),
            new_caches,
            jnp.mean(jnp.stack([layer.load_balance_loss for layer in layers])),
            jnp.mean(jnp.stack([layer.z_loss for layer in layers])),
            jnp.stack([layer.tokens_per_expert for layer in layers]),
        )

    def update_selection_bias(self, load, rate):
        """After a step with that load (l, e); see MoE.update_selection_bias."""
        for block, tokens_per_expert in zip(self.blocks, load):
            block.moe.update_selection_bias(tokens_per_expert, rate)


def programs(model: MoELM):
    """-> prefill and decode, functions of arrays alone, and the weights that both take first.

    prefill(weights, prompts (b, capacity), lengths (b,), seeds (b,), temperature) and
    decode(weights, caches, tokens (b,), positions (b,), seeds, temperature) return what the
    next decode takes after the weights, and load (l, e). Tokens are the last ones of each
    sequence, at positions, not in the caches yet; -1 where the sequence has ended, by END
    or as the capacity is used up. These and padding take part in no expert.
    """
    graph, state = nnx.split(model)
    weights, tree = jax.tree.flatten(state)

    def run(weights, *args, **kwargs):
        return nnx.merge(graph, jax.tree.unflatten(tree, weights))(*args, **kwargs)

    def prefill(weights, prompts, lengths, seeds, temperature):
        out = run(weights, prompts, token_mask=jnp.arange(prompts.shape[1]) < lengths[:, None])
        last = jnp.maximum(lengths - 1, 0)[:, None, None]
        logits = jnp.take_along_axis(out.logits, last, axis=1)[:, 0]
        tokens = jnp.where(lengths > 0, _choose(logits, lengths, seeds, temperature), -1)
        return (out.caches, tokens, lengths), out.load

    def decode(weights, caches, tokens, positions, seeds, temperature):
        active = (tokens >= 0) & (positions < caches[0][0].shape[1])
        out = run(
            weights,
            jnp.maximum(tokens, 0)[:, None],
            positions=positions[:, None],
            caches=caches,
            token_mask=active[:, None],
        )
        tokens = _choose(out.logits[:, 0], positions + 1, seeds, temperature)
        return (out.caches, jnp.where(active, tokens, -1), positions + active), out.load

    return prefill, decode, weights


def _choose(logits, positions, seeds, temperature):
    """Logits (b, 256) -> (b,), drawn from softmax(logits / temperature); -1 for END.

    The noise depends on the sequence's seed and the position, not on the rest of the batch.
    """

    def noise(seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (VOCAB_SIZE,))

    tokens = jnp.argmax(logits + temperature * jax.vmap(noise)(seeds, positions), axis=-1)
    return jnp.where(tokens == END, -1, tokens.astype(jnp.int32))


# A run's folder: train_moe.json with its settings, checkpoints/ with its last states.

_SETTINGS = "train_moe.json"


def open_checkpoints(directory) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        _checkpoints(directory), options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )


def start(directory, settings: dict):
    """Makes the folder, without the checkpoints of an earlier run; settings hold those of Config.

    Raises ValueError where the folder has other things.
    """
    directory = pathlib.Path(directory)
    if directory.exists() and any(directory.iterdir()) and not (directory / _SETTINGS).exists():
        raise ValueError(f"{directory} is not empty, and of no earlier run")
    shutil.rmtree(_checkpoints(directory), ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")


def save(checkpoints, step, **modules):
    """Writes the state of modules, in the background."""
    states = {
        name: ocp.args.StandardSave(nnx.to_pure_dict(nnx.state(module)))
        for name, module in modules.items()
    }
    checkpoints.save(step, args=ocp.args.Composite(**states))


def restore(checkpoints, **modules) -> int:
    """Sets the state of modules to that of the last checkpoint; its step."""
    step = checkpoints.latest_step()
    if step is None:
        raise ValueError(f"{checkpoints.directory} has no checkpoint")
    states = {name: nnx.state(module) for name, module in modules.items()}
    args = {
        name: ocp.args.StandardRestore(nnx.to_pure_dict(state)) for name, state in states.items()
    }
    restored = checkpoints.restore(step, args=ocp.args.Composite(**args))
    for name, module in modules.items():
        nnx.replace_by_pure_dict(states[name], restored[name])
        nnx.update(module, states[name])
    return step


def read_settings(directory) -> dict:
    """Raises FileNotFoundError where there is no run."""
    path = pathlib.Path(directory) / _SETTINGS
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; train_moe.py writes it")
    return json.loads(path.read_text())


def load(directory, **changes) -> MoELM:
    """The model of the last checkpoint of a run; changes to its Config, as of the dtype."""
    settings = read_settings(directory) | changes
    config = Config(**{field.name: settings[field.name] for field in dataclasses.fields(Config)})
    model = MoELM(config, rngs=nnx.Rngs(0))
    with open_checkpoints(directory) as checkpoints:
        restore(checkpoints, model=model)
    return model


def _checkpoints(directory):
    return pathlib.Path(directory).absolute() / "checkpoints"
